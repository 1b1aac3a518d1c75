#include "raylm/cuda/tokens.cuh"

#include <algorithm>
#include <climits>

#include "launch.h"
#include "shapes.h"

namespace raylm::cuda {
namespace {

void check_place_on_device(const Tensor& num_computed, const Tensor& token_ids, const Tensor& block_table,
                           const Tensor& token_rows, const Tensor& offsets, const Tensor& rows,
                           const Tensor& query_start) {
  const char* op = "place";
  Arg(op, "token_ids", token_ids).on_device_of(num_computed);
  Arg(op, "block_table", block_table).on_device_of(num_computed);
  Arg(op, "token_rows", token_rows).on_device_of(num_computed);
  Arg(op, "offsets", offsets).on_device_of(num_computed);
  Arg(op, "rows", rows).on_device_of(num_computed);
  Arg(op, "query_start", query_start).on_device_of(num_computed);
}

// Pieces of the block tables of a step, and the blocks that place its tokens: the grid of place_kernel.
int64_t place_blocks(int64_t token_blocks, int64_t num_groups, int64_t num_seqs, int64_t columns) {
  const int64_t blocks = token_blocks + num_groups * num_seqs * divide_up(columns, int64_t{kPlacePiece});
  if (blocks > INT32_MAX) {
    fail("place", "rows has size ", num_seqs, ", too many for ", num_groups, " groups of ", columns, " columns");
  }
  return blocks;
}

using Placed = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Placed place(Tensor num_computed, Tensor token_ids, Tensor block_table, Tensor token_rows, Tensor offsets, Tensor rows,
             Tensor query_start, int64_t block_size) {
  check_place(num_computed, token_ids, block_table, token_rows, offsets, rows, query_start, block_size);
  check_place_on_device(num_computed, token_ids, block_table, token_rows, offsets, rows, query_start);
  const int64_t num_tokens = token_rows.size(0), num_seqs = rows.size(0);
  const int64_t num_groups = block_table.size(0), columns = block_table.size(2);
  Tensor ids = torch::stable::new_empty(token_rows, {num_tokens});
  Tensor positions = torch::stable::new_empty(token_rows, {num_tokens});
  Tensor following = torch::stable::new_empty(token_rows, {num_tokens});
  Tensor slots = torch::stable::new_empty(token_rows, {num_groups, num_tokens});
  Tensor seq_lens = torch::stable::new_empty(query_start, {num_seqs});
  Tensor block_ids = torch::stable::new_empty(query_start, {num_groups, num_seqs, columns});
  if (const int64_t threads = std::max(num_tokens, num_seqs)) {
    const int64_t token_blocks = divide_up(threads, int64_t{kTokenThreads});
    const dim3 grid(place_blocks(token_blocks, num_groups, num_seqs, columns));
    const Guard guard(num_computed.get_device_index());
    const PlaceParams params{
        data<int64_t>(num_computed), data<int32_t>(token_ids), token_ids.stride(0), token_ids.size(0),
        token_ids.size(1), data<int32_t>(block_table), block_table.stride(0), block_table.stride(1),
        columns, static_cast<int>(num_groups), block_size, data<int64_t>(token_rows),
        data<int64_t>(offsets), num_tokens, data<int64_t>(rows), data<int32_t>(query_start), num_seqs,
        static_cast<int>(token_blocks), static_cast<int>(divide_up(columns, int64_t{kPlacePiece})),
        data<int64_t>(ids), data<int64_t>(positions), data<int64_t>(following), data<int64_t>(slots),
        data<int32_t>(seq_lens), data<int32_t>(block_ids)};
    launch_dependent(place_kernel, grid, dim3(kTokenThreads), current_stream(num_computed), params);
    check_launch("place");
  }
  return {ids, positions, following, slots, seq_lens, block_ids};
}

Tensor accept(Tensor token_ids, Tensor num_known, Tensor num_computed, Tensor rows, Tensor query_start,
              Tensor sample_start, Tensor sampled) {
  const char* op = "accept";
  check_accept(token_ids, num_known, num_computed, rows, query_start, sample_start, sampled);
  Arg(op, "num_known", num_known).on_device_of(token_ids);
  Arg(op, "num_computed", num_computed).on_device_of(token_ids);
  Arg(op, "rows", rows).on_device_of(token_ids);
  Arg(op, "query_start", query_start).on_device_of(token_ids);
  Arg(op, "sample_start", sample_start).on_device_of(token_ids);
  Arg(op, "sampled", sampled).on_device_of(token_ids);
  const int64_t num_seqs = rows.size(0);
  Tensor counts = torch::stable::new_empty(rows, {num_seqs});
  if (num_seqs == 0) return counts;
  const Guard guard(token_ids.get_device_index());
  const AcceptParams params{
      data<int32_t>(token_ids), token_ids.stride(0), token_ids.size(0), token_ids.size(1), data<int64_t>(num_known),
      data<int64_t>(num_computed), data<int64_t>(rows), data<int32_t>(query_start), data<int32_t>(sample_start),
      num_seqs, data<int64_t>(sampled), sampled.size(0), data<int64_t>(counts)};
  const dim3 grid(divide_up(num_seqs, kTokenThreads / kWarp));
  launch_dependent(accept_kernel, grid, dim3(kTokenThreads), current_stream(token_ids), params);
  check_launch(op);
  return counts;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CUDA, m) {
  m.impl("place", TORCH_BOX(&place));
  m.impl("accept", TORCH_BOX(&accept));
}

}  // namespace raylm::cuda
