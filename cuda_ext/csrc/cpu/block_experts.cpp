// A mixture of experts whose weights are in blocks: the products of block_linear, for each expert with the rows that go to
// it.
#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "blocks.h"
#include "common.h"
#include "phases.h"
#include "quantised.h"

namespace raylm {
namespace {

using Tensors = std::vector<Tensor>;
using Numbers = std::vector<int64_t>;

constexpr const char* kOp = "block_experts";
constexpr int64_t kNumActivations = 3;

struct Sizes {
  int64_t rows, per_row, hidden, experts, inner;

  int64_t pairs() const { return rows * per_row; }
};

struct Given {
  const Tensor& x;
  const Tensors& blocks;
  const Numbers& kinds;
  const Tensor &weights, &chosen;
  const std::optional<Tensor>&gate_up_bias, &down_bias;
  int64_t activation;
  float limit;
};

void check_blocks(const Given& given, int at, int64_t experts, int64_t rows, int64_t columns) {
  const std::string name = "blocks[" + std::to_string(at) + "]";
  const BlockSize block = block_size(kOp, given.kinds[at]);
  if (columns % block.values != 0) {
    fail(kOp, name, " is for ", columns, " columns, must be for a multiple of the ", block.values, " values of a ",
         block.name, " block");
  }
  const std::string why = "as many " + std::string(block.name) + " blocks as there are columns for";
  Arg(kOp, name.c_str(), given.blocks[at]).dtype({ScalarType::Byte}).dim(3).last_contiguous().on_cpu()
      .size(0, experts, "experts of blocks[0]").size(1, rows, "as the other weights' sizes say")
      .size(2, columns / block.values * block.bytes, why.c_str());
}

Sizes check(const Given& given) {
  Arg(kOp, "x", given.x).floating().dim(2).last_contiguous().on_cpu();
  if (given.blocks.size() != 3 || given.kinds.size() != 3) {
    fail(kOp, "blocks has ", given.blocks.size(), " tensors and kinds ", given.kinds.size(),
         " numbers, must have 3: of gate, up and down");
  }
  Arg(kOp, "blocks[0]", given.blocks[0]).dim(3);
  Arg(kOp, "chosen", given.chosen).dtype({ScalarType::Long}).dim(2).contiguous().on_cpu();
  const Sizes sizes{given.x.size(0), given.chosen.size(1), given.x.size(1), given.blocks[0].size(0),
                    given.blocks[0].size(1)};
  for (int at = 0; at < 2; ++at) check_blocks(given, at, sizes.experts, sizes.inner, sizes.hidden);
  check_blocks(given, 2, sizes.experts, sizes.hidden, sizes.inner);
  Arg(kOp, "chosen", given.chosen).size(0, sizes.rows, "the rows of x");
  Arg(kOp, "weights", given.weights).dtype({ScalarType::Float}).dim(2).contiguous().on_cpu()
      .size(0, sizes.rows, "the rows of x").size(1, sizes.per_row, "as chosen");
  const auto check_bias = [&](const char* name, const std::optional<Tensor>& bias, int64_t columns) {
    if (!bias) return;
    Arg(kOp, name, *bias).dtype({given.x.scalar_type()}).dim(2).contiguous().on_cpu()
        .size(0, sizes.experts, "experts of blocks[0]").size(1, columns, "the rows of an expert's weights");
  };
  check_bias("gate_up_bias", given.gate_up_bias, 2 * sizes.inner);
  check_bias("down_bias", given.down_bias, sizes.hidden);
  if (given.activation < 0 || given.activation >= kNumActivations) {
    fail(kOp, "activation is ", given.activation, ", must be at least 0 and below ", kNumActivations);
  }
  return sizes;
}

// A row of x and one of its experts are a pair. Pairs lie in the order of their experts, so that an expert's rows are
// neighbours; those of experts that no row goes to are not there, and their weights are not read.
class Mixture {
 public:
  Mixture(const Given& given, const Sizes& sizes, const Tensor& out)
      : given_(given), sizes_(sizes), dtype_(dtype_of(given.x)), element_(static_cast<int64_t>(given.x.element_size())),
        rows_(sizes.pairs(), sizes.hidden), inner_rows_(sizes.pairs(), sizes.inner),
        inner_(std::make_unique_for_overwrite<char[]>(sizes.pairs() * sizes.inner * element_)),
        parts_(std::make_unique_for_overwrite<char[]>(sizes.pairs() * sizes.hidden * element_)) {
    place_pairs();
    combine_ = {dtype_, parts_.get(),   places_.data(), given.weights.const_data_ptr<float>(), out.mutable_data_ptr(),
                sizes.per_row, sizes.hidden};
  }

  void run() {
    const int64_t used = static_cast<int64_t>(gate_up_.size());
    for (const int64_t pieces : {sizes_.rows, used * linear_groups(sizes_.inner), sizes_.pairs(),
                                 used * linear_groups(sizes_.hidden), sizes_.rows}) {
      phases_.add(pieces);
    }
    torch::stable::parallel_for(0, threads_, 1, [&](int64_t, int64_t) {
      phases_.work([](size_t, int64_t) {}, [&](size_t phase, int64_t piece) { run_piece(phase, piece); });
    });
  }

 private:
  void place_pairs() {
    const int64_t* chosen = checked_indices(kOp, "chosen", given_.chosen, sizes_.experts);
    Numbers next(sizes_.experts + 1);
    for (int64_t pair = 0; pair < sizes_.pairs(); ++pair) ++next[chosen[pair] + 1];
    for (int64_t expert = 0; expert < sizes_.experts; ++expert) {
      const int64_t count = next[expert + 1];
      if (count > 0) add_expert(expert, next[expert], count);
      next[expert + 1] += next[expert];
    }
    places_.resize(sizes_.pairs());
    for (int64_t pair = 0; pair < sizes_.pairs(); ++pair) places_[pair] = next[chosen[pair]]++;
  }

  void add_expert(int64_t expert, int64_t first, int64_t count) {
    BlockLinearArgs args{};
    args.dtype = dtype_;
    args.num_rows = count;
    args.activation = static_cast<Activation>(given_.activation);
    args.limit = given_.limit;
    args.x = rows_.from(first);
    for (int at = 0; at < 2; ++at) {
      set_weight(args, at, at, expert);
      args.bias[at] = bias_of(given_.gate_up_bias, (2 * expert + at) * sizes_.inner);
    }
    args.out = inner_.get() + first * sizes_.inner * element_;
    args.out_stride = args.out_size = sizes_.inner;
    gate_up_.push_back(args);
    args.x = inner_rows_.from(first);
    set_weight(args, 0, 2, expert);
    args.bias[0] = bias_of(given_.down_bias, expert * sizes_.hidden);
    args.out = parts_.get() + first * sizes_.hidden * element_;
    args.out_stride = args.out_size = sizes_.hidden;
    down_.push_back(args);
  }

  void set_weight(BlockLinearArgs& args, int at, int weight, int64_t expert) const {
    const Tensor& blocks = given_.blocks[weight];
    args.kinds[at] = static_cast<int>(given_.kinds[weight]);
    args.blocks[at] = blocks.const_data_ptr<uint8_t>() + expert * blocks.stride(0);
    args.blocks_stride[at] = blocks.stride(1);
  }

  const void* bias_of(const std::optional<Tensor>& bias, int64_t column) const {
    return bias ? static_cast<const char*>(bias->const_data_ptr()) + column * element_ : nullptr;
  }

  void run_piece(size_t phase, int64_t piece) const {
    switch (phase) {
      case 0: return quantise_row(piece);
      case 1: return multiply(cpu_kernels().block_gated, gate_up_, piece);
      case 2: return inner_rows_.quantise(dtype_, inner_.get() + piece * sizes_.inner * element_, piece, 0, sizes_.inner);
      case 3: return multiply(cpu_kernels().block_linear, down_, piece);
      default: return cpu_kernels().combine(combine_, piece, piece + 1);
    }
  }

  // Once, for all its experts.
  void quantise_row(int64_t row) const {
    const int64_t* places = places_.data() + row * sizes_.per_row;
    if (sizes_.per_row == 0) return;
    const char* x = static_cast<const char*>(given_.x.const_data_ptr()) + row * given_.x.stride(0) * element_;
    rows_.quantise(dtype_, x, places[0], 0, sizes_.hidden);
    for (int64_t k = 1; k < sizes_.per_row; ++k) rows_.copy(places[0], places[k]);
  }

  // A group of columns of an expert's product, for all its rows.
  template <typename Kernel>
  static void multiply(Kernel kernel, const std::vector<BlockLinearArgs>& experts, int64_t piece) {
    const int64_t columns = experts[0].out_size, groups = linear_groups(columns), begin = piece % groups * kLinearColumns;
    kernel(experts[piece / groups], begin, std::min(begin + kLinearColumns, columns));
  }

  const Given& given_;
  const Sizes sizes_;
  const DType dtype_;
  const int64_t element_;
  Quantised rows_, inner_rows_;
  std::unique_ptr<char[]> inner_, parts_;  // of x's type
  Numbers places_;                         // [rows, per_row]: of each pair
  std::vector<BlockLinearArgs> gate_up_, down_;  // of the experts that rows go to
  CombineArgs combine_{};
  const int64_t threads_ = torch::stable::get_num_threads();
  Phases phases_{threads_};
};

Tensor block_experts(Tensor x, Tensors blocks, Numbers kinds, Tensor weights, Tensor chosen,
                     std::optional<Tensor> gate_up_bias, std::optional<Tensor> down_bias, int64_t activation,
                     double limit) {
  const Given given{x, blocks, kinds, weights, chosen, gate_up_bias, down_bias, activation, static_cast<float>(limit)};
  const Sizes sizes = check(given);
  Tensor out = empty_like_shape(x, {sizes.rows, sizes.hidden});
  if (out.numel() > 0) Mixture(given, sizes, out).run();
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CPU, m) { m.impl("block_experts", TORCH_BOX(&block_experts)); }

}  // namespace raylm
