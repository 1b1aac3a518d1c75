// What both prefill kernels (mma.sync and wgmma) share: which tile a block works on, the online softmax over the
// fragments of a matrix product (tile/fragments.cuh), which both instructions lay out alike, and the way out to memory.
#pragma once

#include "raylm/cuda/attention.cuh"
#include "raylm/cuda/ptx/math.cuh"
#include "raylm/cuda/tile/fragments.cuh"

namespace raylm::cuda {

template <typename T>
struct PrefillParams {
  AttentionParams<T> attention;
  int64_t num_tokens;
  int num_seqs, num_heads, group, block_size, window;  // group: query heads of a KV head
  int min_query_len;  // sequences with fewer query tokens belong to another kernel
  // exp(score) = exp2(x * exp2_scale), where x is q k, or with a soft cap tanh(q k * scale / soft_cap), which is
  // 1 - 2 / (exp2(q k * tanh_scale) + 1).
  float exp2_scale, tanh_scale;
};

template <typename T>
PrefillParams<T> prefill_params(const AttentionParams<T>& a, int64_t num_tokens, int64_t min_query_len) {
  const bool capped = a.soft_cap > 0;
  return {a,
          num_tokens,
          static_cast<int>(a.num_seqs),
          static_cast<int>(a.num_heads),
          static_cast<int>(a.group()),
          static_cast<int>(a.block_size),
          static_cast<int>(a.window < INT32_MAX ? a.window : 0),
          static_cast<int>(min_query_len > 1 ? min_query_len : 1),
          (capped ? a.soft_cap : a.scale) * kLog2E,
          capped ? 2 * kLog2E * a.scale / a.soft_cap : 0.0f};
}

// The most tiles of `rows` query tokens that sequences of at least min_query_len tokens can make of num_tokens.
inline int64_t most_tiles(int64_t num_tokens, int64_t num_seqs, int64_t min_query_len, int64_t rows) {
  const int64_t fit = num_tokens / (min_query_len > 1 ? min_query_len : 1);
  return num_tokens / rows + (num_seqs < fit ? num_seqs : fit);
}

// Rows `first_row` and on of one sequence's queries, one head.
struct Tile {
  int seq = -1, head = 0, first_row = 0;
  int query_start = 0, query_len = 0, seq_len = 0;

  // The position of the tile's first query, and the first key that no query of the tile may see.
  __device__ int position() const { return seq_len - query_len + first_row; }
  __device__ int end_key(int rows) const { return min(position() + rows, seq_len); }
  __device__ int first_key(int window) const { return window > 0 ? max(position() - window + 1, 0) : 0; }
};

// Finds the tiles of a batch by their number, in a warp. Of a sequence, its KV heads go in sections whose keys and
// values fit the L2 cache together; in a section the last tile, which sees the most keys, comes first with all its
// heads, then the one before. Numbers asked for must grow; past the last tile seq is -1, and then no more may be asked
// for.
class TileSearch {
 public:
  template <typename T>
  __device__ TileSearch(const PrefillParams<T>& p, int rows)
      : query_start_(p.attention.query_start), seq_lens_(p.attention.seq_lens), num_seqs_(p.num_seqs),
        num_heads_(p.num_heads), group_(p.group), min_query_len_(p.min_query_len), rows_(rows),
        section_keys_(kSectionBytes / (2 * sizeof(T) * p.attention.head_dim)) {
    load();
  }

  __device__ Tile find(int number) {
    const int tile = number / num_heads_;
    while (tile >= before_ + __shfl_sync(kAllLanes, end_, kWarp - 1)) {
      before_ += __shfl_sync(kAllLanes, end_, kWarp - 1);
      first_ += kWarp;
      if (first_ >= num_seqs_) return Tile{};
      load();
    }
    const int owner = __ffs(__ballot_sync(kAllLanes, end_ > tile - before_)) - 1;
    Tile found;
    found.seq = first_ + owner;
    found.query_start = __shfl_sync(kAllLanes, start_, owner);
    found.query_len = __shfl_sync(kAllLanes, length_, owner);
    found.seq_len = seq_lens_[found.seq];
    const int tiles = (found.query_len + rows_ - 1) / rows_;
    place(found, number - (before_ + __shfl_sync(kAllLanes, end_, owner) - tiles) * num_heads_, tiles);
    return found;
  }

 private:
  static constexpr int kSectionBytes = 20 << 20;

  // The sequence's tile of this number: which head, which rows.
  __device__ void place(Tile& found, int number, int tiles) const {
    const int heads = min(max(section_keys_ / found.seq_len, 1) * group_, num_heads_);
    const int first_head = number / (tiles * heads) * heads, left = number - first_head * tiles;
    const int section_heads = min(heads, num_heads_ - first_head);
    found.head = first_head + left % section_heads;
    found.first_row = (tiles - 1 - left / section_heads) * rows_;
  }

  // Lane l looks after sequence first_ + l: end_ is the number of tiles up to and with it, from first_ on.
  __device__ void load() {
    const int lane = threadIdx.x % kWarp, seq = first_ + lane;
    start_ = seq < num_seqs_ ? query_start_[seq] : 0;
    length_ = seq < num_seqs_ ? query_start_[seq + 1] - start_ : 0;
    end_ = length_ >= min_query_len_ ? (length_ + rows_ - 1) / rows_ : 0;
    for (int step = 1; step < kWarp; step *= 2) {
      const int below = __shfl_up_sync(kAllLanes, end_, step);
      if (lane >= step) end_ += below;
    }
  }

  const int32_t* query_start_;
  const int32_t* seq_lens_;
  int num_seqs_, num_heads_, group_, min_query_len_, rows_, section_keys_;
  int before_ = 0, first_ = 0, start_ = 0, length_ = 0, end_ = 0;
};

// Output rows past the last sequence are zero. Threads rank, rank + count, ... of a launch share the work.
template <typename T>
__device__ void zero_surplus_rows(const PrefillParams<T>& p, int64_t rank, int64_t count) {
  const AttentionParams<T>& a = p.attention;
  const int64_t width = a.num_heads * a.head_dim, end = p.num_tokens * width;
  for (int64_t i = a.query_start[a.num_seqs] * width + rank; i < end; i += count) a.out[i] = from_float<T>(0.0f);
}

// tanh.approx would be one instruction, but its 11 bits are too few for a score that is multiplied by the cap.
template <int N>
__device__ void soft_cap_scores(float (&scores)[N], float tanh_scale) {
#pragma unroll
  for (int i = 0; i < N; ++i) scores[i] = 1.0f - 2.0f * reciprocal_approx(exp2_approx(scores[i] * tanh_scale) + 1.0f);
}

// Keys a query does not see get -inf, whatever stands there: unused slots of the cache may hold NaN. `position` is that
// of the thread's first row, `key` that of the tile's first column.
template <int N>
__device__ void mask_scores(float (&scores)[N], int position, int key, int window) {
  const int top = position - key - 2 * (threadIdx.x % 4);
  const int low = window > 0 ? top - window : INT32_MIN / 2;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int column = i / 4 * 8 + i % 2, shift = i % 4 < 2 ? 0 : 8;
    if (column > top + shift || column <= low + shift) scores[i] = -INFINITY;
  }
}

// Softmax of two rows a thread, kept up to date as keys pass by (arXiv:1805.02867).
struct OnlineSoftmax {
  float top[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0};

  // Makes weights of scores; what has been summed up before must be multiplied by shrink.
  template <int N>
  __device__ void update(float (&scores)[N], float scale, float (&shrink)[2]) {
    float peak[2] = {top[0], top[1]};
#pragma unroll
    for (int i = 0; i < N; ++i) peak[i % 4 / 2] = fmaxf(peak[i % 4 / 2], scores[i]);
    float base[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      peak[r] = fmaxf(peak[r], __shfl_xor_sync(kAllLanes, peak[r], 1));
      peak[r] = fmaxf(peak[r], __shfl_xor_sync(kAllLanes, peak[r], 2));
      base[r] = peak[r] == -INFINITY ? 0.0f : peak[r] * scale;  // a row that sees no key yet
      // 1, not about 1, where nothing is raised: keys that the row does not see may come in steps before or after those that
      // it sees, as many as its neighbours in the tile want, and must leave no trace.
      shrink[r] = top[r] == peak[r] ? 1.0f : exp2_approx(top[r] * scale - base[r]);
      top[r] = peak[r];
      total[r] *= shrink[r];
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      scores[i] = exp2_approx(scores[i] * scale - base[i % 4 / 2]);
      total[i % 4 / 2] += scores[i];
    }
  }

  // With the head's sink in the denominator.
  template <typename T>
  __device__ float inverse_total(int r, const PrefillParams<T>& p, int head) const {
    float sum = total[r];
    sum += __shfl_xor_sync(kAllLanes, sum, 1);
    sum += __shfl_xor_sync(kAllLanes, sum, 2);
    return sum > 0 ? 1.0f / (sum + sink_weight(p.attention, head, top[r] * p.exp2_scale)) : 0.0f;
  }
};

template <int N>
__device__ void scale_rows(float (&values)[N], const float (&by)[2]) {
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] *= by[i % 4 / 2];
}

// Writes two rows of the output, `row` and row + 8 of the tile's sequence where it has as many. Of every 32 columns
// four lanes first exchange what they hold, so that each writes 16 bytes.
template <typename T, int N>
__device__ void write_rows(const PrefillParams<T>& p, const Tile& tile, int row, const float (&values)[N],
                           const OnlineSoftmax& softmax) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float inverse = softmax.inverse_total(r, p, tile.head) * p.attention.v_scale;
    const int64_t token = tile.query_start + row + 8 * r;
    const bool valid = row + 8 * r < tile.query_len;
    T* out = p.attention.out + (token * p.num_heads + tile.head) * (N * 2);
#pragma unroll
    for (int chunk = 0; chunk < N / 4; chunk += 4) {
      uint32_t x[4] = {};
#pragma unroll
      for (int i = 0; i < 4 && chunk + i < N / 4; ++i) {
        const int at = (chunk + i) * 4 + 2 * r;
        x[i] = pack<T>(values[at] * inverse, values[at + 1] * inverse);
      }
      transpose4(x);
      if (valid && chunk + lane < N / 4) {
        *reinterpret_cast<uint4*>(out + (chunk + lane) * 8) = make_uint4(x[0], x[1], x[2], x[3]);
      }
    }
  }
}

}  // namespace raylm::cuda
