// Paged attention for sequences with few queries: decode, and the checking of speculated tokens. K and V are read once
// for all query heads of a group and all query tokens. The keys are split over the blocks of the grid, as in
// Flash-Decoding (arXiv:2311.01282); decode_schedule.cuh says how. The last block to bring its part of a sequence that was
// cut joins them all, in the order of the keys: which block that is changes nothing. In a block, each warp copies 16 keys
// of a tile of 64 into shared memory, ahead of their use and across sequences; the softmax is kept up to date as keys pass
// by (arXiv:1805.02867). The products on tensor cores are transposed, keys x queries and head x queries: so 8 rows of
// queries are the least that is multiplied, where the other way round it would be 16. decode_fragments.cuh says how
// numbers or codes of the cache get there.
#pragma once

#include "raylm/cuda/decode_copies.cuh"
#include "raylm/cuda/decode_fragments.cuh"
#include "raylm/cuda/ptx/grid.cuh"
#include "raylm/cuda/ptx/math.cuh"
#include "raylm/cuda/ptx/matrix.cuh"

namespace raylm::cuda {

// The rows of a warp. Of the softmax and the sums, a lane has rows n * 8 + lane % 4 * 2 and the next.
template <int D, int N>
struct DecodeRows {
  using Queries = uint32_t[D / 16][N][2];
  Queries q;
  float sum[D / 16][N][4];
  float top[N][2], total[N][2];
};

// One block's work. `warp` copies keys for all; it multiplies for row tile `row_tile` and the keys of every
// `key_warps`-th warp from `key_warp` on: with few rows the warps share the keys, with more they share the rows.
template <typename T, typename C, int D, int N, bool Biased, DecodePart Part, bool Boxes>
struct DecodeBlock {
  using Cursor = DecodeCursor<Part>;
  using Share = DecodeShare<Part>;
  using Layout = DecodeLayout<C, D, N, Boxes>;
  using Copies = DecodeCopies<T, C, D, N, Part, Boxes>;
  using Rows = DecodeRows<D, N>;
  using Fragments = DecodeFragments<T, C>;
  using Number = typename Fragments::Number;
  static constexpr int kRowTile = N * 8;
  // Whether the next sequence's queries come while the last keys of the one before it are multiplied: heads of 64 have too few
  // registers, and what follows a prefix too many keys for it.
  static constexpr bool kPreloads = N == 1 && D == 128 && Part == DecodePart::kAll;
  using Queries = typename Rows::Queries;
  const DecodeParams<T, Part, Boxes>& p;
  int lane, warp, column, columns, kv_head, first_row;
  Copies copies;
  int rows, row_warps, row_tile, key_warps, key_warp;

  __device__ DecodeBlock(const DecodeParams<T, Part, Boxes>& params, unsigned char* shared, uint32_t barriers)
      : p(params), lane(threadIdx.x % kWarp), warp(threadIdx.x / kWarp), column(blockIdx.x), columns(gridDim.x),
        kv_head(column % static_cast<int>(p.attention.num_kv_heads)),
        first_row(column / static_cast<int>(p.attention.num_kv_heads) * Layout::kRows),
        copies{p, shared + -shared_address(shared) % Layout::kAlign, barriers, kv_head, lane, warp} {}

  __device__ int rows_of(const DecodeSequence& now) const {
    return min(now.num_queries * p.batch.group - first_row, Layout::kRows);
  }

  __device__ const T* query(const DecodeSequence& now, int row) const {
    const int pair = first_row + row;
    int token = now.query + pair / p.batch.group;
    if constexpr (Part == DecodePart::kPrefixes) token = p.batch.query_start[p.batch.prefixes.members[token]];
    const int64_t head = static_cast<int64_t>(kv_head) * p.batch.group + pair % p.batch.group;
    return p.attention.q + token * p.attention.q_token_stride + head * p.attention.q_head_stride;
  }

  // The queries of a sequence that the copies have just reached, towards this multiprocessor.
  __device__ void prefetch_queries(const DecodeSequence& now) const {
    const int lines = (static_cast<int>(p.attention.head_dim) * 2 + 127) / 128, count = rows_of(now) * lines;
    for (int i = threadIdx.x; i < count; i += kDecodeThreads) prefetch(query(now, i / lines) + i % lines * 64);
  }

  // How many tiles of rows the warps share.
  __device__ int row_warps_of(const DecodeSequence& now) const {
    const int count = rows_of(now);
    return count <= kRowTile ? 1 : count <= 2 * kRowTile ? 2 : 4;
  }

  __device__ void load_queries(const DecodeSequence& now, Queries& queries) const {
    const int count = rows_of(now), first = warp % row_warps_of(now) * kRowTile;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const int row = first + n * 8 + lane / 4;
      // Where a prefix has no such row, there is no member to look up.
      const bool absent = Part == DecodePart::kPrefixes && row >= count;
      const T* q = query(now, absent ? 0 : row) + Fragments::query_offset(lane);
      const int head_dim = row < count ? static_cast<int>(p.attention.head_dim) : 0;
#pragma unroll
      for (int i = 0; i < D / 16; ++i) {
        const uint2 pairs = Fragments::query(q, head_dim, i);
        queries[i][n][0] = pairs.x, queries[i][n][1] = pairs.y;
      }
    }
  }

  __device__ void begin(const DecodeSequence& now, Rows& mine) {
    rows = rows_of(now);
    row_warps = row_warps_of(now);
    key_warps = kDecodeWarps / row_warps;
    row_tile = warp % row_warps;
    key_warp = warp / row_warps;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < D / 16 * 4; ++i) mine.sum[i / 4][n][i % 4] = 0;
      for (int r = 0; r < 2; ++r) mine.top[n][r] = -INFINITY, mine.total[n][r] = 0;
    }
  }

  // Of element i of a lane's scores: its row, and the key after the first of the 16.
  __device__ int row_of(int i) const { return first_row + row_tile * kRowTile + i / 4 * 8 + lane % 4 * 2 + i % 2; }
  __device__ int key_of(int i) const { return i % 4 / 2 * 8 + lane / 4; }

  // Adds to each score its head's slope times how far the key is before the query: linear biases (arXiv:2108.12409).
  __device__ void add_biases(int key, const DecodeSequence& now, float (&s)[N][4]) const {
#pragma unroll
    for (int i = 0; i < N * 4; ++i) {
      const int pair = row_of(i), position = now.high - now.num_queries + pair / p.batch.group;
      const float slope = p.alibi_slopes[kv_head * p.batch.group + pair % p.batch.group] * kLog2E;
      s[i / 4][i % 4] += slope * static_cast<float>(key + key_of(i) - position);
    }
  }

  // The scores of 16 keys, to base 2: scaled, capped, biased, and -inf where a row does not see the key. A lane gets
  // keys lane / 4 and + 8 of its rows.
  __device__ void score(uint32_t k, int key, const DecodeSequence& now, const Rows& mine, int active,
                        float (&s)[N][4]) const {
    float odd[N][4] = {};  // two chains of products are twice as fast as one
    Fragments::template for_keys<D, typename Layout::Places>(k, lane, [&](int i, const uint32_t(&a)[4]) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        if (n < active) multiply_add<Number>(N == 1 && i % 2 ? odd[n] : s[n], a, mine.q[i][n][0], mine.q[i][n][1]);
      }
    });
    const float cap = p.attention.soft_cap, scale = p.attention.scale * kLog2E * (cap > 0 ? 2 / cap : 1);
#pragma unroll
    for (int i = 0; i < N * 4; ++i) {
      float& x = s[i / 4][i % 4];
      x = (x + odd[i / 4][i % 4]) * scale;
      if (cap > 0) x = cap * kLog2E * (1 - __fdividef(2.0f, exp2_approx(x) + 1));  // tanh
    }
    if constexpr (Biased) add_biases(key, now, s);
    if constexpr (Part != DecodePart::kPrefixes) hide_unseen(key, now, s);
  }

  __device__ void hide_unseen(int key, const DecodeSequence& now, float (&s)[N][4]) const {
    const int window = p.batch.window > 0 ? p.batch.window : now.high;
    const bool all = key + 16 <= now.high - now.num_queries + 1 && key > now.high - 1 - window;
    if (all) return;
#pragma unroll
    for (int i = 0; i < N * 4; ++i) {
      const int at = key + key_of(i), position = now.high - now.num_queries + row_of(i) / p.batch.group;
      if (at > position || at <= position - window) s[i / 4][i % 4] = -INFINITY;
    }
  }

  // The softmax's step: scores become weights, as the right-hand side of the next product. The maximum that they are
  // relative to is raised only where a score is far above it: weights up to 2 ^ kSlack do as well as weights up to 1.
  __device__ void weigh(const float (&s)[N][4], Rows& mine, uint32_t (&weights)[N][2]) const {
    constexpr float kSlack = 8;
    bool above = false;
#pragma unroll
    for (int i = 0; i < N * 4; ++i) above = above || s[i / 4][i % 4] > mine.top[i / 4][i % 2] + kSlack;
    if (__any_sync(kAllLanes, above)) raise_tops(s, mine);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      float w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        w[i] = exp2_approx(s[n][i] - (mine.top[n][i % 2] == -INFINITY ? 0 : mine.top[n][i % 2]));
        mine.total[n][i % 2] += w[i];
      }
      weights[n][0] = transpose(pack<Number>(w[0], w[1]));
      weights[n][1] = transpose(pack<Number>(w[2], w[3]));
    }
  }

  __device__ void raise_tops(const float (&s)[N][4], Rows& mine) const {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      float shrink[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float top = fmaxf(s[n][r], s[n][2 + r]);
        for (int step = 4; step < kWarp; step *= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));
        top = fmaxf(top, mine.top[n][r]);
        shrink[r] = top == -INFINITY ? 0 : exp2_approx(mine.top[n][r] - top);
        mine.top[n][r] = top;
        mine.total[n][r] *= shrink[r];
      }
#pragma unroll
      for (int i = 0; i < D / 16 * 4; ++i) mine.sum[i / 4][n][i % 4] *= shrink[i % 2];
    }
  }

  __device__ void attend(uint32_t k, int key, const DecodeSequence& now, Rows& mine) const {
    // Of the N groups of 8 rows. A prefix fills nearly all, so all are computed: sums of missing rows are not stored.
    const int active = Part == DecodePart::kPrefixes ? N : (rows - row_tile * kRowTile + 7) / 8;
    float s[N][4] = {};
    uint32_t weights[N][2];
    score(k, key, now, mine, active, s);
    weigh(s, mine, weights);
    Fragments::template for_values<D, typename Layout::Places>(k + Layout::kTensor, lane, [&](int i, const uint32_t(&a)[4]) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        if (n < active) multiply_add<Number>(mine.sum[i][n], a, weights[n][0], weights[n][1]);
      }
    });
  }

  __device__ void multiply(const Cursor& at, int stage, Rows& mine) const {
    if (row_tile * kRowTile >= rows) return;
    for (int w = key_warp; w < kDecodeWarps; w += key_warps) {
      if (at.unit + w < at.stop) attend(shared_address(copies.part(stage, w)), (at.unit + w) * kDecodeKeys, at.now, mine);
    }
  }

  // Joins what the warps have of each row, and writes it: to `out`, or to the parts. The stage just used is free until
  // the next copy; a warp's part of it has room for the sums of 8 * kPass rows.
  __device__ void finish(const Cursor& at, bool begins, int stage, Rows& mine) {
    if constexpr (Part == DecodePart::kPrefixes) {
      if (row_warps == kDecodeWarps) return store_rows(at, begins, mine);
    } else if constexpr (Part == DecodePart::kRest) {
      wait_for_dependencies();
    }
    __shared__ float tops[kDecodeWarps][kRowTile], totals[kDecodeWarps][kRowTile];
    constexpr int kPass = Layout::kPass;
#pragma unroll
    for (int i = 0; i < N * 2; ++i) {
      float total = mine.total[i / 2][i % 2];
      for (int step = 4; step < kWarp; step *= 2) total += __shfl_xor_sync(kAllLanes, total, step);
      const int row = i / 2 * 8 + lane % 4 * 2 + i % 2;
      if (lane < 4) tops[warp][row] = mine.top[i / 2][i % 2], totals[warp][row] = total;
    }
#pragma unroll
    for (int pass = 0; pass < N; pass += kPass) {
      // Until no warp reads keys from another one's part.
      if (pass > 0 || row_warps > 1) __syncthreads(); else __syncwarp();
      float* sums = reinterpret_cast<float*>(copies.part(stage, warp)) + lane % 4 * 2 * Layout::kSumPitch;
#pragma unroll
      for (int i = 0; i < D / 16 * kPass * 4; ++i) {
        const int n = i / 4 % kPass, d = i / 4 / kPass * 16 + Fragments::element(lane, i % 4 / 2);
        sums[(n * 8 + i % 2) * Layout::kSumPitch + d] = mine.sum[i / 4 / kPass][pass + n][i % 4];
      }
      __syncthreads();
      join_warps(at, begins, stage, pass * 8, kPass * 8, tops, totals);
    }
    if constexpr (Boxes) fence_shared_writes();
    __syncthreads();
  }

  // Where each warp has rows of its own, there is nothing to join.
  __device__ void store_rows(const Cursor& at, bool begins, const Rows& mine) const {
    const bool complete = begins && at.stop == at.now.last();
    const int64_t parts = p.parts.index(blockIdx.y, begins, columns, column);
#pragma unroll
    for (int i = 0; i < N * 2; ++i) {
      float total = mine.total[i / 2][i % 2];
      for (int step = 4; step < kWarp; step *= 2) total += __shfl_xor_sync(kAllLanes, total, step);
      const int row = row_tile * kRowTile + i / 2 * 8 + lane % 4 * 2 + i % 2;
      if (row >= rows) continue;
      const int64_t to = complete ? of_whole_prefix(at, row) : parts + row;
      const float over = total > 0 ? p.attention.v_scale / total : 0;
#pragma unroll
      for (int e = 0; e < D / 16 * 2; ++e) {
        const int d = e / 2 * 16 + Fragments::element(lane, e % 2);
        const float sum = mine.sum[e / 2][i / 2][e % 2 * 2 + i % 2] * over;
        if (d < p.attention.head_dim) p.parts.sums[to * p.attention.head_dim + d] = sum;
      }
      if (lane < 4) p.parts.logs[to] = total > 0 ? mine.top[i / 2][i % 2] + log2f(total) : -INFINITY;
    }
    __syncthreads();  // before the next copies
  }

  // Where a member's row is of a prefix that was not cut.
  __device__ int64_t of_whole_prefix(const Cursor& at, int row) const {
    const int seq = p.batch.prefixes.members[at.now.query + (first_row + row) / p.batch.group];
    return p.prefixes.whole + seq * p.attention.num_heads + head_of(row);
  }

  // Rows from `first` on, `count` of them, of every row tile.
  __device__ void join_warps(const Cursor& at, bool begins, int stage, int first, int count,
                             const float (*tops)[kRowTile], const float (*totals)[kRowTile]) const {
    const bool complete = begins && at.stop == at.now.last();
    const int64_t to = complete ? 0 : p.parts.index(blockIdx.y, begins, columns, column);
    const bool final = complete && !is_partial(at);
    for (int i = threadIdx.x; i < row_warps * count * (D / 4); i += kDecodeThreads) {
      const int tile = i / (D / 4) / count, r = i / (D / 4) % count, d = i % (D / 4) * 4;
      const int row = tile * kRowTile + first + r;
      if (d >= p.attention.head_dim || row >= rows) continue;
      float top = -INFINITY, total = 0;
      float4 sum = make_float4(0, 0, 0, 0);
      for (int w = tile; w < kDecodeWarps; w += row_warps) top = fmaxf(top, tops[w][first + r]);
      for (int w = tile; w < kDecodeWarps && top > -INFINITY; w += row_warps) {
        const float weight = exp2_approx(tops[w][first + r] - top);
        const float* from = reinterpret_cast<const float*>(copies.part(stage, w)) + r * Layout::kSumPitch + d;
        const float4 x = *reinterpret_cast<const float4*>(from);
        total += weight * totals[w][first + r];
        sum.x += weight * x.x, sum.y += weight * x.y, sum.z += weight * x.z, sum.w += weight * x.w;
      }
      const float beside = final ? sink_weight(p.attention, head_of(row), top) : 0;
      const float over = total > 0 ? p.attention.v_scale / (total + beside) : 0;
      sum.x *= over, sum.y *= over, sum.z *= over, sum.w *= over;
      const auto log = [&] { return total > 0 ? top + log2f(total) : -INFINITY; };
      if (final) {
        write(at.now, row, d, sum);
      } else if (complete) {
        settle(at, row, d, log(), sum);
      } else {
        store_part(to + row, d, log(), sum);
      }
    }
  }

  __device__ void store_part(int64_t to, int d, float log, const float4& sum) const {
    *reinterpret_cast<float4*>(p.parts.sums + to * p.attention.head_dim + d) = sum;
    if (d == 0) p.parts.logs[to] = log;
  }

  // A row's results from all keys that the launch has for it, where these are not all that there are.
  __device__ void settle(const Cursor& at, int row, int d, float log, const float4& sum) const {
    if constexpr (Part == DecodePart::kPrefixes) {
      store_part(of_whole_prefix(at, row), d, log, sum);
    } else if constexpr (Part == DecodePart::kRest) {
      write(at.now, row, d, join_prefix(at, row, d, log, sum));
    }
  }

  __device__ int64_t head_of(int row) const {
    return static_cast<int64_t>(kv_head) * p.batch.group + (first_row + row) % p.batch.group;
  }

  __device__ void write(const DecodeSequence& now, int row, int d, const float4& sum) const {
    const int token = now.query + (first_row + row) / p.batch.group;
    T* out = p.attention.out + (token * p.attention.num_heads + head_of(row)) * p.attention.head_dim + d;
    *reinterpret_cast<uint2*>(out) = make_uint2(pack<T>(sum.x, sum.y), pack<T>(sum.z, sum.w));
  }

  // Whether its results are not final: they are a prefix's, or those of a sequence that has one.
  __device__ bool is_partial(const Cursor& at) const {
    return Part == DecodePart::kPrefixes || (Part == DecodePart::kRest && at.now.low > 0);
  }

  // Tells the members of a prefix where its sums are.
  __device__ void place_members(const Cursor& at, const Share& share) const {
    if (kv_head != 0 || static_cast<int>(threadIdx.x) >= at.now.num_queries) return;
    const int2 slots = at.stop == at.now.last() ? make_int2(0, 1) : slots_of(at, share);
    const int seq = p.batch.prefixes.members[at.now.query + threadIdx.x], chunk = first_row / Layout::kRows;
    p.prefixes.places[chunk * p.batch.num_seqs + seq] = {slots.x, slots.y, static_cast<int>(threadIdx.x)};
  }

  // The results of a row's own keys, with those of its sequence's prefix.
  __device__ float4 join_prefix(const Cursor& at, int row, int d, float log, const float4& sum) const {
    using Join = DecodeJoin<D, N>;
    const PrefixSums& prefix = p.prefixes;
    const int of_all = prefix.places[at.seq].member * p.batch.group + first_row + row;
    const int chunk = of_all / prefix.parts.rows, of_chunk = of_all % prefix.parts.rows;
    const PrefixSums::Place place = prefix.places[chunk * p.batch.num_seqs + at.seq];
    const int in = kv_head + chunk * static_cast<int>(p.attention.num_kv_heads);
    Join join;
    for (int first = -1; first < place.slots; first += Join::kBatch) {  // -1: its own
      float logs[Join::kBatch];
      float4 sums[Join::kBatch];
#pragma unroll
      for (int i = 0; i < Join::kBatch; ++i) {
        const int part = first + i;
        const int64_t from = place.slots == 1 ? prefix.whole + at.seq * p.attention.num_heads + head_of(row)
                                              : prefix.parts.index(place.slot + part, part == 0, prefix.columns, in) + of_chunk;
        const bool read = part >= 0 && part < place.slots;
        logs[i] = part < 0 ? log : read ? prefix.parts.logs[from] : -INFINITY;
        const float4* other = reinterpret_cast<const float4*>(prefix.parts.sums + from * p.attention.head_dim + d);
        sums[i] = part < 0 ? sum : read ? *other : make_float4(0, 0, 0, 0);
      }
      join.add(logs, sums);
    }
    return join.result(sink_weight(p.attention, head_of(row), join.top));
  }

  // The slots that have the sequence's parts: the first one, and how many. (A sequence begins in the slot that its first
  // unit is in.)
  __device__ static int2 slots_of(const Cursor& at, const Share& share) {
    const int first = at.start / share.size;
    return make_int2(first, (at.start + at.now.units() - 1) / share.size - first + 1);
  }

  // Whether this block is the last to have brought its part; what the others wrote can be read then. The counter is left
  // as it was found.
  __device__ bool is_last(int2 slots) const {
    __shared__ bool last;
    if (threadIdx.x == 0) {
      unsigned* arrivals = p.parts.arrivals + slots.x * columns + column;
      __threadfence();
      last = atomicAdd(arrivals, 1) + 1 == slots.y;
      if (last) *arrivals = 0;
      __threadfence();
    }
    __syncthreads();
    return last;
  }

  // Rows go to teams of as many threads as take a row at once.
  __device__ void join_parts(const Cursor& at, const Share& share) const {
    using Join = DecodeJoin<D, N>;
    const int2 slots = slots_of(at, share);
    if (!is_last(slots)) return;
    const int thread = threadIdx.x % Join::kThreads;
    for (int row = threadIdx.x / Join::kThreads; row < rows; row += kDecodeThreads / Join::kThreads) {
      Join join;
      for (int first = 0; first < slots.y; first += Join::kBatch) {
        float logs[Join::kBatch];
        float4 sums[Join::kBatch];
#pragma unroll
        for (int i = 0; i < Join::kBatch; ++i) {
          const int part = first + i;
          const int64_t from = p.parts.index(slots.x + part, part == 0, columns, column) + row;
          const bool read = part < slots.y && thread * 4 < p.attention.head_dim;
          logs[i] = part < slots.y ? __ldcg(p.parts.logs + from) : -INFINITY;
          const float4* sum = reinterpret_cast<const float4*>(p.parts.sums + from * p.attention.head_dim) + thread;
          sums[i] = read ? __ldcg(sum) : make_float4(0, 0, 0, 0);
        }
        join.add(logs, sums);
      }
      if (thread * 4 >= p.attention.head_dim) continue;
      if (is_partial(at)) {
        const float log = join.top + log2f(join.total);
        settle(at, row, thread * 4, log, join.result(0));
      } else {
        write(at.now, row, thread * 4, join.result(sink_weight(p.attention, head_of(row), join.top)));
      }
    }
  }

  __device__ void run(const Share& share) {
    const int depth = Layout::stages(p.deep);
    Cursor ahead = share.cursor, at = share.cursor;
    int block = copies.cache_block(ahead);
    if constexpr (Part == DecodePart::kAll) {
      if (p.early) wait_for_dependencies();
    }
    const auto copy_next = [&](int stage) {
      if (!ahead.done()) {
        copies.start(ahead, block, stage);
        const int seq = ahead.seq;
        ahead.advance(p.batch, first_row);
        block = copies.cache_block(ahead);
        if (!kPreloads && ahead.seq > seq) prefetch_queries(ahead.now);
      }
      copies.commit();
    };
    for (int i = 0; i < depth - 1; ++i) copy_next(i);
    Rows mine;
    Queries queries;
    if (kPreloads && !at.done()) load_queries(at.now, queries);
    bool fresh = true, begins = false;
    for (int stage = 0, parity = 0; !at.done(); ++stage) {
      if (stage == depth) stage = 0, parity ^= 1;
      if (fresh) {
        begin(at.now, mine);
        begins = at.unit == at.now.first();
        if constexpr (kPreloads) {
          memcpy(mine.q, queries, sizeof(queries));
        } else {
          load_queries(at.now, mine.q);
        }
      }
      if constexpr (Part == DecodePart::kPrefixes) {
        if (fresh && begins) place_members(at, share);
      }
      copies.wait(at, stage, parity);
      // Warps that share the keys read only what they copied themselves.
      if (row_warps == 1) __syncwarp(); else __syncthreads();
      copy_next(stage == 0 ? depth - 1 : stage - 1);
      fresh = at.last_tile();
      Cursor next = at;
      next.advance(p.batch, first_row);
      if (kPreloads && fresh && !next.done()) load_queries(next.now, queries);
      multiply(at, stage, mine);
      if (fresh) finish(at, begins, stage, mine);
      if constexpr (Part != DecodePart::kPrefixes) {
        if (fresh && !(begins && at.stop == at.now.last())) join_parts(at, share);
      }
      at = next;
    }
  }
};

template <typename T, typename C, int D, int N, bool Biased, DecodePart Part, bool Boxes>
__device__ __forceinline__ void decode_attention_block(const DecodeParams<T, Part, Boxes>& p) {
  using Block = DecodeBlock<T, C, D, N, Biased, Part, Boxes>;
  extern __shared__ uint4 stages[];
  __shared__ uint64_t barriers[Block::Copies::kBarriers];
  Block block(p, reinterpret_cast<unsigned char*>(stages), shared_address(barriers));
  if constexpr (Boxes) {
    if (threadIdx.x == 0) block.copies.init_barriers();  // decode_share lets the others wait
  }
  // The launch of what follows prefixes starts when every block of theirs has waited, so when all before them has ended. It
  // waits only before it reads their sums.
  if constexpr (Part == DecodePart::kPrefixes) wait_for_dependencies();
  start_dependents();
  if constexpr (Part == DecodePart::kAll) {
    if (!p.early) wait_for_dependencies();
  }
  block.run(decode_share(p.batch, blockIdx.y, block.first_row));
  if constexpr (Part == DecodePart::kPrefixes) return;
  if constexpr (Part == DecodePart::kRest) wait_for_dependencies();
  // Rows past the last sequence are zeros.
  const int64_t width = p.attention.num_heads * p.attention.head_dim;
  const int64_t blocks = gridDim.x * gridDim.y, first = blockIdx.y * gridDim.x + blockIdx.x;
  for (int64_t row = p.batch.query_start[p.batch.num_seqs] + first; row < p.num_tokens; row += blocks) {
    T* out = p.attention.out + row * width;
    for (int64_t i = threadIdx.x; i < width; i += kDecodeThreads) out[i] = from_float<T>(0.0f);
  }
}

template <typename T, typename C, int D, int N, bool Biased, DecodePart Part, bool Boxes>
__global__ void __launch_bounds__(kDecodeThreads, DecodeLayout<C, D, N, Boxes>::kBlocks)
    decode_attention_kernel(const __grid_constant__ DecodeParams<T, Part, Boxes> p) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr bool kCompiled = true;
#else
  constexpr bool kCompiled = !Boxes;
#endif
  if constexpr (kCompiled) decode_attention_block<T, C, D, N, Biased, Part, Boxes>(p);
}

}  // namespace raylm::cuda
