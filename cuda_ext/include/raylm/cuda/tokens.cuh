// Where a step's tokens stand, from the counts on the device, and what sampling adds to them (raylm/ops/tokens.py).
#pragma once

#include "raylm/cuda/common.cuh"
#include "raylm/cuda/ptx/grid.cuh"

namespace raylm::cuda {

constexpr int kTokenThreads = 256;

// Tables of the running requests: a row each, and the padding row last.
struct PlaceParams {
  const int64_t* num_computed;
  const int32_t* token_ids;
  int64_t token_stride, num_rows, width;
  const int32_t* block_table;
  int64_t group_stride, row_stride, columns;
  int num_groups;
  int64_t block_size;
  const int64_t *token_rows, *offsets;
  int64_t num_tokens;
  const int64_t* rows;
  const int32_t* query_start;
  int64_t num_seqs;
  int token_blocks, pieces;  // blocks of the grid that place tokens, before the others; pieces of a sequence's blocks
  int64_t *ids, *positions, *following, *slots;
  int32_t *seq_lens, *block_ids;
};

// What is no row of the tables is the last one.
__device__ inline int64_t row_or_last(int64_t row, int64_t num_rows) {
  return static_cast<uint64_t>(row) < static_cast<uint64_t>(num_rows) ? row : num_rows - 1;
}

constexpr int kPlaceCells = 4;  // of a block table, a thread
constexpr int kPlacePiece = kTokenThreads * kPlaceCells;

// Piece `piece` of what the sequences have in the block tables of all groups. All is loaded before any is stored: the
// compiler cannot know that the tables are not written.
__device__ inline void copy_block_ids(const PlaceParams& p, int piece) {
  const int sequence = piece / p.pieces;  // of num_groups * num_seqs
  const int group = sequence / static_cast<int>(p.num_seqs), s = sequence % static_cast<int>(p.num_seqs);
  const int64_t first = static_cast<int64_t>(piece % p.pieces) * kPlacePiece + threadIdx.x;
  const int32_t* from = p.block_table + group * p.group_stride + row_or_last(p.rows[s], p.num_rows) * p.row_stride;
  int32_t* to = p.block_ids + sequence * p.columns;
  int32_t cells[kPlaceCells]{};
#pragma unroll
  for (int i = 0; i < kPlaceCells; ++i) {
    if (first + i * kTokenThreads < p.columns) cells[i] = from[first + i * kTokenThreads];
  }
#pragma unroll
  for (int i = 0; i < kPlaceCells; ++i) {
    if (first + i * kTokenThreads < p.columns) to[first + i * kTokenThreads] = cells[i];
  }
}

// The first blocks place one token a thread, and one sequence; the others copy a piece of the block tables each.
__global__ void __launch_bounds__(kTokenThreads) place_kernel(const __grid_constant__ PlaceParams p) {
  start_dependents();
  wait_for_dependencies();
  if (const int piece = static_cast<int>(blockIdx.x) - p.token_blocks; piece >= 0) return copy_block_ids(p, piece);
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kTokenThreads + threadIdx.x;
  if (i < p.num_tokens) {
    const int64_t row = row_or_last(p.token_rows[i], p.num_rows);
    const int64_t wanted = p.num_computed[row] + p.offsets[i];
    const int64_t position = max(min(wanted, p.width - 1), static_cast<int64_t>(0));
    const int64_t column = min(position / p.block_size, p.columns - 1), offset = position % p.block_size;
    p.ids[i] = p.token_ids[row * p.token_stride + position];
    p.positions[i] = position;
    p.following[i] = position + 1;
    const int32_t* block = p.block_table + row * p.row_stride + column;
    for (int g = 0; g < p.num_groups; ++g) {
      p.slots[g * p.num_tokens + i] = block[g * p.group_stride] * p.block_size + offset;
    }
  }
  if (i < p.num_seqs) {
    const int64_t computed = p.num_computed[row_or_last(p.rows[i], p.num_rows)];
    p.seq_lens[i] = static_cast<int32_t>(min(computed + p.query_start[i + 1] - p.query_start[i], p.width));
  }
}

struct AcceptParams {
  int32_t* token_ids;
  int64_t token_stride, num_rows, width;
  int64_t *num_known, *num_computed;
  const int64_t* rows;
  const int32_t *query_start, *sample_start;
  int64_t num_seqs;
  const int64_t* sampled;
  int64_t num_sampled;
  int64_t* counts;
};

// How many of the first `count` drafts, in `cells` from `known` on, are the tokens sampled for them: up to the first that
// is not, or has no cell. Called and answered by a whole warp.
__device__ inline int64_t equal_drafts(const int32_t* cells, int64_t known, int64_t width, const int64_t* sampled,
                                       int64_t count) {
  for (int64_t base = 0; base < count; base += kWarp) {
    const int64_t j = base + threadIdx.x % kWarp;
    const bool has_cell = static_cast<uint64_t>(known + j) < static_cast<uint64_t>(width);
    const bool differs = j < count && !(has_cell && cells[known + j] == sampled[j]);
    if (const unsigned lanes = __ballot_sync(kAllLanes, differs)) return base + __ffs(lanes) - 1;
  }
  return count;
}

// One sequence a warp. No two that are not padding have the same row.
__global__ void __launch_bounds__(kTokenThreads) accept_kernel(const __grid_constant__ AcceptParams p) {
  start_dependents();
  wait_for_dependencies();
  const int64_t s = (static_cast<int64_t>(blockIdx.x) * kTokenThreads + threadIdx.x) / kWarp;
  if (s >= p.num_seqs) return;
  const int64_t begin = max(static_cast<int64_t>(p.sample_start[s]), static_cast<int64_t>(0));
  const int64_t end = min(static_cast<int64_t>(p.sample_start[s + 1]), p.num_sampled);
  const int64_t num = max(end - begin, static_cast<int64_t>(0)), row = p.rows[s];
  const bool first_lane = threadIdx.x % kWarp == 0;
  // The last row, and what is none.
  if (static_cast<uint64_t>(row) >= static_cast<uint64_t>(p.num_rows - 1)) {
    if (first_lane) p.counts[s] = min(num, static_cast<int64_t>(1));
    return;
  }
  int32_t* cells = p.token_ids + row * p.token_stride;
  const int64_t known = p.num_known[row], *sampled = p.sampled + begin;
  const int64_t equal = equal_drafts(cells, known, p.width, sampled, num - 1);
  if (!first_lane) return;
  const int64_t count = num > 0 ? equal + 1 : 0;
  // The drafts that are kept stand in their cells already.
  const int64_t last = known + count - 1;
  if (count > 0 && static_cast<uint64_t>(last) < static_cast<uint64_t>(p.width)) {
    cells[last] = static_cast<int32_t>(sampled[count - 1]);
  }
  p.counts[s] = count;
  p.num_known[row] = known + count;
  p.num_computed[row] += p.query_start[s + 1] - p.query_start[s] - (num - count);
}

}  // namespace raylm::cuda
