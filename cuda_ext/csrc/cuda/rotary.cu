#include "launch.h"
#include "raylm/cuda/rotary.cuh"
#include "shapes.h"

namespace raylm::cuda {
namespace {

template <typename T>
RotarySide<T> side(const Tensor& x) {
  return {data<T>(x), x.stride(0), x.stride(1), x.size(1)};
}

void rotary(Tensor q, Tensor k, Tensor positions, Tensor cos_sin) {
  const char* op = "rotary";
  check_rotary(op, q, k, positions, cos_sin);
  Arg(op, "k", k).on_device_of(q);
  Arg(op, "positions", positions).on_device_of(q);
  Arg(op, "cos_sin", cos_sin).on_device_of(q);
  const int64_t pairs = (q.size(1) + k.size(1)) * cos_sin.size(1) / 2;
  if (q.size(0) == 0 || pairs == 0) return;
  const Guard guard(q.get_device_index());
  by_dtype(q, [&](auto type) {
    using T = decltype(type);
    rotary_kernel<T><<<q.size(0), threads_for(pairs, 512), 0, current_stream(q)>>>(
        side<T>(q), side<T>(k), data<int64_t>(positions), data<float>(cos_sin), cos_sin.size(0), cos_sin.size(1));
  });
  check_launch(op);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CUDA, m) { m.impl("rotary", TORCH_BOX(&rotary)); }

}  // namespace raylm::cuda
