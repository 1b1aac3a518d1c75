// The checks that an operator's CPU and CUDA launchers share: everything but the device.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>

#include "checks.h"

namespace raylm {

inline void check_norm(const char* op, const Tensor& x, const Tensor* residual, const Tensor& weight) {
  Arg(op, "x", x).floating().last_contiguous();
  if (x.dim() < 1) fail(op, "x must have at least one dimension");
  const int64_t hidden = x.size(x.dim() - 1);
  Arg(op, "weight", weight).dtype({x.scalar_type()}).dim(1).size(0, hidden, "the last dimension of x").contiguous();
  if (!residual) return;
  Arg(op, "x", x).dim(2);
  Arg(op, "residual", *residual).dtype({x.scalar_type()}).dim(2).last_contiguous();
  Arg(op, "residual", *residual).size(0, x.size(0), "as x").size(1, hidden, "as x");
}

inline void check_rotary(const char* op, const Tensor& q, const Tensor& k, const Tensor& positions,
                         const Tensor& cos_sin) {
  Arg(op, "q", q).floating().dim(3).last_contiguous();
  Arg(op, "k", k).dtype({q.scalar_type()}).dim(3).last_contiguous();
  Arg(op, "k", k).size(0, q.size(0), "the tokens of q").size(2, q.size(2), "the head size of q");
  Arg(op, "positions", positions).dtype({ScalarType::Long}).dim(1).size(0, q.size(0), "the tokens of q").contiguous();
  Arg(op, "cos_sin", cos_sin).dtype({ScalarType::Float}).dim(2).contiguous();
  const int64_t rotary_dim = cos_sin.size(1);
  if (rotary_dim % 2 != 0 || rotary_dim > q.size(2)) {
    fail(op, "cos_sin has ", rotary_dim, " columns, must be an even number of at most the head size, ", q.size(2));
  }
}

// A KV cache has the numbers' type, or with `codes` allowed 8-bit floats.
inline void check_cache_type(const char* op, const Tensor& numbers, const Tensor& k_cache, const Tensor& v_cache,
                             bool codes) {
  if (codes && k_cache.scalar_type() != numbers.scalar_type()) {
    Arg(op, "k_cache", k_cache).dtype({numbers.scalar_type(), ScalarType::Float8_e4m3fn});
  } else {
    Arg(op, "k_cache", k_cache).dtype({numbers.scalar_type()});
  }
  Arg(op, "v_cache", v_cache).dtype({k_cache.scalar_type()});
}

// Scales of a cache: of what it holds as codes alone.
inline void check_scales(const char* op, const Tensor& cache, double k_scale, double v_scale) {
  const auto check = [&](const char* name, double scale) {
    if (!(scale > 0) || std::isinf(scale)) fail(op, name, " is ", scale, ", must be positive and finite");
    if (cache.scalar_type() != ScalarType::Float8_e4m3fn && scale != 1) {
      fail(op, name, " is ", scale, ", must be 1: the cache is ", dtype_name(cache.scalar_type()));
    }
  };
  check("k_scale", k_scale);
  check("v_scale", v_scale);
}

inline void check_store(const char* op, const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache,
                        const Tensor& slots, bool codes = false) {
  Arg(op, "k", k).floating().dim(3).last_contiguous();
  Arg(op, "v", v).dtype({k.scalar_type()}).dim(3).last_contiguous();
  for (int64_t d = 0; d < 3; ++d) Arg(op, "v", v).size(d, k.size(d), "as k");
  check_cache_type(op, k, k_cache, v_cache, codes);
  Arg(op, "k_cache", k_cache).dim(4).last_contiguous();
  Arg(op, "k_cache", k_cache).size(2, k.size(1), "the heads of k").size(3, k.size(2), "the head size of k");
  Arg(op, "v_cache", v_cache).dim(4).last_contiguous();
  for (int64_t d = 0; d < 4; ++d) Arg(op, "v_cache", v_cache).size(d, k_cache.size(d), "as k_cache");
  Arg(op, "slot_mapping", slots).dtype({ScalarType::Long}).dim(1).size(0, k.size(0), "the tokens of k").contiguous();
}

inline void check_rope_store(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& q_weight,
                             const std::optional<Tensor>& k_weight, const Tensor& positions, const Tensor& cos_sin,
                             const Tensor& k_cache, const Tensor& v_cache, const Tensor& slots, bool codes = false) {
  const char* op = "rope_store";
  check_rotary(op, q, k, positions, cos_sin);
  check_store(op, k, v, k_cache, v_cache, slots, codes);
  if (q_weight.has_value() != k_weight.has_value()) fail(op, "q_weight and k_weight must be given both or neither");
  if (!q_weight) return;
  Arg(op, "q_weight", *q_weight).dtype({q.scalar_type()}).dim(1).size(0, q.size(2), "the head size").contiguous();
  Arg(op, "k_weight", *k_weight).dtype({q.scalar_type()}).dim(1).size(0, q.size(2), "the head size").contiguous();
}

inline void check_gated(const char* op, const Tensor& x) {
  Arg(op, "x", x).floating().dim(2).last_contiguous();
  if (x.size(1) % 2 != 0) fail(op, "x has ", x.size(1), " columns, must be an even number: two halves");
}

// With `narrow`, x of float32 may meet a weight of 16 bits.
inline void check_linear(const char* op, const Tensor& x, const Tensor& weight, const Tensor* bias,
                         bool narrow = false) {
  Arg(op, "x", x).floating().last_contiguous();
  if (x.dim() < 1) fail(op, "x must have at least one dimension");
  const int64_t size = x.size(x.dim() - 1);
  Arg(op, "weight", weight).dim(2).size(1, size, "the last dimension of x").last_contiguous();
  if (narrow && x.scalar_type() == ScalarType::Float) {
    Arg(op, "weight", weight).floating();
  } else {
    Arg(op, "weight", weight).dtype({x.scalar_type()});
  }
  if (!bias) return;
  Arg(op, "bias", *bias).dtype({x.scalar_type()}).dim(1).size(0, weight.size(0), "the rows of weight").contiguous();
}

inline void check_gated_linear(const Tensor& x, const Tensor& weight, const Tensor* bias) {
  const char* op = "gated_linear";
  Arg(op, "x", x).dim(2);
  check_linear(op, x, weight, bias);
  if (weight.size(0) % 2 != 0) fail(op, "weight has ", weight.size(0), " rows, must have an even number: gate and up");
}

inline void check_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_table,
                            const Tensor& query_start, const Tensor& seq_lens, int64_t window, double soft_cap,
                            const std::optional<Tensor>& alibi_slopes, const std::optional<Tensor>& sinks,
                            bool codes = false) {
  const char* op = "paged_attention";
  Arg(op, "q", q).floating().dim(3).last_contiguous();
  check_cache_type(op, q, k_cache, v_cache, codes);
  Arg(op, "k_cache", k_cache).dim(4).last_contiguous();
  Arg(op, "k_cache", k_cache).size(3, q.size(2), "the head size of q");
  Arg(op, "v_cache", v_cache).dim(4).last_contiguous();
  for (int64_t d = 0; d < 4; ++d) Arg(op, "v_cache", v_cache).size(d, k_cache.size(d), "as k_cache");
  const int64_t kv_heads = k_cache.size(2);
  if (kv_heads == 0 || q.size(1) % kv_heads != 0) {
    fail(op, "q has ", q.size(1), " heads, must be a multiple of the ", kv_heads, " heads of k_cache");
  }
  if (k_cache.size(1) == 0) fail(op, "k_cache has blocks of 0 slots, must have at least 1");
  const int64_t num_seqs = seq_lens.dim() == 1 ? seq_lens.size(0) : 0;
  Arg(op, "seq_lens", seq_lens).dtype({ScalarType::Int}).dim(1).contiguous();
  Arg(op, "query_start", query_start).dtype({ScalarType::Int}).dim(1).contiguous();
  Arg(op, "query_start", query_start).size(0, num_seqs + 1, "one more than seq_lens");
  Arg(op, "block_table", block_table).dtype({ScalarType::Int}).dim(2).last_contiguous();
  Arg(op, "block_table", block_table).size(0, num_seqs, "as seq_lens");
  if (window < 0) fail(op, "window is ", window, ", must be 0 (off) or positive");
  if (!(soft_cap >= 0)) fail(op, "soft_cap is ", soft_cap, ", must be 0 (off) or positive");
  const auto check_of_heads = [&](const char* name, const std::optional<Tensor>& values) {
    if (values) Arg(op, name, *values).dtype({ScalarType::Float}).dim(1).size(0, q.size(1), "the heads of q").contiguous();
  };
  check_of_heads("alibi_slopes", alibi_slopes);
  check_of_heads("sinks", sinks);
}

// token_ids [R, L] and a count of each of its rows.
inline void check_table(const char* op, const Tensor& token_ids, const char* name, const Tensor& counts) {
  Arg(op, "token_ids", token_ids).dtype({ScalarType::Int}).dim(2).last_contiguous();
  Arg(op, name, counts).dtype({ScalarType::Long}).dim(1).size(0, token_ids.size(0), "the rows of token_ids");
  Arg(op, name, counts).contiguous();
  if (token_ids.size(0) == 0) fail(op, "token_ids has no rows");
  if (token_ids.size(1) == 0) fail(op, "token_ids has no columns");
  if (token_ids.size(1) > INT32_MAX) {
    fail(op, "token_ids has ", token_ids.size(1), " columns, must have at most ", INT32_MAX);
  }
}

// Where each of the sequences `rows` begins, and the last ends.
inline void check_starts(const char* op, const Tensor& rows, const char* name, const Tensor& starts) {
  Arg(op, name, starts).dtype({ScalarType::Int}).dim(1).size(0, rows.size(0) + 1, "one more than rows").contiguous();
}

inline void check_place(const Tensor& num_computed, const Tensor& token_ids, const Tensor& block_table,
                        const Tensor& token_rows, const Tensor& offsets, const Tensor& rows, const Tensor& query_start,
                        int64_t block_size) {
  const char* op = "place";
  check_table(op, token_ids, "num_computed", num_computed);
  Arg(op, "block_table", block_table).dtype({ScalarType::Int}).dim(3).last_contiguous();
  Arg(op, "block_table", block_table).size(1, token_ids.size(0), "the rows of token_ids");
  if (block_table.size(2) == 0) fail(op, "block_table has no columns");
  Arg(op, "token_rows", token_rows).dtype({ScalarType::Long}).dim(1).contiguous();
  Arg(op, "offsets", offsets).dtype({ScalarType::Long}).dim(1).size(0, token_rows.size(0), "as token_rows").contiguous();
  Arg(op, "rows", rows).dtype({ScalarType::Long}).dim(1).contiguous();
  check_starts(op, rows, "query_start", query_start);
  if (block_size < 1) fail(op, "block_size is ", block_size, ", must be at least 1");
}

inline void check_accept(const Tensor& token_ids, const Tensor& num_known, const Tensor& num_computed,
                         const Tensor& rows, const Tensor& query_start, const Tensor& sample_start,
                         const Tensor& sampled) {
  const char* op = "accept";
  check_table(op, token_ids, "num_known", num_known);
  check_table(op, token_ids, "num_computed", num_computed);
  Arg(op, "rows", rows).dtype({ScalarType::Long}).dim(1).contiguous();
  check_starts(op, rows, "query_start", query_start);
  check_starts(op, rows, "sample_start", sample_start);
  Arg(op, "sampled", sampled).dtype({ScalarType::Long}).dim(1).contiguous();
}

}  // namespace raylm
