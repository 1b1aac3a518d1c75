#include <algorithm>
#include <cstring>
#include <tuple>

#include "common.h"
#include "shapes.h"

namespace raylm {
namespace {

using Placed = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

int64_t* integers(const Tensor& tensor) { return tensor.mutable_data_ptr<int64_t>(); }

// Of starts [S + 1]: how many sequence s has. They must not decrease, nor leave the first `limit`.
int64_t length_of(const char* op, const char* name, const int32_t* starts, int64_t s, int64_t limit) {
  if (starts[s] < 0 || starts[s + 1] < starts[s] || starts[s + 1] > limit) {
    fail(op, name, "[", s + 1, "] is ", starts[s + 1], ", must be from ", std::max(starts[s], 0), " to ", limit);
  }
  return starts[s + 1] - starts[s];
}

Placed place(Tensor num_computed, Tensor token_ids, Tensor block_table, Tensor token_rows, Tensor offsets, Tensor rows,
             Tensor query_start, int64_t block_size) {
  const char* op = "place";
  check_place(num_computed, token_ids, block_table, token_rows, offsets, rows, query_start, block_size);
  for (const Tensor* tensor : {&num_computed, &token_ids, &block_table, &token_rows, &offsets, &rows, &query_start}) {
    Arg(op, "one of the tensors", *tensor).on_cpu();
  }
  const int64_t num_tokens = token_rows.size(0), num_seqs = rows.size(0), num_rows = token_ids.size(0);
  const int64_t num_groups = block_table.size(0), columns = block_table.size(2), width = token_ids.size(1);
  Tensor ids = torch::stable::new_empty(token_rows, {num_tokens});
  Tensor positions = torch::stable::new_empty(token_rows, {num_tokens});
  Tensor following = torch::stable::new_empty(token_rows, {num_tokens});
  Tensor slots = torch::stable::new_empty(token_rows, {num_groups, num_tokens});
  Tensor seq_lens = torch::stable::new_empty(query_start, {num_seqs});
  Tensor block_ids = torch::stable::new_empty(query_start, {num_groups, num_seqs, columns});
  const int64_t* computed = num_computed.const_data_ptr<int64_t>();
  const int32_t* table = token_ids.const_data_ptr<int32_t>();
  const int64_t *row_of = checked_indices(op, "token_rows", token_rows, num_rows);
  const int64_t *offset_of = offsets.const_data_ptr<int64_t>(), *sequences = checked_indices(op, "rows", rows, num_rows);
  const int32_t *blocks = block_table.const_data_ptr<int32_t>(), *starts = query_start.const_data_ptr<int32_t>();
  const int64_t group_stride = block_table.stride(0), row_stride = block_table.stride(1);
  for (int64_t t = 0; t < num_tokens; ++t) {
    const int64_t row = row_of[t], position = std::clamp<int64_t>(computed[row] + offset_of[t], 0, width - 1);
    integers(ids)[t] = table[row * token_ids.stride(0) + position];
    integers(positions)[t] = position;
    integers(following)[t] = position + 1;
    const int32_t* cell = blocks + row * row_stride + std::min(position / block_size, columns - 1);
    for (int64_t g = 0; g < num_groups; ++g) {
      integers(slots)[g * num_tokens + t] = cell[g * group_stride] * block_size + position % block_size;
    }
  }
  for (int64_t s = 0; s < num_seqs; ++s) {
    const int64_t length = length_of(op, "query_start", starts, s, INT32_MAX), row = sequences[s];
    seq_lens.mutable_data_ptr<int32_t>()[s] = static_cast<int32_t>(std::min(computed[row] + length, width));
    for (int64_t g = 0; g < num_groups; ++g) {
      std::memcpy(block_ids.mutable_data_ptr<int32_t>() + (g * num_seqs + s) * columns,
                  blocks + g * group_stride + row * row_stride, columns * sizeof(int32_t));
    }
  }
  return {ids, positions, following, slots, seq_lens, block_ids};
}

// How many of the drafts that begin at cell `known` of a row are what was sampled.
int64_t equal_drafts(const int32_t* cells, int64_t known, int64_t width, const int64_t* sampled, int64_t drafts) {
  int64_t equal = 0;
  while (equal < drafts && known + equal < width && cells[known + equal] == sampled[equal]) ++equal;
  return equal;
}

Tensor accept(Tensor token_ids, Tensor num_known, Tensor num_computed, Tensor rows, Tensor query_start,
              Tensor sample_start, Tensor sampled) {
  const char* op = "accept";
  check_accept(token_ids, num_known, num_computed, rows, query_start, sample_start, sampled);
  for (const Tensor* tensor : {&token_ids, &num_known, &num_computed, &rows, &query_start, &sample_start, &sampled}) {
    Arg(op, "one of the tensors", *tensor).on_cpu();
  }
  const int64_t num_seqs = rows.size(0), width = token_ids.size(1), padding_row = token_ids.size(0) - 1;
  Tensor counts = torch::stable::new_empty(rows, {num_seqs});
  const int64_t* sequences = checked_indices(op, "rows", rows, padding_row + 1);
  const int32_t *queries = query_start.const_data_ptr<int32_t>(), *samples = sample_start.const_data_ptr<int32_t>();
  for (int64_t s = 0; s < num_seqs; ++s) {
    // Before anything is written.
    const int64_t known = integers(num_known)[sequences[s]];
    if (known < 0) fail(op, "num_known[", sequences[s], "] is ", known, ", must be at least 0");
    length_of(op, "query_start", queries, s, INT32_MAX);
    length_of(op, "sample_start", samples, s, sampled.size(0));
  }
  for (int64_t s = 0; s < num_seqs; ++s) {
    const int64_t row = sequences[s], length = samples[s + 1] - samples[s];
    int64_t& count = integers(counts)[s];
    if (row == padding_row) {
      count = std::min<int64_t>(length, 1);
      continue;
    }
    int32_t* cells = token_ids.mutable_data_ptr<int32_t>() + row * token_ids.stride(0);
    int64_t& known = integers(num_known)[row];
    const int64_t* tokens = sampled.const_data_ptr<int64_t>() + samples[s];
    count = length > 0 ? equal_drafts(cells, known, width, tokens, length - 1) + 1 : 0;
    // The drafts that are kept stand in their cells already.
    if (count > 0 && known + count - 1 < width) cells[known + count - 1] = static_cast<int32_t>(tokens[count - 1]);
    known += count;
    integers(num_computed)[row] += queries[s + 1] - queries[s] - (length - count);
  }
  return counts;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CPU, m) {
  m.impl("place", TORCH_BOX(&place));
  m.impl("accept", TORCH_BOX(&accept));
}

}  // namespace raylm
