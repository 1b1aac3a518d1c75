// Shared memory by its address, as PTX's instructions take it.
#pragma once

#include <cstdint>

namespace raylm::cuda {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The same number, which the compiler keeps in a register: what follows from special registers it would rather work out
// again wherever it is used.
__device__ inline uint32_t kept(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

__device__ inline void store_shared(uint32_t to, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
}

__device__ inline uint32_t load_shared_word(uint32_t from) {
  uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
  return x;
}

// 8 bytes, aligned.
__device__ inline float2 load_shared_pair(uint32_t from) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
  return x;
}

// 16 bytes, aligned.
__device__ inline void store_shared(uint32_t to, const uint4& x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

// 16 bytes, aligned.
__device__ inline uint4 load_shared(uint32_t from) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(from)
               : "memory");
  return x;
}

__device__ inline float4 load_shared_floats(uint32_t from) {
  const uint4 x = load_shared(from);
  return make_float4(__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w));
}

// Makes the thread's ordinary writes to shared memory visible to the copy engine and to wgmma (sm_90).
__device__ inline void fence_shared_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace raylm::cuda
