// What a layer does to its queries, keys and values before attention, in one pass: norm of the heads of q and k
// (arXiv:2302.05442; optional), rotary embedding (RoFormer, arXiv:2104.09864), k and v into the paged cache. A head has
// R rotary dimensions, of which i < R/2 pairs with i + R/2.
#pragma once

#include "raylm/cuda/ptx/grid.cuh"
#include "raylm/cuda/tile/vec.cuh"

namespace raylm::cuda {

template <typename T>
struct HeadsView {
  T* x;
  int64_t token_stride, head_stride;
  int num_heads;
};

template <typename T>
struct CacheView {
  T* x;
  int64_t block_stride, slot_stride, head_stride;
};

template <typename T>
struct RopeStoreParams {
  HeadsView<T> q, k, v;
  CacheView<T> k_cache, v_cache;
  const T* q_weight;  // null: no norm
  const T* k_weight;
  float eps;
  const int64_t* positions;
  const int64_t* slots;
  const float* cos_sin;
  int64_t num_tokens, max_position, num_slots;
  int block_size, head_dim, rotary_dim;
  bool early;  // positions, slots and weights may be read before the kernel before has ended
};

// One head of one token: where it is read, where it goes, and what happens to it on the way.
template <typename T>
struct Head {
  const T* source;
  T* target;        // null: nowhere, as the token's slot lies outside the cache
  const T* weight;  // null: no norm
  bool rotates;
};

template <typename T>
__device__ T* slot_of(const RopeStoreParams<T>& p, const CacheView<T>& cache, int64_t token, int head) {
  const int64_t slot = p.slots[token];
  if (slot < 0 || slot >= p.num_slots) return nullptr;
  const int64_t block = slot / p.block_size;
  return cache.x + block * cache.block_stride + (slot - block * p.block_size) * cache.slot_stride +
         head * cache.head_stride;
}

template <typename T>
__device__ Head<T> head_of(const RopeStoreParams<T>& p, int64_t token, int head) {
  if (head < p.q.num_heads) {
    T* x = p.q.x + token * p.q.token_stride + head * p.q.head_stride;
    return {x, x, p.q_weight, true};
  }
  head -= p.q.num_heads;
  if (head < p.k.num_heads) {
    return {p.k.x + token * p.k.token_stride + head * p.k.head_stride, slot_of(p, p.k_cache, token, head), p.k_weight,
            true};
  }
  head -= p.k.num_heads;
  return {p.v.x + token * p.v.token_stride + head * p.v.head_stride, slot_of(p, p.v_cache, token, head), nullptr, false};
}

// The cosines of a token's position, then its sines; null leaves the token as it is: its position is outside the table.
template <typename T>
__device__ const float* angles_of(const RopeStoreParams<T>& p, int64_t token) {
  const int64_t position = p.positions[token];
  return position < 0 || position >= p.max_position ? nullptr : p.cos_sin + position * p.rotary_dim;
}

// kSize floats, 16 bytes at a time.
template <int kSize>
struct Floats {
  float x[kSize];

  __device__ static Floats load(const float* p) {
    Floats out;
#pragma unroll
    for (int i = 0; i < kSize; i += 4) {
      const float4 part = *reinterpret_cast<const float4*>(p + i);
      out.x[i] = part.x, out.x[i + 1] = part.y, out.x[i + 2] = part.z, out.x[i + 3] = part.w;
    }
    return out;
  }
};

// kLanes threads a head, each with 16 bytes of its first half and the 16 that pair with them: R is the head size.
template <typename T, int kLanes>
__global__ void __launch_bounds__(128) rope_store_kernel(RopeStoreParams<T> p) {
  constexpr int kSize = kVec<T>;
  if (!p.early) wait_for_dependencies();
  const int heads = p.q.num_heads + p.k.num_heads + p.v.num_heads, half = p.head_dim / 2;
  const int64_t unit = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kLanes;
  const int64_t token = unit / heads;
  const int at = threadIdx.x % kLanes * kSize;
  const bool inside = token < p.num_tokens && at < half;
  Head<T> head{};
  const float* angles = nullptr;
  Floats<kSize> cos{}, sin{};
  if (inside) {
    head = head_of(p, token, static_cast<int>(unit - token * heads));
    if (head.rotates) angles = angles_of(p, token);
  }
  if (angles) cos = Floats<kSize>::load(angles + at), sin = Floats<kSize>::load(angles + half + at);
  if (p.early) wait_for_dependencies();
  start_dependents();
  Vec<T> a{}, b{};
  if (inside) a = Vec<T>::load(head.source + at), b = Vec<T>::load(head.source + half + at);
  float u[kSize], v[kSize], squares = 0;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    u[i] = a[i], v[i] = b[i];
    squares += u[i] * u[i] + v[i] * v[i];
  }
  if (p.q_weight) {  // the same for the whole warp
    for (int step = kLanes / 2; step > 0; step /= 2) squares += __shfl_xor_sync(kAllLanes, squares, step);
  }
  if (!inside || !head.target) return;
  if (head.weight) {
    const float scale = rsqrtf(squares / static_cast<float>(p.head_dim) + p.eps);
    const Vec<T> wa = Vec<T>::load(head.weight + at), wb = Vec<T>::load(head.weight + half + at);
#pragma unroll
    for (int i = 0; i < kSize; ++i) u[i] *= scale * wa[i], v[i] *= scale * wb[i];
  }
  if (angles) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const float first = u[i] * cos.x[i] - v[i] * sin.x[i];
      v[i] = v[i] * cos.x[i] + u[i] * sin.x[i];
      u[i] = first;
    }
  }
  if (head.rotates) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) a.set(i, u[i]), b.set(i, v[i]);
  }
  a.store(head.target + at);
  b.store(head.target + half + at);
}

// Heads of any size and alignment: a warp a head, which it reads twice.
template <typename T>
__global__ void rope_store_any_kernel(RopeStoreParams<T> p) {
  wait_for_dependencies();
  start_dependents();
  const int heads = p.q.num_heads + p.k.num_heads + p.v.num_heads, half = p.rotary_dim / 2;
  const int64_t unit = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
  const int64_t token = unit / heads;
  const int lane = threadIdx.x % kWarp;
  if (token >= p.num_tokens) return;
  const Head<T> head = head_of(p, token, static_cast<int>(unit - token * heads));
  if (!head.target) return;
  float squares = 0, scale = 1;
  if (head.weight) {
    for (int i = lane; i < p.head_dim; i += kWarp) squares += to_float(head.source[i]) * to_float(head.source[i]);
    scale = rsqrtf(warp_sum(squares) / static_cast<float>(p.head_dim) + p.eps);
  }
  const auto value = [&](int i) {
    return to_float(head.source[i]) * (head.weight ? scale * to_float(head.weight[i]) : 1.0f);
  };
  const float* angles = head.rotates ? angles_of(p, token) : nullptr;
  for (int i = lane; i < half; i += kWarp) {
    const float c = angles ? angles[i] : 1, s = angles ? angles[i + half] : 0, u = value(i), v = value(i + half);
    head.target[i] = from_float<T>(u * c - v * s);
    head.target[i + half] = from_float<T>(v * c + u * s);
  }
  for (int i = 2 * half + lane; i < p.head_dim; i += kWarp) head.target[i] = from_float<T>(value(i));
}

}  // namespace raylm::cuda
