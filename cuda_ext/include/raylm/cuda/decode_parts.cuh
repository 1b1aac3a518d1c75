// What several blocks have of a sequence's results, and how these are joined.
#pragma once

#include "raylm/cuda/common.cuh"
#include "raylm/cuda/ptx/math.cuh"

namespace raylm::cuda {

// Parts of sequences that were cut. A slot has at most two: of one that an earlier slot began (part 2 * slot) and of one
// that it begins itself (part 2 * slot + 1).
struct DecodeParts {
  float* sums;  // [slots, 2, columns, rows, head_dim], each divided by its softmax's denominator
  float* logs;  // [slots, 2, columns, rows]: the logarithm to base 2 of that denominator
  unsigned* arrivals;  // [slots, columns]: parts so far of the sequence that is cut at the slot's end; 0 but in a kernel
  int rows;            // room for as many rows

  __device__ int64_t index(int slot, bool begins, int columns, int column) const {
    return (static_cast<int64_t>(slot * 2 + begins) * columns + column) * rows;
  }
};

// What the keys of prefixes gave their members' queries: parts, and behind these the sums of prefixes that were not cut,
// [num_seqs, num_heads]. Nobody joins the parts but the launch of what follows the prefixes, sequence by sequence.
struct PrefixSums {
  // Where a member's sums are: the first of its prefix's slots, how many it was cut into (1: none), and the member's place
  // among the others.
  struct Place {
    int slot, slots, member;
  };
  DecodeParts parts;
  int columns;
  int64_t whole;   // the first row of the others
  Place* places;   // [chunks of rows, num_seqs]: each chunk is cut by itself
};

// A row's softmax over its parts; a thread has 4 neighbouring elements.
template <int D, int N>
struct DecodeJoin {
  static constexpr int kThreads = D <= 64 ? 16 : D <= 128 ? 32 : 64;
  static constexpr int kBatch = N == 1 ? 8 : 2;  // parts loaded at a time, as far as registers go
  float top = -INFINITY, total = 0;
  float4 sum = {};

  __device__ void add(const float (&logs)[kBatch], const float4 (&sums)[kBatch]) {
    float highest = top;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) highest = fmaxf(highest, logs[i]);
    if (highest == -INFINITY) return;
    scale(exp2_approx(top - highest));
    top = highest;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float weight = exp2_approx(logs[i] - top);
      total += weight;
      sum.x += weight * sums[i].x, sum.y += weight * sums[i].y;
      sum.z += weight * sums[i].z, sum.w += weight * sums[i].w;
    }
  }

  // `beside` joins the denominator, relative to `top`.
  __device__ float4 result(float beside) {
    scale(1 / (total + beside));
    return sum;
  }

 private:
  __device__ void scale(float by) { total *= by, sum.x *= by, sum.y *= by, sum.z *= by, sum.w *= by; }
};

}  // namespace raylm::cuda
