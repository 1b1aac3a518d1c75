#include "launch.h"
#include "raylm/cuda/norm.cuh"
#include "shapes.h"

namespace raylm::cuda {
namespace {

// Up to two leading dimensions of x may be strided: the heads of a fused projection.
Tensor run(const char* op, const Tensor& x, const Tensor* residual, const Tensor& weight, double eps) {
  Tensor out = torch::stable::new_empty(x, x.sizes());
  if (x.numel() == 0) return out;
  const int64_t hidden = weight.size(0), rows = x.numel() / hidden;
  const int64_t inner = x.dim() == 3 ? x.size(1) : 1, inner_stride = x.dim() == 3 ? x.stride(1) : 0;
  const int64_t outer_stride = x.dim() == 2 || x.dim() == 3 ? x.stride(0) : hidden;
  const Guard guard(x.get_device_index());
  by_dtype(x, [&](auto type) {
    using T = decltype(type);
    rms_norm_kernel<T><<<rows, threads_for(hidden, 512), 0, current_stream(x)>>>(
        data<T>(x), inner, outer_stride, inner_stride, residual ? data<T>(*residual) : nullptr,
        residual ? residual->stride(0) : 0, data<T>(weight), data<T>(out), hidden, static_cast<float>(eps));
  });
  check_launch(op);
  return out;
}

Tensor rms_norm(Tensor x, Tensor weight, double eps) {
  check_norm("rms_norm", x, nullptr, weight);
  Arg("rms_norm", "weight", weight).on_device_of(x);
  if (x.dim() > 3) Arg("rms_norm", "x (with more than 3 dimensions)", x).contiguous();
  return run("rms_norm", x, nullptr, weight, eps);
}

Tensor add_rms_norm(Tensor x, Tensor residual, Tensor weight, double eps) {
  check_norm("add_rms_norm", x, &residual, weight);
  Arg("add_rms_norm", "residual", residual).on_device_of(x);
  Arg("add_rms_norm", "weight", weight).on_device_of(x);
  return run("add_rms_norm", x, &residual, weight, eps);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CUDA, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
}

}  // namespace raylm::cuda
