// What the launchers of mixtures of experts share: pairs of tokens and experts in the order of the experts.
#pragma once

#include <algorithm>

#include "products.h"
#include "raylm/cuda/gated.cuh"
#include "raylm/cuda/segments.cuh"

namespace raylm::cuda {

constexpr int kSharedOfTwo = 113 * 1024;  // of a block, where two are to be on a multiprocessor
constexpr int64_t kUnsorted = 1;  // tokens, at most, whose pairs are taken as they come: two may share an expert

// What the products have to know of a call.
struct Sizes {
  int64_t tokens, per_token, experts, hidden, size;  // size: columns between an expert's two products
  int most_rows;  // of a segment, at most
  int64_t pairs = tokens * per_token;
  int segment_rows = std::min(rows_of_segment(), most_rows);

  // Few, so that stages are small and many, but seldom fewer than an expert has.
  int rows_of_segment() const {
    const int64_t mean = divide_up(pairs, experts);
    if (tokens <= 8) return 8;
    return 2 * mean + 4 <= 16 ? 16 : 2 * mean <= 32 ? 32 : 2 * mean <= 64 ? 64 : 2 * mean <= 128 ? 128 : 256;
  }
  int64_t most_segments() const { return std::min(experts, pairs) + pairs / segment_rows; }
};

// Where pairs' rows are: parts of one tensor of ints, or pairs as they come.
struct Order {
  std::optional<Tensor> memory;
  Segments segments;
  int *places, *tokens;  // a pair's row and a row's token; null: rows lie in the order of the pairs
  int64_t most_segments;
};

Order order_of(const Tensor& chosen, const Sizes& sizes, cudaStream_t stream);

// x's rows, each once for every expert that its token goes to, in the order of the experts; x itself where that has none.
Tensor spread(const Tensor& x, const Order& order, const Sizes& sizes, cudaStream_t stream);

// Each token's sum of its pairs' rows with their weights.
Tensor gather_sums(const Tensor& rows, const Tensor& weights, const Order& order, const Sizes& sizes,
                   cudaStream_t stream);

// Of the activation's number in raylm/ops/experts.py; `limit` is of clamped_swiglu. Fails where there is no such number.
ExpertGate expert_gate(const char* op, int64_t activation, double limit);

// Fails unless weights and chosen are as route gives them for the rows of x.
void check_pairs(const char* op, const Tensor& x, const Tensor& weights, const Tensor& chosen);

}  // namespace raylm::cuda
