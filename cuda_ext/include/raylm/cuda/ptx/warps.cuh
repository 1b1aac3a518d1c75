// Some of a block's warps by themselves: barriers among them, and the registers that they may use (sm_90a).
#pragma once

namespace raylm::cuda {

// Until `threads` threads of the block, whole warps, are at the barrier of this number; 0 is __syncthreads's.
__device__ inline void sync_some(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Counts a thread's warp as there without waiting for the others.
__device__ inline void arrive_some(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

template <int Registers>
__device__ inline void give_registers_back() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

template <int Registers>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

}  // namespace raylm::cuda
