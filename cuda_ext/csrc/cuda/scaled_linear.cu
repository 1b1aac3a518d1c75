#include <optional>

#include "products.h"
#include "scaled_rows.h"

namespace raylm::cuda {
namespace {

constexpr const char* kScaledLinear = "scaled_linear";

// The arguments, checked.
Product product_of(const Tensor& x, const Tensor& x_scales, const Tensor& weight, const Tensor& scales,
                   const std::optional<Tensor>& bias, ScalarType dtype, bool frozen) {
  Product p{.x = x, .weight = weight, .bias = bias, .frozen = frozen};
  p.result = dtype, p.x_scales = &x_scales, p.scales = &scales;
  Arg(kScaledLinear, "x", p.x).dtype({ScalarType::Float8_e4m3fn}).dim(2).contiguous();
  Arg(kScaledLinear, "weight", p.weight).dtype({ScalarType::Float8_e4m3fn}).dim(2).contiguous().on_device_of(p.x);
  Arg(kScaledLinear, "weight", p.weight).size(1, p.x.size(1), "the last dimension of x");
  Arg(kScaledLinear, "x_scales", *p.x_scales).dtype({ScalarType::Float}).dim(1).size(0, p.rows, "the rows of x").contiguous();
  Arg(kScaledLinear, "scales", *p.scales).dtype({ScalarType::Float}).dim(1).size(0, p.n, "the rows of weight").contiguous();
  Arg(kScaledLinear, "x_scales", *p.x_scales).on_device_of(p.x);
  Arg(kScaledLinear, "scales", *p.scales).on_device_of(p.x);
  if (p.result != ScalarType::BFloat16 && p.result != ScalarType::Half) {
    fail(kScaledLinear, "dtype is ", dtype_name(p.result), ", must be bfloat16 or float16");
  }
  if (p.bias) {
    Arg(kScaledLinear, "bias", *p.bias).dtype({p.result}).dim(1).size(0, p.n, "the rows of weight").contiguous();
    Arg(kScaledLinear, "bias", *p.bias).on_device_of(p.x);
  }
  if (p.n % 16 != 0 || p.k % 16 != 0) {
    fail(kScaledLinear, "weight has ", p.n, " rows and ", p.k, " columns, must have multiples of 16");
  }
  if (p.k == 0) fail(kScaledLinear, "x has rows of 0 numbers, must have some");
  const bool aligned = is_aligned(p.x.data_ptr()) && is_aligned(p.weight.data_ptr());
  if (!aligned) fail(kScaledLinear, "x or weight is not 16-byte aligned");
  return p;
}

// torch's library, whose results are of bfloat16.
Tensor torch_scaled_linear(const Product& p) {
  using torch::stable::detail::from;
  const Tensor by_columns = torch::stable::transpose(p.weight, 0, 1);
  const Tensor x_scales = torch::stable::unsqueeze(*p.x_scales, 1), scales = torch::stable::unsqueeze(*p.scales, 0);
  std::optional<Tensor> bias, none;
  if (p.bias) bias = torch::stable::to(*p.bias, ScalarType::BFloat16);
  StableIValue stack[8] = {from(p.x),  from(by_columns), from(x_scales), from(scales),
                           from(bias), from(none), from(std::optional<ScalarType>(ScalarType::BFloat16)), from(true)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::_scaled_mm", "", stack, TORCH_ABI_VERSION));
  const Tensor out = torch::stable::detail::to<Tensor>(stack[0]);
  return p.result == ScalarType::BFloat16 ? out : torch::stable::to(out, p.result);
}

Tensor run(const Product& product) {
  std::optional<Tensor> out = few_scaled_linear(product, false);
  if (!out) out = tile_linear(product);
  if (!out) out = few_scaled_linear(product, true);
  return out ? *out : torch_scaled_linear(product);
}

Tensor scaled_linear(Tensor x, Tensor x_scales, Tensor weight, Tensor scales, std::optional<Tensor> bias,
                     ScalarType dtype, bool frozen) {
  const Product product = product_of(x, x_scales, weight, scales, bias, dtype, frozen);
  if (product.rows == 0) return torch::stable::new_zeros(x, {0, product.n}, dtype);
  return run(product);
}

// Where no kernel does both: the product, and then the activation with the rounding.
std::tuple<Tensor, Tensor> scaled_gated_linear(Tensor x, Tensor x_scales, Tensor weight, Tensor scales,
                                               std::optional<Tensor> bias, ScalarType dtype, bool gelu_tanh,
                                               bool frozen) {
  const Product product = product_of(x, x_scales, weight, scales, bias, dtype, frozen);
  if (product.rows == 0) return scale_rows(torch::stable::new_zeros(x, {0, product.n / 2}, dtype));
  // Of fewer rows, the product and then both others in one kernel took less in a model (H100).
  std::optional<Tensor> out;
  if (!bias && product.rows > 8) out = tile_gated_linear(product, gelu_tanh);
  return out ? scale_rows(*out) : scaled_gated(run(product), gelu_tanh);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CUDA, m) {
  m.impl("scaled_linear", TORCH_BOX(&scaled_linear));
  m.impl("scaled_gated_linear", TORCH_BOX(&scaled_gated_linear));
}

}  // namespace raylm::cuda
