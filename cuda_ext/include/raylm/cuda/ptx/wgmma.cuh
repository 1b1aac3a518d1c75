// Matrix products of a group of four warps that run beside the threads (wgmma, sm_90a), with operands in shared memory as
// the copy engine writes them, and sums in registers: of each 8 columns a thread has two neighbours of row lane / 4 of its
// warp's 16, and the same two of row lane / 4 + 8.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

namespace raylm::cuda {

// Where wgmma finds a matrix in shared memory, as the copy engine writes it with 128-byte swizzling: rows of 128 bytes,
// 64 elements of 16 bits, in groups of 8 rows. Distances are in bytes: from one group of rows to the next, and from 64
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

template <int N>
__device__ __forceinline__ void settle(int32_t (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

// c (+)= a b^T for 64 rows of a and N rows of b, 16 products, or 32 of 8-bit numbers; both in shared memory with the summed
// dimension innermost.
template <typename T, int N>
__device__ void multiply_transposed(float (&c)[N / 2], uint64_t a, uint64_t b, int accumulate);

// c += a b for 64 rows of a, in registers, and N columns of b, 16 products; b has the summed dimension outermost.
template <typename T, int N>
__device__ void multiply(float (&c)[N / 2], const uint32_t* a, uint64_t b);

// c += a b^T for 64 rows of a, in registers, and N rows of b, 16 products; b has the summed dimension innermost.
template <typename T, int N>
__device__ void multiply_by_transpose(float (&c)[N / 2], const uint32_t* a, uint64_t b);

// c (+)= a b^T of numbers of 8 bits, 32 products: integers, whose sums are integers, or floats.
template <typename Byte>
using ByteSum = std::conditional_t<std::is_same_v<Byte, signed char>, int32_t, float>;
template <typename Byte, int N>
__device__ void multiply_bytes(ByteSum<Byte> (&c)[N / 2], const uint32_t* a, uint64_t b, int accumulate);

}  // namespace raylm::cuda

#include "raylm/cuda/ptx/wgmma_forms.cuh"  // all, for the types and widths that cmake/wgmma_forms.py names
