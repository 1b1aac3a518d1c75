// Changes to logits in place: tokens that a bit mask does not allow, biases of single tokens (raylm/ops/logits.py). What is
// not changed is not written, and what a mask forbids whole is not read.
#pragma once

#include "raylm/cuda/ptx/grid.cuh"
#include "raylm/cuda/tile/vec.cuh"

namespace raylm::cuda {

constexpr int kMaskSlice = 8192;  // tokens of the vocabulary: one block
constexpr int kMaskThreads = 256;
constexpr int kBiasThreads = 128;

template <typename T>
struct MaskParams {
  T* logits;
  int64_t logits_stride, vocab;
  const int32_t* bitmask;
  int64_t mask_stride, num_masks;
  const int64_t* mask_rows;
  bool vectors;  // rows of logits are aligned for 16-byte accesses
};

// A bit each of the tokens first ... first + kVec<T> - 1; first is a multiple of their number.
template <typename T>
__device__ inline uint32_t allowed_bits(const int32_t* mask, int64_t first) {
  return static_cast<uint32_t>(mask[first / 32]) >> (first % 32) & ((1u << kVec<T>)-1);
}

// One row of logits a block in x, one slice of it in y.
template <typename T>
__global__ void __launch_bounds__(kMaskThreads) mask_logits_kernel(const __grid_constant__ MaskParams<T> p) {
  constexpr int kSize = kVec<T>;
  start_dependents();
  wait_for_dependencies();
  const int64_t row = blockIdx.x, mask_row = p.mask_rows[row];
  if (static_cast<uint64_t>(mask_row) >= static_cast<uint64_t>(p.num_masks)) return;
  const int32_t* mask = p.bitmask + mask_row * p.mask_stride;
  T* logits = p.logits + row * p.logits_stride;
  const T masked = from_float<T>(-INFINITY);
  const int64_t begin = static_cast<int64_t>(blockIdx.y) * kMaskSlice, end = min(begin + kMaskSlice, p.vocab);
  if (!p.vectors) {
    for (int64_t i = begin + threadIdx.x; i < end; i += kMaskThreads) {
      if (!(static_cast<uint32_t>(mask[i / 32]) >> (i % 32) & 1)) logits[i] = masked;
    }
    return;
  }
#pragma unroll
  for (int step = 0; step < kMaskSlice / (kSize * kMaskThreads); ++step) {
    const int64_t first = begin + (step * kMaskThreads + threadIdx.x) * kSize;
    if (first >= end) break;
    const uint32_t bits = allowed_bits<T>(mask, first);
    if (bits == (1u << kSize) - 1) continue;
    if (first + kSize > end) {
      for (int i = 0; first + i < end; ++i) {
        if (!(bits >> i & 1)) logits[first + i] = masked;
      }
      continue;
    }
    Vec<T> x;
    if (bits) x = Vec<T>::load(logits + first);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (!(bits >> i & 1)) x.x[i] = masked;
    }
    x.store(logits + first);
  }
}

template <typename T>
struct BiasParams {
  T* logits;
  int64_t logits_stride, vocab;
  const int64_t* table_rows;
  const int32_t* ids;
  int64_t ids_stride;
  const float* values;
  int64_t values_stride;
  const int32_t* counts;
  int64_t num_table_rows, width;
};

// One row a block. The tokens of a row of the table are different ones.
template <typename T>
__global__ void __launch_bounds__(kBiasThreads) bias_logits_kernel(const __grid_constant__ BiasParams<T> p) {
  start_dependents();
  wait_for_dependencies();
  const int64_t row = blockIdx.x, table_row = p.table_rows[row];
  if (static_cast<uint64_t>(table_row) >= static_cast<uint64_t>(p.num_table_rows)) return;
  const int64_t count = min(static_cast<int64_t>(p.counts[table_row]), p.width);
  T* logits = p.logits + row * p.logits_stride;
  constexpr float most = kLargest<T>;
  for (int64_t i = threadIdx.x; i < count; i += kBiasThreads) {
    const int64_t token = p.ids[table_row * p.ids_stride + i];
    const float value = p.values[table_row * p.values_stride + i];
    if (token < 0 || token >= p.vocab || value == 0) continue;
    const float before = to_float(logits[token]);
    if (isinf(before)) continue;
    const float after = before + value;
    logits[token] = from_float<T>(after > most ? most : after < -most ? -most : after);
  }
}

}  // namespace raylm::cuda
