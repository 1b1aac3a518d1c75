// Rows of x as numbers of 8 bits, for products with weights in patches.
#pragma once

#include "launch.h"

namespace raylm::cuda {

// Rows up to which products by integers and by floats do not round them. raylm/ops/patches.py has them too.
constexpr int64_t kMostUnroundedByIntegers = 16, kMostUnroundedByFloats = 64;
constexpr int64_t kMostIntegers = 1 << 17;  // columns, whose products' sums integers of 32 bits hold

// In the order of columns that rounded_rows.cuh says.
struct RoundedRows {
  Tensor bytes;   // [rows, whole patches]
  Tensor scales;  // [rows]
};

// Of x [rows, k], bfloat16 or float16, as floats (e4m3) or as integers; k is a multiple of 16. With places, `each` a row,
// which are all from 0 to their number, a row goes to each of its own.
RoundedRows rounded_rows(const Tensor& x, bool floats, cudaStream_t stream, const int* places = nullptr, int64_t each = 1);

}  // namespace raylm::cuda
