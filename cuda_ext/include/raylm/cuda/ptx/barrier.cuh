// Barriers in shared memory that count arrivals and bytes (mbarrier, sm_90), by their address. A phase ends with the last
// arrival and the last byte expected; its parity alternates from 0.
#pragma once

#include "raylm/cuda/common.cuh"
#include "raylm/cuda/ptx/shared.cuh"

namespace raylm::cuda {

// Lanes that arrive at a barrier for their warp. One does: __syncwarp has ordered what the others did before. The tool
// racecheck does not follow that; in a build for it every lane arrives, which costs a decode step a tenth and more.
#ifdef RAYLM_RACECHECK
constexpr int kWarpArrivals = kWarp;
#else
constexpr int kWarpArrivals = 1;
#endif

__device__ inline void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// After barrier_init, before another thread, another block of the cluster or a copy uses the barriers.
__device__ inline void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  fence_shared_writes();
}

__device__ inline void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// A warp's arrivals, all of kWarpArrivals.
__device__ inline void barrier_arrive_warp(uint32_t barrier) {
  __syncwarp();
  if (threadIdx.x % kWarp < kWarpArrivals) barrier_arrive(barrier);
}

// One arrival, which also announces the bytes that copies will bring.
__device__ inline void barrier_arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Whether the phase of this parity has ended.
__device__ inline bool barrier_passed(uint32_t barrier, int parity) {
  uint32_t done;
  asm volatile("{\n.reg .pred p;\n"
               "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
               "selp.u32 %0, 1, 0, p;\n}"
               : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done;
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

}  // namespace raylm::cuda
