#include "products.h"
#include "raylm/cuda/gated.cuh"
#include "shapes.h"

namespace raylm::cuda {
namespace {

constexpr int kMany = 2;  // 16-byte accesses a thread where there is work for all multiprocessors

template <typename T, typename Act>
void launch(const Tensor& x, const Tensor& out, int64_t rows, int64_t width) {
  const auto stream = current_stream(x);
  const T* source = data<T>(x);
  T* target = data<T>(out);
  const int64_t vecs = width / kVec<T>;
  if (!is_aligned(source) || !is_aligned(target) || width % kVec<T> != 0 || x.stride(0) % kVec<T> != 0) {
    const unsigned threads = threads_for(width, 256);
    const dim3 grid(rows, divide_up(width, 4 * threads));
    return launch_dependent(gated_any_kernel<T, Act>, grid, dim3(threads), stream, source, x.stride(0), target, width);
  }
  const bool many = rows * vecs >= 256 * 1024;
  const unsigned threads = many ? threads_for(vecs / kMany, 256) : 64, each = many ? kMany * threads : threads;
  const dim3 grid(rows, divide_up(vecs, each));
  const auto kernel = many ? gated_kernel<T, Act, kMany> : gated_kernel<T, Act, 1>;
  launch_dependent(kernel, grid, dim3(threads), stream, source, x.stride(0), target, width);
}

template <typename Act>
Tensor run(const char* op, const Tensor& x) {
  check_gated(op, x);
  const int64_t rows = x.size(0), width = x.size(1) / 2;
  Tensor out = new_rows(x, width);
  if (out.numel() == 0) return out;
  const Guard guard(x.get_device_index());
  by_dtype(x, [&](auto type) { launch<decltype(type), Act>(x, out, rows, width); });
  check_launch(op);
  return out;
}

}  // namespace

Tensor silu_mul(Tensor x) { return run<Silu>("silu_mul", x); }

Tensor gelu_tanh_mul(Tensor x) { return run<GeluTanh>("gelu_tanh_mul", x); }

STABLE_TORCH_LIBRARY_IMPL(raylm, CUDA, m) {
  m.impl("silu_mul", TORCH_BOX(&silu_mul));
  m.impl("gelu_tanh_mul", TORCH_BOX(&gelu_tanh_mul));
}

}  // namespace raylm::cuda
