#include "raylm/cuda/route.cuh"

#include <tuple>

#include "launch.h"

namespace raylm::cuda {
namespace {

constexpr const char* kRoute = "route";

template <typename T, int Each>
void launch(const RouteParams& params, cudaStream_t stream) {
  const dim3 grid(divide_up(params.rows, kRouteWarps)), block(kRouteWarps * kWarp);
  launch_dependent(route_kernel<T, Each>, grid, block, stream, params);
}

template <typename T>
void launch(const RouteParams& params, cudaStream_t stream) {
  const int each = divide_up(params.experts, kWarp);
  if (each <= 1) return launch<T, 1>(params, stream);
  if (each <= 2) return launch<T, 2>(params, stream);
  if (each <= 4) return launch<T, 4>(params, stream);
  if (each <= 8) return launch<T, 8>(params, stream);
  launch<T, kRouteMost / kWarp>(params, stream);
}

void check(const Tensor& logits, const std::optional<Tensor>& bias, int64_t per_token, int64_t groups,
           int64_t groups_per_token) {
  Arg(kRoute, "logits", logits).floating().dim(2).last_contiguous();
  const int64_t experts = logits.size(1);
  if (bias) {
    Arg(kRoute, "bias", *bias).dtype({ScalarType::Float}).dim(1).size(0, experts, "the experts").contiguous();
    Arg(kRoute, "bias", *bias).on_device_of(logits);
  }
  if (experts > kRouteMost) fail(kRoute, "logits has ", experts, " experts, must have at most ", kRouteMost);
  if (per_token < 1 || per_token > kWarp || per_token > experts) {
    fail(kRoute, "per_token is ", per_token, ", must be from 1 to ", experts < kWarp ? experts : kWarp);
  }
  if (groups < 1 || groups > kRouteMostGroups || experts % groups != 0) {
    fail(kRoute, "groups is ", groups, ", must be a divisor of the ", experts, " experts and at most ", kRouteMostGroups);
  }
  if (groups_per_token < 1 || groups_per_token > groups) {
    fail(kRoute, "groups_per_token is ", groups_per_token, ", must be from 1 to ", groups);
  }
}

std::tuple<Tensor, Tensor> route(Tensor logits, std::optional<Tensor> bias, int64_t per_token, bool sigmoid,
                                 bool normalized, double scale, int64_t groups, int64_t groups_per_token) {
  check(logits, bias, per_token, groups, groups_per_token);
  const int64_t rows = logits.size(0);
  Tensor weights = torch::stable::new_empty(logits, {rows, per_token}, ScalarType::Float);
  Tensor chosen = torch::stable::new_empty(logits, {rows, per_token}, ScalarType::Long);
  if (rows == 0) return {weights, chosen};
  RouteParams params{};
  params.logits = logits.data_ptr();
  params.stride = logits.stride(0);
  params.bias = bias ? data<float>(*bias) : nullptr;
  params.weights = data<float>(weights);
  params.chosen = data<int64_t>(chosen);
  params.rows = static_cast<int>(rows);
  params.experts = static_cast<int>(logits.size(1));
  params.per_token = static_cast<int>(per_token);
  params.groups = static_cast<int>(groups);
  params.groups_per_token = static_cast<int>(groups_per_token);
  params.scale = static_cast<float>(scale);
  params.sigmoid = sigmoid;
  params.normalized = normalized;
  const Guard guard(logits.get_device_index());
  by_dtype(logits, [&](auto type) { launch<decltype(type)>(params, current_stream(logits)); });
  check_launch(kRoute);
  return {weights, chosen};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CUDA, m) { m.impl("route", TORCH_BOX(&route)); }

}  // namespace raylm::cuda
