// Logits to tokens: temperature, top-k, top-p (Holtzman et al., arXiv:1904.09751), min-p (arXiv:2407.01082), the draw.
//
// A cluster of thread blocks works on a row, which is read once: it stays, as exp((logit - max) / temperature), in their
// shared memory, unless its largest logit is all that is wanted (greedy.cuh). Nothing is sorted. Whether a token is kept
// depends on how many tokens are heavier and on what they weigh, and both grow as the weight falls: a search with several pivots at a time, in the manner of the dual pivots of
// FlashInfer (arXiv:2501.01005), narrows the weight of the last token kept down to a few candidates, which are then
// ranked. The token drawn is where the running sum of the kept weights, in the order of the vocabulary, passes a uniform
// number's share of their total.
//
// Sums are taken in one fixed order whatever the batch, so a row's token follows from its logits and settings alone.
#pragma once

#include <cooperative_groups.h>

#include <climits>
#include <utility>

#include "raylm/cuda/greedy.cuh"
#include "raylm/cuda/ptx/grid.cuh"
#include "raylm/cuda/ptx/math.cuh"

namespace raylm::cuda {

constexpr int kSampleCtas = 8;  // of a cluster: one row
constexpr int kSampleWarps = 16;
constexpr int kSampleBlocks = 2;  // on one multiprocessor, where their shared memory fits
constexpr int kSampleThreads = kSampleWarps * kWarp;
constexpr int kRowWarps = kSampleCtas * kSampleWarps;
constexpr int kSegmentUnit = 256;  // a warp's part of a row is a multiple of this
constexpr int kPivots = 4;
constexpr int kCandidates = 256;
constexpr uint32_t kHeaviest = 0x3f800000;  // the bits of weight 1

struct SampleParams {
  const void* logits;
  int64_t row_stride;
  int vocab, segment;  // tokens, and those of one warp
  bool vectors;        // rows are aligned for 16-byte loads
  const float *temperature, *top_p, *min_p;
  const int64_t *top_k, *seed, *position;
  int64_t* token_ids;
};

// What the blocks of a row tell each other. Two of some: a slow block may still read what the round before wrote.
struct SampleExchange {
  uint64_t best[kRowWarps];  // weight and token, see ordered()
  double sums[2][kRowWarps];
  double mass[2][kSampleCtas][kPivots];
  int count[2][kSampleCtas][kPivots];
  uint64_t candidates[kCandidates];
  int num_candidates, tie_token;
};

// What the warps of a block tell each other.
struct SampleScratch {
  float mass[kSampleWarps][kPivots];
  int count[kSampleWarps][kPivots];
  uint64_t local[kCandidates], sorted[kCandidates];
  int num_local, base[kSampleCtas];
};

// Inclusive sum over the lanes up to one's own.
__device__ inline double warp_scan(double x, int lane) {
  for (int step = 1; step < kWarp; step *= 2) {
    const double before = __shfl_up_sync(kAllLanes, x, step);
    if (lane >= step) x += before;
  }
  return x;
}

// The uniform number in [0, 1) of a seed and a position: splitmix64 (Steele, Lea, Flood: OOPSLA 2014) of both.
__device__ inline double uniform_number(int64_t seed, int64_t position) {
  uint64_t state = static_cast<uint64_t>(seed) + 0x9E3779B97F4A7C15ull * (static_cast<uint64_t>(position) + 1);
  state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9ull;
  state = (state ^ (state >> 27)) * 0x94D049BB133111EBull;
  state ^= state >> 31;
  return static_cast<double>(state >> 11) * 0x1.0p-53;
}

// The kept tokens that the search has narrowed: those above `high` are kept, those up to `low` are not.
struct SampleBracket {
  uint32_t low, high;  // bits of weights
  int count_low, count_high;
  double mass_high;  // of the weights above high
};

// How many tokens are kept: fewer than k are heavier than each of them, and less than mass.
struct SampleLimits {
  int k;
  double mass;

  __device__ bool allows(int count, double mass_above) const { return count < k && mass_above < mass; }
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// One row, as one thread of its cluster sees it. What has no lane, warp or block in it is the same in all threads.
struct SampleRow {
  const SampleParams& p;
  SampleExchange& exchange;
  SampleScratch& scratch;
  float* weights;  // of this warp's tokens: [first, end); at first their logits
  int row, cta, warp, lane, first, end;
  int round = 0;

  template <typename V>
  __device__ V* of_cta(V* here, int other) const {
    return cooperative_groups::this_cluster().map_shared_rank(here, other);
  }

  __device__ void sync() const { cooperative_groups::this_cluster().sync(); }

  __device__ int row_warp() const { return cta * kSampleWarps + warp; }

  // Puts a warp's value into the tables of all blocks.
  template <typename V>
  __device__ void tell(V* table, V value) const {
    if (lane < kSampleCtas) of_cta(table, lane)[row_warp()] = value;
  }

  // body(weight, token) for this lane's tokens, in order: four neighbours of each 128.
  template <typename Body>
  __device__ void each(const Body& body) const {
    for (int at = 4 * lane; first + at < end; at += 4 * kWarp) {
      const float4 w = *reinterpret_cast<const float4*>(weights + at);
      body(w.x, first + at);
      body(w.y, first + at + 1);
      body(w.z, first + at + 2);
      body(w.w, first + at + 3);
    }
  }

  template <typename T>
  __device__ const T* logits() const { return static_cast<const T*>(p.logits) + row * p.row_stride; }
  template <typename T>
  __device__ uint64_t load() const;
  __device__ uint64_t best_of_row(uint64_t best_of_warp) const;
  __device__ void weigh(float max, float temperature) const;
  __device__ void count_above(const uint32_t (&pivots)[kPivots]);
  __device__ void narrow(const uint32_t (&pivots)[kPivots], const SampleLimits& limits, SampleBracket& bracket) const;
  __device__ uint64_t cut(double total);
  __device__ void gather(const SampleBracket& bracket) const;
  __device__ uint64_t cut_ranked(const SampleLimits& limits, const SampleBracket& bracket) const;
  __device__ uint64_t cut_ties(const SampleLimits& limits, const SampleBracket& bracket) const;
  template <typename Weight>
  __device__ int locate(const double* sums, double target, const Weight& weight) const;
  template <typename Weight>
  __device__ int walk(double target, const Weight& weight) const;
  __device__ void draw();
};

// Reads this warp's segment into shared memory; returns the largest logit's order-preserving image, with its token.
// NaN counts as infinity: a row that has one still gives a token.
template <typename T>
__device__ uint64_t SampleRow::load() const {
  constexpr int kSize = kVec<T>, kBatch = 4;
  const T* const x = logits<T>();
  float best = -INFINITY;
  int token = first;
  const auto put = [&](int at, float value) {
    value = comparable(value);
    weights[at - first] = value;
    if (value > best) best = value, token = at;
  };
  for (int base = first + lane * kSize; base < end; base += kBatch * kWarp * kSize) {
    Vec<T> held[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int at = base + j * kWarp * kSize;
      if (p.vectors && at + kSize <= end) held[j] = Vec<T>::load(x + at);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int at = base + j * kWarp * kSize;
      if (p.vectors && at + kSize <= end) {
        for (int i = 0; i < kSize; ++i) put(at + i, held[j][i]);
      } else {
        for (int i = at; i < min(at + kSize, end); ++i) put(i, to_float(x[i]));
      }
    }
  }
  return warp_max(first < end ? ordered(image_of(best), token) : 0);
}

__device__ inline uint64_t SampleRow::best_of_row(uint64_t best_of_warp) const {
  tell(exchange.best, best_of_warp);
  sync();
  uint64_t best = 0;
  for (int i = lane; i < kRowWarps; i += kWarp) best = max(best, exchange.best[i]);
  return warp_max(best);
}

// Logits to weights, in place, and their sums to all blocks. The largest weighs 1, also when it is infinite.
__device__ inline void SampleRow::weigh(float max, float temperature) const {
  const float scale = kLog2E / temperature;
  const auto weight = [&](float logit, int token) {
    return token >= end ? 0.0f : logit == max ? 1.0f : exp2f((logit - max) * scale);
  };
  float sum = 0;
  for (int at = 4 * lane; first + at < end; at += 4 * kWarp) {
    float4& w = *reinterpret_cast<float4*>(weights + at);
    const int token = first + at;
    const float4 out = {weight(w.x, token), weight(w.y, token + 1), weight(w.z, token + 2), weight(w.w, token + 3)};
    sum += out.x, sum += out.y, sum += out.z, sum += out.w;
    w = out;
  }
  tell(exchange.sums[0], static_cast<double>(warp_sum(sum)));
}

// How many tokens of each block are heavier than each pivot, and what they weigh: to all blocks.
__device__ inline void SampleRow::count_above(const uint32_t (&pivots)[kPivots]) {
  float mass[kPivots] = {};
  int count[kPivots] = {};
  each([&](float w, int) {
#pragma unroll
    for (int j = 0; j < kPivots; ++j) {
      if (__float_as_uint(w) > pivots[j]) mass[j] += w, ++count[j];
    }
  });
#pragma unroll
  for (int j = 0; j < kPivots; ++j) {
    mass[j] = warp_sum(mass[j]);
    count[j] = __reduce_add_sync(kAllLanes, count[j]);
    if (lane == j) scratch.mass[warp][j] = mass[j], scratch.count[warp][j] = count[j];
  }
  __syncthreads();
  round ^= 1;
  if (threadIdx.x < kSampleCtas * kPivots) {
    const int j = threadIdx.x % kPivots, other = threadIdx.x / kPivots;
    double block_mass = 0;
    int block_count = 0;
    for (int w = 0; w < kSampleWarps; ++w) block_mass += scratch.mass[w][j], block_count += scratch.count[w][j];
    of_cta(&exchange.mass[round][cta][j], other)[0] = block_mass;
    of_cta(&exchange.count[round][cta][j], other)[0] = block_count;
  }
  sync();
}

// Moves the ends of the bracket to the nearest of the pivots, which ascend.
__device__ inline void SampleRow::narrow(const uint32_t (&pivots)[kPivots], const SampleLimits& limits,
                                         SampleBracket& bracket) const {
#pragma unroll
  for (int j = 0; j < kPivots; ++j) {
    double mass = 0;
    int count = 0;
    for (int c = 0; c < kSampleCtas; ++c) mass += exchange.mass[round][c][j], count += exchange.count[round][c][j];
    if (limits.allows(count, mass)) {
      bracket.high = pivots[j], bracket.count_high = count, bracket.mass_high = mass;
      return;
    }
    bracket.low = pivots[j], bracket.count_low = count;
  }
}

// The kept tokens are those whose ordered() is at least what this returns. total: the sum of all weights.
__device__ inline uint64_t SampleRow::cut(double total) {
  const int64_t k = p.top_k[row];
  const float top_p = p.top_p[row], min_p = p.min_p[row];
  const SampleLimits limits{k > 0 && k < p.vocab ? static_cast<int>(k) : INT_MAX, top_p < 1 ? top_p * total : INFINITY};
  const uint32_t floor = min_p > 0 ? __float_as_uint(fminf(min_p, 1.0f)) - 1 : 0;
  SampleBracket bracket{floor, kHeaviest, 0, 0, 0};
  // Powers of two that part what a language model's distributions usually keep from their tails.
  uint32_t pivots[kPivots] = {floor, max(floor, 111u << 23), max(floor, 118u << 23), max(floor, 123u << 23)};
  count_above(pivots);
  narrow(pivots, limits, bracket);
  if (bracket.high == floor) return static_cast<uint64_t>(floor + 1) << 32;
  while (bracket.count_low - bracket.count_high > kCandidates && bracket.high - bracket.low > 1) {
    const uint64_t width = bracket.high - bracket.low;
#pragma unroll
    for (int j = 0; j < kPivots; ++j) pivots[j] = bracket.low + static_cast<uint32_t>(width * (j + 1) / (kPivots + 1));
    count_above(pivots);
    narrow(pivots, limits, bracket);
  }
  const bool few = bracket.count_low - bracket.count_high <= kCandidates;
  return few ? cut_ranked(limits, bracket) : cut_ties(limits, bracket);
}

// The tokens of the bracket, in any order, to all blocks.
__device__ inline void SampleRow::gather(const SampleBracket& bracket) const {
  each([&](float w, int token) {
    const uint32_t bits = __float_as_uint(w);
    if (bits > bracket.low && bits <= bracket.high) {
      scratch.local[atomicAdd(&scratch.num_local, 1)] = ordered(bits, token);
    }
  });
  __syncthreads();
  if (threadIdx.x < kSampleCtas) {
    scratch.base[threadIdx.x] = atomicAdd(of_cta(&exchange.num_candidates, threadIdx.x), scratch.num_local);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kSampleCtas * scratch.num_local; i += kSampleThreads) {
    const int other = i % kSampleCtas, item = i / kSampleCtas;
    of_cta(exchange.candidates, other)[scratch.base[other] + item] = scratch.local[item];
  }
  sync();
}

// Sorts the few tokens of the bracket and takes them one by one.
__device__ inline uint64_t SampleRow::cut_ranked(const SampleLimits& limits, const SampleBracket& bracket) const {
  constexpr int kEach = kCandidates / kWarp;
  gather(bracket);
  const int num = exchange.num_candidates;
  if (threadIdx.x < num) {
    const uint64_t mine = exchange.candidates[threadIdx.x];
    int heavier = 0;
    for (int i = 0; i < num; ++i) heavier += exchange.candidates[i] > mine;
    scratch.sorted[heavier] = mine;
  }
  __syncthreads();
  const auto weight = [&](int i) { return i < num ? __uint_as_float(scratch.sorted[i] >> 32) : 0.0f; };
  double sum = 0;
  for (int i = 0; i < kEach; ++i) sum += weight(kEach * lane + i);
  const double upto = __shfl_up_sync(kAllLanes, warp_scan(sum, lane), 1);
  double before = bracket.mass_high + (lane ? upto : 0);
  int last = 0;  // the first of them is kept, or `high` would not have been allowed
  for (int i = kEach * lane; i < min(num, kEach * (lane + 1)); ++i) {
    if (limits.allows(bracket.count_high + i, before)) last = i;
    before += weight(i);
  }
  return scratch.sorted[__reduce_max_sync(kAllLanes, last)];
}

// All tokens of the bracket weigh the same, and are too many to rank: keeps the first of them.
__device__ inline uint64_t SampleRow::cut_ties(const SampleLimits& limits, const SampleBracket& bracket) const {
  const double by_mass = ceil((limits.mass - bracket.mass_high) / __uint_as_float(bracket.high));
  const double kept = fmin(static_cast<double>(limits.k - bracket.count_high), by_mass);
  if (kept >= bracket.count_low - bracket.count_high) return static_cast<uint64_t>(bracket.high) << 32;
  const auto is_tie = [&](float w, int) { return __float_as_uint(w) == bracket.high ? 1.0f : 0.0f; };
  int count = 0;
  each([&](float w, int token) { count += is_tie(w, token) != 0; });
  tell(exchange.sums[1], static_cast<double>(__reduce_add_sync(kAllLanes, count)));
  sync();
  const int token = locate(exchange.sums[1], kept - 0.5, is_tie);
  if (token >= 0 && lane < kSampleCtas) *of_cta(&exchange.tie_token, lane) = token;
  sync();
  return ordered(bracket.high, exchange.tie_token);
}

// The first token whose running sum of weights passes the target; -1 in the warps that do not have it. sums: the
// warps' own.
template <typename Weight>
__device__ int SampleRow::locate(const double* sums, double target, const Weight& weight) const {
  constexpr int kEach = kRowWarps / kWarp;
  double own[kEach], sum = 0;
  for (int i = 0; i < kEach; ++i) sum += own[i] = sums[kEach * lane + i];
  const double upto = __shfl_up_sync(kAllLanes, warp_scan(sum, lane), 1);
  double bound = lane ? upto : 0, start = 0;
  int owner = -1;
  for (int i = 0; i < kEach; ++i) {
    if (own[i] > 0 && bound <= target) owner = kEach * lane + i, start = bound;
    bound += own[i];
  }
  const int last = __reduce_max_sync(kAllLanes, owner);
  if (last != row_warp()) return -1;
  return walk(target - __shfl_sync(kAllLanes, start, last / kEach), weight);
}

// Within this warp's tokens; where rounding leaves the sum short of the target, the last token that weighs anything.
template <typename Weight>
__device__ int SampleRow::walk(double target, const Weight& weight) const {
  double running = 0;
  int last = -1;
  for (int at = 4 * lane; first + at - 4 * lane < end; at += 4 * kWarp) {
    double passed[4], sum = 0;
    float w[4];
    for (int i = 0; i < 4; ++i) {
      const int token = first + at + i;
      w[i] = token < end ? weight(weights[at + i], token) : 0.0f;
      passed[i] = sum += w[i];
    }
    const double upto = warp_scan(sum, lane), before = __shfl_up_sync(kAllLanes, upto, 1);
    int found = -1, mine = -1;
    for (int i = 3; i >= 0; --i) {
      if (w[i] <= 0) continue;
      if (mine < 0) mine = first + at + i;
      if (running + (lane ? before : 0) + passed[i] > target) found = first + at + i;
    }
    if (const unsigned lanes = __ballot_sync(kAllLanes, found >= 0)) {
      return __shfl_sync(kAllLanes, found, __ffs(lanes) - 1);
    }
    if (const unsigned lanes = __ballot_sync(kAllLanes, mine >= 0)) {
      last = __shfl_sync(kAllLanes, mine, 31 - __clz(lanes));
    }
    running += __shfl_sync(kAllLanes, upto, kWarp - 1);
  }
  return last;
}

__device__ inline double row_total(const double* sums, int lane) {
  double sum = 0;
  for (int i = 0; i < kRowWarps / kWarp; ++i) sum += sums[kRowWarps / kWarp * lane + i];
  return __shfl_sync(kAllLanes, warp_scan(sum, lane), kWarp - 1);
}

// From the weights to a token.
__device__ inline void SampleRow::draw() {
  const int64_t top_k = p.top_k[row];
  const bool truncates = (top_k > 0 && top_k < p.vocab) || p.top_p[row] < 1 || p.min_p[row] > 0;
  sync();  // the sums of all warps are there
  const double* sums = exchange.sums[0];
  const uint64_t least = truncates ? cut(row_total(sums, lane)) : 0;
  const auto kept = [&](float w, int token) { return ordered(__float_as_uint(w), token) >= least ? w : 0.0f; };
  if (truncates) {
    float sum = 0;
    each([&](float w, int token) { sum += kept(w, token); });
    tell(exchange.sums[1], static_cast<double>(warp_sum(sum)));
    sync();
    sums = exchange.sums[1];
  }
  const double target = uniform_number(p.seed[row], p.position[row]) * row_total(sums, lane);
  const int token = locate(sums, target, kept);
  if (token >= 0 && lane == 0) p.token_ids[row] = token;
}

#endif

// kSampleCtas blocks a row, one cluster. Dynamic shared memory: kSampleWarps segments of floats.
template <typename T>
__global__ void __launch_bounds__(kSampleThreads, kSampleBlocks) sample_kernel(const __grid_constant__ SampleParams p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ float4 segments[];
  __shared__ SampleExchange exchange;
  __shared__ SampleScratch scratch;
  const auto cluster = cooperative_groups::this_cluster();
  if (threadIdx.x == 0) exchange.num_candidates = scratch.num_local = 0;
  auto arrived = cluster.barrier_arrive();
  wait_for_dependencies();
  start_dependents();
  const int cta = static_cast<int>(cluster.block_rank()), warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int first = min((cta * kSampleWarps + warp) * p.segment, p.vocab), end = min(first + p.segment, p.vocab);
  SampleRow row{p, exchange, scratch, reinterpret_cast<float*>(segments) + warp * p.segment,
                static_cast<int>(blockIdx.x / kSampleCtas), cta, warp, lane, first, end};
  const float temperature = p.temperature[row.row];
  const uint64_t best_of_warp =
      temperature == 0 ? GreedyRow<T>(row.logits<T>(), p.vectors, first, end).best_of_warp() : row.load<T>();
  cluster.barrier_wait(std::move(arrived));  // all blocks have started: their shared memory may be written
  const uint64_t best = row.best_of_row(best_of_warp);
  // Also before a draw: where every logit is minus infinity or none is a number, nothing is drawn.
  if (cta == 0 && threadIdx.x == 0) p.token_ids[row.row] = token_of(best);
  if (temperature == 0) return;
  row.weigh(number_of(static_cast<uint32_t>(best >> 32)), temperature);
  row.draw();
#endif
}

}  // namespace raylm::cuda
