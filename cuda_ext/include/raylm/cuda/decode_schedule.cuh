// Who attends to what in a step of short queries, worked out on the device by every block for itself: the grid knows no
// sequence length, so that one CUDA graph serves all. The sequences' keys, in tiles of kDecodeTile, form one long line,
// with a gap of kDecodeTurn before each sequence; it is cut into equal shares, one for each "slot" of the grid (the split
// of Stream-K, arXiv:2301.03598). All KV heads
// of a slot walk the same keys at the same time, because a token's heads lie side by side in memory.
#pragma once

#include "raylm/cuda/common.cuh"

namespace raylm::cuda {

constexpr int kDecodeTile = 64;
constexpr int kDecodeThreads = 128;
constexpr int kDecodeQueries = 16;  // sequences with more are not decode
constexpr int kDecodeTurn = 1;      // tiles that pass while a block turns to another sequence

struct DecodeBatch {
  const int32_t* query_start;
  const int32_t* seq_lens;
  int num_seqs, group, window;
  int slots, min_tiles;  // a share has at least min_tiles
  bool whole;            // no sequence is cut: it belongs to the slot that its first tile falls in
};

// A sequence as one block sees it: queries from row `query` of q on, which see the keys [low, high) between them.
struct DecodeSequence {
  int query, num_queries, low, high;

  __device__ int first() const { return low / kDecodeTile; }
  __device__ int last() const { return (high + kDecodeTile - 1) / kDecodeTile; }
  __device__ int tiles() const { return num_queries > 0 && high > low ? last() - first() : 0; }
  __device__ int length() const { return tiles() > 0 ? tiles() + kDecodeTurn : 0; }  // in the line
};

// Sequences that have too many queries, or no rows from first_row on, show no queries and so no tiles.
__device__ inline DecodeSequence decode_sequence(const DecodeBatch& batch, int seq, int first_row) {
  const int query = batch.query_start[seq], length = batch.seq_lens[seq];
  const int queries = batch.query_start[seq + 1] - query, low = length - queries - batch.window + 1;
  const bool mine = queries <= kDecodeQueries && queries * batch.group > first_row;
  return {query, mine ? queries : 0, batch.window > 0 && low > 0 ? low : 0, length};
}

// A position in a slot's share: a tile of a sequence. The same tiles pass by wherever it is advanced.
struct DecodeCursor {
  DecodeSequence now;
  int seq;         // -1: past the end
  int tile, stop;  // of this sequence, the share has the tiles up to stop
  int start, end;  // in the line: the sequence's first tile; the end of the share

  __device__ bool done() const { return seq < 0; }

  // Takes the first sequence from `from` on that has tiles, the gap before which is at `at`, if it starts in the share.
  __device__ void take(const DecodeBatch& batch, int from, int at, int first_row) {
    start = at + kDecodeTurn;
    for (seq = from; seq < batch.num_seqs && start < end; ++seq) {
      now = decode_sequence(batch, seq, first_row);
      const int tiles = now.tiles();
      if (tiles == 0) continue;
      tile = now.first();
      stop = batch.whole || start + tiles <= end ? now.last() : tile + end - start;
      return;
    }
    seq = -1;
  }

  __device__ void advance(const DecodeBatch& batch, int first_row) {
    if (++tile < stop) return;
    take(batch, seq + 1, start + now.tiles(), first_row);
  }
};

struct DecodeShare {
  DecodeCursor cursor;
  int begin, size;
};

// The share of a slot, in every thread of the block. Each thread counts the tiles of a run of sequences; the runs' sums
// are added up over the block, and the thread whose run holds the share's first tile says where that is.
__device__ inline DecodeShare decode_share(const DecodeBatch& batch, int slot, int first_row) {
  __shared__ int warp_tiles[kDecodeThreads / kWarp], found[2];
  const int run = (batch.num_seqs + kDecodeThreads - 1) / kDecodeThreads, from = threadIdx.x * run;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int to = min(from + run, batch.num_seqs);
  int tiles = 0;
  for (int s = from; s < to; ++s) tiles += decode_sequence(batch, s, first_row).length();
  int before = tiles;
  for (int step = 1; step < kWarp; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, before, step);
    if (lane >= step) before += other;
  }
  if (lane == kWarp - 1) warp_tiles[warp] = before;
  __syncthreads();
  int total = 0;
  before -= tiles;
  for (int w = 0; w < kDecodeThreads / kWarp; ++w) {
    if (w < warp) before += warp_tiles[w];
    total += warp_tiles[w];
  }
  DecodeShare share;
  share.size = max(batch.min_tiles, (total + batch.slots - 1) / batch.slots);
  share.begin = slot * share.size;
  if (before <= share.begin && share.begin < before + tiles) {
    int s = from, start = before;
    for (int n; start + (n = decode_sequence(batch, s, first_row).length()) <= share.begin; ++s) start += n;
    found[0] = s, found[1] = start;
  }
  __syncthreads();
  share.cursor.seq = -1;
  if (share.begin >= total) return share;
  share.cursor.end = min(share.begin + share.size, total);
  share.cursor.take(batch, found[0], found[1], first_row);
  const int passed = share.begin - share.cursor.start;
  if (share.cursor.done() || passed <= 0) return share;
  if (batch.whole) {
    share.cursor.tile = share.cursor.stop - 1;
    share.cursor.advance(batch, first_row);
  } else {
    share.cursor.tile += passed;
  }
  return share;
}

}  // namespace raylm::cuda
