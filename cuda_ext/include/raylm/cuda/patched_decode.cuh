// Weights in patches as numbers of 16 bits, for products of many rows.
#pragma once

#include "raylm/cuda/ptx/grid.cuh"
#include "raylm/cuda/tile/patches.cuh"

namespace raylm::cuda {

// A warp takes a patch.
struct PatchedDecodeParams {
  const unsigned char* weight;
  void* out;  // [n, k]
  int n, k, across, group_log2;
};

constexpr int kDecodeWarps = 8;

// A pair, rounded once.
template <typename T, typename Form>
__device__ inline uint32_t decoded(const Form& form, int step, int behind) {
  if constexpr (Form::kSums) {
    const float2 pair = unpack<T>(form.number(step, behind));
    return pack<T>(pair.x * form.scale(step), pair.y * form.scale(step));
  } else {
    const float2 pair = unpack<T>(form.scaled(step, behind));
    return pack<T>(pair.x * Form::kFactor, pair.y * Form::kFactor);
  }
}

template <typename T, typename Form>
__global__ void patched_decode_kernel(PatchedDecodeParams p) {
  constexpr int kMostBytes = bytes_of_patch(Form::kBits, 4);
  __shared__ alignas(16) unsigned char patches[kDecodeWarps][kMostBytes];
  wait_for_dependencies();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, bytes = bytes_of_patch<Form>(p.group_log2);
  const int64_t number = static_cast<int64_t>(blockIdx.x) * kDecodeWarps + warp;
  if (number >= static_cast<int64_t>(p.n / kPatchRows) * p.across) return;
  const uint4* from = reinterpret_cast<const uint4*>(p.weight + number * bytes);
  uint4* to = reinterpret_cast<uint4*>(patches[warp]);
  for (int i = lane; i < bytes / 16; i += kWarp) to[i] = from[i];
  __syncwarp();
#pragma unroll
  for (int rows = 0; rows < 2; ++rows) {
    Form form;
    form.load(shared_address(to), PatchLane::of(rows), p.group_log2);
    const int64_t row = number / p.across * kPatchRows + rows * 8 + lane / 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t pairs[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) pairs[j] = decoded<T>(form, 2 * i + j / 2, j % 2);
      transpose4(pairs);
      const int column = static_cast<int>(number % p.across) * kPatchColumns + i * 32 + lane % 4 * 8;
      if (column >= p.k) continue;
      *reinterpret_cast<uint4*>(static_cast<T*>(p.out) + row * p.k + column) =
          make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }
}

}  // namespace raylm::cuda
