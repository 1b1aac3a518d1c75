// The products of a layer's rows with its weights, which are plain matrices or in blocks.
#pragma once

#include <algorithm>
#include <memory>

#include "blocks.h"
#include "common.h"
#include "quantised.h"

namespace raylm {

// Rows of float32 that products read; those of weights in blocks read them in 16 bits.
class ProductInput {
 public:
  ProductInput(int64_t rows, int64_t size)
      : size_(size), values_(std::make_unique_for_overwrite<float[]>(rows * size)), quantised_(rows, size) {}

  int64_t size() const { return size_; }
  float* values() const { return values_.get(); }
  QuantisedRows quantised() const { return quantised_.from(0); }

  // Some values of a row in 16 bits, from a multiple of kQuantised on.
  void quantise(int64_t row, int64_t begin, int64_t count) const {
    quantised_.quantise(DType::kFloat32, values_.get() + row * size_ + begin, row, begin, count);
  }

 private:
  int64_t size_;
  std::unique_ptr<float[]> values_;
  Quantised quantised_;
};

// x times the transpose of a weight. The weight is one plain matrix, or parts in blocks side by side, or (`gated`) gate and
// up in blocks, of which the result is act(gate) * up.
class Product {
 public:
  static constexpr int kMostParts = 3;

  bool in_blocks() const { return num_parts_ > 0; }
  bool gated() const { return gated_; }
  // Groups of kLinearColumns columns that the work is divided into.
  int64_t groups() const { return in_blocks() ? ends_[num_parts_ - 1] : linear_groups(plain_.out_size); }

  void set_plain(const ProductInput& x, int64_t rows, const Tensor& weight, const float* bias, float* out) {
    plain_.dtype = dtype_of(weight);
    plain_.x = x.values();
    plain_.x_stride = x.size();
    plain_.weight = weight.const_data_ptr();
    plain_.weight_stride = weight.stride(0);
    plain_.bias = bias;
    plain_.out = out;
    plain_.num_rows = rows;
    plain_.in_size = x.size();
    plain_.out_size = weight.size(0);
  }

  // The next part, whose columns are the next ones of out [rows, width].
  void add_blocks(const ProductInput& x, int64_t rows, const Tensor& blocks, int64_t kind, const float* bias, float* out,
                  int64_t width) {
    BlockLinearArgs& args = parts_[num_parts_];
    args.dtype = DType::kFloat32;
    args.x = x.quantised();
    args.num_rows = rows;
    args.out_stride = width;
    args.out = out + column_;
    args.out_size = blocks.size(0);
    set_weight(args, 0, blocks, kind);
    args.bias[0] = bias ? bias + column_ : nullptr;
    column_ += args.out_size;
    ends_[num_parts_] = (num_parts_ > 0 ? ends_[num_parts_ - 1] : 0) + linear_groups(args.out_size);
    ++num_parts_;
  }

  // Makes of one part, gate, a product with gate and up.
  void gate(const Tensor& up, int64_t kind, Activation activation) {
    set_weight(parts_[0], 1, up, kind);
    parts_[0].activation = activation;
    gated_ = true;
  }

  // Computes the groups of columns from begin to end, of all rows.
  void run(int64_t begin, int64_t end) const {
    if (!in_blocks()) return cpu_kernels().linear(plain_, begin * kLinearColumns, last_column(end, plain_.out_size));
    for (int i = 0; i < num_parts_; ++i) {
      const int64_t start = i == 0 ? 0 : ends_[i - 1], from = std::max(begin, start), to = std::min(end, ends_[i]);
      if (from >= to) continue;
      const auto kernel = gated_ ? cpu_kernels().block_gated : cpu_kernels().block_linear;
      kernel(parts_[i], (from - start) * kLinearColumns, last_column(to - start, parts_[i].out_size));
    }
  }

  // Brings the weights of a group into the second-level cache.
  void prefetch(int64_t group) const {
    if (!in_blocks()) {
      const int64_t element = plain_.dtype == DType::kFloat32 ? 4 : 2;
      return prefetch_lines(plain_.weight, plain_.weight_stride * element, group);
    }
    for (int i = 0; i < num_parts_; ++i) {
      if (group >= ends_[i]) continue;
      const int64_t start = i == 0 ? 0 : ends_[i - 1];
      for (int weight = 0; weight < (gated_ ? 2 : 1); ++weight) {
        prefetch_lines(parts_[i].blocks[weight], parts_[i].blocks_stride[weight], group - start);
      }
      return;
    }
  }

 private:
  static int64_t last_column(int64_t groups, int64_t columns) { return std::min(groups * kLinearColumns, columns); }

  static void set_weight(BlockLinearArgs& args, int at, const Tensor& blocks, int64_t kind) {
    args.kinds[at] = static_cast<int>(kind);
    args.blocks[at] = blocks.const_data_ptr<uint8_t>();
    args.blocks_stride[at] = blocks.stride(0);
  }

  // At most as much as is not driven out before its turn. Past the weight's end this asks for lines that nobody needs, which
  // is allowed.
  static void prefetch_lines(const void* weight, int64_t stride, int64_t group) {
    constexpr int64_t kLine = 64, kMostBytes = 16 * 1024;
    const char* first = static_cast<const char*>(weight) + group * kLinearColumns * stride;
    const int64_t bytes = std::min(kLinearColumns * stride, kMostBytes);
    for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(first + at, 0, 2);
  }

  LinearArgs plain_{};
  BlockLinearArgs parts_[kMostParts]{};
  int64_t ends_[kMostParts]{};  // of each part: groups up to its end
  int64_t column_ = 0;
  int num_parts_ = 0;
  bool gated_ = false;
};

}  // namespace raylm
