#include <optional>
#include <tuple>

#include "raylm/cuda/norm.cuh"
#include "scaled_rows.h"
#include "shapes.h"

namespace raylm::cuda {
namespace {

template <typename T>
void launch_any(const NormParams<T>& params, cudaStream_t stream) {
  launch_dependent(rms_norm_any_kernel<T>, dim3(params.rows), dim3(threads_for(params.hidden, 512)), stream, params);
}

// One access a thread is fastest for a few rows, two where many long rows wait: more bytes are under way. Short rows share
// a block.
template <bool kIsScaled, typename T>
void launch_vec(const NormParams<T>& params, const ScaledOut& scaled, cudaStream_t stream) {
  const int64_t vecs = params.hidden / kVec<T>;
  int64_t each = vecs >= 512 && params.rows >= 1024 ? 2 : 1;
  while (each < kMaxVecs && divide_up(vecs, each) > 1024) each *= 2;
  const unsigned threads = threads_for(divide_up(vecs, each), 1024);
  const unsigned rows = threads >= 256 || params.rows < 512 ? 1 : 256 / threads;
  const dim3 grid(divide_up(params.rows, rows)), block(threads, rows);
  switch (each) {
    case 1: return launch_dependent(rms_norm_kernel<T, 1, kIsScaled>, grid, block, stream, params, scaled);
    case 2: return launch_dependent(rms_norm_kernel<T, 2, kIsScaled>, grid, block, stream, params, scaled);
    default: return launch_dependent(rms_norm_kernel<T, 4, kIsScaled>, grid, block, stream, params, scaled);
  }
}

template <typename T>
bool fits_vectors(const NormParams<T>& p) {
  const auto fits = [](const void* pointer, int64_t a, int64_t b) {
    return is_aligned(pointer) && a % kVec<T> == 0 && b % kVec<T> == 0;
  };
  return fits(p.x, p.outer_stride, p.inner_stride) && fits(p.residual, p.residual_stride, 0) &&
         fits(p.weight, p.hidden, 0) && fits(p.out, 0, 0) && fits(p.other, 0, 0) && p.hidden <= kMaxVecs * 1024 * kVec<T>;
}

// Up to two leading dimensions of x may be strided: the heads of a fused projection.
template <typename T>
NormParams<T> params_of(const Tensor& x, const Tensor* residual, const Tensor& weight, T* out, double eps) {
  const int64_t hidden = weight.size(0), rows = x.numel() / hidden;
  const int64_t inner = x.dim() == 3 ? x.size(1) : 1, inner_stride = x.dim() == 3 ? x.stride(1) : 0;
  const int64_t outer_stride = x.dim() == 2 || x.dim() == 3 ? x.stride(0) : hidden;
  return {data<T>(x), rows, inner, outer_stride, inner_stride,
          residual ? data<T>(*residual) : nullptr, residual ? residual->stride(0) : 0,
          data<T>(weight), out, hidden, static_cast<float>(eps)};
}

Tensor run(const char* op, const Tensor& x, const Tensor* residual, const Tensor& weight, double eps) {
  Tensor out = torch::stable::new_empty(x, x.sizes());
  if (x.numel() == 0) return out;
  const Guard guard(x.get_device_index());
  by_dtype(x, [&](auto type) {
    using T = decltype(type);
    const NormParams<T> params = params_of(x, residual, weight, data<T>(out), eps);
    fits_vectors(params) ? launch_vec<false>(params, {}, current_stream(x)) : launch_any(params, current_stream(x));
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

Tensor add_halves_rms_norm(Tensor halves, Tensor residual, Tensor weight, double eps) {
  const char* op = "add_halves_rms_norm";
  Arg(op, "halves", halves).floating().dim(3).size(0, 2, "one for each half").last_contiguous();
  const ScalarType type = halves.scalar_type();
  Arg(op, "residual", residual).dtype({type}).dim(2).last_contiguous().on_device_of(halves);
  Arg(op, "residual", residual).size(0, halves.size(1), "the rows of halves").size(1, halves.size(2), "as halves");
  Arg(op, "weight", weight).dtype({type}).dim(1).size(0, halves.size(2), "the last dimension of halves").contiguous();
  Arg(op, "weight", weight).on_device_of(halves);
  Tensor out = torch::stable::new_empty(residual, residual.sizes());
  if (residual.numel() == 0) return out;
  const Guard guard(residual.get_device_index());
  by_dtype(residual, [&](auto type) {
    using T = decltype(type);
    NormParams<T> params = params_of(residual, &residual, weight, data<T>(out), eps);
    params.x = data<T>(halves), params.other = params.x + halves.stride(0), params.outer_stride = halves.stride(1);
    fits_vectors(params) ? launch_vec<false>(params, {}, current_stream(residual))
                         : launch_any(params, current_stream(residual));
  });
  check_launch(op);
  return out;
}

std::tuple<Tensor, Tensor> scaled_rms_norm(Tensor x, std::optional<Tensor> residual, Tensor weight, double eps) {
  const char* op = "scaled_rms_norm";
  const Tensor* added = residual ? &*residual : nullptr;
  Arg(op, "x", x).dim(2);
  check_norm(op, x, added, weight);
  if (added) Arg(op, "residual", *added).on_device_of(x);
  Arg(op, "weight", weight).on_device_of(x);
  const ScaledTensors out(x, x.size(1));
  if (x.numel() == 0) return out.both();
  bool fits = false;
  const Guard guard(x.get_device_index());
  by_dtype(x, [&](auto type) {
    using T = decltype(type);
    const NormParams<T> params = params_of<T>(x, added, weight, nullptr, eps);
    fits = fits_vectors(params);
    if (fits) launch_vec<true>(params, out.pointers(), current_stream(x));
  });
  check_launch(op);
  return fits ? out.both() : scale_rows(run(op, x, added, weight, eps));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CUDA, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
  m.impl("add_halves_rms_norm", TORCH_BOX(&add_halves_rms_norm));
  m.impl("scaled_rms_norm", TORCH_BOX(&scaled_rms_norm));
}

}  // namespace raylm::cuda
