#include <algorithm>
#include <optional>
#include <vector>

#include "blocks.h"
#include "common.h"
#include "quantised.h"

namespace raylm {
namespace {

using Tensors = std::vector<Tensor>;

// Returns how many columns the weights have in all.
int64_t check(const char* op, const Tensor& x, const Tensors& blocks, const std::vector<int64_t>& kinds,
              const std::optional<Tensor>& bias) {
  Arg(op, "x", x).floating().last_contiguous().on_cpu();
  if (x.dim() < 1) fail(op, "x must have at least one dimension");
  if (x.dim() != 2) Arg(op, "x (not of 2 dimensions)", x).contiguous();
  if (blocks.empty()) fail(op, "blocks has no tensors, must have at least 1");
  if (blocks.size() != kinds.size()) fail(op, "kinds has ", kinds.size(), " numbers for ", blocks.size(), " tensors");
  const int64_t size = x.size(x.dim() - 1);
  int64_t columns = 0;
  for (size_t i = 0; i < blocks.size(); ++i) {
    const std::string name = "blocks[" + std::to_string(i) + "]";
    const BlockSize block = block_size(op, kinds[i]);
    if (size % block.values != 0) {
      fail(op, "the last dimension of x is ", size, ", must be a multiple of the ", block.values, " values of a ",
           block.name, " block");
    }
    const Arg arg(op, name.c_str(), blocks[i]);
    arg.dtype({ScalarType::Byte}).dim(2).last_contiguous().on_cpu();
    const std::string why = "as many " + std::string(block.name) + " blocks as x has columns for";
    arg.size(1, size / block.values * block.bytes, why.c_str());
    columns += blocks[i].size(0);
  }
  if (bias) {
    Arg(op, "bias", *bias).dtype({x.scalar_type()}).dim(1).size(0, columns, "the rows of all weights");
    Arg(op, "bias", *bias).contiguous().on_cpu();
  }
  return columns;
}

// x in 16 bits.
class QuantisedX {
 public:
  explicit QuantisedX(const Tensor& x)
      : size_(x.size(x.dim() - 1)), num_rows_(size_ == 0 ? 0 : x.numel() / size_), memory_(num_rows_, size_) {
    const QuantiseArgs args{dtype_of(x), x.const_data_ptr(), x.dim() == 2 ? x.stride(0) : size_, rows()};
    for_range(num_rows_, size_, [&](int64_t begin, int64_t end) { cpu_kernels().quantise(args, begin, end); });
  }

  QuantisedRows rows() const { return memory_.from(0); }
  int64_t num_rows() const { return num_rows_; }

 private:
  int64_t size_, num_rows_;
  Quantised memory_;
};

BlockLinearArgs args_for(const Tensor& x, const QuantisedX& quantised, const Tensor& out) {
  BlockLinearArgs args{};
  args.dtype = dtype_of(x);
  args.x = quantised.rows();
  args.num_rows = quantised.num_rows();
  args.out_stride = out.size(out.dim() - 1);
  return args;
}

void set_weight(BlockLinearArgs& args, int at, const Tensor& blocks, int64_t kind, const void* bias) {
  args.kinds[at] = static_cast<int>(kind);
  args.blocks[at] = blocks.const_data_ptr<uint8_t>();
  args.blocks_stride[at] = blocks.stride(0);
  args.bias[at] = bias;
  args.out_size = blocks.size(0);
}

Tensor empty_out(const Tensor& x, int64_t columns) {
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = columns;
  return torch::stable::new_empty(x, shape);
}

const void* bias_from(const std::optional<Tensor>& bias, int64_t column) {
  if (!bias) return nullptr;
  return static_cast<const char*>(bias->const_data_ptr()) + column * static_cast<int64_t>(bias->element_size());
}

// As in linear: products of 16 bits take about as long as those of floats.
int64_t cost_of(const QuantisedX& x) { return kLinearColumns * x.rows().size * x.num_rows() / 4; }

Tensor block_linear(Tensor x, Tensors blocks, std::vector<int64_t> kinds, std::optional<Tensor> bias) {
  Tensor out = empty_out(x, check("block_linear", x, blocks, kinds, bias));
  if (out.numel() == 0) return out;
  const QuantisedX quantised(x);
  std::vector<BlockLinearArgs> parts;
  std::vector<int64_t> ends;  // in groups of columns, of all weights
  int64_t column = 0, groups = 0;
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i].size(0) == 0) continue;
    BlockLinearArgs args = args_for(x, quantised, out);
    set_weight(args, 0, blocks[i], kinds[i], bias_from(bias, column));
    args.out = static_cast<char*>(out.mutable_data_ptr()) + column * static_cast<int64_t>(out.element_size());
    parts.push_back(args);
    column += args.out_size;
    ends.push_back(groups += linear_groups(args.out_size));
  }
  for_range(groups, cost_of(quantised), [&](int64_t begin, int64_t end) {
    for (size_t i = 0; i < parts.size(); ++i) {
      const int64_t start = i == 0 ? 0 : ends[i - 1], from = std::max(begin, start), to = std::min(end, ends[i]);
      if (from >= to) continue;
      const int64_t last = std::min((to - start) * kLinearColumns, parts[i].out_size);
      cpu_kernels().block_linear(parts[i], (from - start) * kLinearColumns, last);
    }
  });
  return out;
}

Tensor block_gated_linear(Tensor x, Tensors blocks, std::vector<int64_t> kinds, std::optional<Tensor> bias,
                          bool gelu_tanh) {
  const char* op = "block_gated_linear";
  check(op, x, blocks, kinds, bias);
  if (blocks.size() != 2) fail(op, "blocks has ", blocks.size(), " tensors, must have 2: gate and up");
  const int64_t width = blocks[0].size(0);
  Arg(op, "blocks[1]", blocks[1]).size(0, width, "as blocks[0]");
  Tensor out = empty_out(x, width);
  if (out.numel() == 0) return out;
  const QuantisedX quantised(x);
  BlockLinearArgs args = args_for(x, quantised, out);
  for (int i = 0; i < 2; ++i) set_weight(args, i, blocks[i], kinds[i], bias_from(bias, i * width));
  args.activation = gelu_tanh ? Activation::kGeluTanh : Activation::kSilu;
  args.out = out.mutable_data_ptr();
  for_range(linear_groups(width), 2 * cost_of(quantised), [&](int64_t begin, int64_t end) {
    cpu_kernels().block_gated(args, begin * kLinearColumns, std::min(end * kLinearColumns, width));
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CPU, m) {
  m.impl("block_linear", TORCH_BOX(&block_linear));
  m.impl("block_gated_linear", TORCH_BOX(&block_gated_linear));
}

}  // namespace raylm
