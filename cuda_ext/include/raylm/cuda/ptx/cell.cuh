// Results that blocks of one grid, or of grids on several GPUs, hand each other without a fence: a cell of 8 bytes has two
// 16-bit elements and a stamp that says of which time they are. It is written and read in one piece, so who finds the
// stamp has the elements (the protocol "LL" of NCCL).
#pragma once

#include <cstdint>

namespace raylm::cuda {

__device__ inline void store_cell(uint2* to, uint32_t pair, uint32_t stamp) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(pair), "r"(stamp) : "memory");
}

// Two cells, 16-byte aligned, as {pair, stamp, pair, stamp}; they need not be of one time.
__device__ inline uint4 load_cells(const uint2* from) {
  uint4 x;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from) : "memory");
  return x;
}

// Two neighbouring cells' elements, once they are of the time asked for. `seen`: the cells as found before.
__device__ inline uint2 await_cells(const uint2* from, uint32_t stamp, uint4 seen) {
  while (seen.y != stamp || seen.w != stamp) seen = load_cells(from);
  return make_uint2(seen.x, seen.z);
}

__device__ inline uint2 await_cells(const uint2* from, uint32_t stamp) {
  return await_cells(from, stamp, load_cells(from));
}

// The same of one cell, for blocks of other GPUs.
__device__ inline void store_cell_of_peer(uint2* to, uint32_t pair, uint32_t stamp) {
  asm volatile("st.relaxed.sys.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(pair), "r"(stamp) : "memory");
}

__device__ inline uint2 load_cell_of_peer(const uint2* from) {
  uint2 x;
  asm volatile("ld.relaxed.sys.global.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(from) : "memory");
  return x;
}

}  // namespace raylm::cuda
