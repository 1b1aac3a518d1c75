#include <algorithm>
#include <atomic>
#include <vector>

#include "common.h"
#include "shapes.h"

namespace raylm {
namespace {

// Keys that one unit walks where it has few rows. A fixed number, so that how a context is split, and with it the
// result to the last bit, depends neither on the batch nor on the number of threads.
constexpr int64_t kSplitKeys = 512;
constexpr int64_t kSplitRows = 16;

// One sequence of the call, its lengths checked.
struct Sequence {
  int64_t index, first_token, num_queries, seq_len;
};

struct Plan {
  std::vector<AttentionUnit> units;
  std::vector<int64_t> splits;  // for each unit: how many units from it on share its rows, 0 for all but the first
  int64_t partial_floats = 0;
  int64_t max_rows = 0;
};

std::vector<Sequence> read_sequences(const Tensor& q, const Tensor& k_cache, const Tensor& block_table,
                                     const Tensor& query_start, const Tensor& seq_lens, int64_t max_query_len,
                                     int64_t max_seq_len) {
  const char* op = "paged_attention";
  const int32_t* starts = query_start.const_data_ptr<int32_t>();
  const int32_t* lens = seq_lens.const_data_ptr<int32_t>();
  const int32_t* table = block_table.const_data_ptr<int32_t>();
  const int64_t block_size = k_cache.size(1), num_seqs = seq_lens.size(0);
  if (starts[0] != 0) fail(op, "query_start[0] is ", starts[0], ", must be 0");
  std::vector<Sequence> sequences;
  for (int64_t s = 0; s < num_seqs; ++s) {
    const int64_t queries = starts[s + 1] - starts[s], len = lens[s], blocks = (len + block_size - 1) / block_size;
    if (queries < 0 || starts[s + 1] > q.size(0)) {
      fail(op, "query_start[", s + 1, "] is ", starts[s + 1], ", must be between ", starts[s], " and the ", q.size(0),
           " tokens of q");
    }
    if (queries > max_query_len) fail(op, "sequence ", s, " has ", queries, " queries, max_query_len is ", max_query_len);
    if (len > max_seq_len) fail(op, "seq_lens[", s, "] is ", len, ", max_seq_len is ", max_seq_len);
    if (queries > len) fail(op, "sequence ", s, " has ", queries, " queries but seq_lens[", s, "] is ", len);
    if (blocks > block_table.size(1)) {
      fail(op, "seq_lens[", s, "] is ", len, " and needs ", blocks, " blocks, block_table has ", block_table.size(1));
    }
    for (int64_t b = 0; queries > 0 && b < blocks; ++b) {
      const int64_t block = table[s * block_table.stride(0) + b];
      if (block < 0 || block >= k_cache.size(0)) {
        fail(op, "block_table[", s, "][", b, "] is ", block, ", must be at least 0 and below ", k_cache.size(0));
      }
    }
    if (queries > 0) sequences.push_back({s, starts[s], queries, len});
  }
  return sequences;
}

void add_units(const AttentionArgs& args, const Sequence& s, int64_t first_query, int64_t num_queries, Plan& plan) {
  const int64_t rows = num_queries * (args.num_heads / args.num_kv_heads);
  const int64_t first_position = s.seq_len - s.num_queries + first_query;
  const int64_t end = first_position + num_queries;
  const int64_t begin = args.window > 0 ? std::max<int64_t>(first_position - args.window + 1, 0) : 0;
  const int64_t step = rows <= kSplitRows ? kSplitKeys : end - begin;
  const int64_t num_splits = (end - begin + step - 1) / step;
  plan.max_rows = std::max(plan.max_rows, rows);
  for (int64_t head = 0; head < args.num_kv_heads; ++head) {
    for (int64_t split = 0; split < num_splits; ++split) {
      AttentionUnit unit{s.index, head, s.first_token + first_query, num_queries, first_position, 0, 0, nullptr};
      unit.key_begin = begin + split * step;
      unit.key_end = std::min(unit.key_begin + step, end);
      plan.units.push_back(unit);
      plan.splits.push_back(split == 0 ? num_splits : 0);
      if (num_splits > 1) plan.partial_floats += rows * (args.head_dim + 2);
    }
  }
}

Plan make_plan(const AttentionArgs& args, const std::vector<Sequence>& sequences) {
  Plan plan;
  const int64_t group = args.num_heads / args.num_kv_heads;
  const int64_t tile = std::max<int64_t>(kAttentionRows / group, 1);
  for (const Sequence& s : sequences) {
    for (int64_t first = 0; first < s.num_queries; first += tile) {
      add_units(args, s, first, std::min(tile, s.num_queries - first), plan);
    }
  }
  return plan;
}

// Units differ in cost, so each thread takes the next one when it is free.
template <typename Body>
void for_each_unit(const Plan& plan, const Body& body) {
  const int64_t count = static_cast<int64_t>(plan.units.size());
  const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), count);
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) body([&] { return next.fetch_add(1); }, count);
  });
}

void run(const AttentionArgs& args, const Tensor& q, Plan& plan) {
  const int64_t group = args.num_heads / args.num_kv_heads;
  std::vector<float> partials(plan.partial_floats);
  float* partial = partials.data();
  int64_t splits = 0;
  for (size_t i = 0; i < plan.units.size(); ++i) {
    if (plan.splits[i] > 0) splits = plan.splits[i];
    if (splits == 1) continue;
    plan.units[i].partial = partial;
    partial += plan.units[i].num_queries * group * (args.head_dim + 2);
  }
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
                       std::optional<Tensor> sinks) {
  const char* op = "paged_attention";
  check_attention(q, k_cache, v_cache, block_table, query_start, seq_lens, window, soft_cap, alibi_slopes, sinks);
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
  args.k_cache = k_cache.const_data_ptr();
  args.v_cache = v_cache.const_data_ptr();
  args.k_block_stride = k_cache.stride(0);
  args.k_slot_stride = k_cache.stride(1);
  args.k_head_stride = k_cache.stride(2);
  args.v_block_stride = v_cache.stride(0);
  args.v_slot_stride = v_cache.stride(1);
  args.v_head_stride = v_cache.stride(2);
  args.block_table = block_table.const_data_ptr<int32_t>();
  args.block_table_stride = block_table.stride(0);
  args.out = out.mutable_data_ptr();
  args.num_heads = q.size(1);
  args.num_kv_heads = k_cache.size(2);
  args.head_dim = q.size(2);
  args.block_size = k_cache.size(1);
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
  Plan plan = make_plan(args, sequences);
  run(args, q, plan);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(raylm, CPU, m) { m.impl("paged_attention", TORCH_BOX(&paged_attention)); }

}  // namespace raylm
