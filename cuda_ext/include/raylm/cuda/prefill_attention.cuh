// Attention of long runs of queries over a paged cache, for any GPU since Ampere: FlashAttention-2 (Dao,
// arXiv:2307.08691) with mma.sync. A block takes 128 queries of one head, each of its 8 warps 16 of them, and walks
// over the keys 16 to 64 at a time; cp.async brings the next keys and values while the current ones are multiplied. Codes of
// a cache of 8-bit floats are brought through registers, where they become numbers of the queries' type. Any block size,
// and any strides that are multiples of 16 bytes.
#pragma once

#include "raylm/cuda/prefill_common.cuh"
#include "raylm/cuda/ptx/copy.cuh"
#include "raylm/cuda/ptx/matrix.cuh"
#include "raylm/cuda/tile/numbers.cuh"

namespace raylm::cuda {

template <int D>
struct PrefillShape {
  static constexpr int kRows = 128, kThreads = 256;
  static constexpr int kKeys = D <= 96 ? 64 : D <= 128 ? 32 : 16;  // so that 99 KiB of shared memory, any GPU's, suffice
  static constexpr int kStride = D + 8;  // elements of a row in shared memory: an odd number of 16 bytes, no conflicts
  static constexpr int kStage = kKeys * kStride;
  static constexpr int kSharedBytes = (kRows * kStride + 4 * kStage) * 2;  // Q, two stages of K, two of V
  static_assert(kSharedBytes <= 99 * 1024);
};

template <typename T, int D>
__device__ void load_queries(const PrefillParams<T>& p, const Tile& tile, T* shared) {
  using Shape = PrefillShape<D>;
  const T* q = p.attention.q + tile.head * p.attention.q_head_stride;
  for (int i = threadIdx.x; i < Shape::kRows * D / 8; i += Shape::kThreads) {
    const int row = i / (D / 8), column = i % (D / 8) * 8;
    const bool valid = tile.first_row + row < tile.query_len;
    const int64_t token = tile.query_start + (valid ? tile.first_row + row : 0);
    const uint32_t to = shared_address(shared + row * Shape::kStride + column);
    copy_async(to, q + token * p.attention.q_token_stride + column, valid);
  }
}

// Keys outside [low, end) become zeros: their weight is 0, and 0 times the NaN of an unused slot would be NaN.
template <typename T, int D>
__device__ void load_keys(const PrefillParams<T>& p, const Tile& tile, int first, int low, int end, T* k, T* v) {
  using Shape = PrefillShape<D>;
  const AttentionParams<T>& a = p.attention;
  const int32_t* table = a.block_table + tile.seq * a.block_table_stride;
  const int head = tile.head / p.group;
  for (int i = threadIdx.x; i < Shape::kKeys * D / 8; i += Shape::kThreads) {
    const int row = i / (D / 8), column = i % (D / 8) * 8, key = first + row;
    const bool valid = key >= low && key < end;
    const int64_t block = valid ? table[key / p.block_size] : 0, slot = valid ? key % p.block_size : 0;
    const int at = row * Shape::kStride + column;
    const T* k_row = static_cast<const T*>(a.k_cache) + block * a.k_block_stride + slot * a.k_slot_stride + head * a.k_head_stride;
    const T* v_row = static_cast<const T*>(a.v_cache) + block * a.v_block_stride + slot * a.v_slot_stride + head * a.v_head_stride;
    copy_async(shared_address(k + at), k_row + column, valid);
    copy_async(shared_address(v + at), v_row + column, valid);
  }
}

// A tile's keys and values as codes, on their way through registers: each thread has 16 of either.
template <typename T, int D>
struct PrefillCodes {
  using Shape = PrefillShape<D>;
  static_assert(Shape::kKeys * D == 16 * Shape::kThreads);
  uint4 k, v;

  __device__ static int row() { return threadIdx.x / (D / 16); }
  __device__ static int column() { return threadIdx.x % (D / 16) * 16; }

  // As load_keys; a code of 0 is the number 0.
  __device__ void fetch(const PrefillParams<T>& p, const Tile& tile, int first, int low, int end) {
    const AttentionParams<T>& a = p.attention;
    const int key = first + row(), head = tile.head / p.group;
    k = v = make_uint4(0, 0, 0, 0);
    if (key < low || key >= end) return;
    const int64_t block = a.block_table[tile.seq * a.block_table_stride + key / p.block_size], slot = key % p.block_size;
    const Code* k_row = static_cast<const Code*>(a.k_cache) + block * a.k_block_stride + slot * a.k_slot_stride;
    const Code* v_row = static_cast<const Code*>(a.v_cache) + block * a.v_block_stride + slot * a.v_slot_stride;
    k = *reinterpret_cast<const uint4*>(k_row + head * a.k_head_stride + column());
    v = *reinterpret_cast<const uint4*>(v_row + head * a.v_head_stride + column());
  }

  __device__ void store(T* k_stage, T* v_stage) const {
    const int at = row() * Shape::kStride + column();
    store_numbers(k, k_stage + at);
    store_numbers(v, v_stage + at);
  }

 private:
  __device__ static void store_numbers(const uint4& codes, T* to) {
    uint4* vectors = reinterpret_cast<uint4*>(to);
    vectors[0] = make_uint4(numbers_of<T, 0>(codes.x), numbers_of<T, 1>(codes.x), numbers_of<T, 0>(codes.y),
                            numbers_of<T, 1>(codes.y));
    vectors[1] = make_uint4(numbers_of<T, 0>(codes.z), numbers_of<T, 1>(codes.z), numbers_of<T, 0>(codes.w),
                            numbers_of<T, 1>(codes.w));
  }
};

// scores = Q K^T, for the warp's 16 rows of Q.
template <typename T, int D>
__device__ void multiply_keys(float (&scores)[PrefillShape<D>::kKeys / 2], const T* q, const T* k) {
  using Shape = PrefillShape<D>;
  const int lane = threadIdx.x % kWarp;
  const T* q_row = q + lane % 16 * Shape::kStride + lane / 16 * 8;
  const T* k_row = k + (lane / 16 * 8 + lane % 8) * Shape::kStride + lane / 8 % 2 * 8;
#pragma unroll
  for (int i = 0; i < Shape::kKeys / 2; ++i) scores[i] = 0;
#pragma unroll
  for (int d = 0; d < D; d += 16) {
    uint32_t a[4], b[4];
    load_matrices(a, shared_address(q_row + d));
#pragma unroll
    for (int n = 0; n < Shape::kKeys; n += 16) {
      load_matrices(b, shared_address(k_row + n * Shape::kStride + d));
      multiply_add<T>(scores + n / 2, a, b[0], b[1]);
      multiply_add<T>(scores + n / 2 + 4, a, b[2], b[3]);
    }
  }
}

// out += weights V. The accumulators of one product have the layout of the other's left side.
template <typename T, int D>
__device__ void multiply_values(float (&out)[D / 2], const float (&weights)[PrefillShape<D>::kKeys / 2], const T* v) {
  using Shape = PrefillShape<D>;
  const int lane = threadIdx.x % kWarp;
  const T* v_row = v + lane % 16 * Shape::kStride + lane / 16 * 8;
#pragma unroll
  for (int n = 0; n < Shape::kKeys; n += 16) {
    uint32_t a[4], b[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = pack<T>(weights[n / 2 + 2 * i], weights[n / 2 + 2 * i + 1]);
#pragma unroll
    for (int d = 0; d < D; d += 16) {
      load_matrices_transposed(b, shared_address(v_row + n * Shape::kStride + d));
      multiply_add<T>(out + d / 2, a, b[0], b[1]);
      multiply_add<T>(out + d / 2 + 4, a, b[2], b[3]);
    }
  }
}

// Adds the head's slope times how far each key is before the query: linear biases (arXiv:2108.12409). The slope is in
// units of the scores; `position` and `key` are as in mask_scores.
template <int N>
__device__ void add_biases(float (&scores)[N], float slope, int position, int key) {
  const int top = position - key - 2 * (threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int column = i / 4 * 8 + i % 2, shift = i % 4 < 2 ? 0 : 8;
    scores[i] += slope * static_cast<float>(column - top - shift);
  }
}

struct Nothing {};

// Walks from the last keys to the first, so that the masked ones come while the first copies are awaited anyway.
template <typename T, typename C, int D, bool Biased>
__device__ void attend(const PrefillParams<T>& p, const float* alibi_slopes, const Tile& tile, T* shared) {
  using Shape = PrefillShape<D>;
  constexpr int kKeys = Shape::kKeys;
  constexpr bool kCodes = std::is_same_v<C, Code>;
  std::conditional_t<kCodes, PrefillCodes<T, D>, Nothing> codes;
  T* k = shared + Shape::kRows * Shape::kStride;
  T* v = k + 2 * Shape::kStage;
  const int low = tile.first_key(p.window), end = tile.end_key(Shape::kRows);
  const int first_row = threadIdx.x / kWarp * 16, row = first_row + threadIdx.x % kWarp / 4;
  const int warp_position = tile.position() + first_row;
  float out[D / 2] = {}, scores[kKeys / 2], shrink[2];
  OnlineSoftmax softmax;

  load_queries<T, D>(p, tile, shared);
  int n = (end - 1) / kKeys, stage = 0;
  if constexpr (kCodes) {
    codes.fetch(p, tile, n * kKeys, low, end);
    codes.store(k, v);
  } else {
    load_keys<T, D>(p, tile, n * kKeys, low, end, k, v);
  }
  copy_commit();
  for (; n >= low / kKeys; --n, stage ^= 1) {
    const int other = (stage ^ 1) * Shape::kStage;
    const bool more = n > low / kKeys;
    if constexpr (kCodes) {
      if (more) codes.fetch(p, tile, (n - 1) * kKeys, low, end);
      copy_wait<0>();  // for the queries
    } else {
      if (more) load_keys<T, D>(p, tile, (n - 1) * kKeys, low, end, k + other, v + other);
      copy_commit();
      copy_wait<1>();
    }
    __syncthreads();
    multiply_keys<T, D>(scores, shared + first_row * Shape::kStride, k + stage * Shape::kStage);
    if (p.tanh_scale != 0) soft_cap_scores(scores, p.tanh_scale);
    if constexpr (Biased) {
      const float unit = p.tanh_scale != 0 ? p.attention.soft_cap : p.attention.scale;
      add_biases(scores, alibi_slopes[tile.head] / unit, tile.position() + row, n * kKeys);
    }
    const bool future = (n + 1) * kKeys > warp_position + 1;
    const bool past = p.window > 0 && n * kKeys <= warp_position + 15 - p.window;
    if (future || past) mask_scores(scores, tile.position() + row, n * kKeys, p.window);
    softmax.update(scores, p.exp2_scale, shrink);
    scale_rows(out, shrink);
    multiply_values<T, D>(out, scores, v + stage * Shape::kStage);
    if constexpr (kCodes) {
      // All warps have read the other stage before they met above.
      if (more) codes.store(k + other, v + other);
    } else {
      __syncthreads();
    }
  }
  write_rows(p, tile, tile.first_row + row, out, softmax);
}

// The grid is (heads, most_tiles): a block past the last tile ends at once. alibi_slopes [num_heads] are for the kernel
// that is Biased: a branch instead would cost the other one registers.
template <typename T, typename C, int D, bool Biased>
__global__ void __launch_bounds__(PrefillShape<D>::kThreads, D <= 128 ? 2 : 1)
    prefill_kernel(const __grid_constant__ PrefillParams<T> p, const float* alibi_slopes) {
  extern __shared__ __align__(16) unsigned char memory[];
  using Shape = PrefillShape<D>;
  const int number = blockIdx.y * gridDim.x + blockIdx.x;
  zero_surplus_rows(p, int64_t{number} * Shape::kThreads + threadIdx.x,
                    int64_t{gridDim.x} * gridDim.y * Shape::kThreads);
  const Tile tile = TileSearch(p, Shape::kRows).find(number);
  if (tile.seq >= 0) attend<T, C, D, Biased>(p, alibi_slopes, tile, reinterpret_cast<T*>(memory));
}

}  // namespace raylm::cuda
