// What a layer does to its queries, keys and values before attention, in one pass: norm of the heads of q and k
// (arXiv:2302.05442; optional), rotary embedding (RoFormer, arXiv:2104.09864), k and v into the paged cache. A head has
// R rotary dimensions, of which i < R/2 pairs with i + R/2.
#pragma once

#include "raylm/cuda/ptx/grid.cuh"
#include "raylm/cuda/tile/numbers.cuh"
#include "raylm/cuda/tile/vec.cuh"

namespace raylm::cuda {

template <typename T>
struct HeadsView {
  T* x;
  int64_t token_stride, head_stride;
  int num_heads;
};

template <typename C>
struct CacheView {
  C* x;
  int64_t block_stride, slot_stride, head_stride;
  float inverse;  // of the scale, where C is a code
};

// Queries, keys and values are of T, the cache holds C: T, or codes.
template <typename T, typename C>
struct RopeStoreParams {
  HeadsView<T> q, k, v;
  CacheView<C> k_cache, v_cache;
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
template <typename T, typename C>
struct Head {
  const T* source;
  T* target;        // a query's, else null
  C* slot;          // in the cache; null: nowhere, as the token's slot lies outside
  float inverse;    // as in CacheView
  const T* weight;  // null: no norm
  bool rotates;

  __device__ bool goes() const { return target || slot; }

  __device__ void write(int i, T x) const {
    if (target) {
      target[i] = x;
    } else {
      slot[i] = kept<C>(x, inverse);
    }
  }

  // Elements from i on, as many as a vector has.
  __device__ void write(int i, const Vec<T>& x) const {
    if constexpr (std::is_same_v<T, C>) {
      x.store((target ? target : slot) + i);
    } else if (target) {
      x.store(target + i);
    } else {
      uint32_t codes[kVec<T> / 4];
#pragma unroll
      for (int n = 0; n < kVec<T> / 4; ++n) {
        codes[n] = codes_of(x[4 * n] * inverse, x[4 * n + 1] * inverse, x[4 * n + 2] * inverse, x[4 * n + 3] * inverse);
      }
      if constexpr (kVec<T> == 8) {
        *reinterpret_cast<uint2*>(slot + i) = make_uint2(codes[0], codes[1]);
      } else {
        *reinterpret_cast<uint32_t*>(slot + i) = codes[0];
      }
    }
  }
};

template <typename T, typename C>
__device__ C* slot_of(const RopeStoreParams<T, C>& p, const CacheView<C>& cache, int64_t token, int head) {
  const int64_t slot = p.slots[token];
  if (slot < 0 || slot >= p.num_slots) return nullptr;
  const int64_t block = slot / p.block_size;
  return cache.x + block * cache.block_stride + (slot - block * p.block_size) * cache.slot_stride +
         head * cache.head_stride;
}

template <typename T, typename C>
__device__ Head<T, C> head_of(const RopeStoreParams<T, C>& p, int64_t token, int head) {
  if (head < p.q.num_heads) {
    T* x = p.q.x + token * p.q.token_stride + head * p.q.head_stride;
    return {x, x, nullptr, 1, p.q_weight, true};
  }
  head -= p.q.num_heads;
  if (head < p.k.num_heads) {
    const T* x = p.k.x + token * p.k.token_stride + head * p.k.head_stride;
    return {x, nullptr, slot_of(p, p.k_cache, token, head), p.k_cache.inverse, p.k_weight, true};
  }
  head -= p.k.num_heads;
  const T* x = p.v.x + token * p.v.token_stride + head * p.v.head_stride;
  return {x, nullptr, slot_of(p, p.v_cache, token, head), p.v_cache.inverse, nullptr, false};
}

// The cosines of a token's position, then its sines; null leaves the token as it is: its position is outside the table.
template <typename T, typename C>
__device__ const float* angles_of(const RopeStoreParams<T, C>& p, int64_t token) {
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
template <typename T, typename C, int kLanes>
__global__ void __launch_bounds__(128) rope_store_kernel(RopeStoreParams<T, C> p) {
  constexpr int kSize = kVec<T>;
  start_dependents();
  if (!p.early) wait_for_dependencies();
  const int heads = p.q.num_heads + p.k.num_heads + p.v.num_heads, half = p.head_dim / 2;
  const int64_t unit = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kLanes;
  const int64_t token = unit / heads;
  const int at = threadIdx.x % kLanes * kSize;
  const bool inside = token < p.num_tokens && at < half;
  Head<T, C> head{};
  const float* angles = nullptr;
  Floats<kSize> cos{}, sin{};
  if (inside) {
    head = head_of(p, token, static_cast<int>(unit - token * heads));
    if (head.rotates) angles = angles_of(p, token);
  }
  if (angles) cos = Floats<kSize>::load(angles + at), sin = Floats<kSize>::load(angles + half + at);
  if (p.early) wait_for_dependencies();
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
  if (!inside || !head.goes()) return;
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
  head.write(at, a);
  head.write(half + at, b);
}

// Heads of any size and alignment: a warp a head, which it reads twice.
template <typename T, typename C>
__global__ void rope_store_any_kernel(RopeStoreParams<T, C> p) {
  wait_for_dependencies();
  start_dependents();
  const int heads = p.q.num_heads + p.k.num_heads + p.v.num_heads, half = p.rotary_dim / 2;
  const int64_t unit = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
  const int64_t token = unit / heads;
  const int lane = threadIdx.x % kWarp;
  if (token >= p.num_tokens) return;
  const Head<T, C> head = head_of(p, token, static_cast<int>(unit - token * heads));
  if (!head.goes()) return;
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
    head.write(i, from_float<T>(u * c - v * s));
    head.write(i + half, from_float<T>(v * c + u * s));
  }
  for (int i = 2 * half + lane; i < p.head_dim; i += kWarp) head.write(i, from_float<T>(value(i)));
}

}  // namespace raylm::cuda
