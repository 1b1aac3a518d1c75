#include <algorithm>
#include <atomic>
#include <vector>

#include "attention_plan.h"
#include "common.h"
#include "shapes.h"

namespace raylm {
namespace {

std::vector<Sequence> read_sequences(const Tensor& q, const Tensor& k_cache, const Tensor& block_table,
                                     const Tensor& query_start, const Tensor& seq_lens, int64_t max_query_len,
                                     int64_t max_seq_len) {
  const char* op = "paged_attention";
  const int32_t* starts = query_start.const_data_ptr<int32_t>();
  const int32_t* lens = seq_lens.const_data_ptr<int32_t>();
  const int64_t num_seqs = seq_lens.size(0);
  if (starts[0] != 0) fail(op, "query_start[0] is ", starts[0], ", must be 0");
  std::vector<Sequence> sequences;
  for (int64_t s = 0; s < num_seqs; ++s) {
    const int64_t queries = starts[s + 1] - starts[s], len = lens[s];
    if (queries < 0 || starts[s + 1] > q.size(0)) {
      fail(op, "query_start[", s + 1, "] is ", starts[s + 1], ", must be between ", starts[s], " and the ", q.size(0),
           " tokens of q");
    }
    if (queries > max_query_len) fail(op, "sequence ", s, " has ", queries, " queries, max_query_len is ", max_query_len);
    if (len > max_seq_len) fail(op, "seq_lens[", s, "] is ", len, ", max_seq_len is ", max_seq_len);
    if (queries > len) fail(op, "sequence ", s, " has ", queries, " queries but seq_lens[", s, "] is ", len);
    if (queries == 0) continue;
    check_blocks(op, s, len, block_table, k_cache);
    sequences.push_back({s, starts[s], queries, len});
  }
  return sequences;
}

// Units differ in cost, so each thread takes the next one when it is free.
template <typename Body>
void for_each_unit(const AttentionPlan& plan, const Body& body) {
  const int64_t count = static_cast<int64_t>(plan.units.size());
  const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), count);
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) body([&] { return next.fetch_add(1); }, count);
  });
}

void run(const AttentionArgs& args, const Tensor& q, AttentionPlan& plan) {
  const std::vector<float> partials = place_partials(args, plan);
  const CpuKernels& kernels = cpu_kernels();
  const int64_t scratch_floats = attention_scratch(plan.max_rows, args.head_dim);
  const int64_t threads = torch::stable::get_num_threads();
  std::vector<float> scratch(scratch_floats * threads);
  std::atomic<int64_t> next_scratch{0};
  for_each_unit(plan, [&](const auto& take, int64_t count) {
    float* mine = scratch.data() + next_scratch.fetch_add(1) * scratch_floats;
    for (int64_t i = take(); i < count; i = take()) kernels.attention(args, plan.units[i], mine);
  });
  if (plan.partial_floats == 0) return;
  for_each_unit(plan, [&](const auto& take, int64_t count) {
    for (int64_t i = take(); i < count; i = take()) {
      if (plan.splits[i] > 1) kernels.merge(args, plan.units[i], plan.splits[i]);
    }
  });
}

Tensor paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor query_start,
                       Tensor seq_lens, int64_t max_query_len, int64_t max_seq_len, double scale, int64_t window,
                       double soft_cap, std::optional<Tensor> alibi_slopes, std::optional<Tensor>,
                       std::optional<Tensor> sinks, double k_scale, double v_scale, std::optional<Tensor>, bool) {
  const char* op = "paged_attention";
  check_attention(q, k_cache, v_cache, block_table, query_start, seq_lens, window, soft_cap, alibi_slopes, sinks);
  check_scales(op, k_cache, k_scale, v_scale);
  Arg(op, "q", q).on_cpu();
  Arg(op, "k_cache", k_cache).on_cpu();
  Arg(op, "v_cache", v_cache).on_cpu();
  Arg(op, "block_table", block_table).on_cpu();
  Arg(op, "query_start", query_start).on_cpu();
  Arg(op, "seq_lens", seq_lens).on_cpu();
  if (alibi_slopes) Arg(op, "alibi_slopes", *alibi_slopes).on_cpu();
  if (sinks) Arg(op, "sinks", *sinks).on_cpu();
  const auto sequences = read_sequences(q, k_cache, block_table, query_start, seq_lens, max_query_len, max_seq_len);
  Tensor out = empty_like_shape(q, {q.size(0), q.size(1), q.size(2)});
  AttentionArgs args{};
  args.dtype = dtype_of(q);
  args.q = q.const_data_ptr();
  args.q_token_stride = q.stride(0);
  args.q_head_stride = q.stride(1);
  set_cache(args, k_cache, v_cache);
  args.block_table = block_table.const_data_ptr<int32_t>();
  args.block_table_stride = block_table.stride(0);
  args.out = out.mutable_data_ptr();
  args.num_heads = q.size(1);
  args.head_dim = q.size(2);
  args.scale = static_cast<float>(scale);
  args.window = window;
  args.soft_cap = static_cast<float>(soft_cap);
  args.alibi_slopes = alibi_slopes ? alibi_slopes->const_data_ptr<float>() : nullptr;
  args.sinks = sinks ? sinks->const_data_ptr<float>() : nullptr;
  const int64_t used = sequences.empty() ? 0 : sequences.back().first_token + sequences.back().num_queries;
  if (used < q.size(0)) {
    Tensor unused = torch::stable::narrow(out, 0, used, q.size(0) - used);
    torch::stable::zero_(unused);
  }
  AttentionPlan plan = make_plan(args, sequences);
  run(args, q, plan);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CPU, m) { m.impl("paged_attention", TORCH_BOX(&paged_attention)); }

}  // namespace raylm
