#include "scaled_rows.h"

#include "shapes.h"

namespace raylm::cuda {
namespace {

template <typename T, typename Rows>
void launch(const Rows& rows, int64_t count, const ScaledOut& out, cudaStream_t stream) {
  const int64_t vecs = out.size / kVec<T>;
  const bool fits = is_aligned(rows.x) && rows.stride % kVec<T> == 0 && out.size % kVec<T> == 0;
  if (!fits || vecs > kMaxVecs * 1024) {
    const dim3 block(threads_for(out.size, 512));
    return launch_dependent(scaled_rows_any_kernel<Rows>, dim3(count), block, stream, rows, out);
  }
  // As for norms: more bytes under way where many long rows wait, and short rows share a block.
  int64_t each = vecs >= 512 && count >= 1024 ? 2 : 1;
  while (each < kMaxVecs && divide_up(vecs, each) > 1024) each *= 2;
  const unsigned threads = threads_for(divide_up(vecs, each), 1024);
  const unsigned together = threads >= 256 || count < 512 ? 1 : 256 / threads;
  const dim3 grid(divide_up(count, together)), block(threads, together);
  switch (each) {
    case 1: return launch_dependent(scaled_rows_kernel<T, Rows, 1>, grid, block, stream, rows, count, out);
    case 2: return launch_dependent(scaled_rows_kernel<T, Rows, 2>, grid, block, stream, rows, count, out);
    default: return launch_dependent(scaled_rows_kernel<T, Rows, 4>, grid, block, stream, rows, count, out);
  }
}

// make(T{}): what the rows are made of.
template <typename Make>
std::tuple<Tensor, Tensor> run(const char* op, const Tensor& x, int64_t columns, const Make& make) {
  const ScaledTensors out(x, columns);
  if (x.numel() == 0) return out.both();
  const Guard guard(x.get_device_index());
  by_dtype(x, [&](auto type) {
    launch<decltype(type)>(make(type), x.size(0), out.pointers(), current_stream(x));
  });
  check_launch(op);
  return out.both();
}

}  // namespace

std::tuple<Tensor, Tensor> scale_rows(Tensor x) {
  Arg("scale_rows", "x", x).floating().dim(2).last_contiguous();
  return run("scale_rows", x, x.size(1), [&](auto type) {
    using T = decltype(type);
    return RowsAsTheyAre<T>{data<T>(x), x.stride(0)};
  });
}

std::tuple<Tensor, Tensor> scaled_gated(Tensor x, bool gelu_tanh) {
  check_gated("scaled_gated", x);
  return run("scaled_gated", x, x.size(1) / 2, [&](auto type) {
    using T = decltype(type);
    return GatedRows<T>{data<T>(x), x.stride(0), gelu_tanh};
  });
}

STABLE_TORCH_LIBRARY_IMPL(raylm, CUDA, m) {
  m.impl("scale_rows", TORCH_BOX(&scale_rows));
  m.impl("scaled_gated", TORCH_BOX(&scaled_gated));
}

}  // namespace raylm::cuda
