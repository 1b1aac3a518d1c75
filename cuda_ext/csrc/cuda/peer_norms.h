// What the launchers of norms over peer memory share.
#pragma once

#include "peers.h"
#include "raylm/cuda/norm.cuh"
#include "shapes.h"

namespace raylm::cuda {

constexpr int64_t kMostNormVecs = 4;  // 16-byte accesses that a thread may hold

inline void check_peer_norm(const char* op, const Tensor& x, const Tensor& residual, const Tensor& weight) {
  check_norm(op, x, &residual, weight);
  Arg(op, "x", x).on_device_of(x);
  Arg(op, "residual", residual).on_device_of(x);
  Arg(op, "weight", weight).on_device_of(x);
}

// The kernels hold a row in `threads` threads, 16 bytes at a time. Returns x [T, H] and what belongs to it as they take
// it.
template <typename T>
NormParams<T> peer_norm_params(const char* op, const Tensor& x, const Tensor& residual, const Tensor& weight,
                               const Tensor& out, double eps, int64_t threads) {
  const NormParams<T> p{data<T>(x), x.size(0), 1, x.stride(0), 0, data<T>(residual), residual.stride(0),
                        data<T>(weight), data<T>(out), x.size(1), static_cast<float>(eps)};
  const int64_t most = kMostNormVecs * threads * kVec<T>;
  if (p.hidden % kVec<T> != 0 || p.hidden > most) {
    fail(op, "x has ", p.hidden, " columns, must have a multiple of ", kVec<T>, " and at most ", most);
  }
  const bool aligned = is_aligned(p.x) && is_aligned(p.residual) && is_aligned(p.weight) &&
                       p.outer_stride % kVec<T> == 0 && p.residual_stride % kVec<T> == 0;
  if (!aligned) fail(op, "the rows of x and residual, and weight, must start at multiples of 16 bytes");
  return p;
}

}  // namespace raylm::cuda
