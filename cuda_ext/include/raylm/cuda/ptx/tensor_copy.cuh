// The copy engine (TMA, sm_90): boxes of tensors between global and shared memory. What it has to know of a tensor is a
// map, which the launcher makes (csrc/cuda/tensor_map.h).
#pragma once

#include <cuda.h>

#include <cstdint>

namespace raylm::cuda {

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

__device__ inline void load_box_once(uint32_t to, const CUtensorMap& map, uint32_t barrier, const int (&at)[5],
                                     uint64_t policy) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;"
               ::"r"(to), "l"(&map), "r"(barrier), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]),
               "l"(policy) : "memory");
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

}  // namespace raylm::cuda
