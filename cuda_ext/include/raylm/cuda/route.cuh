// Which experts each token goes to: a warp a token, its scores in registers, of which each lane has every 32nd.
#pragma once

#include "raylm/cuda/order.cuh"
#include "raylm/cuda/ptx/grid.cuh"

namespace raylm::cuda {

constexpr int kRouteWarps = 4;
constexpr int kRouteMost = 512;  // experts
constexpr int kRouteMostGroups = kWarp;

struct RouteParams {
  const void* logits;  // [rows, experts] of T
  int64_t stride;
  const float* bias;  // [experts], or null
  float* weights;     // [rows, per_token]
  int64_t* chosen;    // the same
  int rows, experts, per_token;
  int groups, groups_per_token;
  float scale;
  bool sigmoid, normalized;
};

template <int Each>
struct RouteRow {
  float score[Each];
  uint32_t key[Each];  // of who comes first; 0: not to be chosen
  const int lane = threadIdx.x % kWarp;

  template <typename T>
  __device__ void read(const RouteParams& p, int row) {
    const T* logits = static_cast<const T*>(p.logits) + row * p.stride;
    float most = -INFINITY, sum = 0;
#pragma unroll
    for (int i = 0; i < Each; ++i) {
      const int expert = lane + kWarp * i;
      score[i] = expert < p.experts ? to_float(logits[expert]) : -INFINITY;
      most = fmaxf(most, score[i]);
    }
    for (int step = kWarp / 2; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, step));
#pragma unroll
    for (int i = 0; i < Each; ++i) {
      score[i] = p.sigmoid ? 1.0f / (1.0f + expf(-score[i])) : expf(score[i] - most);
      sum += score[i];
    }
    const float share = p.sigmoid ? 1.0f : 1.0f / warp_sum(sum);
#pragma unroll
    for (int i = 0; i < Each; ++i) {
      const int expert = lane + kWarp * i;
      score[i] *= share;
      key[i] = expert >= p.experts ? 0 : image_of(p.bias ? score[i] + p.bias[expert] : score[i]);
    }
  }

  // The first of those with the highest key, on all lanes, which is then not to be chosen again.
  __device__ int take() {
    uint32_t own = 0;
#pragma unroll
    for (int i = 0; i < Each; ++i) own = max(own, key[i]);
    const uint32_t best = __reduce_max_sync(kAllLanes, own);
    int first = INT_MAX;
#pragma unroll
    for (int i = Each - 1; i >= 0; --i) {
      if (key[i] == best) first = lane + kWarp * i;
    }
    first = __reduce_min_sync(kAllLanes, static_cast<unsigned>(first));
#pragma unroll
    for (int i = 0; i < Each; ++i) {
      if (lane + kWarp * i == first) key[i] = 0;
    }
    return first;
  }

  __device__ float score_of(int expert) const {
    float own = 0;
#pragma unroll
    for (int i = 0; i < Each; ++i) {
      if (lane + kWarp * i == expert) own = score[i];
    }
    return __shfl_sync(kAllLanes, own, expert % kWarp);
  }

  // Leaves the groups whose two best sum to most. `wanted`: room for what the experts are ranked by.
  __device__ void keep_groups(const RouteParams& p, float* wanted) {
#pragma unroll
    for (int i = 0; i < Each; ++i) {
      const int expert = lane + kWarp * i;
      if (expert < p.experts) wanted[expert] = p.bias ? score[i] + p.bias[expert] : score[i];
    }
    __syncwarp();
    const int width = p.experts / p.groups;
    float first = -INFINITY, second = -INFINITY;
    for (int i = 0; lane < p.groups && i < width; ++i) {
      const float x = wanted[lane * width + i];
      second = fmaxf(second, fminf(first, x));
      first = fmaxf(first, x);
    }
    uint32_t own = lane < p.groups ? image_of(first + second) : 0, kept = 0;
    for (int n = 0; n < p.groups_per_token; ++n) {
      const uint32_t best = __reduce_max_sync(kAllLanes, own);
      const int group = __ffs(__ballot_sync(kAllLanes, own == best)) - 1;
      kept |= 1u << group;
      if (lane == group) own = 0;
    }
#pragma unroll
    for (int i = 0; i < Each; ++i) {
      if (!(kept >> min((lane + kWarp * i) / width, kWarp - 1) & 1)) key[i] = 0;
    }
  }
};

template <typename T, int Each>
__global__ void __launch_bounds__(kRouteWarps* kWarp) route_kernel(const __grid_constant__ RouteParams p) {
  __shared__ float wanted[kRouteWarps][Each * kWarp];
  start_dependents();
  wait_for_dependencies();
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, row = blockIdx.x * kRouteWarps + warp;
  if (row >= p.rows) return;
  RouteRow<Each> own;
  own.template read<T>(p, row);
  if (p.groups > 1) own.keep_groups(p, wanted[warp]);
  float weight = 0, sum = 0;
  int expert = 0;
  for (int n = 0; n < p.per_token; ++n) {
    const int next = own.take();
    const float score = own.score_of(next);
    sum += score;
    if (lane == n) weight = score, expert = next;
  }
  if (p.normalized) weight /= sum + 1e-20f;
  if (lane >= p.per_token) return;
  p.weights[row * p.per_token + lane] = weight * p.scale;
  p.chosen[row * p.per_token + lane] = expert;
}

}  // namespace raylm::cuda
