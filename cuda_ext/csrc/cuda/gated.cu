#include "launch.h"
#include "raylm/cuda/gated.cuh"
#include "shapes.h"

namespace raylm::cuda {
namespace {

template <typename Act>
Tensor run(const char* op, const Tensor& x) {
  check_gated(op, x);
  const int64_t rows = x.size(0), width = x.size(1) / 2;
  const int64_t shape[2] = {rows, width};
  Tensor out = torch::stable::new_empty(x, torch::headeronly::IntHeaderOnlyArrayRef(shape, 2));
  if (out.numel() == 0) return out;
  const unsigned threads = threads_for(width, 256);
  const dim3 grid(rows, (width + 4 * threads - 1) / (4 * threads));
  const Guard guard(x.get_device_index());
  by_dtype(x, [&](auto type) {
    using T = decltype(type);
    gated_kernel<T, Act><<<grid, threads, 0, current_stream(x)>>>(data<T>(x), x.stride(0), data<T>(out), width);
  });
  check_launch(op);
  return out;
}

Tensor silu_mul(Tensor x) { return run<Silu>("silu_mul", x); }

Tensor gelu_tanh_mul(Tensor x) { return run<GeluTanh>("gelu_tanh_mul", x); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CUDA, m) {
  m.impl("silu_mul", TORCH_BOX(&silu_mul));
  m.impl("gelu_tanh_mul", TORCH_BOX(&gelu_tanh_mul));
}

}  // namespace raylm::cuda
