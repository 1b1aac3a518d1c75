// Copies of bytes into shared memory that run behind the program: 16 bytes a thread (sm_80), and rows by the copy engine,
// which complete on a barrier in shared memory (sm_90).
#pragma once

#include "raylm/cuda/ptx/shared.cuh"

namespace raylm::cuda {

// Copies 16 bytes, or writes 16 zero bytes and reads nothing.
__device__ inline void copy_async(uint32_t to, const void* from, bool read) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(read ? 16 : 0));
}

// The same for bytes that are read once.
__device__ inline void copy_async_once(uint32_t to, const void* from, bool read, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;"
               ::"r"(to), "l"(from), "r"(read ? 16 : 0), "l"(policy));
}

__device__ inline void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `Pending` of this thread's latest groups of copies are under way.
template <int Pending>
__device__ inline void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Arrives at a barrier in shared memory once this thread's copies so far are there. `Counted`: the barrier's count
// includes it. Otherwise it adds one to the count of the phase, which another arrival must keep open until then.
template <bool Counted>
__device__ inline void copies_arrive(uint32_t barrier) {
  if constexpr (Counted) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
  } else {
    asm volatile("cp.async.mbarrier.arrive.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
  }
}

// For copies of what is read once: it is the first to leave the L2 cache.
__device__ inline uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ inline uint64_t evict_normal_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Addresses and bytes are multiples of 16.
__device__ inline void bulk_copy(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// The same for bytes that are read once.
__device__ inline void bulk_copy_once(uint32_t to, const void* from, int bytes, uint32_t barrier, uint64_t policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1], %2, [%3], %4;"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}

__device__ inline void prefetch(const void* pointer) { asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer)); }

}  // namespace raylm::cuda
