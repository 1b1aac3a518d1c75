// Rows of 8-bit numbers with a scale each, as operators return them.
#pragma once

#include <tuple>

#include "launch.h"
#include "raylm/cuda/scaled_rows.cuh"

namespace raylm::cuda {

constexpr int64_t kMaxVecs = 4;  // 16-byte accesses to a row that a thread may hold

// These check their arguments.
std::tuple<Tensor, Tensor> scale_rows(Tensor x);
std::tuple<Tensor, Tensor> scaled_gated(Tensor x, bool gelu_tanh);

// Room for as many rows as x has, of so many columns.
struct ScaledTensors {
  Tensor codes, scales;
  int64_t columns;

  ScaledTensors(const Tensor& x, int64_t columns)
      : codes(torch::stable::new_empty(x, {x.size(0), columns}, ScalarType::Float8_e4m3fn)),
        scales(torch::stable::new_empty(x, {x.size(0)}, ScalarType::Float)),
        columns(columns) {}

  ScaledOut pointers() const { return {data<Code>(codes), data<float>(scales), columns}; }
  std::tuple<Tensor, Tensor> both() const { return {codes, scales}; }
};

}  // namespace raylm::cuda
