// Hopper's bulk copies into shared memory and the barriers in shared memory that they complete on.
#pragma once

#include <cstdint>

#include "raylm/cuda/common.cuh"

namespace raylm::cuda {

__device__ inline unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

__device__ inline void barrier_init(unsigned barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// After barrier_init, before another thread or a copy uses the barriers.
__device__ inline void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ inline void barrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// A warp's arrivals, all of kWarpArrivals.
__device__ inline void barrier_arrive_warp(unsigned barrier) {
  __syncwarp();
  if (threadIdx.x % kWarp < kWarpArrivals) barrier_arrive(barrier);
}

// One arrival, which also announces the bytes that copies will bring.
__device__ inline void barrier_expect(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ inline void barrier_wait(unsigned barrier, unsigned phase) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "AGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\n"
      "DONE:\n}" ::"r"(barrier),
      "r"(phase)
      : "memory");
}

// Addresses and bytes are multiples of 16.
__device__ inline void bulk_copy(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
      "r"(bytes), "r"(barrier)
      : "memory");
}

// The same for bytes that are read once: they are the first to leave L2.
__device__ inline void bulk_copy_once(unsigned to, const void* from, unsigned bytes, unsigned barrier,
                                      uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

}  // namespace raylm::cuda
