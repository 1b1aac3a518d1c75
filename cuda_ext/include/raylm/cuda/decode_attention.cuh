// Paged attention for sequences with few queries: decode, and the checking of speculated tokens. K and V are read once for
// all query heads of a group and all query tokens, which are the rows of 16-row matrix products. The keys are split over
// the blocks of the grid and a second kernel joins the parts, as in Flash-Decoding (arXiv:2311.01282); how they are split
// is in decode_schedule.cuh. In a block, each warp copies 16 keys of a tile of 64 into shared memory, some tiles ahead of
// their use, across sequences; the softmax is kept up to date as keys pass by (arXiv:1805.02867).
#pragma once

#include "raylm/cuda/attention.cuh"
#include "raylm/cuda/decode_schedule.cuh"
#include "raylm/cuda/warp_mma.cuh"

namespace raylm::cuda {

constexpr int kDecodeWarps = kDecodeThreads / kWarp;
constexpr float kLog2E = 1.4426950408889634f;

// What is left to join where sequences were cut. A slot has at most two parts of sequences: of one that an earlier slot
// began (part 2 * slot) and of one that it begins itself (part 2 * slot + 1).
struct DecodeParts {
  float* sums;   // [slots, 2, columns, rows, D], each divided by its softmax's denominator
  float* logs;   // [slots, 2, columns, rows]: the logarithm to base 2 of that denominator
  int2* joins;   // [slots, chunks]: a sequence that the slot begins, or -1, and the number of its parts
  int rows;      // room for as many rows

  __device__ int64_t index(int slot, bool begins, int columns, int column) const {
    return (static_cast<int64_t>(slot * 2 + begins) * columns + column) * rows;
  }
};

// The grid is (columns, slots); a column is a KV head and a chunk of kDecodeRows rows.
template <typename T>
struct DecodeParams {
  AttentionParams<T> attention;
  DecodeBatch batch;
  DecodeParts parts;
  int64_t num_tokens;
};

template <int D>
struct DecodeLayout {
  static constexpr int kChunks = D / 8;    // of 16 bytes, in a row
  static constexpr int kPitch = D + 8;     // so that the same chunk of 8 rows is in 8 different banks
  static constexpr int kKeys = 16;         // that a warp copies
  static constexpr int kTensor = kKeys * kPitch;
  static constexpr int kPart = 2 * kTensor;  // a warp's K, then its V
  static constexpr int kStage = kDecodeWarps * kPart;
  static constexpr int kStages = D == 192 ? 4 : D == 96 ? 4 : 3;
  static constexpr int kBlocks = D <= 64 ? 4 : D <= 128 ? 2 : 1;  // on a multiprocessor
  static constexpr int kBytes = kStages * kStage * 2;
};

// The rows of a warp: 16 of the (query token, head of the group) pairs of a sequence. A lane has two of them.
template <int D>
struct DecodeRows {
  uint32_t q[D / 16][4];
  float sum[D / 8][4];
  float top[2], total[2];
  int position[2];
};

// One block's work. `warp` copies keys for all; it multiplies for row tile `row_tile` and the keys of every
// `key_warps`-th warp from `key_warp` on: with up to 16 rows the warps share the keys, with more they share the rows.
template <typename T, int D>
struct DecodeBlock {
  using Layout = DecodeLayout<D>;
  const DecodeParams<T>& p;
  T* stages;
  int lane, warp, column, columns, kv_head, first_row;
  const T* k_head;
  const T* v_head;
  int rows, row_tiles, row_warps, row_tile, key_warps, key_warp;

  __device__ DecodeBlock(const DecodeParams<T>& params, T* shared) : p(params), stages(shared) {
    lane = threadIdx.x % kWarp;
    warp = threadIdx.x / kWarp;
    column = blockIdx.x;
    columns = gridDim.x;
    kv_head = column % static_cast<int>(p.attention.num_kv_heads);
    first_row = column / static_cast<int>(p.attention.num_kv_heads) * kDecodeRows;
    k_head = p.attention.k_cache + kv_head * p.attention.k_head_stride;
    v_head = p.attention.v_cache + kv_head * p.attention.v_head_stride;
  }

  __device__ T* part(int stage, int of_warp) const { return stages + stage * Layout::kStage + of_warp * Layout::kPart; }

  // The block of the cache that holds this warp's keys of the cursor's tile.
  __device__ int cache_block(const DecodeCursor& cursor) const {
    const int key = cursor.tile * kDecodeTile + warp * Layout::kKeys;
    if (cursor.done() || key >= cursor.now.high || key + Layout::kKeys <= cursor.now.low) return 0;
    const unsigned column = static_cast<unsigned>(key) / static_cast<unsigned>(p.attention.block_size);
    return p.attention.block_table[cursor.seq * p.attention.block_table_stride + column];
  }

  // Keys outside the sequence become zeros: their slots may hold NaN, which no weight of 0 would remove from the sum.
  __device__ void copy(const DecodeCursor& cursor, int block, int stage) const {
    const int key = cursor.tile * kDecodeTile + warp * Layout::kKeys;
    const int slot = static_cast<unsigned>(key) % static_cast<unsigned>(p.attention.block_size);
    const T* k = k_head + block * p.attention.k_block_stride + slot * p.attention.k_slot_stride;
    const T* v = v_head + block * p.attention.v_block_stride + slot * p.attention.v_slot_stride;
    const uint32_t to = shared_address(part(stage, warp));
#pragma unroll
    for (int i = 0; i < Layout::kKeys * Layout::kChunks / kWarp; ++i) {
      const int row = (i * kWarp + lane) / Layout::kChunks, d = (i * kWarp + lane) % Layout::kChunks * 8;
      const bool read = key + row < cursor.now.high && key + row >= cursor.now.low && d < p.attention.head_dim;
      const uint32_t at = to + (row * Layout::kPitch + d) * 2;
      copy_async(at, k + row * p.attention.k_slot_stride + d, read);
      copy_async(at + Layout::kTensor * 2, v + row * p.attention.v_slot_stride + d, read);
    }
  }

  __device__ void begin(const DecodeSequence& now, DecodeRows<D>& mine) {
    rows = min(now.num_queries * p.batch.group - first_row, kDecodeRows);
    row_tiles = (rows + 15) / 16;
    row_warps = row_tiles == 3 ? 4 : row_tiles;
    key_warps = kDecodeWarps / row_warps;
    row_tile = warp % row_warps;
    key_warp = warp / row_warps;
    for (int r = 0; r < 2; ++r) {
      const int row = row_tile * 16 + r * 8 + lane / 4, pair = first_row + row, token = pair / p.batch.group;
      const int64_t head = static_cast<int64_t>(kv_head) * p.batch.group + pair % p.batch.group;
      const T* q = p.attention.q + (now.query + token) * p.attention.q_token_stride + head * p.attention.q_head_stride;
      mine.position[r] = now.high - now.num_queries + token;
      mine.top[r] = -INFINITY;
      mine.total[r] = 0;
#pragma unroll
      for (int i = 0; i < D / 8; ++i) {
        const int d = i * 8 + lane % 4 * 2;
        const bool read = row < rows && d < p.attention.head_dim;
        mine.q[i / 2][i % 2 * 2 + r] = read ? *reinterpret_cast<const uint32_t*>(q + d) : 0;
        mine.sum[i][2 * r] = mine.sum[i][2 * r + 1] = 0;
      }
    }
  }

  // The scores of 16 keys, to base 2: scaled, capped, and -inf where a row does not see the key.
  __device__ void score(const T* k, int key, const DecodeSequence& now, const DecodeRows<D>& mine, float (&s)[2][4]) const {
    const uint32_t from = shared_address(k + (lane / 16 * 8 + lane % 8) * Layout::kPitch + lane / 8 % 2 * 8);
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      uint32_t b[4];
      load_matrices(b, from + i * 32);
      multiply_add<T>(s[0], mine.q[i], b[0], b[1]);
      multiply_add<T>(s[1], mine.q[i], b[2], b[3]);
    }
    const float cap = p.attention.soft_cap, scale = p.attention.scale * kLog2E * (cap > 0 ? 2 / cap : 1);
    const int window = p.batch.window > 0 ? p.batch.window : now.high;
    const bool all = key + 16 <= now.high - now.num_queries + 1 && key > now.high - 1 - window;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& x = s[i / 4][i % 4];
      x *= scale;
      if (cap > 0) x = cap * kLog2E * (1 - __fdividef(2.0f, exp2_approx(x) + 1));  // tanh
      const int at = key + i / 4 * 8 + lane % 4 * 2 + i % 2, position = mine.position[i % 4 / 2];
      if (!all && (at > position || at <= position - window)) x = -INFINITY;
    }
  }

  __device__ void attend(const T* k, int key, const DecodeSequence& now, DecodeRows<D>& mine) const {
    float s[2][4] = {};
    score(k, key, now, mine, s);
    uint32_t weights[4];
    float shrink[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = fmaxf(fmaxf(s[0][2 * r], s[0][2 * r + 1]), fmaxf(s[1][2 * r], s[1][2 * r + 1]));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      top = fmaxf(top, mine.top[r]);
      const float base = top == -INFINITY ? 0 : top;
      shrink[r] = exp2_approx(mine.top[r] - base);
      mine.top[r] = top;
      mine.total[r] *= shrink[r];
      for (int n = 0; n < 2; ++n) {
        const float first = exp2_approx(s[n][2 * r] - base), second = exp2_approx(s[n][2 * r + 1] - base);
        mine.total[r] += first + second;
        weights[n * 2 + r] = pack<T>(first, second);
      }
    }
    if (__any_sync(0xffffffffu, shrink[0] != 1 || shrink[1] != 1)) {
#pragma unroll
      for (int i = 0; i < D / 8; ++i) {
        for (int c = 0; c < 4; ++c) mine.sum[i][c] *= shrink[c / 2];
      }
    }
    const uint32_t from = shared_address(k + Layout::kTensor + lane % 16 * Layout::kPitch + lane / 16 * 8);
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      uint32_t b[4];
      load_matrices_transposed(b, from + i * 32);
      multiply_add<T>(mine.sum[2 * i], weights, b[0], b[1]);
      multiply_add<T>(mine.sum[2 * i + 1], weights, b[2], b[3]);
    }
  }

  // Joins what the warps have of each row, and writes it: to `out`, or to the parts. The stage just used is free until
  // the next copy, and a warp's part of it holds exactly its sums.
  __device__ void finish(const DecodeCursor& at, const DecodeShare& share, bool begins, int stage, DecodeRows<D>& mine) {
    __shared__ float tops[kDecodeWarps][16], totals[kDecodeWarps][16];
    __syncthreads();
    float* sums = reinterpret_cast<float*>(part(stage, warp));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = r * 8 + lane / 4;
      float total = mine.total[r];
      total += __shfl_xor_sync(0xffffffffu, total, 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
      if (lane % 4 == 0) tops[warp][row] = mine.top[r], totals[warp][row] = total;
#pragma unroll
      for (int i = 0; i < D / 8; ++i) {
        const float2 pair = make_float2(mine.sum[i][2 * r], mine.sum[i][2 * r + 1]);
        *reinterpret_cast<float2*>(sums + row * Layout::kPitch + i * 8 + lane % 4 * 2) = pair;
      }
    }
    __syncthreads();
    const bool complete = begins && at.stop == at.now.last();
    const int64_t to = complete ? 0 : p.parts.index(blockIdx.y, begins, columns, column);
    for (int i = threadIdx.x; i < rows * (D / 4); i += kDecodeThreads) {
      const int row = i / (D / 4), d = i % (D / 4) * 4, tile = row / 16;
      if (d >= p.attention.head_dim) continue;
      float top = -INFINITY, total = 0;
      float4 sum = make_float4(0, 0, 0, 0);
      for (int w = tile; w < kDecodeWarps; w += row_warps) top = fmaxf(top, tops[w][row % 16]);
      for (int w = tile; w < kDecodeWarps && top > -INFINITY; w += row_warps) {
        const float weight = exp2_approx(tops[w][row % 16] - top);
        const float* from = reinterpret_cast<const float*>(part(stage, w)) + row % 16 * Layout::kPitch + d;
        const float4 x = *reinterpret_cast<const float4*>(from);
        total += weight * totals[w][row % 16];
        sum.x += weight * x.x, sum.y += weight * x.y, sum.z += weight * x.z, sum.w += weight * x.w;
      }
      const float over = total > 0 ? 1 / total : 0;
      sum.x *= over, sum.y *= over, sum.z *= over, sum.w *= over;
      if (complete) {
        write(at.now, row, d, sum);
      } else {
        *reinterpret_cast<float4*>(p.parts.sums + (to + row) * p.attention.head_dim + d) = sum;
        if (d == 0) p.parts.logs[to + row] = total > 0 ? top + log2f(total) : -INFINITY;
      }
    }
    __syncthreads();
  }

  __device__ void write(const DecodeSequence& now, int row, int d, const float4& sum) const {
    const int pair = first_row + row, token = now.query + pair / p.batch.group;
    const int64_t head = static_cast<int64_t>(kv_head) * p.batch.group + pair % p.batch.group;
    T* out = p.attention.out + (token * p.attention.num_heads + head) * p.attention.head_dim + d;
    *reinterpret_cast<uint2*>(out) = make_uint2(pack<T>(sum.x, sum.y), pack<T>(sum.z, sum.w));
  }

  // Whether a sequence was cut at the end of the share, for the kernel that joins its parts.
  __device__ void leave_join(const DecodeCursor& at, const DecodeShare& share, bool begins) const {
    if (threadIdx.x != 0 || kv_head != 0 || !begins || at.stop == at.now.last()) return;
    const int pieces = (at.start - share.begin + at.now.tiles() + share.size - 1) / share.size;
    p.parts.joins[blockIdx.y * (columns / p.attention.num_kv_heads) + first_row / kDecodeRows] = make_int2(at.seq, pieces);
  }

  __device__ void multiply(const DecodeCursor& at, int stage, DecodeRows<D>& mine) const {
    if (row_tile >= row_tiles) return;
    for (int w = key_warp; w < kDecodeWarps; w += key_warps) {
      const int key = at.tile * kDecodeTile + w * Layout::kKeys;
      if (key < at.now.high && key + Layout::kKeys > at.now.low) attend(part(stage, w), key, at.now, mine);
    }
  }

  __device__ void run(const DecodeShare& share) {
    DecodeCursor ahead = share.cursor, at = share.cursor;
    int block = cache_block(ahead);
    const auto copy_next = [&](int stage) {
      if (!ahead.done()) {
        copy(ahead, block, stage);
        ahead.advance(p.batch, first_row);
        block = cache_block(ahead);
      }
      copy_commit();
    };
    for (int i = 0; i < Layout::kStages - 1; ++i) copy_next(i);
    DecodeRows<D> mine;
    bool fresh = true, begins = false;
    for (int stage = 0; !at.done(); stage = stage + 1 == Layout::kStages ? 0 : stage + 1) {
      if (fresh) begin(at.now, mine), begins = at.tile == at.now.first();
      copy_wait<Layout::kStages - 2>();
      // Warps that share the keys read only what they copied themselves.
      if (row_warps == 1) __syncwarp(); else __syncthreads();
      copy_next(stage == 0 ? Layout::kStages - 1 : stage - 1);
      multiply(at, stage, mine);
      fresh = at.tile + 1 == at.stop;
      if (fresh) finish(at, share, begins, stage, mine), leave_join(at, share, begins);
      at.advance(p.batch, first_row);
    }
  }
};

template <typename T, int D>
__global__ void __launch_bounds__(kDecodeThreads, DecodeLayout<D>::kBlocks)
    decode_attention_kernel(const __grid_constant__ DecodeParams<T> p) {
  extern __shared__ uint4 shared[];
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  DecodeBlock<T, D> block(p, reinterpret_cast<T*>(shared));
  const int slot = blockIdx.y, chunks = gridDim.x / p.attention.num_kv_heads;
  if (p.parts.joins && threadIdx.x == 0 && block.kv_head == 0) {
    p.parts.joins[slot * chunks + block.first_row / kDecodeRows] = make_int2(-1, 0);
  }
  block.run(decode_share(p.batch, slot, block.first_row));
  // Rows past the last sequence are zeros.
  const int64_t width = p.attention.num_heads * p.attention.head_dim;
  const int64_t blocks = gridDim.x * gridDim.y, first = slot * gridDim.x + blockIdx.x;
  for (int64_t row = p.batch.query_start[p.batch.num_seqs] + first; row < p.num_tokens; row += blocks) {
    for (int64_t i = threadIdx.x; i < width; i += kDecodeThreads) p.attention.out[row * width + i] = from_float<T>(0.0f);
  }
}

// Joins the parts of the sequences that were cut; the grid is (columns, slots, rows or fewer). The warps take the parts in
// turn.
template <typename T>
__global__ void __launch_bounds__(kDecodeThreads) decode_join_kernel(const __grid_constant__ DecodeParams<T> p) {
  __shared__ float4 sums[kDecodeWarps][64];
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  const int columns = gridDim.x, column = blockIdx.x, slot = blockIdx.y;
  const int num_kv_heads = static_cast<int>(p.attention.num_kv_heads), head_dim = static_cast<int>(p.attention.head_dim);
  const int kv_head = column % num_kv_heads, chunk = column / num_kv_heads;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int2 join = p.parts.joins[slot * (columns / num_kv_heads) + chunk];
  if (join.x < 0) return;
  const int query = p.batch.query_start[join.x];
  const int pairs = (p.batch.query_start[join.x + 1] - query) * p.batch.group;
  const auto part = [&](int i) { return p.parts.index(slot + i, i == 0, columns, column); };
  for (int row = blockIdx.z; row < min(pairs - chunk * kDecodeRows, kDecodeRows); row += gridDim.z) {
    float top = -INFINITY, total = 0;
    for (int i = lane; i < join.y; i += kWarp) top = fmaxf(top, p.parts.logs[part(i) + row]);
    for (int step = kWarp / 2; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
    for (int i = lane; i < join.y; i += kWarp) total += exp2_approx(p.parts.logs[part(i) + row] - top);
    total = warp_sum(total);
    for (int d = lane * 4; d < head_dim; d += kWarp * 4) {
      float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 4
      for (int i = warp; i < join.y; i += kDecodeWarps) {
        const float weight = exp2_approx(p.parts.logs[part(i) + row] - top);
        const float4 x = *reinterpret_cast<const float4*>(p.parts.sums + (part(i) + row) * head_dim + d);
        sum.x += weight * x.x, sum.y += weight * x.y, sum.z += weight * x.z, sum.w += weight * x.w;
      }
      sums[warp][d / 4] = sum;
    }
    __syncthreads();
    const int pair = chunk * kDecodeRows + row;
    const int64_t token = query + pair / p.batch.group, head = static_cast<int64_t>(kv_head) * p.batch.group + pair % p.batch.group;
    T* out = p.attention.out + (token * p.attention.num_heads + head) * head_dim;
    for (int d = threadIdx.x; d < head_dim; d += kDecodeThreads) {
      float sum = 0;
      for (int w = 0; w < kDecodeWarps; ++w) sum += reinterpret_cast<const float*>(sums[w])[d];
      out[d] = from_float<T>(sum / total);
    }
    __syncthreads();
  }
}

}  // namespace raylm::cuda
