// Logits lowered for tokens that a row has already: repetition (arXiv:1909.05858), frequency and presence penalties.
//
// A block works on a slice of a row's logits. It counts the row's tokens of its slice in shared memory, where no two
// slices meet, and then copies the logits, changing those of the tokens it has seen. Counts are integers, so the order
// of the additions does not matter, and every operation rounds by itself, so the result is that of torch's operators.
#pragma once

#include "raylm/cuda/ptx/grid.cuh"
#include "raylm/cuda/tile/vec.cuh"

namespace raylm::cuda {

constexpr int kPenalizeSlice = 8192;  // tokens of the vocabulary; 32 KiB of counters
constexpr int kPenalizeThreads = 512;
constexpr uint32_t kInPrompt = 0x80000000u;  // of a counter; the other bits count generated tokens

template <typename T>
struct PenalizeParams {
  const T* logits;
  int64_t logits_stride, vocab;
  const int32_t* token_ids;
  int64_t token_stride, table_rows, table_width;
  const int64_t *rows, *prompt_lens, *seq_lens;
  const float *repetition, *frequency, *presence;
  T* out;
  bool vectors;  // rows of logits and of out are aligned for 16-byte accesses
};

// What one row is to pay.
struct Penalty {
  float repetition, frequency, presence;

  __device__ bool is_neutral() const { return repetition == 1 && frequency == 0 && presence == 0; }

  // The logit of a token that the row has. A row of several infinite ones could not be sampled from.
  template <typename T>
  __device__ T of(T logit, uint32_t count) const {
    float x = to_float(logit);
    x = x > 0 ? __fdiv_rn(x, repetition) : __fmul_rn(x, repetition);
    const uint32_t generated = count & ~kInPrompt;
    if (generated) x = __fsub_rn(x, __fadd_rn(__fmul_rn(frequency, __uint2float_rn(generated)), presence));
    constexpr float most = kLargest<T>;
    return from_float<T>(x > most ? most : x);
  }
};

// Counts the tokens begin ... end - 1 that lie in a slice, of which those before prompt_end are the prompt's.
__device__ inline void count_tokens(uint32_t* counts, int64_t first, int size, const int32_t* tokens, int64_t begin,
                                    int64_t prompt_end, int64_t end) {
  constexpr int kBatch = 4;  // loads under way at a time
  for (int64_t base = begin + threadIdx.x; base < end; base += kBatch * kPenalizeThreads) {
    int32_t held[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int64_t i = base + j * kPenalizeThreads;
      held[j] = i < end ? tokens[i] : -1;
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      // What is no token of the slice, or none at all, is far out of its range: negative ones wrap.
      const uint64_t at = static_cast<uint64_t>(held[j] - first);
      if (at >= static_cast<uint64_t>(size)) continue;
      if (base + j * kPenalizeThreads < prompt_end) {
        atomicOr(counts + at, kInPrompt);
      } else {
        atomicAdd(counts + at, 1u);
      }
    }
  }
}

// One row of logits a block in x, one slice of it in y.
template <typename T>
__global__ void __launch_bounds__(kPenalizeThreads) penalize_kernel(const PenalizeParams<T> p) {
  constexpr int kSize = kVec<T>;
  alignas(16) __shared__ uint32_t counts[kPenalizeSlice];
  start_dependents();
  wait_for_dependencies();
  const int64_t row = blockIdx.x, first = static_cast<int64_t>(blockIdx.y) * kPenalizeSlice;
  const int size = static_cast<int>(min(static_cast<int64_t>(kPenalizeSlice), p.vocab - first));
  const Penalty penalty{p.repetition[row], p.frequency[row], p.presence[row]};
  const T* logits = p.logits + row * p.logits_stride + first;
  T* out = p.out + row * p.vocab + first;
  const bool pays = !penalty.is_neutral();  // the same in all threads
  if (pays) {
    for (int i = 4 * threadIdx.x; i < kPenalizeSlice; i += 4 * kPenalizeThreads) {
      *reinterpret_cast<uint4*>(counts + i) = uint4{};
    }
    __syncthreads();
    const int64_t table_row = p.rows[row];
    if (table_row >= 0 && table_row < p.table_rows) {
      const int64_t prompt_end = max(p.prompt_lens[row], static_cast<int64_t>(0));
      const int64_t begin = penalty.repetition == 1 ? prompt_end : 0;  // The prompt only counts for repetition.
      const int64_t end = min(p.seq_lens[row], p.table_width);
      count_tokens(counts, first, size, p.token_ids + table_row * p.token_stride, begin, prompt_end, end);
    }
    __syncthreads();
  }
  if (!p.vectors) {
    for (int i = threadIdx.x; i < size; i += kPenalizeThreads) {
      out[i] = pays && counts[i] ? penalty.of(logits[i], counts[i]) : logits[i];
    }
    return;
  }
  for (int i = kSize * threadIdx.x; i < size; i += kSize * kPenalizeThreads) {
    Vec<T> x = Vec<T>::load(logits + i);
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      if (pays && counts[i + j]) x.x[j] = penalty.of(x.x[j], counts[i + j]);
    }
    // One store: of Vec's the compiler makes four here, whose alignment it has lost sight of.
    __stcg(reinterpret_cast<uint4*>(out + i), *reinterpret_cast<const uint4*>(&x));
  }
}

}  // namespace raylm::cuda
