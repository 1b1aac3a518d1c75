// Launchers that another operator's launcher calls. They check their arguments.
#pragma once

#include <optional>

#include "launch.h"

namespace raylm::cuda {

Tensor linear(Tensor x, Tensor weight, std::optional<Tensor> bias);
Tensor silu_mul(Tensor x);
Tensor gelu_tanh_mul(Tensor x);

}  // namespace raylm::cuda
