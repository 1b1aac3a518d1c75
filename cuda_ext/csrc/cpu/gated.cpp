#include "common.h"
#include "shapes.h"

namespace raylm {
namespace {

Tensor run(const char* op, const Tensor& x, Activation activation) {
  check_gated(op, x);
  Arg(op, "x", x).on_cpu();
  GatedArgs args{};
  args.width = x.size(1) / 2;
  Tensor out = empty_like_shape(x, {x.size(0), args.width});
  args.dtype = dtype_of(x);
  args.activation = activation;
  args.x = x.const_data_ptr();
  args.x_stride = x.stride(0);
  args.out = out.mutable_data_ptr();
  for_range(x.size(0), 2 * args.width, [&](int64_t begin, int64_t end) { cpu_kernels().gated(args, begin, end); });
  return out;
}

Tensor silu_mul(Tensor x) { return run("silu_mul", x, Activation::kSilu); }

Tensor gelu_tanh_mul(Tensor x) { return run("gelu_tanh_mul", x, Activation::kGeluTanh); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CPU, m) {
  m.impl("silu_mul", TORCH_BOX(&silu_mul));
  m.impl("gelu_tanh_mul", TORCH_BOX(&gelu_tanh_mul));
}

}  // namespace raylm
