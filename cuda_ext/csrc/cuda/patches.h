// What launchers of operators with weights in patches share: which numbers these hold.
#pragma once

#include "launch.h"

namespace raylm::cuda {

// In the order of raylm/ops/patches.py.
enum class Numbers : int64_t { kInt4, kInt8, kMxfp4, kFp8, kAffine4, kAffine8, kNf4, kMxfp8, kInt8Rows, kFp8Rows };

inline int bits_of(Numbers numbers) {
  switch (numbers) {
    case Numbers::kInt8:
    case Numbers::kFp8:
    case Numbers::kAffine8:
    case Numbers::kMxfp8:
    case Numbers::kInt8Rows:
    case Numbers::kFp8Rows: return 8;
    default: return 4;
  }
}

// Fails for numbers that there are none of, or that have no kernels with x's type.
inline Numbers numbers_of(const char* op, int64_t numbers, const Tensor& x) {
  if (numbers < 0 || numbers > 9) fail(op, "numbers is ", numbers, ", must be from 0 to 9");
  const auto kind = static_cast<Numbers>(numbers);
  const bool takes_half = kind == Numbers::kInt4 || kind == Numbers::kInt8 || kind == Numbers::kInt8Rows;
  if (x.scalar_type() == ScalarType::Half && !takes_half) fail(op, "x is float16, must be bfloat16 with such numbers");
  return kind;
}

// The logarithm of columns that share a word of scales.
inline int group_log2_of(const char* op, Numbers numbers, int64_t group) {
  const bool of_patch = numbers == Numbers::kFp8 || numbers == Numbers::kInt8Rows || numbers == Numbers::kFp8Rows;
  if (of_patch || numbers == Numbers::kMxfp4 || numbers == Numbers::kMxfp8) return 7;
  const int64_t least = numbers == Numbers::kInt4 || numbers == Numbers::kNf4 ? 32 : 16;
  const bool fits = group == 16 || group == 32 || group == 64 || group == 128;
  if (!fits || group < least) fail(op, "group is ", group, ", must be a power of two from ", least, " to 128");
  return group == 16 ? 4 : group == 32 ? 5 : group == 64 ? 6 : 7;
}

}  // namespace raylm::cuda
