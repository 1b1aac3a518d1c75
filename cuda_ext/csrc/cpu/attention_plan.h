// How the attention of a step is divided into units, each of which one thread computes.
#pragma once

#include <algorithm>
#include <vector>

#include "checks.h"
#include "raylm/cpu/kernels.h"

namespace raylm {

// Keys that one unit walks where it has few rows. A fixed number, so that how a context is split, and with it the
// result to the last bit, depends neither on the batch nor on the number of threads.
inline constexpr int64_t kSplitKeys = 512;
inline constexpr int64_t kSplitRows = 16;

// One sequence of the call, its lengths checked.
struct Sequence {
  int64_t index, first_token, num_queries, seq_len;
};

struct AttentionPlan {
  std::vector<AttentionUnit> units;
  std::vector<int64_t> splits;  // for each unit: how many units from it on share its rows, 0 for all but the first
  int64_t partial_floats = 0;
  int64_t max_rows = 0;
};

inline void add_units(const AttentionArgs& args, const Sequence& s, int64_t first_query, int64_t num_queries,
                      AttentionPlan& plan) {
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

inline AttentionPlan make_plan(const AttentionArgs& args, const std::vector<Sequence>& sequences) {
  AttentionPlan plan;
  const int64_t group = args.num_heads / args.num_kv_heads;
  const int64_t tile = std::max<int64_t>(kAttentionRows / group, 1);
  for (const Sequence& s : sequences) {
    for (int64_t first = 0; first < s.num_queries; first += tile) {
      add_units(args, s, first, std::min(tile, s.num_queries - first), plan);
    }
  }
  return plan;
}

// Gives the units of a plan room for what they leave to merge, where a sequence has several.
inline std::vector<float> place_partials(const AttentionArgs& args, AttentionPlan& plan) {
  std::vector<float> partials(plan.partial_floats);
  float* partial = partials.data();
  int64_t splits = 0;
  for (size_t i = 0; i < plan.units.size(); ++i) {
    if (plan.splits[i] > 0) splits = plan.splits[i];
    if (splits == 1) continue;
    plan.units[i].partial = partial;
    partial += plan.units[i].num_queries * (args.num_heads / args.num_kv_heads) * (args.head_dim + 2);
  }
  return partials;
}

// The sizes, strides and pointers of a cache.
inline void set_cache(AttentionArgs& args, const Tensor& k_cache, const Tensor& v_cache) {
  args.k_cache = k_cache.const_data_ptr();
  args.v_cache = v_cache.const_data_ptr();
  args.k_block_stride = k_cache.stride(0);
  args.k_slot_stride = k_cache.stride(1);
  args.k_head_stride = k_cache.stride(2);
  args.v_block_stride = v_cache.stride(0);
  args.v_slot_stride = v_cache.stride(1);
  args.v_head_stride = v_cache.stride(2);
  args.num_kv_heads = k_cache.size(2);
  args.block_size = k_cache.size(1);
}

// Refuses a sequence with more keys than its blocks hold, or with a block that is not in the cache.
inline void check_blocks(const char* op, int64_t s, int64_t len, const Tensor& block_table, const Tensor& k_cache) {
  const int64_t blocks = (len + k_cache.size(1) - 1) / k_cache.size(1);
  if (blocks > block_table.size(1)) {
    fail(op, "seq_lens[", s, "] is ", len, " and needs ", blocks, " blocks, block_table has ", block_table.size(1));
  }
  const int32_t* of_sequence = block_table.const_data_ptr<int32_t>() + s * block_table.stride(0);
  for (int64_t b = 0; b < blocks; ++b) {
    if (of_sequence[b] < 0 || of_sequence[b] >= k_cache.size(0)) {
      fail(op, "block_table[", s, "][", b, "] is ", of_sequence[b], ", must be at least 0 and below ", k_cache.size(0));
    }
  }
}

}  // namespace raylm
