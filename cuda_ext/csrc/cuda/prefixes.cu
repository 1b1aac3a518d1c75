#include "raylm/cuda/prefixes.cuh"

#include "launch.h"

namespace raylm::cuda {
namespace {

Tensor shared_prefixes(Tensor block_table, Tensor query_start, Tensor seq_lens, int64_t block_size) {
  const char* op = "shared_prefixes";
  Arg(op, "block_table", block_table).dtype({ScalarType::Int}).dim(2).last_contiguous();
  const int64_t num_seqs = block_table.size(0);
  Arg(op, "seq_lens", seq_lens).dtype({ScalarType::Int}).dim(1).size(0, num_seqs, "the rows of block_table");
  Arg(op, "query_start", query_start).dtype({ScalarType::Int}).dim(1).size(0, num_seqs + 1, "one more than seq_lens");
  Arg(op, "seq_lens", seq_lens).contiguous().on_device_of(block_table);
  Arg(op, "query_start", query_start).contiguous().on_device_of(block_table);
  if (block_size < 1) fail(op, "block_size is ", block_size, ", must be at least 1");
  if (num_seqs > kMostPrefixSeqs) {
    fail(op, "block_table has ", num_seqs, " rows, must have at most ", kMostPrefixSeqs);
  }
  Tensor found = torch::stable::new_empty(seq_lens, {3, num_seqs});
  if (num_seqs == 0) return found;
  const Guard guard(block_table.get_device_index());
  int32_t* members = data<int32_t>(found);
  const PrefixParams params{
      data<int32_t>(block_table), block_table.stride(0), data<int32_t>(query_start), data<int32_t>(seq_lens),
      static_cast<int>(num_seqs), static_cast<int>(block_size), members, members + num_seqs, members + 2 * num_seqs};
  const size_t shared = (kPrefixDepths + 3) * prefix_room(params.num_seqs) * sizeof(int);
  launch_dependent(shared_prefixes_kernel, {dim3(1), dim3(kPrefixThreads), current_stream(seq_lens), shared}, params);
  check_launch(op);
  return found;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CUDA, m) { m.impl("shared_prefixes", TORCH_BOX(&shared_prefixes)); }

}  // namespace raylm::cuda
