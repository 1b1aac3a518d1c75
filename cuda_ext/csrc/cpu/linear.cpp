#include <optional>

#include "common.h"
#include "shapes.h"

namespace raylm {
namespace {

Tensor torch_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  StableIValue stack[3] = {torch::stable::detail::from(x), torch::stable::detail::from(weight),
                           torch::stable::detail::from(bias)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "", stack, TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

void check(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  check_linear("linear", x, weight, bias.has_value() ? &*bias : nullptr, /*narrow=*/true);
  Arg("linear", "x", x).on_cpu();
  Arg("linear", "weight", weight).on_cpu();
  if (bias.has_value()) Arg("linear", "bias", *bias).on_cpu();
}

// x of float32 has a kernel of its own, for weights of every type; other x go to torch, whose library has instructions for
// them. That weights are frozen makes no difference here: nothing else runs.
Tensor linear(Tensor x, Tensor weight, std::optional<Tensor> bias, bool /*frozen*/) {
  check(x, weight, bias);
  const int64_t in_size = weight.size(1), out_size = weight.size(0);
  if (x.scalar_type() != ScalarType::Float || in_size == 0 || out_size == 0) return torch_linear(x, weight, bias);
  if (x.dim() != 2) Arg("linear", "x (not of 2 dimensions)", x).contiguous();
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = out_size;
  Tensor out = torch::stable::new_empty(x, shape);
  LinearArgs args{};
  args.x = x.const_data_ptr<float>();
  args.x_stride = x.dim() == 2 ? x.stride(0) : in_size;
  args.dtype = dtype_of(weight);
  args.weight = weight.const_data_ptr();
  args.weight_stride = weight.stride(0);
  args.bias = bias.has_value() ? bias->const_data_ptr<float>() : nullptr;
  args.out = out.mutable_data_ptr<float>();
  args.num_rows = x.numel() / in_size;
  args.in_size = in_size;
  args.out_size = out_size;
  const int64_t groups = (out_size + kLinearColumns - 1) / kLinearColumns;
  for_range(groups, kLinearColumns * in_size * args.num_rows / 4, [&](int64_t begin, int64_t end) {
    const int64_t last = end * kLinearColumns;
    cpu_kernels().linear(args, begin * kLinearColumns, last < out_size ? last : out_size);
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CPU, m) { m.impl("linear", TORCH_BOX(&linear)); }

}  // namespace raylm
