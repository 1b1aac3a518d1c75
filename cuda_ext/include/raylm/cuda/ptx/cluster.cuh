// Blocks in a cluster (sm_90): they see each other's shared memory and arrive at each other's barriers.
#pragma once

#include "raylm/cuda/ptx/barrier.cuh"

namespace raylm::cuda {

__device__ inline int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

// Until all threads of the cluster's blocks are here, or have ended.
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// The same in two steps, relaxed: they wait neither for a thread's writes nor for its loads and arrivals in flight, as a
// release would. Use them after barrier_init_done, or before a block ends if the other blocks have used all that they
// loaded from its shared memory and do not arrive at its barriers any more.
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }
__device__ inline void cluster_meet() {
  cluster_arrive();
  cluster_wait();
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

// For what another block stored by store_shared_at: this thread sees it.
__device__ inline void barrier_wait_acquiring(uint32_t barrier, int parity) {
  uint32_t done = 0;
  while (!done) {
    asm volatile("{\n.reg .pred p;\n"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  }
}

// Stores 16 bytes, aligned, in what the cluster's block `rank` has at this block's address of it, and counts them at that
// block's barrier, as a copy's bytes are: who has waited there by barrier_wait_acquiring sees them.
__device__ inline void store_shared_at(uint32_t to, uint32_t barrier, int rank, const float4& x) {
  asm volatile("{\n.reg .b32 there, counts;\n"
               "mapa.shared::cluster.u32 there, %0, %2;\n"
               "mapa.shared::cluster.u32 counts, %1, %2;\n"
               "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3, %4, %5, %6}, [counts];\n}"
               ::"r"(to), "r"(barrier), "r"(rank), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}

// What the cluster's block `rank` has at this block's address of it.
__device__ inline int load_shared_word_at(uint32_t from, int rank) {
  int x;
  asm volatile("{\n.reg .b32 there;\n"
               "mapa.shared::cluster.u32 there, %1, %2;\n"
               "ld.shared::cluster.s32 %0, [there];\n}"
               : "=r"(x) : "r"(from), "r"(rank) : "memory");
  return x;
}

// The same of 16 bytes, aligned.
__device__ inline float4 load_shared_at(uint32_t from, int rank) {
  float4 x;
  asm volatile("{\n.reg .b32 there;\n"
               "mapa.shared::cluster.u32 there, %4, %5;\n"
               "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(from), "r"(rank) : "memory");
  return x;
}

}  // namespace raylm::cuda
