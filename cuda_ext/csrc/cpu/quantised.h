// Rows in 16 bits for products with weights in blocks, and the memory that they are in.
#pragma once

#include <cstring>
#include <memory>

#include "common.h"

namespace raylm {

class Quantised {
 public:
  Quantised(int64_t rows, int64_t size)
      : size_(size), codes_(std::make_unique_for_overwrite<uint8_t[]>(rows * size * kCodeBytes)),
        scales_(std::make_unique_for_overwrite<RowScales[]>(rows * size / kQuantised)) {}

  // From a row on, or from a value of it, which a block of kQuantised begins with.
  QuantisedRows from(int64_t row, int64_t value = 0) const {
    const int64_t at = row * size_ + value;
    return {codes_.get() + at * kCodeBytes, scales_.get() + at / kQuantised, size_};
  }

  // The values of a row from `begin` on, which a block of kQuantised begins with.
  void quantise(DType dtype, const void* values, int64_t row, int64_t begin, int64_t count) const {
    QuantisedRows out = from(row, begin);
    out.size = count;
    cpu_kernels().quantise({dtype, values, count, out}, 0, 1);
  }

  void copy(int64_t row, int64_t to) const {
    const QuantisedRows source = from(row), target = from(to);
    std::memcpy(target.codes, source.codes, size_ * kCodeBytes);
    std::memcpy(target.scales, source.scales, size_ / kQuantised * sizeof(RowScales));
  }

 private:
  int64_t size_;
  std::unique_ptr<uint8_t[]> codes_;
  std::unique_ptr<RowScales[]> scales_;
};

}  // namespace raylm
