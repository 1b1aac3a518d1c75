// Which rows are of which expert: a token and one of its experts are a pair; pairs are numbered token by token.
#pragma once

#include <cstdint>

namespace raylm::cuda {

constexpr int kMostExperts = 512;

// Neighbouring rows of one expert that a product takes at a time. `source`: the first of them among the rows of x.
struct alignas(16) Segment {
  int expert, first, rows, source;
};

// Those of a call: as they stand in memory, or, of very few tokens, one a pair, with rows of x that `share` pairs share.
struct Segments {
  const Segment* list;  // null: a pair each
  const int* num;
  const int64_t* chosen;
  int pairs, share;

  __device__ int count() const { return list ? *num : pairs; }
  __device__ Segment at(int i) const {
    return list ? list[i] : Segment{static_cast<int>(chosen[i]), i, 1, i / share};
  }
};

}  // namespace raylm::cuda
