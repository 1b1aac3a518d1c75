#include "raylm/cuda/peer_norm.cuh"

#include "peers.h"
#include "shapes.h"

namespace raylm::cuda {
namespace {

constexpr const char* kOp = "peer_add_rms_norm";
constexpr int64_t kMostVecs = 4;  // 16-byte accesses that a thread may hold

void check(const Tensor& x, const Tensor& residual, const Tensor& weight) {
  check_norm(kOp, x, &residual, weight);
  Arg(kOp, "x", x).on_device_of(x);
  Arg(kOp, "residual", residual).on_device_of(x);
  Arg(kOp, "weight", weight).on_device_of(x);
  if (x.size(0) > kPeerBlocks) fail(kOp, "x has ", x.size(0), " rows, must have at most ", kPeerBlocks);
}

template <typename T>
void check_vectors(const NormParams<T>& p, int64_t stride, int64_t capacity) {
  const int64_t most = kMostVecs * kPeerNormThreads * kVec<T>;
  if (p.hidden % kVec<T> != 0 || p.hidden > most) {
    fail(kOp, "x has ", p.hidden, " columns, must have a multiple of ", kVec<T>, " and at most ", most);
  }
  const bool aligned = is_aligned(p.x) && is_aligned(p.residual) && is_aligned(p.weight) && stride % kVec<T> == 0 &&
                       p.residual_stride % kVec<T> == 0;
  if (!aligned) fail(kOp, "the rows of x and residual, and weight, must start at multiples of 16 bytes");
  const int64_t bytes = p.rows * p.hidden * static_cast<int64_t>(sizeof(T));
  if (bytes > capacity) fail(kOp, "x has ", bytes, " bytes, must have at most ", capacity, " (capacity)");
}

template <typename T>
void launch(const Peers& peers, const NormParams<T>& params, cudaStream_t stream) {
  const int64_t vecs = params.hidden / kVec<T>;
  const int64_t each = vecs <= kPeerNormThreads ? 1 : vecs <= 2 * kPeerNormThreads ? 2 : kMostVecs;
  const dim3 grid(static_cast<unsigned>(params.rows)), block(threads_for((vecs + each - 1) / each, kPeerNormThreads));
  by_ranks(peers.ranks, [&](auto most) {
    const auto kernel = each == 1   ? peer_add_rms_norm_kernel<T, most, 1>
                        : each == 2 ? peer_add_rms_norm_kernel<T, most, 2>
                                    : peer_add_rms_norm_kernel<T, most, kMostVecs>;
    launch_dependent(kernel, grid, block, stream, peers, params);
  });
}

Tensor peer_add_rms_norm(Tensor x, Tensor residual, Tensor weight, double eps, Tensor windows, int64_t rank,
                         int64_t capacity, double limit_s) {
  check(x, residual, weight);
  const Peers peers = make_peers(kOp, windows, rank, capacity, limit_s);
  Tensor out = torch::stable::new_empty(x, x.sizes());
  const Guard guard(x.get_device_index());
  by_dtype(x, [&](auto type) {
    using T = decltype(type);
    const NormParams<T> params{data<T>(x), x.size(0), 1, x.stride(0), 0, data<T>(residual), residual.stride(0),
                               data<T>(weight), data<T>(out), x.size(1), static_cast<float>(eps)};
    check_vectors(params, x.stride(0), capacity);
    if (x.numel() > 0) launch(peers, params, current_stream(x));
  });
  check_launch(kOp);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CUDA, m) { m.impl("peer_add_rms_norm", TORCH_BOX(&peer_add_rms_norm)); }

}  // namespace raylm::cuda
