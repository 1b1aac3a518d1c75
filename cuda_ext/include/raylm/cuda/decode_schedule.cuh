// Who attends to what in a step of short queries, worked out on the device by every block for itself: the grid knows no
// sequence length, so that one CUDA graph serves all. The sequences' keys, in units of kDecodeKeys, form one long line
// with a gap before each sequence; it is cut into equal shares, one for each "slot" of the grid (the split of Stream-K,
// arXiv:2301.03598). Where sequences are few or of similar length, slots get whole ones instead. All KV heads of a slot
// walk the same keys at the same time, as a token's heads lie side by side in memory.
#pragma once

#include <climits>

#include "raylm/cuda/common.cuh"

namespace raylm::cuda {

constexpr int kDecodeKeys = 16;     // in a unit
constexpr int kDecodeTile = 4;      // units that a block takes in one go
constexpr int kDecodeThreads = 128;
constexpr int kDecodeQueries = 16;  // sequences with more are never decode
constexpr int kDecodeTurn = 4;      // units that pass while a block turns to another sequence: the gap
constexpr int kDecodeWhole = 16;
constexpr int kDecodeJoin = 24;     // units that a slot may have beyond an even share before sequences are cut
constexpr int kMostSharers = 16;    // members of a prefix

// Which keys a launch takes. Sequences of one query may begin with the same blocks (prefixes.cuh): attention to a prefix is
// that of one sequence with its members' queries, which one launch computes for all prefixes and another one, of what
// follows them, joins to its own (cascade inference, arXiv:2402.05099).
enum class DecodePart { kAll, kPrefixes, kRest };

// All are [num_seqs].
struct DecodePrefixes {
  const int32_t* members;  // those of a prefix lie side by side
  const int32_t* counts;   // where a prefix's members begin, how many there are; elsewhere 0
  const int32_t* lengths;  // of a sequence's prefix, in keys: whole units. 0: none
};

struct DecodeBatch {
  const int32_t* query_start;
  const int32_t* seq_lens;
  int num_seqs, group, window;
  int most_queries;  // of decode: sequences with more are another kernel's
  int slots, min_share;
  bool few;  // there are several slots for each sequence

  // Sequences of at most as many units are not cut: the first one's slot has them all. Where blocks would be idle, the
  // shortest way is a tile a block.
  __host__ __device__ int whole() const { return few ? kDecodeTile : kDecodeWhole; }
};

template <DecodePart Part>
struct DecodeLine : DecodeBatch {
  DecodePrefixes prefixes;
};

template <>
struct DecodeLine<DecodePart::kAll> : DecodeBatch {};

// A sequence as one block sees it: queries from row `query` of q on, which see the keys [low, high) between them.
struct DecodeSequence {
  int query, num_queries, low, high;

  __device__ int first() const { return low / kDecodeKeys; }
  __device__ int last() const { return (high + kDecodeKeys - 1) / kDecodeKeys; }
  __device__ int units() const { return num_queries > 0 && high > low ? last() - first() : 0; }
  __device__ int length() const { return units() > 0 ? units() + kDecodeTurn : 0; }  // in the line
};

// Sequences that have too many queries, or no rows from first_row on, show no queries and so no units. A prefix stands for
// the first of its members, whose number in DecodePrefixes is the sequence's.
template <DecodePart Part>
__device__ inline DecodeSequence decode_sequence(const DecodeLine<Part>& batch, int seq, int first_row) {
  if constexpr (Part == DecodePart::kPrefixes) {
    const int count = batch.prefixes.counts[seq];
    return {seq, count * batch.group > first_row ? count : 0, 0, batch.prefixes.lengths[batch.prefixes.members[seq]]};
  }
  const int query = batch.query_start[seq], length = batch.seq_lens[seq];
  const int queries = batch.query_start[seq + 1] - query, low = length - queries - batch.window + 1;
  const bool mine = queries <= batch.most_queries && queries * batch.group > first_row;
  if constexpr (Part == DecodePart::kRest) return {query, mine ? queries : 0, batch.prefixes.lengths[seq], length};
  return {query, mine ? queries : 0, batch.window > 0 && low > 0 ? low : 0, length};
}

// A position in a slot's share: a tile of a sequence. The same tiles pass by wherever it is advanced.
template <DecodePart Part>
struct DecodeCursor {
  DecodeSequence now;
  int seq, seqs;   // -1: past the end; sequences from `seqs` on are other slots'
  int unit, stop;  // where the tile begins in the sequence, and where the share's part of the sequence ends
  int start, end;  // in the line: the sequence's first unit; the end of the share

  __device__ bool done() const { return seq < 0; }
  __device__ bool last_tile() const { return unit + kDecodeTile >= stop; }

  // Takes the first sequence from `from` on that has units, the gap before which is at `at`, if it starts in the share.
  __device__ void take(const DecodeLine<Part>& batch, int from, int at, int first_row) {
    start = at + kDecodeTurn;
    for (seq = from; seq < seqs && start < end; ++seq) {
      now = decode_sequence(batch, seq, first_row);
      const int units = now.units();
      if (units == 0) continue;
      unit = now.first();
      stop = units <= batch.whole() || start + units <= end ? now.last() : unit + end - start;
      return;
    }
    seq = -1;
  }

  __device__ void advance(const DecodeLine<Part>& batch, int first_row) {
    if (last_tile()) {
      take(batch, seq + 1, start + now.units(), first_row);
    } else {
      unit += kDecodeTile;
    }
  }
};

template <DecodePart Part>
struct DecodeShare {
  DecodeCursor<Part> cursor;
  int begin, size;
};

// The share of a slot, in every thread of the block. Each thread counts the units of a run of sequences; the runs' sums
// are added up over the block, and the thread whose run holds the share's first unit says where that is.
template <DecodePart Part>
__device__ inline DecodeShare<Part> decode_share(const DecodeLine<Part>& batch, int slot, int first_row) {
  __shared__ int warp_units[kDecodeThreads / kWarp], warp_longest[kDecodeThreads / kWarp], found[2];
  const int run = (batch.num_seqs + kDecodeThreads - 1) / kDecodeThreads, from = threadIdx.x * run;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int to = min(from + run, batch.num_seqs);
  int units = 0, longest = 0;
  for (int s = from; s < to; ++s) {
    const int length = decode_sequence(batch, s, first_row).length();
    units += length, longest = max(longest, length);
  }
  longest = __reduce_max_sync(kAllLanes, longest);
  int before = units;
  for (int step = 1; step < kWarp; step *= 2) {
    const int other = __shfl_up_sync(kAllLanes, before, step);
    if (lane >= step) before += other;
  }
  if (lane == kWarp - 1) warp_units[warp] = before, warp_longest[warp] = longest;
  __syncthreads();
  int total = 0;
  before -= units;
  for (int w = 0; w < kDecodeThreads / kWarp; ++w) {
    if (w < warp) before += warp_units[w];
    total += warp_units[w], longest = max(longest, warp_longest[w]);
  }
  DecodeShare<Part> share;
  share.size = max(batch.min_share, (total + batch.slots - 1) / batch.slots);
  // The same number of whole sequences for each slot, where that takes no longer than cutting and joining them.
  const int each = (batch.num_seqs + batch.slots - 1) / batch.slots;
  if (!batch.few && each * longest <= share.size + kDecodeJoin) {
    share.cursor.seqs = min((slot + 1) * each, batch.num_seqs), share.cursor.end = INT_MAX;
    share.cursor.take(batch, slot * each, 0, first_row);
    return share;
  }
  if (batch.few) share.size = (share.size + kDecodeTile - 1) / kDecodeTile * kDecodeTile;
  share.begin = slot * share.size;
  if (before <= share.begin && share.begin < before + units) {
    int s = from, start = before;
    for (int n; start + (n = decode_sequence(batch, s, first_row).length()) <= share.begin; ++s) start += n;
    found[0] = s, found[1] = start;
  }
  __syncthreads();
  share.cursor.seq = -1, share.cursor.seqs = batch.num_seqs;
  if (share.begin >= total) return share;
  share.cursor.end = min(share.begin + share.size, total);
  share.cursor.take(batch, found[0], found[1], first_row);
  const int passed = share.begin - share.cursor.start;
  if (share.cursor.done() || passed <= 0) return share;
  if (share.cursor.now.units() <= batch.whole()) {
    share.cursor.unit = share.cursor.stop;
    share.cursor.advance(batch, first_row);
  } else {
    share.cursor.unit += passed;
  }
  return share;
}

}  // namespace raylm::cuda
