#include "common.h"
#include "shapes.h"

namespace raylm {
namespace {

void run(const Tensor& x, NormArgs& args, const Tensor& weight, const Tensor& out) {
  args.dtype = dtype_of(x);
  args.x = x.const_data_ptr();
  args.weight = weight.const_data_ptr();
  args.out = out.mutable_data_ptr();
  args.hidden = weight.size(0);
  const int64_t rows = args.hidden ? x.numel() / args.hidden : 0;
  for_range(rows, args.hidden, [&](int64_t begin, int64_t end) { cpu_kernels().rms_norm(args, begin, end); });
}

Tensor rms_norm(Tensor x, Tensor weight, double eps) {
  const char* op = "rms_norm";
  check_norm(op, x, nullptr, weight);
  Arg(op, "x", x).on_cpu();
  Arg(op, "weight", weight).on_cpu();
  if (x.dim() > 3) Arg(op, "x (with more than 3 dimensions)", x).contiguous();
  NormArgs args{};
  args.eps = static_cast<float>(eps);
  // Up to two leading dimensions may be strided: the heads of a fused projection.
  const int64_t hidden = weight.size(0);
  args.inner = x.dim() == 3 ? x.size(1) : 1;
  args.inner_stride = x.dim() == 3 ? x.stride(1) : 0;
  args.outer_stride = x.dim() == 2 || x.dim() == 3 ? x.stride(0) : hidden;
  if (args.inner == 0) args.inner = 1;
  Tensor out = torch::stable::new_empty(x, x.sizes());
  run(x, args, weight, out);
  return out;
}

Tensor add_rms_norm(Tensor x, Tensor residual, Tensor weight, double eps) {
  const char* op = "add_rms_norm";
  check_norm(op, x, &residual, weight);
  Arg(op, "x", x).on_cpu();
  Arg(op, "residual", residual).on_cpu();
  Arg(op, "weight", weight).on_cpu();
  NormArgs args{};
  args.eps = static_cast<float>(eps);
  args.inner = 1;
  args.outer_stride = x.stride(0);
  args.residual = residual.mutable_data_ptr();
  args.residual_stride = residual.stride(0);
  Tensor out = torch::stable::new_empty(x, x.sizes());
  run(x, args, weight, out);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
}

}  // namespace raylm
