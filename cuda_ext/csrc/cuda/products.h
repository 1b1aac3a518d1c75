// Products, and launchers that another operator's launcher calls.
#pragma once

#include <optional>
#include <vector>

#include "launch.h"

namespace raylm::cuda {

constexpr int kSharedOfBlock = 227 * 1024;  // the most that a block of compute capability 9.0 may have
constexpr int kDynamicOfBlock = kSharedOfBlock - 1024;  // of it; the rest is for barriers

// These check their arguments.
Tensor linear(Tensor x, Tensor weight, std::optional<Tensor> bias, bool frozen);
Tensor silu_mul(Tensor x);
Tensor gelu_tanh_mul(Tensor x);

// A product as the launchers see it, its arguments checked.
struct Product {
  const Tensor& x;
  const Tensor& weight;
  const std::optional<Tensor>& bias;
  bool frozen;  // weight and bias may be read while the kernels ahead still run
  int64_t n = weight.size(0), k = weight.size(1), rows = k ? x.numel() / k : 0;
  int64_t x_stride = x.dim() == 2 ? x.stride(0) : k;  // elements from row to row
  ScalarType result = x.scalar_type();
  const Tensor *x_scales = nullptr, *scales = nullptr;  // of rows of x and weight, where these hold 8-bit numbers
};

// linear by the kernel for up to 64 rows; nothing where it does not take the shape. The caller has checked that x and
// weight hold 16-bit numbers, that their rows are 16-byte aligned, and that this is Hopper.
std::optional<Tensor> split_linear(const Product& product);

// scaled_linear for up to 8 rows; nothing where the kernel does not take the shape or, unless `anyway`, was measured to be
// slower than that of tiles. The caller has checked its arguments.
std::optional<Tensor> few_scaled_linear(const Product& product, bool anyway);

// linear for up to 64 rows, scaled_linear for up to 1,023, and both with a gated activation, without a bias, for up to 1,023, by
// the kernel of tiles; nothing where it does not take the shape or was measured to be slower. The caller has checked the
// same.
//
// With `invariant`, tile_linear takes any number of rows, of 16-bit numbers, and sums over k in one order for all of
// them; nothing where it does not take the shape of the weight, whatever the rows.
std::optional<Tensor> tile_linear(const Product& product, bool invariant = false);
std::optional<Tensor> tile_gated_linear(const Product& product, bool gelu_tanh);

// gated_linear by the kernels for up to 1,023 rows; nothing where they do not take the shape.
std::optional<Tensor> fused_gated_linear(const Product& product, bool gelu_tanh);

// For a result that has x's rows, of so many columns.
inline Tensor new_rows(const Tensor& x, int64_t columns, std::optional<ScalarType> dtype = std::nullopt) {
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = columns;
  return torch::stable::new_empty(x, shape, dtype);
}

}  // namespace raylm::cuda
