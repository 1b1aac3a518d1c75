// Hopper's own instructions (sm_90a), as PTX: barriers in shared memory that count bytes, the copy engine (TMA), blocks
// in clusters, matrix products of a group of four warps that run beside the threads (wgmma), and the registers a group
// of warps may use.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "raylm/cuda/common.cuh"

namespace raylm::cuda::hopper {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Barriers in shared memory, by their address. A phase ends with the last arrival and the last byte expected; its
// parity alternates from 0.
__device__ inline void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ inline void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ inline void barrier_arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ inline void barrier_wait(uint32_t barrier, int parity) {
  uint32_t done = 0;
  while (!done) {
    asm volatile("{\n.reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  }
}

// Arrives at the barrier that the cluster's block `rank` has at this block's address of it; threads that name no such rank
// do nothing. It orders no ordinary writes for the other block (a release to the cluster would wait for all memory
// accesses of the thread): for shared memory that the copy engine and wgmma alone touch.
template <int Ranks>
__device__ inline void barrier_arrive_at(uint32_t barrier, int rank) {
  asm volatile("{\n.reg .b32 there;\n.reg .pred p;\n"
               "setp.lt.u32 p, %1, %2;\n"
               "@p mapa.shared::cluster.u32 there, %0, %1;\n"
               "@p mbarrier.arrive.shared::cluster.b64 _, [there];\n}"
               ::"r"(barrier), "r"(rank), "n"(Ranks) : "memory");
}

// The same for ordinary writes to shared memory, also of the threads that were synchronised with this one before: another
// block's thread sees them when it has waited by barrier_wait_acquiring.
template <int Ranks>
__device__ inline void barrier_arrive_releasing(uint32_t barrier, int rank) {
  asm volatile("{\n.reg .b32 there;\n.reg .pred p;\n"
               "setp.lt.u32 p, %1, %2;\n"
               "@p mapa.shared::cluster.u32 there, %0, %1;\n"
               "@p mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n}"
               ::"r"(barrier), "r"(rank), "n"(Ranks) : "memory");
}

// A lane's part of its warp's arrivals, kWarpArrivals of them, at this barrier of every block; __syncwarp stands before.
template <int Ranks>
__device__ inline void barrier_arrive_lane(uint32_t barrier, int lane) {
  if constexpr (kWarpArrivals == 1) {
    barrier_arrive_releasing<Ranks>(barrier, lane);
  } else {
    for (int rank = 0; rank < Ranks; ++rank) barrier_arrive_releasing<Ranks>(barrier, rank);
  }
}

__device__ inline void barrier_wait_acquiring(uint32_t barrier, int parity) {
  uint32_t done = 0;
  while (!done) {
    asm volatile("{\n.reg .pred p;\n"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  }
}

__device__ inline void store_shared(uint32_t to, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
}

// What the cluster's block `rank` has at this block's address of it, 16-byte aligned.
__device__ inline float4 load_shared_at(uint32_t from, int rank) {
  float4 x;
  asm volatile("{\n.reg .b32 there;\n"
               "mapa.shared::cluster.u32 there, %4, %5;\n"
               "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(from), "r"(rank) : "memory");
  return x;
}

// The stage of a ring that comes next, and the parity of its barrier.
template <int Stages>
struct Ring {
  int stage = 0, parity = 0;
  __device__ void advance() {
    if (++stage == Stages) stage = 0, parity ^= 1;
  }
};

__device__ inline int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

// Until all threads of the cluster's blocks are here, or have ended.
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Until `threads` threads of the block, whole warps, are at the barrier of this number; 0 is __syncthreads's.
__device__ inline void sync_some(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Makes barriers just initialised known to the copy engine.
__device__ inline void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Makes the thread's ordinary writes to shared memory visible to the copy engine and to wgmma.
__device__ inline void fence_shared_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int Registers>
__device__ inline void give_registers_back() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

template <int Registers>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

__device__ inline void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies a box of a tensor to shared memory; the barrier counts its bytes. The innermost coordinate is the first.
__device__ inline void load_box(uint32_t to, const CUtensorMap& map, uint32_t barrier, const int (&at)[2]) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4}], [%2];"
               ::"r"(to), "l"(&map), "r"(barrier), "r"(at[0]), "r"(at[1]) : "memory");
}

// The same for what is read once: it is the first to leave the L2 cache.
__device__ inline void load_box_once(uint32_t to, const CUtensorMap& map, uint32_t barrier, const int (&at)[2],
                                     uint64_t policy) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1, {%3, %4}], [%2], %5;"
               ::"r"(to), "l"(&map), "r"(barrier), "r"(at[0]), "r"(at[1]), "l"(policy) : "memory");
}

__device__ inline void load_box(uint32_t to, const CUtensorMap& map, uint32_t barrier, const int (&at)[3]) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4, %5}], [%2];"
               ::"r"(to), "l"(&map), "r"(barrier), "r"(at[0]), "r"(at[1]), "r"(at[2]) : "memory");
}

__device__ inline void load_box(uint32_t to, const CUtensorMap& map, uint32_t barrier, const int (&at)[5]) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
               ::"r"(to), "l"(&map), "r"(barrier), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4])
               : "memory");
}

// To this address in each block of the cluster whose bit is set; the barrier at this address there counts the bytes.
__device__ inline void load_box_to_blocks(uint32_t to, const CUtensorMap& map, uint32_t barrier, const int (&at)[2],
                                          uint16_t blocks) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1, {%3, %4}], [%2], %5;"
               ::"r"(to), "l"(&map), "r"(barrier), "r"(at[0]), "r"(at[1]), "h"(blocks) : "memory");
}

// Copies a box from shared memory to a tensor; what lies outside of the tensor is left out. In the thread's current group
// of stores.
__device__ inline void store_box(const CUtensorMap& map, uint32_t from, const int (&at)[2]) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
               ::"l"(&map), "r"(from), "r"(at[0]), "r"(at[1]) : "memory");
}

__device__ inline void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until the thread's stores have read what they store: their shared memory may be written again.
__device__ inline void store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Until the thread's stores are done.
__device__ inline void store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Four 8 x 8 matrices of 16-bit elements to shared memory; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void store_matrices(uint32_t row, const uint32_t (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(row), "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3]) : "memory");
}

// Where wgmma finds a matrix of 16-bit elements in shared memory, as the copy engine writes it with 128-byte swizzling:
// rows of 64 elements, in groups of 8 rows. Distances are in bytes: from one group of rows to the next, and from 64
// columns to the next 64, which is looked at only where the rows are the summed dimension.
__device__ inline uint64_t matrix_descriptor(uint32_t address, int row_groups, int column_groups) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | uint64_t(row_groups >> 4) << 32 | uint64_t(column_groups >> 4) << 16 | (address & 0x3ffff) >> 4;
}

// Between writes to registers and the wgmma that reads them.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most Pending of the groups committed are under way.
template <int Pending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Keeps the compiler from reading accumulators before the wait that stands above.
template <int N>
__device__ __forceinline__ void settle(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// The operands of wgmma are written out one by one: 8 accumulators as text and as operands.
#define RAYLM_TEXT0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define RAYLM_TEXT8 "%8, %9, %10, %11, %12, %13, %14, %15"
#define RAYLM_TEXT16 "%16, %17, %18, %19, %20, %21, %22, %23"
#define RAYLM_TEXT24 "%24, %25, %26, %27, %28, %29, %30, %31"
#define RAYLM_TEXT32 "%32, %33, %34, %35, %36, %37, %38, %39"
#define RAYLM_TEXT40 "%40, %41, %42, %43, %44, %45, %46, %47"
#define RAYLM_TEXT48 "%48, %49, %50, %51, %52, %53, %54, %55"
#define RAYLM_TEXT56 "%56, %57, %58, %59, %60, %61, %62, %63"
#define RAYLM_TEXT64 "%64, %65, %66, %67, %68, %69, %70, %71"
#define RAYLM_TEXT72 "%72, %73, %74, %75, %76, %77, %78, %79"
#define RAYLM_TEXT80 "%80, %81, %82, %83, %84, %85, %86, %87"
#define RAYLM_TEXT88 "%88, %89, %90, %91, %92, %93, %94, %95"
#define RAYLM_TEXT96 "%96, %97, %98, %99, %100, %101, %102, %103"
#define RAYLM_TEXT104 "%104, %105, %106, %107, %108, %109, %110, %111"
#define RAYLM_TEXT112 "%112, %113, %114, %115, %116, %117, %118, %119"
#define RAYLM_TEXT120 "%120, %121, %122, %123, %124, %125, %126, %127"
#define RAYLM_OUT8(i) \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), \
      "+f"(c[i + 6]), "+f"(c[i + 7])
#define RAYLM_LIST08 RAYLM_TEXT0
#define RAYLM_OUT08 RAYLM_OUT8(0)
#define RAYLM_LIST16 RAYLM_LIST08 "," RAYLM_TEXT8
#define RAYLM_OUT16 RAYLM_OUT08, RAYLM_OUT8(8)
#define RAYLM_LIST32 RAYLM_LIST16 "," RAYLM_TEXT16 "," RAYLM_TEXT24
#define RAYLM_OUT32 RAYLM_OUT16, RAYLM_OUT8(16), RAYLM_OUT8(24)
#define RAYLM_LIST40 RAYLM_LIST32 "," RAYLM_TEXT32
#define RAYLM_OUT40 RAYLM_OUT32, RAYLM_OUT8(32)
#define RAYLM_LIST48 RAYLM_LIST40 "," RAYLM_TEXT40
#define RAYLM_OUT48 RAYLM_OUT40, RAYLM_OUT8(40)
#define RAYLM_LIST64 RAYLM_LIST48 "," RAYLM_TEXT48 "," RAYLM_TEXT56
#define RAYLM_OUT64 RAYLM_OUT48, RAYLM_OUT8(48), RAYLM_OUT8(56)
#define RAYLM_LIST96 RAYLM_LIST64 "," RAYLM_TEXT64 "," RAYLM_TEXT72 "," RAYLM_TEXT80 "," RAYLM_TEXT88
#define RAYLM_OUT96 RAYLM_OUT64, RAYLM_OUT8(64), RAYLM_OUT8(72), RAYLM_OUT8(80), RAYLM_OUT8(88)
#define RAYLM_LIST128 RAYLM_LIST96 "," RAYLM_TEXT96 "," RAYLM_TEXT104 "," RAYLM_TEXT112 "," RAYLM_TEXT120
#define RAYLM_OUT128 RAYLM_OUT96, RAYLM_OUT8(96), RAYLM_OUT8(104), RAYLM_OUT8(112), RAYLM_OUT8(120)

// A and B in shared memory, both with the summed dimension innermost. P is the number of the predicate's operand.
#define RAYLM_WGMMA_SS(N, TYPE, COUNT, A, B, P)                                                              \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                                              \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" RAYLM_LIST##COUNT "}, %" #A \
               ", %" #B ", p, 1, 1, 0, 0;\n}"                                                                \
               : RAYLM_OUT##COUNT : "l"(a), "l"(b), "r"(accumulate))

// A in registers, B in shared memory with the summed dimension outermost.
#define RAYLM_WGMMA_RS(N, TYPE, COUNT, A0, A1, A2, A3, B)                                       \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                       \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {"              \
               RAYLM_LIST##COUNT "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1, 1;\n}" \
               : RAYLM_OUT##COUNT : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// c (+)= a b^T for 64 rows of a and N rows of b, 16 products.
template <typename T, int N>
__device__ __forceinline__ void multiply_transposed(float (&c)[N / 2], uint64_t a, uint64_t b, int accumulate) {
  static_assert(N == 16 || N == 32 || N == 64 || N == 96 || N == 128 || N == 256);
  constexpr bool kHalf = std::is_same_v<T, __half>;
  if constexpr (N == 16 && kHalf) RAYLM_WGMMA_SS(16, "f16", 08, 8, 9, 10);
  if constexpr (N == 16 && !kHalf) RAYLM_WGMMA_SS(16, "bf16", 08, 8, 9, 10);
  if constexpr (N == 32 && kHalf) RAYLM_WGMMA_SS(32, "f16", 16, 16, 17, 18);
  if constexpr (N == 32 && !kHalf) RAYLM_WGMMA_SS(32, "bf16", 16, 16, 17, 18);
  if constexpr (N == 64 && kHalf) RAYLM_WGMMA_SS(64, "f16", 32, 32, 33, 34);
  if constexpr (N == 64 && !kHalf) RAYLM_WGMMA_SS(64, "bf16", 32, 32, 33, 34);
  if constexpr (N == 96 && kHalf) RAYLM_WGMMA_SS(96, "f16", 48, 48, 49, 50);
  if constexpr (N == 96 && !kHalf) RAYLM_WGMMA_SS(96, "bf16", 48, 48, 49, 50);
  if constexpr (N == 128 && kHalf) RAYLM_WGMMA_SS(128, "f16", 64, 64, 65, 66);
  if constexpr (N == 128 && !kHalf) RAYLM_WGMMA_SS(128, "bf16", 64, 64, 65, 66);
  if constexpr (N == 256 && kHalf) RAYLM_WGMMA_SS(256, "f16", 128, 128, 129, 130);
  if constexpr (N == 256 && !kHalf) RAYLM_WGMMA_SS(256, "bf16", 128, 128, 129, 130);
}

// c += a b for 64 rows of a, in registers, and N columns of b, 16 products.
template <typename T, int N>
__device__ __forceinline__ void multiply(float (&c)[N / 2], const uint32_t* a, uint64_t b) {
  static_assert(N == 64 || N == 80 || N == 96 || N == 128 || N == 192 || N == 256);
  constexpr bool kHalf = std::is_same_v<T, __half>;
  if constexpr (N == 64 && kHalf) RAYLM_WGMMA_RS(64, "f16", 32, 32, 33, 34, 35, 36);
  if constexpr (N == 64 && !kHalf) RAYLM_WGMMA_RS(64, "bf16", 32, 32, 33, 34, 35, 36);
  if constexpr (N == 80 && kHalf) RAYLM_WGMMA_RS(80, "f16", 40, 40, 41, 42, 43, 44);
  if constexpr (N == 80 && !kHalf) RAYLM_WGMMA_RS(80, "bf16", 40, 40, 41, 42, 43, 44);
  if constexpr (N == 96 && kHalf) RAYLM_WGMMA_RS(96, "f16", 48, 48, 49, 50, 51, 52);
  if constexpr (N == 96 && !kHalf) RAYLM_WGMMA_RS(96, "bf16", 48, 48, 49, 50, 51, 52);
  if constexpr (N == 128 && kHalf) RAYLM_WGMMA_RS(128, "f16", 64, 64, 65, 66, 67, 68);
  if constexpr (N == 128 && !kHalf) RAYLM_WGMMA_RS(128, "bf16", 64, 64, 65, 66, 67, 68);
  if constexpr (N == 192 && kHalf) RAYLM_WGMMA_RS(192, "f16", 96, 96, 97, 98, 99, 100);
  if constexpr (N == 192 && !kHalf) RAYLM_WGMMA_RS(192, "bf16", 96, 96, 97, 98, 99, 100);
  if constexpr (N == 256 && kHalf) RAYLM_WGMMA_RS(256, "f16", 128, 128, 129, 130, 131, 132);
  if constexpr (N == 256 && !kHalf) RAYLM_WGMMA_RS(256, "bf16", 128, 128, 129, 130, 131, 132);
}

}  // namespace raylm::cuda::hopper
