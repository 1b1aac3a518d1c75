// Plain paged attention for any head size up to 256: right first, and independent of how long sequences are.
#pragma once

#include "raylm/cuda/common.cuh"
#include "raylm/cuda/ptx/math.cuh"
#include "raylm/cuda/tile/numbers.cuh"

namespace raylm::cuda {

constexpr int kAttentionWarps = 8;

// Queries and results are of T. The cache holds C, which kernels have as a template's parameter: T, or codes. Codes of keys
// are in units of a scale that the launcher has multiplied into `scale`, those of values in units of `v_scale`, which the
// kernels multiply into their results: no number of the cache is scaled by itself.
template <typename T>
struct AttentionParams {
  const T* q;
  int64_t q_token_stride, q_head_stride;
  const void* k_cache;
  const void* v_cache;
  int64_t k_block_stride, k_slot_stride, k_head_stride;
  int64_t v_block_stride, v_slot_stride, v_head_stride;
  const int32_t* block_table;
  int64_t block_table_stride;
  const int32_t* query_start;
  const int32_t* seq_lens;
  T* out;  // contiguous [T, Hq, D]
  int64_t num_seqs, num_heads, num_kv_heads, head_dim, block_size;
  float scale;
  int64_t window;
  float soft_cap;
  int64_t min_query_len;  // sequences with fewer queries are left to another kernel
  const float* sinks;     // [num_heads], may be null
  float v_scale;          // 1 where C is T

  // Query heads of a KV head.
  __host__ __device__ int64_t group() const { return num_heads / num_kv_heads; }
};

// What the sink of a head, a logit without a value, adds to the softmax's denominator, which is relative to the score
// `top`; `top` is to base 2.
template <typename T>
__device__ inline float sink_weight(const AttentionParams<T>& p, int64_t head, float top) {
  return p.sinks ? exp2_approx(p.sinks[head] * kLog2E - top) : 0.0f;
}

// The sequence that a token belongs to, or num_seqs for rows past the last one.
__device__ inline int64_t sequence_of(const int32_t* query_start, int64_t num_seqs, int64_t token) {
  int64_t low = 0, high = num_seqs;  // the first s with query_start[s + 1] > token
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (query_start[middle + 1] > token) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// One block for a (token, query head). Its warps take the keys in turn, each with a softmax of its own that is kept up
// to date as keys pass by (online softmax, arXiv:1805.02867); in the end the warps' sums are joined. Lane l holds the
// elements l, l + 32, ... of the head: PerLane of them.
template <typename T, typename C, int PerLane>
__global__ void attention_kernel(const AttentionParams<T> p, const float* alibi_slopes) {
  const int64_t token = blockIdx.x, head = blockIdx.y;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  T* out = p.out + (token * p.num_heads + head) * p.head_dim;
  const int64_t s = sequence_of(p.query_start, p.num_seqs, token);
  if (s == p.num_seqs) {
    for (int64_t d = threadIdx.x; d < p.head_dim; d += blockDim.x) out[d] = from_float<T>(0.0f);
    return;
  }
  if (p.query_start[s + 1] - p.query_start[s] < p.min_query_len) return;
  const int64_t position = p.seq_lens[s] - p.query_start[s + 1] + token;
  const int64_t first = p.window > 0 && position >= p.window ? position - p.window + 1 : 0;
  const int64_t kv_head = head / p.group();
  const T* q_row = p.q + token * p.q_token_stride + head * p.q_head_stride;
  float q[PerLane], acc[PerLane] = {};
  for (int i = 0; i < PerLane; ++i) q[i] = lane + i * kWarp < p.head_dim ? to_float(q_row[lane + i * kWarp]) * p.scale : 0;
  float top = -INFINITY, total = 0;
  for (int64_t key = first + warp; key <= position; key += kAttentionWarps) {
    const int64_t block = p.block_table[s * p.block_table_stride + key / p.block_size], slot = key % p.block_size;
    const C* k = static_cast<const C*>(p.k_cache) + block * p.k_block_stride + slot * p.k_slot_stride + kv_head * p.k_head_stride;
    const C* v = static_cast<const C*>(p.v_cache) + block * p.v_block_stride + slot * p.v_slot_stride + kv_head * p.v_head_stride;
    float score = 0;
    for (int i = 0; i < PerLane; ++i) {
      if (lane + i * kWarp < p.head_dim) score += q[i] * to_float(k[lane + i * kWarp]);
    }
    score = warp_sum(score);
    if (p.soft_cap > 0) score = p.soft_cap * tanhf(score / p.soft_cap);
    if (alibi_slopes) score += alibi_slopes[head] * static_cast<float>(key - position);
    const float new_top = fmaxf(top, score), shrink = __expf(top - new_top), weight = __expf(score - new_top);
    total = total * shrink + weight;
    for (int i = 0; i < PerLane; ++i) {
      if (lane + i * kWarp < p.head_dim) acc[i] = acc[i] * shrink + weight * to_float(v[lane + i * kWarp]);
    }
    top = new_top;
  }

  __shared__ float tops[kAttentionWarps], totals[kAttentionWarps], sums[kAttentionWarps][PerLane * kWarp];
  if (lane == 0) tops[warp] = top, totals[warp] = total;
  for (int i = 0; i < PerLane; ++i) sums[warp][lane + i * kWarp] = acc[i];
  __syncthreads();
  float block_top = -INFINITY, block_total = 0;
  for (int w = 0; w < kAttentionWarps; ++w) block_top = fmaxf(block_top, tops[w]);
  for (int w = 0; w < kAttentionWarps; ++w) block_total += totals[w] * __expf(tops[w] - block_top);
  block_total += sink_weight(p, head, block_top * kLog2E);
  for (int64_t d = threadIdx.x; d < p.head_dim; d += blockDim.x) {
    float sum = 0;
    for (int w = 0; w < kAttentionWarps; ++w) sum += sums[w][d] * __expf(tops[w] - block_top);
    out[d] = from_float<T>(sum * p.v_scale / block_total);
  }
}

}  // namespace raylm::cuda
