// Log probabilities of tokens, their ranks and the likeliest tokens (raylm/ops/logprobs.py), in two kernels.
//
// The first reads the logits once: a warp takes a strip of a row and leaves the strip's largest logit, the sum of its
// exponentials, how many logits are above the row's token, and the largest logit of each group of neighbours. The second,
// a block a row, adds up the strips and finds the likeliest tokens without another look at the row: they are in the groups
// that have the largest logits, as many groups as tokens are asked for. Of these it reads the logits again, narrows them
// down to as many chunks of 8 in the same way, and ranks what is left.
#pragma once

#include "raylm/cuda/order.cuh"
#include "raylm/cuda/ptx/grid.cuh"
#include "raylm/cuda/ptx/math.cuh"
#include "raylm/cuda/tile/vec.cuh"

namespace raylm::cuda {

constexpr int kStripThreads = 256, kTopThreads = 256;
constexpr int kTopWarps = kTopThreads / kWarp;
constexpr int kGroup = 256, kStripGroups = 4, kStrip = kGroup * kStripGroups, kChunk = 8;  // tokens, but for the groups
constexpr int kMaxTop = 64;
constexpr int kMaxKeys = kMaxTop * kGroup / kChunk;
constexpr int kIdBits = 20;  // of a token's id in a key
constexpr int kMaxVocab = kMaxKeys * kGroup;
constexpr int kStripsEach = kMaxVocab / kStrip / kTopThreads;
static_assert(kMaxVocab + kGroup <= 1 << kIdBits && kMaxKeys % kTopThreads == 0);

// What is left of a strip: of its logits x the sum of exp(x - max), and how many are above the row's token.
struct alignas(16) StripSum {
  float max, sum;
  int above, unused;
};

template <typename T>
struct RowParams {
  const T* logits;
  int64_t stride;
  int vocab, num_strips, num_groups;
  bool vectors;              // rows of logits are aligned for 16-byte loads
  const int64_t* token_ids;  // a token a row, or null
  StripSum* strips;          // [rows, num_strips]
  float* groups;             // [rows, num_groups], or null where the likeliest tokens are not wanted

  // The logit of a token of a row; minus infinity of what is no token.
  __device__ float logit(int64_t row, int64_t token) const {
    const bool known = static_cast<uint64_t>(token) < static_cast<uint64_t>(vocab);
    return known ? to_float(logits[row * stride + token]) : -INFINITY;
  }
};

// What to subtract in an exponent, so that no difference of infinities comes of a row without finite logits.
__device__ inline float reference_of(float max) { return max == -INFINITY ? 0.0f : max; }

template <typename T>
struct PairOf;
template <>
struct PairOf<__half> {
  using type = __half2;
};
template <>
struct PairOf<__nv_bfloat16> {
  using type = __nv_bfloat162;
};

template <typename T>
__device__ inline const auto& pair(const Vec<T>& v, int i) {
  return reinterpret_cast<const typename PairOf<T>::type*>(v.x)[i];
}

// The largest of some vectors' elements.
template <typename T, int N>
__device__ inline float largest(const Vec<T> (&held)[N], int begin, int end) {
  if constexpr (sizeof(T) == 2) {
    auto most = pair(held[begin], 0);
#pragma unroll
    for (int i = 0; i < kVec<T> / 2 * (end - begin); ++i) {
      most = __hmax2(most, pair(held[begin + 2 * i / kVec<T>], i % (kVec<T> / 2)));
    }
    return fmaxf(to_float(most.x), to_float(most.y));
  } else {
    float most = -INFINITY;
#pragma unroll
    for (int i = 0; i < kVec<T> * (end - begin); ++i) most = fmaxf(most, held[begin + i / kVec<T>][i % kVec<T>]);
    return most;
  }
}

// How many of some vectors' elements are greater than a number of their type. They are few enough to be counted in it.
template <typename T, int N>
__device__ inline int count_above(const Vec<T> (&held)[N], float bound) {
  if constexpr (sizeof(T) == 2) {
    static_assert(N * kVec<T> / 2 <= 256);
    typename PairOf<T>::type bounds, sum;
    bounds.x = bounds.y = from_float<T>(bound), sum.x = sum.y = from_float<T>(0.0f);
#pragma unroll
    for (int i = 0; i < N * kVec<T> / 2; ++i) {
      sum = __hadd2(sum, __hgt2(pair(held[2 * i / kVec<T>], i % (kVec<T> / 2)), bounds));
    }
    return static_cast<int>(to_float(sum.x) + to_float(sum.y));
  } else {
    int count = 0;
#pragma unroll
    for (int i = 0; i < N * kVec<T>; ++i) count += held[i / kVec<T>][i % kVec<T>] > bound;
    return count;
  }
}

// A lane's part of a strip: neighbours of each group. What is past the end of the row is minus infinity.
template <typename T, int N>
__device__ inline void load_strip(Vec<T> (&held)[N], const T* x, int size, bool vectors, int lane) {
  // All loads are under way before one is waited for.
  const bool whole = vectors && size >= kStrip;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    if (whole) held[j] = Vec<T>::load(x + (j * kWarp + lane) * kVec<T>);
  }
  if (whole) return;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const int at = (j * kWarp + lane) * kVec<T>;
    if (vectors && at + kVec<T> <= size) {
      held[j] = Vec<T>::load(x + at);
    } else {
#pragma unroll
      for (int i = 0; i < kVec<T>; ++i) held[j].x[i] = at + i < size ? x[at + i] : from_float<T>(-INFINITY);
    }
  }
}

// A strip a warp; one row of logits a block in x.
template <typename T>
__global__ void __launch_bounds__(kStripThreads) row_strips_kernel(const __grid_constant__ RowParams<T> p) {
  constexpr int kVecs = kStrip / (kWarp * kVec<T>), kGroupVecs = kVecs / kStripGroups;
  start_dependents();
  wait_for_dependencies();
  const int64_t row = blockIdx.x;
  const int strip = blockIdx.y * (kStripThreads / kWarp) + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (strip >= p.num_strips) return;
  Vec<T> held[kVecs];
  load_strip(held, p.logits + row * p.stride + strip * kStrip, p.vocab - strip * kStrip, p.vectors, lane);
  const float own = p.token_ids ? p.logit(row, p.token_ids[row]) : INFINITY;
  float of_group[kStripGroups], max = -INFINITY;
#pragma unroll
  for (int g = 0; g < kStripGroups; ++g) {
    const float of_lane = largest(held, g * kGroupVecs, (g + 1) * kGroupVecs);
    of_group[g] = number_of(__reduce_max_sync(kAllLanes, image_of(of_lane)));
    max = fmaxf(max, of_group[g]);
  }
  const float reference = reference_of(max);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kVecs * kVec<T>; ++i) {
    sum += exp2_approx((held[i / kVec<T>][i % kVec<T>] - reference) * kLog2E);
  }
  sum = warp_sum(sum);
  const int above = p.token_ids ? __reduce_add_sync(kAllLanes, count_above(held, own)) : 0;
  if (lane == 0) p.strips[row * p.num_strips + strip] = {max, sum, above, 0};
  if (!p.groups) return;
#pragma unroll
  for (int g = 0; g < kStripGroups; ++g) {
    const int group = strip * kStripGroups + g;
    if (lane == g && group < p.num_groups) p.groups[row * p.num_groups + group] = of_group[g];
  }
}

// A row as a whole.
struct RowTotal {
  float max, log_sum;  // of exp(x - max)
  int above;

  // A logit's log probability. Where there is no finite logit, minus infinity.
  __device__ float log_prob(float logit) const { return logit == -INFINITY ? logit : logit - max - log_sum; }
};

// Adds up a row's strips; for all threads of a block.
__device__ inline RowTotal total_of(const StripSum* strips, int num_strips) {
  __shared__ float maxima[kTopWarps], sums[kTopWarps];
  __shared__ int counts[kTopWarps];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  StripSum held[kStripsEach];
  RowTotal total{-INFINITY, 0, 0};
#pragma unroll
  for (int j = 0; j < kStripsEach; ++j) {
    const int i = j * kTopThreads + threadIdx.x;
    held[j] = i < num_strips ? strips[i] : StripSum{-INFINITY, 0, 0, 0};
    total.max = fmaxf(total.max, held[j].max);
  }
  total.max = number_of(__reduce_max_sync(kAllLanes, image_of(total.max)));
  if (lane == 0) maxima[warp] = total.max;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kTopWarps; ++w) total.max = fmaxf(total.max, maxima[w]);
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kStripsEach; ++j) {
    sum += held[j].sum * exp2_approx((held[j].max - reference_of(total.max)) * kLog2E);
    total.above += held[j].above;
  }
  sum = warp_sum(sum);
  total.above = __reduce_add_sync(kAllLanes, total.above);
  if (lane == 0) sums[warp] = sum, counts[warp] = total.above;
  __syncthreads();
  sum = 0, total.above = 0;
#pragma unroll
  for (int w = 0; w < kTopWarps; ++w) sum += sums[w], total.above += counts[w];
  total.log_sum = logf(sum);
  return total;
}

// A logit and its token as an integer: larger for a larger logit, and among equals for an earlier token. 16 bits of a
// logit are enough for the types that have no more: then fewer steps tell two keys apart.
template <typename T>
__device__ inline uint64_t key_of(float logit, int token) {
  const T x = from_float<T>(logit + 0.0f);  // -0 becomes 0: they are equal
  uint32_t image;
  if constexpr (sizeof(T) == 2) {
    const uint32_t bits = reinterpret_cast<const uint16_t&>(x);
    image = bits & 0x8000u ? ~bits & 0xffffu : bits | 0x8000u;
  } else {
    image = image_of(x);
  }
  return static_cast<uint64_t>(image) << kIdBits | ((1 << kIdBits) - 1 - token);
}

// Of what is past the end of the vocabulary: below all keys of tokens.
__device__ inline uint64_t key_of_none(int token) { return (1 << kIdBits) - 1 - token; }

__device__ inline int token_of_key(uint64_t key) {
  return (1 << kIdBits) - 1 - static_cast<int>(key & ((1 << kIdBits) - 1));
}

template <typename T>
__device__ inline float logit_of_key(uint64_t key) {
  const uint32_t image = static_cast<uint32_t>(key >> kIdBits);
  if constexpr (sizeof(T) == 2) {
    const uint16_t bits = static_cast<uint16_t>(image & 0x8000u ? image & 0x7fffu : ~image);
    return to_float(reinterpret_cast<const T&>(bits));
  } else {
    return number_of(image);
  }
}

struct TopScratch {
  uint64_t keys[kMaxKeys], kept[kMaxTop], top[kMaxTop];
  int counts[2][kTopWarps], num_kept;
};

// Moves the k largest of num different keys, k < num, to scratch.kept, in any order: halves the range in which the least
// of them lies, at first up to `high`, until it parts exactly k from the others.
__device__ inline void narrow(TopScratch& scratch, int num, int k, uint64_t high) {
  constexpr int kEach = kMaxKeys / kTopThreads;
  uint64_t held[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int i = j * kTopThreads + threadIdx.x;
    held[j] = i < num ? scratch.keys[i] : 0;
  }
  if (threadIdx.x == 0) scratch.num_kept = 0;
  uint64_t low = 0, bound = 0;
  for (int round = 0;; round ^= 1) {
    bound = low + (high - low) / 2;
    int count = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if (j * kTopThreads < num) count += held[j] >= bound;
    }
    count = __reduce_add_sync(kAllLanes, count);
    if (threadIdx.x % kWarp == 0) scratch.counts[round][threadIdx.x / kWarp] = count;
    __syncthreads();
    count = 0;
#pragma unroll
    for (int w = 0; w < kTopWarps; ++w) count += scratch.counts[round][w];
    if (count == k) break;
    (count > k ? low : high) = bound;
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    if (held[j] >= bound) scratch.kept[atomicAdd(&scratch.num_kept, 1)] = held[j];
  }
  __syncthreads();
}

// Puts the k largest of the num different keys of scratch.keys into scratch.top, the largest first; fewer where there are
// fewer. Returns how many. Every thread has written its keys.
template <typename T>
__device__ inline int keep_largest(TopScratch& scratch, int num, int k) {
  __syncthreads();
  const uint64_t* keys = scratch.keys;
  if (num > kTopThreads) {
    narrow(scratch, num, k, 1ull << (8 * sizeof(T) + kIdBits));
    keys = scratch.kept;
    num = k;
  }
  if (threadIdx.x < num) {
    const uint64_t mine = keys[threadIdx.x];
    int greater = 0;
#pragma unroll 8
    for (int i = 0; i < num; ++i) greater += keys[i] > mine;
    if (greater < k) scratch.top[greater] = mine;
  }
  __syncthreads();
  return min(num, k);
}

// The largest logit of a chunk of a row, as a key with the chunk's first token.
template <typename T>
__device__ inline uint64_t chunk_key(const RowParams<T>& p, const T* x, int first) {
  if (first >= p.vocab) return key_of_none(first);
  float most = -INFINITY;
  if (p.vectors && first + kChunk <= p.vocab) {
    Vec<T> held[kChunk / kVec<T>];
#pragma unroll
    for (int j = 0; j < kChunk / kVec<T>; ++j) held[j] = Vec<T>::load(x + first + j * kVec<T>);
    most = largest(held, 0, kChunk / kVec<T>);
  } else {
    for (int i = first; i < min(first + kChunk, p.vocab); ++i) most = fmaxf(most, to_float(x[i]));
  }
  return key_of<T>(most, first);
}

// Finds the k likeliest tokens of a row, likeliest first, as the keys scratch.top.
template <typename T>
__device__ inline void find_top(const RowParams<T>& p, int64_t row, int k, TopScratch& scratch) {
  const T* x = p.logits + row * p.stride;
  const float* groups = p.groups + row * p.num_groups;
  for (int g = threadIdx.x; g < p.num_groups; g += kTopThreads) scratch.keys[g] = key_of<T>(groups[g], g * kGroup);
  const int num_groups = keep_largest<T>(scratch, p.num_groups, k);
  constexpr int kChunks = kGroup / kChunk;
#pragma unroll 4
  for (int i = threadIdx.x; i < num_groups * kChunks; i += kTopThreads) {
    scratch.keys[i] = chunk_key(p, x, token_of_key(scratch.top[i / kChunks]) + i % kChunks * kChunk);
  }
  const int num_chunks = keep_largest<T>(scratch, num_groups * kChunks, k);
  for (int i = threadIdx.x; i < num_chunks * kChunk; i += kTopThreads) {
    const int token = token_of_key(scratch.top[i / kChunk]) + i % kChunk;
    scratch.keys[i] = token < p.vocab ? key_of<T>(to_float(x[token]), token) : key_of_none(token);
  }
  keep_largest<T>(scratch, num_chunks * kChunk, k);
}

struct TopOutputs {
  float* values;
  int64_t* ranks;
  int num_top;
  int64_t* top_ids;
  float* top_values;
};

// One row a block, after row_strips_kernel.
template <typename T>
__global__ void __launch_bounds__(kTopThreads) token_logprobs_kernel(const __grid_constant__ RowParams<T> p,
                                                                     const __grid_constant__ TopOutputs out) {
  __shared__ TopScratch scratch;
  start_dependents();
  wait_for_dependencies();
  const int64_t row = blockIdx.x;
  const RowTotal total = total_of(p.strips + row * p.num_strips, p.num_strips);
  if (threadIdx.x == 0) {
    out.values[row] = total.log_prob(p.logit(row, p.token_ids[row]));
    out.ranks[row] = 1 + total.above;
  }
  if (out.num_top == 0) return;
  find_top(p, row, out.num_top, scratch);
  if (threadIdx.x < out.num_top) {
    const uint64_t key = scratch.top[threadIdx.x];
    const int64_t at = row * out.num_top + threadIdx.x;
    out.top_ids[at] = token_of_key(key);
    out.top_values[at] = total.log_prob(logit_of_key<T>(key));
  }
}

// One row a block, after row_strips_kernel: the log probabilities of num tokens a row.
template <typename T>
__global__ void __launch_bounds__(kTopThreads) gather_logprobs_kernel(const __grid_constant__ RowParams<T> p,
                                                                      const int64_t* token_ids, int64_t token_stride,
                                                                      int64_t num, float* values) {
  start_dependents();
  wait_for_dependencies();
  const int64_t row = blockIdx.x;
  const RowTotal total = total_of(p.strips + row * p.num_strips, p.num_strips);
  for (int64_t i = threadIdx.x; i < num; i += kTopThreads) {
    values[row * num + i] = total.log_prob(p.logit(row, token_ids[row * token_stride + i]));
  }
}

}  // namespace raylm::cuda
