// Rows of tokens in the order of their experts: where each goes, whose it is, its copy, and the sum of what comes back. A
// token and one of its experts are a pair; pairs are numbered token by token.
#pragma once

#include "raylm/cuda/common.cuh"
#include "raylm/cuda/ptx/cluster.cuh"
#include "raylm/cuda/ptx/grid.cuh"
#include "raylm/cuda/segments.cuh"
#include "raylm/cuda/tile/vec.cuh"

namespace raylm::cuda {

constexpr int kOrderWarps = 16;
constexpr int kOrderThreads = kOrderWarps * kWarp;
constexpr int kOrderPairs = 4096;  // with fewer one block sorts, with as many or more kOrderBlocks
constexpr int kOrderBlocks = 8;    // of a cluster, the most that every GPU with clusters allows
constexpr int kOrderAhead = 8;  // of a lane's pairs, read before they are looked at
static_assert(kMostExperts <= kOrderThreads);

struct OrderParams {
  const int64_t* chosen;  // [pairs]
  int* places;            // [pairs]: a pair's row
  int* tokens;            // [pairs]: a row's token
  Segment* segments;
  int* num_segments;
  int pairs, per_token, experts;
  int segment_rows;  // at most
};

// The sum over the threads before this one, of a block of kOrderThreads.
__device__ inline int sum_before(int x, int* parts) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int sum = x;
  for (int step = 1; step < kWarp; step *= 2) {
    const int other = __shfl_up_sync(kAllLanes, sum, step);
    if (lane >= step) sum += other;
  }
  __syncthreads();
  if (lane == kWarp - 1) parts[warp] = sum;
  __syncthreads();
  int before = sum - x;
  for (int w = 0; w < warp; ++w) before += parts[w];
  return before;
}

// Calls see(pair, expert) with this warp's pairs in their order, a lane each; behind the last one with -1 for the expert.
template <typename See>
__device__ inline void for_pairs(const OrderParams& p, int first, int last, const See& see) {
  for (int base = first + threadIdx.x % kWarp; base - first < (last - first + kWarp - 1) / kWarp * kWarp;
       base += kOrderAhead * kWarp) {
    int experts[kOrderAhead];
#pragma unroll
    for (int i = 0; i < kOrderAhead; ++i) {
      const int pair = base + i * kWarp;
      experts[i] = pair < last ? static_cast<int>(p.chosen[pair]) : -1;
    }
#pragma unroll
    for (int i = 0; i < kOrderAhead; ++i) see(base + i * kWarp, experts[i]);
  }
}

// Writes an expert's segments, of equal numbers of rows but for rounding to multiples of 8.
__device__ inline void write_segments(const OrderParams& p, int expert, int first, int num, int start, int rows) {
  const int each = num ? ((rows + num - 1) / num + 7) / 8 * 8 : 0;
  for (int i = 0; i < num; ++i) {
    const int row = start + i * each;
    p.segments[first + i] = {expert, row, min(each, rows - i * each), row};
  }
}

// The blocks of the grid, which are one cluster, sort: their warps take stretches of pairs, count them by expert, and number
// them in their order. Dynamic shared memory: an int for each warp of a block and expert.
__device__ inline void order_pairs(const OrderParams& p) {
  extern __shared__ int counts[];
  __shared__ int parts[kOrderWarps], totals[kMostExperts];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (int i = threadIdx.x; i < kOrderWarps * p.experts; i += kOrderThreads) counts[i] = 0;
  __syncthreads();
  int* own = counts + warp * p.experts;
  const int threads = gridDim.x * kOrderThreads, stretch = (p.pairs + threads - 1) / threads * kWarp;
  const int first = min((static_cast<int>(blockIdx.x) * kOrderWarps + warp) * stretch, p.pairs);
  const int last = min(first + stretch, p.pairs);
  for_pairs(p, first, last, [&](int, int expert) {
    if (expert >= 0) atomicAdd(own + expert, 1);
  });
  __syncthreads();

  const int expert = threadIdx.x;
  if (expert < p.experts) {
    int sum = 0;
    for (int w = 0; w < kOrderWarps; ++w) sum += counts[w * p.experts + expert];
    totals[expert] = sum;
  }
  cluster_sync();
  int before = 0, total = 0;  // of this expert's pairs: those of the blocks before this one, and all
  for (unsigned block = 0; expert < p.experts && block < gridDim.x; ++block) {
    if (block == blockIdx.x) before = total;
    total += load_shared_word_at(shared_address(totals + expert), block);
  }
  const int num = (total + p.segment_rows - 1) / p.segment_rows;
  const int start = sum_before(total, parts), segment = sum_before(num, parts);
  if (blockIdx.x == 0) {
    if (expert == p.experts - 1) *p.num_segments = segment + num;
    if (expert < p.experts) write_segments(p, expert, segment, num, start, total);
  }
  if (expert < p.experts) {
    before += start;
    for (int w = 0; w < kOrderWarps; ++w) {
      const int count = counts[w * p.experts + expert];
      counts[w * p.experts + expert] = before;
      before += count;
    }
  }
  __syncthreads();

  for_pairs(p, first, last, [&](int pair, int expert) {
    const unsigned active = __ballot_sync(kAllLanes, expert >= 0);
    if (expert >= 0) {
      const unsigned same = __match_any_sync(active, expert), lower = same & ((1u << lane) - 1);
      const int place = own[expert];
      __syncwarp(active);
      if (lower == 0) own[expert] = place + __popc(same);
      p.places[pair] = place + __popc(lower);
      p.tokens[place + __popc(lower)] = pair / p.per_token;
    }
    __syncwarp();
  });
  cluster_meet();  // other blocks may still read this one's totals
}

__global__ void __launch_bounds__(kOrderThreads) order_kernel(const __grid_constant__ OrderParams p) {
#if __CUDA_ARCH__ >= 900
  start_dependents();
  wait_for_dependencies();
  order_pairs(p);
#endif
}

// to[places[pair]] = x[the pair's token]; rows of `width` bytes, which is a multiple of 16. Blocks: tokens.
struct SpreadParams {
  const char* x;
  int64_t x_stride;  // bytes
  char* to;
  const int* places;
  int per_token, width;
};

__global__ void spread_kernel(const __grid_constant__ SpreadParams p) {
  wait_for_dependencies();
  start_dependents();  // only now: the next kernel reads early what the one ahead of this has written
  const int64_t token = blockIdx.x;
  const char* from = p.x + token * p.x_stride;
  constexpr int kSome = 8;  // places that are read before the first store
  for (int first = 0; first < p.per_token; first += kSome) {
    int64_t places[kSome];
#pragma unroll
    for (int n = 0; n < kSome; ++n) {
      places[n] = first + n < p.per_token ? p.places[token * p.per_token + first + n] : -1;
    }
    for (int at = threadIdx.x * 16; at < p.width; at += blockDim.x * 16) {
      const uint4 bytes = *reinterpret_cast<const uint4*>(from + at);
#pragma unroll
      for (int n = 0; n < kSome; ++n) {
        if (places[n] >= 0) *reinterpret_cast<uint4*>(p.to + places[n] * p.width + at) = bytes;
      }
    }
  }
}

// out[token] = the sum of its pairs' rows with their weights, in their order; without `places` the rows lie in the order of
// the pairs. Blocks: tokens, in y shares of the columns.
template <typename T>
__global__ void gather_sums_kernel(const T* rows, const int* places, const float* weights, T* out, int per_token,
                                   int columns) {
  start_dependents();
  wait_for_dependencies();
  const int64_t token = blockIdx.x;
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * kVec<T>;
  if (column >= columns) return;
  float sums[kVec<T>] = {};
#pragma unroll 8
  for (int n = 0; n < per_token; ++n) {
    const int64_t pair = token * per_token + n;
    const float weight = weights[pair];
    const auto row = Vec<T>::load(rows + (places ? places[pair] : pair) * columns + column);
    for (int i = 0; i < kVec<T>; ++i) sums[i] += weight * row[i];
  }
  Vec<T> result;
  for (int i = 0; i < kVec<T>; ++i) result.set(i, sums[i]);
  result.store(out + token * columns + column);
}

}  // namespace raylm::cuda
