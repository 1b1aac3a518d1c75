// Attention of few_layers.cuh: of one query token a row, over the paged cache and the token's own key, which goes into
// the cache here. (A row may also see the token of another row, if the two share its block: then that key and value are
// made here too.) A column is a row and a KV head; its keys, in units of 16, are cut into parts, a block each. In a block
// the warps take units in turn, with a softmax each (arXiv:1805.02867), and join in shared memory; the last block
// to bring its part of a column joins those, in the order of the keys. The products are transposed, as in
// decode_attention.cuh.
#pragma once

#include "raylm/cuda/few_reader.cuh"
#include "raylm/cuda/ptx/cell.cuh"
#include "raylm/cuda/ptx/math.cuh"
#include "raylm/cuda/ptx/warps.cuh"
#include "raylm/cuda/tile/fragments.cuh"

namespace raylm::cuda {

constexpr int kFewGroup = 8;  // query heads of a KV head, at most

template <typename T, int D>
struct FewAttentionShared {
  static constexpr int kPitch = D + 8;  // so that the same 16 bytes of 8 heads are in 8 different banks
  alignas(16) T heads[kFewGroup][kPitch];  // the queries, normed and rotated
  alignas(16) T keys[kFewRows][D], values[kFewRows][D];  // of the step's tokens that the block sees
  alignas(16) T q_norm[D], k_norm[D];
  alignas(16) float angles[kFewRows][D];   // of their positions: cosines, then sines
  float tops[kFewWarps][kFewGroup], totals[kFewWarps][kFewGroup];
  const float* sums[kFewWarps];
  bool last;
};

template <typename N, typename E, int D>
class FewAttention {
 public:
  using T = typename N::Result;
  using Reader = FewReader<N, E, D>;
  using Shared = FewAttentionShared<T, D>;

  // All threads that compute make one, before a barrier of theirs.
  __device__ FewAttention(const FewLayersArgs<T>& args, const FewColumn& column, Reader& reader, Shared& shared)
      : args_(args), column_(column), reader_(reader), shared_(shared), lane_(threadIdx.x % kWarp),
        warp_(threadIdx.x / kWarp) {
    if (!column.works) return;
#pragma unroll 1
    for (int row = 0; row < args.rows; ++row) {
      const int64_t position = args.step.positions[row];
      if (row != column.row && !sees(row, position)) continue;
      const int unit = static_cast<int>(position) / kFewKeys;
      if (position >= 0 && column.begin <= unit && unit < column.end) tokens_ |= 1 << row;
      if (position < 0 || position >= args.step.max_position) continue;
      rotated_ |= 1 << row;
      if (threadIdx.x < D) shared.angles[row][threadIdx.x] = args.step.cos_sin[position * D + threadIdx.x];
    }
    const int64_t slot = args.step.slots[column.row], block = slot >> args.step.block_log2;
    stores_ = (tokens_ >> column.row & 1) && slot >= 0 && slot < args.step.num_slots;
    k_at_ = slot_of(args.step.k_strides, block, slot - (block << args.step.block_log2));
    v_at_ = slot_of(args.step.v_strides, block, slot - (block << args.step.block_log2));
  }

  // This block's part of a layer, from cells with the stamp to cells with the stamp.
  __device__ void run(const FewLayer<T>& layer, uint32_t stamp) {
    if (layer.q_norm && threadIdx.x < D / 4) {
      const int i = threadIdx.x % (D / 8) * 8;
      const bool q = threadIdx.x < D / 8;
      Vec<T>::load((q ? layer.q_norm : layer.k_norm) + i).store((q ? shared_.q_norm : shared_.k_norm) + i);
    }
    sync_some(0, kFewThreads);
#pragma unroll 1
    for (int head = warp_; head < column_.group; head += kFewWarps) prepare_query(layer, head, stamp);
#pragma unroll 1
    for (int i = kFewWarps - 1 - warp_; i < 2 * args_.rows; i += kFewWarps) {
      if (tokens_ >> i / 2 & 1) prepare_token(layer, i / 2, i % 2, stamp);
    }
    clear();
    sync_some(0, kFewThreads);
    char* stage = nullptr;
    float s[4];
#pragma unroll 1
    for (int unit = column_.begin + warp_, values = 0; unit < column_.end; unit += values * kFewWarps, values ^= 1) {
      if (stage) reader_.release();  // the last one is kept: join_warps puts the warp's sums there
      stage = reader_.next();
      put_tokens(stage, unit, values ? shared_.values : shared_.keys);
      values ? add_values(stage, s) : score(stage, unit, s);
    }
    join_warps(stage, stamp);
    if (stage) reader_.release();
    if (column_.parts > 1) join_parts(stamp);
  }

 private:
  static constexpr int kEach = D / kWarp;  // elements of a head that a lane prepares

  // Whether the column sees another row's token of this step: both have its block, so it lies at the same position.
  __device__ bool sees(int row, int64_t position) const {
    if (position < 0 || position >= column_.length - 1) return false;
    const int64_t at = column_.row * args_.step.block_table_stride + (position >> args_.step.block_log2);
    return args_.step.block_table[at] == args_.step.slots[row] >> args_.step.block_log2;
  }

  __device__ const uint2* cells_of(int row, int head) const {
    const int64_t width = static_cast<int64_t>(args_.num_heads + 2 * args_.num_kv_heads) * D;
    return args_.cells[kFewQkv] + (row * width + head * D + lane_ * kEach) / 2;
  }

  __device__ void prepare_query(const FewLayer<T>& layer, int head, uint32_t stamp) {
    float x[kEach];
    load(cells_of(column_.row, column_.kv_head * column_.group + head), stamp, x);
    if (layer.q_norm) norm(shared_.q_norm, x);
    rotate(column_.row, x);
    store(shared_.heads[head] + lane_ * kEach, x);
  }

  // The key or the value of a token of this step; the row's own go into the cache.
  __device__ void prepare_token(const FewLayer<T>& layer, int row, bool value, uint32_t stamp) {
    float x[kEach];
    load(cells_of(row, args_.num_heads + (value ? args_.num_kv_heads : 0) + column_.kv_head), stamp, x);
    if (!value) {
      if (layer.k_norm) norm(shared_.k_norm, x);
      rotate(row, x);
    }
    store((value ? shared_.values : shared_.keys)[row] + lane_ * kEach, x);
    if (row != column_.row || !stores_) return;
    store((value ? layer.v_cache + v_at_ : layer.k_cache + k_at_) + lane_ * kEach, x);
  }

  __device__ static void load(const uint2* cells, uint32_t stamp, float (&x)[kEach]) {
    uint32_t pairs[kEach / 2];
    if constexpr (kEach == 4) {
      const uint2 both = await_cells(cells, stamp);
      pairs[0] = both.x, pairs[1] = both.y;
    } else {
      const bool odd = threadIdx.x & 1;
      const uint2 both = await_cells(cells - odd, stamp);
      pairs[0] = odd ? both.y : both.x;
    }
#pragma unroll
    for (int i = 0; i < kEach / 2; ++i) {
      const float2 pair = unpack<T>(pairs[i]);
      x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
    }
  }

  __device__ static void store(T* to, const float (&x)[kEach]) {
#pragma unroll
    for (int i = 0; i < kEach / 2; ++i) reinterpret_cast<uint32_t*>(to)[i] = pack<T>(x[2 * i], x[2 * i + 1]);
  }

  __device__ void norm(const T* weight, float (&x)[kEach]) const {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) squares += x[i] * x[i];
    const float scale = rsqrtf(warp_sum(squares) / D + args_.eps);
#pragma unroll
    for (int i = 0; i < kEach; ++i) x[i] *= scale * to_float(weight[lane_ * kEach + i]);
  }

  // Elements i and i + D / 2 of a head lie in lanes 16 apart.
  __device__ void rotate(int row, float (&x)[kEach]) const {
    if (!(rotated_ >> row & 1)) return;
    const float* const angles = shared_.angles[row];
    const int at = lane_ % 16 * kEach;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float other = __shfl_xor_sync(kAllLanes, x[i], 16), c = angles[at + i];
      const float s = angles[D / 2 + at + i];
      x[i] = lane_ < 16 ? x[i] * c - other * s : x[i] * c + other * s;
    }
  }

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < D / 4; ++i) sum_[i / 4][i % 4] = 0;
    for (int r = 0; r < 2; ++r) top_[r] = -INFINITY, total_[r] = 0;
  }

  __device__ int64_t slot_of(const FewStrides& strides, int64_t block, int64_t offset) const {
    return block * strides.block + offset * strides.slot + column_.kv_head * strides.head;
  }

  // What tokens of this step have in a unit, in the place of what the copies brought from the cache.
  __device__ void put_tokens(char* unit, int number, const T (*of_rows)[D]) const {
#pragma unroll 1
    for (int row = 0; row < args_.rows; ++row) {
      if (!(tokens_ >> row & 1)) continue;
      const int position = row == column_.row ? column_.length - 1 : static_cast<int>(args_.step.positions[row]);
      const int at = position - number * kFewKeys;
      if (at < 0 || at >= kFewKeys) continue;
      T* const to = reinterpret_cast<T*>(unit + at * Reader::Stage::kKeyPitch);
      if (lane_ < D / 8) Vec<T>::load(of_rows[row] + lane_ * 8).store(to + lane_ * 8);
    }
    Reader::Stage::order_writes();  // also those of the copies that brought the unit
    __syncwarp();
  }

  // The scores of 16 keys, to base 2: a lane has keys lane / 4 (elements 0 and 1) and + 8 of its two rows.
  __device__ void score(const char* keys, int unit, float (&s)[4]) const {
    const uint32_t from = shared_address(keys) + lane_ % 16 * Reader::Stage::kKeyPitch + lane_ / 16 * 16;
    const uint32_t queries = shared_address(shared_.heads[lane_ % 8]) + lane_ / 8 * 16;
    float even[4] = {}, odd[4] = {};  // two chains of products are twice as fast as one
#pragma unroll
    for (int i = 0; i < D / 16; i += 2) {
      uint32_t a[4], q[4];
      load_matrices(q, queries + i * 32);
      load_matrices(a, from + i * 32);
      multiply_add<T>(even, a, q[0], q[1]);
      load_matrices(a, from + i * 32 + 32);
      multiply_add<T>(odd, a, q[2], q[3]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = unit * kFewKeys + i / 2 * 8 + lane_ / 4;
      s[i] = key < column_.length ? (even[i] + odd[i]) * (args_.scale * kLog2E) : -INFINITY;
    }
  }

  __device__ void add_values(const char* values, const float (&s)[4]) {
    float shrink[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = fmaxf(s[r], s[2 + r]);
      for (int step = 4; step < kWarp; step *= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));
      top = fmaxf(top, top_[r]);
      shrink[r] = exp2_approx(top_[r] - top);
      top_[r] = top;
      total_[r] *= shrink[r];
    }
    float w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      w[i] = exp2_approx(s[i] - top_[i % 2]);
      total_[i % 2] += w[i];
    }
    const uint32_t b0 = transpose(pack<T>(w[0], w[1])), b1 = transpose(pack<T>(w[2], w[3]));
    const uint32_t from =
        shared_address(values) + (lane_ / 16 * 8 + lane_ % 8) * Reader::Stage::kKeyPitch + lane_ / 8 % 2 * 16;
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sum_[i][j] *= shrink[j % 2];
      uint32_t a[4];
      load_matrices_transposed(a, from + i * 32);
      multiply_add<T>(sum_[i], a, b0, b1);
    }
  }

  // Joins the warps' sums, each where the values were that the warp used last, and writes the block's part.
  __device__ void join_warps(char* mine, uint32_t stamp) {
    constexpr int kPitch = D + 4;  // floats
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      for (int step = 4; step < kWarp; step *= 2) total_[r] += __shfl_xor_sync(kAllLanes, total_[r], step);
      if (lane_ < 4) shared_.tops[warp_][lane_ * 2 + r] = top_[r], shared_.totals[warp_][lane_ * 2 + r] = total_[r];
    }
    if (lane_ == 0) shared_.sums[warp_] = reinterpret_cast<const float*>(mine);
    if (mine) {
      float* to = reinterpret_cast<float*>(mine) + lane_ % 4 * 2 * kPitch + lane_ / 4;
#pragma unroll
      for (int i = 0; i < D / 4; ++i) to[i % 2 * kPitch + i / 4 * 16 + i % 4 / 2 * 8] = sum_[i / 4][i % 4];
    }
    Reader::Stage::order_writes();
    sync_some(0, kFewThreads);
    const int group = column_.group;
#pragma unroll 1
    for (int i = threadIdx.x; i < group * (D / 4); i += kFewThreads) {
      const int row = i / (D / 4), d = i % (D / 4) * 4;
      float top = -INFINITY, total = 0;
      float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int w = 0; w < kFewWarps; ++w) top = fmaxf(top, shared_.tops[w][row]);
#pragma unroll
      for (int w = 0; w < kFewWarps; ++w) {
        if (shared_.tops[w][row] == -INFINITY) continue;
        const float weight = exp2_approx(shared_.tops[w][row] - top);
        const float4 x = *reinterpret_cast<const float4*>(shared_.sums[w] + row * kPitch + d);
        total += weight * shared_.totals[w][row];
        sum.x += weight * x.x, sum.y += weight * x.y, sum.z += weight * x.z, sum.w += weight * x.w;
      }
      scale(sum, total > 0 ? 1 / total : 0);
      if (column_.parts == 1) {
        write(row, d, sum, stamp);
      } else {
        const int64_t to = part_row(column_.part, row);
        *reinterpret_cast<float4*>(args_.part_sums + to * D + d) = sum;
        if (d == 0) args_.part_logs[to] = total > 0 ? top + log2f(total) : -INFINITY;
      }
    }
    sync_some(0, kFewThreads);
  }

  __device__ static void scale(float4& x, float by) { x.x *= by, x.y *= by, x.z *= by, x.w *= by; }

  __device__ int64_t part_row(int part, int row) const {
    return (static_cast<int64_t>(column_.index) * kFewMostParts + part) * kFewGroup + row;
  }

  __device__ void write(int row, int d, const float4& sum, uint32_t stamp) const {
    const int64_t head = static_cast<int64_t>(column_.row) * args_.num_heads + column_.kv_head * column_.group + row;
    uint2* const to = args_.cells[kFewAttention] + (head * D + d) / 2;
    store_cell(to, pack<T>(sum.x, sum.y), stamp);
    store_cell(to + 1, pack<T>(sum.z, sum.w), stamp);
  }

  // If this block is the last to bring its part of the column, it joins all of them. The counter is left as found.
  __device__ void join_parts(uint32_t stamp) {
    if (threadIdx.x == 0) {
      unsigned* arrivals = args_.arrivals + column_.index;
      __threadfence();
      shared_.last = atomicAdd(arrivals, 1) + 1 == static_cast<unsigned>(column_.parts);
      if (shared_.last) *arrivals = 0;
      __threadfence();
    }
    sync_some(0, kFewThreads);
    if (!shared_.last) return;
    const int d = lane_ * 4;
#pragma unroll 1
    for (int row = warp_; row < column_.group; row += kFewWarps) {
      float top = -INFINITY, total = 0;
      float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 4
      for (int i = 0; i < column_.parts; ++i) {
        const float log = __ldcg(args_.part_logs + part_row(i, row));
        const float4* from = reinterpret_cast<const float4*>(args_.part_sums + part_row(i, row) * D) + lane_;
        const float4 x = d < D ? __ldcg(from) : make_float4(0, 0, 0, 0);
        const float higher = fmaxf(top, log), weight = exp2_approx(log - higher), shrink = exp2_approx(top - higher);
        total = total * shrink + weight, top = higher;
        scale(sum, shrink);
        sum.x += weight * x.x, sum.y += weight * x.y, sum.z += weight * x.z, sum.w += weight * x.w;
      }
      scale(sum, 1 / total);
      if (d < D) write(row, d, sum, stamp);
    }
  }

  const FewLayersArgs<T>& args_;
  const FewColumn& column_;
  Reader& reader_;
  Shared& shared_;
  const int lane_, warp_;
  unsigned tokens_ = 0, rotated_ = 0;  // bits of rows: their tokens are among the block's keys; have angles
  bool stores_ = false;
  int64_t k_at_ = 0, v_at_ = 0;  // where the token's own key and value go in the caches
  float sum_[D / 16][4], top_[2], total_[2];
};

}  // namespace raylm::cuda
