// Attention over the paged cache: scores of a few keys at a time, softmax kept up to date as they pass by (online
// softmax, arXiv:1805.02867; tiled as in FlashAttention, arXiv:2205.14135).
//
// One unit holds the rows (query, head) that share a kv head, so each key and value is read once for all of them.
#pragma once

#include "raylm/cpu/dot.h"
#include "raylm/cpu/kernels.h"

namespace raylm {
namespace {

constexpr float kMinusInf = -__builtin_inff();

// What one unit keeps while it walks its keys. All arrays lie in the caller's scratch memory.
struct AttentionState {
  int64_t rows, group;
  float* q;       // [rows, head_dim], scaled
  float* acc;     // [rows, head_dim], sums of probability * value, relative to `top`
  float* scores;  // [rows, kAttentionKeys], then probabilities
  float* top;     // [rows], largest score so far
  float* total;   // [rows], sum of probabilities, relative to `top`
};

template <typename T>
inline AttentionState start_unit(const AttentionArgs& a, const AttentionUnit& u, float* scratch) {
  AttentionState s;
  s.group = a.num_heads / a.num_kv_heads;
  s.rows = u.num_queries * s.group;
  s.q = scratch;
  s.acc = s.q + s.rows * a.head_dim;
  s.scores = s.acc + s.rows * a.head_dim;
  s.top = s.scores + s.rows * kAttentionKeys;
  s.total = s.top + s.rows;
  const Vec scale = splat(a.scale);
  for (int64_t row = 0; row < s.rows; ++row) {
    const int64_t token = u.first_token + row / s.group, head = u.kv_head * s.group + row % s.group;
    const T* q = static_cast<const T*>(a.q) + token * a.q_token_stride + head * a.q_head_stride;
    float* to = s.q + row * a.head_dim;
    for_each_vec(a.head_dim, [&](int64_t i, auto load, auto store) { store(to + i, load(q + i) * scale); });
    s.top[row] = kMinusInf;
    s.total[row] = 0;
  }
  std::memset(s.acc, 0, s.rows * a.head_dim * sizeof(float));
  return s;
}

// Where the keys and values that are walked together lie.
template <typename T>
struct KeyChunk {
  int64_t size = 0;
  const T* keys[kAttentionKeys];
  const T* values[kAttentionKeys];
};

template <typename T>
RAYLM_INLINE KeyChunk<T> find_keys(const AttentionArgs& a, const AttentionUnit& u, int64_t first) {
  KeyChunk<T> chunk;
  const int32_t* blocks = a.block_table + u.sequence * a.block_table_stride;
  const T* k_cache = static_cast<const T*>(a.k_cache) + u.kv_head * a.k_head_stride;
  const T* v_cache = static_cast<const T*>(a.v_cache) + u.kv_head * a.v_head_stride;
  int64_t block = first / a.block_size, slot = first % a.block_size;
  for (; chunk.size < kAttentionKeys && first + chunk.size < u.key_end; ++chunk.size) {
    chunk.keys[chunk.size] = k_cache + blocks[block] * a.k_block_stride + slot * a.k_slot_stride;
    chunk.values[chunk.size] = v_cache + blocks[block] * a.v_block_stride + slot * a.v_slot_stride;
    if (++slot == a.block_size) ++block, slot = 0;
  }
  return chunk;
}

template <typename T>
RAYLM_INLINE void prefetch_row(const T* row, int64_t size) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < size; i += kLine) prefetch(row + i);
}

// Scores of a chunk's keys; meanwhile the keys of the next chunk are brought into the cache.
template <typename T>
inline void score_keys(const AttentionArgs& a, const AttentionState& s, const KeyChunk<T>& chunk,
                       const KeyChunk<T>& next) {
  for (int64_t key = 0; key < chunk.size; key += 4) {
    for (int64_t i = key; i < key + 4 && i < next.size; ++i) prefetch_row(next.keys[i], a.head_dim);
    const T* four[4];
    for (int64_t n = 0; n < 4; ++n) four[n] = chunk.keys[key + n < chunk.size ? key + n : chunk.size - 1];
    for_each_tile(s.rows, [&]<int Rows>(int64_t, int64_t row) __attribute__((always_inline)) {
      Vec sums[Rows];
      dot_tile<Rows>(s.q + row * a.head_dim, a.head_dim, four, a.head_dim, Ahead<T>{}, sums);
#pragma GCC unroll 8
      for (int m = 0; m < Rows; ++m) {
        std::memcpy(s.scores + (row + m) * kAttentionKeys + key, &sums[m], 4 * sizeof(float));
      }
    });
  }
}

// Turns the scores of keys first..first+num_keys into probabilities relative to each row's largest score so far.
inline void update_softmax(const AttentionArgs& a, const AttentionUnit& u, const AttentionState& s, int64_t first,
                           int64_t num_keys) {
  for (int64_t row = 0; row < s.rows; ++row) {
    float* scores = s.scores + row * kAttentionKeys;
    const int64_t position = u.first_position + row / s.group;
    int64_t begin = a.window > 0 ? position - a.window + 1 - first : 0;
    int64_t end = position + 1 - first;
    begin = begin < 0 ? 0 : begin > num_keys ? num_keys : begin;
    end = end < begin ? begin : end > num_keys ? num_keys : end;
    const auto clear = [&](float value) {
      for (int64_t i = 0; i < begin; ++i) scores[i] = value;
      for (int64_t i = end; i < kAttentionKeys; ++i) scores[i] = value;
    };
    if (begin == end) {
      clear(0);
      continue;
    }
    Vec top = splat(s.top[row]);
    if (a.soft_cap > 0) {
      for (int64_t i = 0; i < num_keys; i += kWidth) {
        store(scores + i, a.soft_cap * tanh(load(scores + i) * (1.0f / a.soft_cap)));
      }
    }
    if (a.alibi_slopes) {
      const float slope = a.alibi_slopes[u.kv_head * s.group + row % s.group];
      for (int64_t i = 0; i < num_keys; ++i) scores[i] += slope * static_cast<float>(first + i - position);
    }
    clear(kMinusInf);
    for (int64_t i = 0; i < kAttentionKeys; i += kWidth) top = max(top, load(scores + i));
    const float new_top = max_element(top);
    const float shrink = exp(splat(s.top[row] - new_top))[0];
    Vec total{};
    for (int64_t i = 0; i < kAttentionKeys; i += kWidth) store(scores + i, exp(load(scores + i) - new_top));
    clear(0);
    for (int64_t i = 0; i < kAttentionKeys; i += kWidth) total += load(scores + i);
    s.total[row] = s.total[row] * shrink + sum(total);
    if (new_top != s.top[row]) {
      float* acc = s.acc + row * a.head_dim;
      for_each_vec(a.head_dim, [&](int64_t i, auto load, auto store) { store(acc + i, load(acc + i) * shrink); });
    }
    s.top[row] = new_top;
  }
}

// acc[row..row+Rows][column..] += probabilities times values, for Vecs whole vectors of columns. The first tile brings
// the values of the next chunk into the cache.
template <int Rows, int Vecs, typename T, typename Load, typename Store>
RAYLM_INLINE void add_values(const AttentionArgs& a, const AttentionState& s, const KeyChunk<T>& chunk,
                             const KeyChunk<T>& next, int64_t row, int64_t column, const Load& load_n,
                             const Store& store_n) {
  const int64_t ahead = row == 0 && column == 0 ? next.size : 0;
  Vec acc[Rows][Vecs];
#pragma GCC unroll 8
  for (int m = 0; m < Rows; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < Vecs; ++v) acc[m][v] = load_n(s.acc + (row + m) * a.head_dim + column + v * kWidth);
  }
  for (int64_t key = 0; key < chunk.size; ++key) {
    if (key < ahead) prefetch_row(next.values[key], a.head_dim);
    Vec value[Vecs];
#pragma GCC unroll 4
    for (int v = 0; v < Vecs; ++v) value[v] = load_n(chunk.values[key] + column + v * kWidth);
#pragma GCC unroll 8
    for (int m = 0; m < Rows; ++m) {
      const Vec p = splat(s.scores[(row + m) * kAttentionKeys + key]);
#pragma GCC unroll 4
      for (int v = 0; v < Vecs; ++v) acc[m][v] += p * value[v];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < Rows; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < Vecs; ++v) store_n(s.acc + (row + m) * a.head_dim + column + v * kWidth, acc[m][v]);
  }
}

template <typename T>
inline void sum_values(const AttentionArgs& a, const AttentionState& s, const KeyChunk<T>& chunk,
                       const KeyChunk<T>& next) {
  const auto load_whole = [](const auto* p) { return load(p); };
  const auto store_whole = [](float* p, Vec v) { store(p, v); };
  for_each_tile(s.rows, [&]<int Rows>(int64_t, int64_t row) __attribute__((always_inline)) {
    int64_t column = 0;
    for (; column + 4 * kWidth <= a.head_dim; column += 4 * kWidth) {
      add_values<Rows, 4>(a, s, chunk, next, row, column, load_whole, store_whole);
    }
    for (; column + kWidth <= a.head_dim; column += kWidth) {
      add_values<Rows, 1>(a, s, chunk, next, row, column, load_whole, store_whole);
    }
    if (const int64_t rest = a.head_dim - column; rest > 0) {
      add_values<Rows, 1>(
          a, s, chunk, next, row, column, [rest](const auto* p) { return load_part(p, rest); },
          [rest](float* p, Vec v) { store_part(p, v, rest); });
    }
  });
}

// `acc` and `total` are relative to the row's largest score, `top`.
template <typename T>
inline void write_row(const AttentionArgs& a, const AttentionUnit& u, int64_t row, const float* acc, float top,
                      float total) {
  const int64_t group = a.num_heads / a.num_kv_heads;
  const int64_t token = u.first_token + row / group, head = u.kv_head * group + row % group;
  T* out = static_cast<T*>(a.out) + (token * a.num_heads + head) * a.head_dim;
  if (a.sinks) total += exp(splat(a.sinks[head] - top))[0];
  const float scale = 1.0f / total;
  for_each_vec(a.head_dim, [&](int64_t i, auto load, auto store) { store(out + i, load(acc + i) * scale); });
}

template <typename T>
inline void attention(const AttentionArgs& a, const AttentionUnit& u, float* scratch) {
  const AttentionState s = start_unit<T>(a, u, scratch);
  int64_t first = u.key_begin;
  KeyChunk<T> chunk = find_keys<T>(a, u, first);
  while (chunk.size > 0) {
    const KeyChunk<T> next = find_keys<T>(a, u, first + chunk.size);
    score_keys(a, s, chunk, next);
    update_softmax(a, u, s, first, chunk.size);
    sum_values(a, s, chunk, next);
    first += chunk.size;
    chunk = next;
  }
  for (int64_t row = 0; row < s.rows; ++row) {
    const float* acc = s.acc + row * a.head_dim;
    if (!u.partial) {
      write_row<T>(a, u, row, acc, s.top[row], s.total[row]);
      continue;
    }
    float* partial = u.partial + row * (a.head_dim + 2);
    std::memcpy(partial, acc, a.head_dim * sizeof(float));
    partial[a.head_dim] = s.top[row];
    partial[a.head_dim + 1] = s.total[row];
  }
}

// Joins what units over different keys of the same rows left in u.partial, one after the other.
template <typename T>
inline void merge(const AttentionArgs& a, const AttentionUnit& u, int64_t num_splits) {
  const int64_t rows = u.num_queries * (a.num_heads / a.num_kv_heads), width = a.head_dim + 2;
  for (int64_t row = 0; row < rows; ++row) {
    float* joined = u.partial + row * width;
    for (int64_t split = 1; split < num_splits; ++split) {
      const float* other = u.partial + (split * rows + row) * width;
      const float top = joined[a.head_dim] > other[a.head_dim] ? joined[a.head_dim] : other[a.head_dim];
      const float mine = exp(splat(joined[a.head_dim] - top))[0], theirs = exp(splat(other[a.head_dim] - top))[0];
      for_each_vec(a.head_dim, [&](int64_t i, auto load, auto store) {
        store(joined + i, load(joined + i) * mine + load(other + i) * theirs);
      });
      joined[a.head_dim] = top;
      joined[a.head_dim + 1] = joined[a.head_dim + 1] * mine + other[a.head_dim + 1] * theirs;
    }
    write_row<T>(a, u, row, joined, joined[a.head_dim], joined[a.head_dim + 1]);
  }
}

}  // namespace
}  // namespace raylm
