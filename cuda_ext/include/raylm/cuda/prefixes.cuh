// Which sequences of a step begin with the same blocks of the cache, found from their block tables: for attention that
// reads these once for all of them (decode_schedule.cuh).
#pragma once

#include <climits>

#include "raylm/cuda/common.cuh"
#include "raylm/cuda/decode_schedule.cuh"
#include "raylm/cuda/ptx/grid.cuh"

namespace raylm::cuda {

constexpr int kLeastShared = 256;  // keys: with fewer, sequences are by themselves
constexpr int kPrefixDepths = 8;   // kLeastShared keys, twice as many, ...: where sequences are compared first
constexpr int kPrefixThreads = 1024;
constexpr int kMostPrefixSeqs = 1024;  // that shared memory has room for

// For so many numbers: loops may read four at a time, past the last one.
__host__ __device__ constexpr int prefix_room(int num_seqs) { return (num_seqs + 3) / 4 * 4; }

struct PrefixParams {
  const int32_t* block_table;
  int64_t block_table_stride;
  const int32_t *query_start, *seq_lens;
  int num_seqs, block_size;
  int32_t *members, *counts, *lengths;  // as DecodePrefixes has them
};

// The blocks of a sequence that may be a prefix: full ones before its only query. At least one key is left, so that
// there is something for the prefix to be joined to.
__device__ inline int prefix_blocks(const PrefixParams& p, int seq) {
  const bool one = p.query_start[seq + 1] - p.query_start[seq] == 1;
  return one ? max(p.seq_lens[seq] - 1, 0) / p.block_size : 0;
}

// The blocks of the first kLeastShared << depth keys.
__device__ inline int blocks_at(const PrefixParams& p, int depth) {
  return ((kLeastShared << depth) + p.block_size - 1) / p.block_size;
}

// The block that a sequence is put beside others by: the one at the depth where most keys are spared, of those where
// others have the same. INT_MAX: there is none. `ids` are [kPrefixDepths, prefix_room], negative past a sequence's end.
__device__ inline int shared_block(const PrefixParams& p, const int* ids, int seq) {
  int best = INT_MAX, spared = 0;
  for (int depth = 0; depth < kPrefixDepths; ++depth, ids += prefix_room(p.num_seqs)) {
    const int id = ids[seq];
    int sharers = 0;
    for (int t = 0; id >= 0 && t < p.num_seqs; ++t) sharers += ids[t] == id;
    if (sharers < 2) break;
    const int reads = (sharers + kMostSharers - 1) / kMostSharers;
    const int here = (kLeastShared << depth) / sharers * (sharers - reads);
    if (here >= spared) best = id, spared = here;
  }
  return best;
}

// The first place in rising keys that is not less than `key`.
__device__ inline int first_not_less(const int* keys, int count, int key) {
  int low = 0, high = count;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (keys[middle] < key) low = middle + 1; else high = middle;
  }
  return low;
}

// How many of the first `most` blocks two sequences have in common. Called and answered by a whole warp.
__device__ inline int common_blocks(const PrefixParams& p, int a, int b, int most) {
  const int32_t *of_a = p.block_table + a * p.block_table_stride, *of_b = p.block_table + b * p.block_table_stride;
  constexpr int kCells = 4;  // of a lane, in flight at the same time
  for (int base = 0; base < most; base += kCells * kWarp) {
    bool differs[kCells];
#pragma unroll
    for (int i = 0; i < kCells; ++i) {
      const int at = base + i * kWarp + threadIdx.x % kWarp;
      differs[i] = at < most && of_a[at] != of_b[at];
    }
#pragma unroll
    for (int i = 0; i < kCells; ++i) {
      if (const unsigned lanes = __ballot_sync(kAllLanes, differs[i])) return base + i * kWarp + __ffs(lanes) - 1;
    }
  }
  return most;
}

// Sequences with the same shared_block are put side by side, and cut into prefixes of about equal numbers of members, at
// most kMostSharers. A prefix is as long as all of its members agree. One block does it all.
__global__ void __launch_bounds__(kPrefixThreads) shared_prefixes_kernel(const __grid_constant__ PrefixParams p) {
  extern __shared__ int shared[];
  const int n = p.num_seqs, room = prefix_room(n);
  int *ids = shared, *keys = ids + kPrefixDepths * room, *sorted = keys + room, *members = sorted + room;
  start_dependents();
  wait_for_dependencies();
  for (int i = threadIdx.x; i < kPrefixDepths * room; i += kPrefixThreads) {
    const int s = i % room, blocks = blocks_at(p, i / room);
    const bool has = s < n && prefix_blocks(p, s) >= blocks;
    ids[i] = has ? p.block_table[s * p.block_table_stride + blocks - 1] : -1;
  }
  __syncthreads();
  for (int s = threadIdx.x; s < n; s += kPrefixThreads) keys[s] = shared_block(p, ids, s);
  __syncthreads();
  for (int s = threadIdx.x; s < n; s += kPrefixThreads) {
    const int key = keys[s];
    int place = 0;
    for (int t = 0; t < n; ++t) place += keys[t] < key || (keys[t] == key && t < s);
    sorted[place] = key, members[place] = s;
  }
  __syncthreads();
  int* blocks = keys;  // of the prefix that begins at a place
  for (int i = threadIdx.x; i < n; i += kPrefixThreads) {
    blocks[i] = sorted[i] == INT_MAX ? 0 : prefix_blocks(p, members[i]);
  }
  __syncthreads();
  // Where the prefix of a place begins, and its members from there on.
  const auto prefix_of = [&](int i, int& count) {
    const int low = first_not_less(sorted, n, sorted[i]);
    const int sharers = first_not_less(sorted, n, sorted[i] + (sorted[i] < INT_MAX)) - low;
    const int prefixes = (sharers + kMostSharers - 1) / kMostSharers, most = (sharers + prefixes - 1) / prefixes;
    const int first = low + (i - low) / most * most;
    count = min(most, low + sharers - first);
    return first;
  };
  for (int i = threadIdx.x / kWarp; i < n && sorted[i] < INT_MAX; i += kPrefixThreads / kWarp) {
    int count;
    const int first = prefix_of(i, count);
    if (first == i) continue;
    const int a = members[first], b = members[i];
    const int same = common_blocks(p, a, b, min(prefix_blocks(p, a), prefix_blocks(p, b)));
    if (threadIdx.x % kWarp == 0) atomicMin(&blocks[first], same);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += kPrefixThreads) {
    int count = 1;
    const int first = sorted[i] < INT_MAX ? prefix_of(i, count) : i;
    const bool shares = count > 1 && blocks[first] >= blocks_at(p, 0);
    p.members[i] = members[i];
    p.counts[i] = shares && first == i ? count : 0;
    p.lengths[members[i]] = shares ? blocks[first] * p.block_size : 0;
  }
}

}  // namespace raylm::cuda
