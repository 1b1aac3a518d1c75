// All layers of a decode step of up to four rows in one kernel, for models of the usual kind (norm, attention with
// rotary embedding, norm, gated MLP), and of one row where a mixture of experts stands for the MLP: so that nothing waits
// for a kernel to end and the next one to begin.
//
// One block lives on each multiprocessor, and all go through the phases of a layer together: q, k and v; attention; o;
// gate and up; down. What a block will read of weights and of the cache's older keys and values depends on no result,
// but for experts' weights: some of its warps fetch it (few_fetcher.cuh), into a ring for each warp that computes
// (few_reader.cuh), across the end of a phase into the next ones. A mixture has its router's product before the
// experts'; from its logits each block finds by itself who they are, and what they give is weighted where it is
// activated, as down is linear.
// Of a model that is split over tensor ranks, o's and down's outputs are summed over them (few_ranks.cuh).
//
// Results pass between the blocks in cells that say of which layer they are (ptx/cell.cuh), so nobody waits for a
// barrier, only for what it reads. Each phase has cells of its own, the same for every layer: whoever reads some
// contributes to what must be there before they are written again.
//
// The products are as those of skinny_linear.cuh: x in shared memory, W read once, k shared out among warps whose sums
// are added in their order. Codes and patches are the left operand there, numbers the right one. Weights may be codes of
// 8 bits with a scale a row: rows of x are halves then, of which none is rounded but to these. That a whole model fits one
// persistent kernel is an old idea (Hazy Research, "Look Ma, No Bubbles!", 2025); here the order is fixed, so there are no
// tasks to interpret.
#pragma once

#include "raylm/cuda/few_attention.cuh"
#include "raylm/cuda/few_fetcher.cuh"
#include "raylm/cuda/few_ranks.cuh"
#include "raylm/cuda/order.cuh"

namespace raylm::cuda {

template <typename N, typename E, int D>
class FewBlock {
 public:
  using T = typename N::Result;
  using Reader = FewReader<N, E, D>;
  static constexpr bool kMixture = kHasExperts<E>;

  __device__ FewBlock(const FewLayersArgs<T>& args, const FewColumn& column, Reader& reader, FewRouted& routed,
                      FewAttentionShared<T, D>& shared, char* x)
      : args_(args), column_(column), reader_(reader), routed_(routed), attention_(args, column, reader, shared),
        ranks_(args.peers, kFewRows * args.hidden / 2), x_(x),
        norm_(reinterpret_cast<T*>(x + args.x_bytes)),
        meeting_(reinterpret_cast<float*>(x + args.x_bytes + args.norm_bytes())),
        squares_(meeting_ + kFewWarps * kFewWarps * sums()), lane_(threadIdx.x % kWarp),
        warp_(threadIdx.x / kWarp) {}

  __device__ void run() {
    // Cells that are not of this launch have other stamps, but for those of 2^32 layers ago.
    stamp_ = args_.launches[1] * args_.num_layers;
#pragma unroll 1
    for (int layer = 0; layer < args_.num_layers; ++layer) {
      ++stamp_;
      ranks_.begin_layer();
#pragma unroll 1
      for (int phase = kFewQkv; phase < kFewPhases; phase = next_phase<E>(phase)) {
        if (phase == kFewAttention) {
          if (column_.works) attention_.run(args_.layers[layer], stamp_);
        } else {
          for_product<N, E>(phase, [&](auto w) { multiply<decltype(w)>(layer, phase); });
        }
      }
    }
    leave();
  }

 private:
  // The last block to end counts the launch.
  __device__ void leave() const {
    if (threadIdx.x != 0 || atomicAdd(args_.launches, 1) + 1 < gridDim.x) return;
    args_.launches[0] = 0, ++args_.launches[1];
    ranks_.count(args_.num_layers);
  }

  template <typename W>
  __device__ FewTeam team_of(int phase, int warp) const {
    return FewTeam(W{}, args_.products[phase].k, warp, reversed_in<E>(phase));
  }

  // Whether some tiles of it are this block's.
  template <typename W>
  __device__ bool has_tiles(int phase) const {
    return team_of<W>(phase, 0).first_tile < args_.products[phase].tiles;
  }

  // W, here and below: what the phase's weights hold.
  template <typename W>
  __device__ void multiply(int layer, int phase) {
    const FewProduct& product = args_.products[phase];
    const bool works = has_tiles<W>(phase);
    if (works) prepare<W>(layer, phase, product);
    if constexpr (kMixture) {
      if (phase == kFewGateUp && (works || has_tiles<W>(kFewDown))) route();
    }
    if (!works) return;
    multiply_tiles<W>(layer, phase, product);
    sync_some(0, kFewThreads);  // x has been read
  }

  // Puts the product's rows into shared memory.
  template <typename W>
  __device__ void prepare(int layer, int phase, const FewProduct& product) {
    const bool norms = phase == kFewQkv || phase == kFewRouter || phase == kFewGateUp;
    if (norms) fetch_norm(phase == kFewQkv ? args_.layers[layer].attention_norm : args_.layers[layer].mlp_norm);
    if (phase == kFewQkv) {
      copy<W>(layer == 0 ? nullptr : args_.cells[kFewDown], product.k, stamp_ - 1, norms);
    } else {
      copy<W>(args_.cells[phase == kFewGateUp ? kFewO : phase - 1], product.k, stamp_, norms);
    }
    if (norms) norm<W>();
  }

  // Finds the experts of the layer's token from the router's logits: a thread an expert counts those that come before it.
  __device__ void route() {
    static_assert(kFewExperts <= kFewThreads && 2 * kFewExperts <= kFewWarps * kFewWarps * few_sums<N>(1));
    const int experts = args_.mixture.experts, own = threadIdx.x;
    auto* const keys = reinterpret_cast<uint32_t*>(meeting_);
    float* const logits = meeting_ + kFewExperts;
    if (own < experts) {
      const uint2 four = await_cells(args_.cells[kFewRouter] + own / 4 * 2, stamp_);
      const float2 two = unpack<T>(own / 2 % 2 ? four.y : four.x);
      logits[own] = own % 2 ? two.y : two.x;
      keys[own] = image_of(logits[own]);
    }
    sync_some(0, kFewThreads);
    if (own < experts) {
      const uint32_t mine = keys[own];
      int before = 0;
#pragma unroll 4
      for (int i = 0; i < experts; i += 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(keys + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32_t key = word_of(four, j);
          before += key > mine || (key == mine && i + j < own);
        }
      }
      if (before < args_.mixture.per_token) routed_.chosen[before] = own, routed_.weights[before] = logits[own];
    }
    sync_some(0, kFewThreads);
    if (warp_ == 0) {
      barrier_arrive_warp(shared_address(&routed_.known));
      weigh(logits);
    }
    sync_some(0, kFewThreads);
  }

  // The chosen experts' weights in place of their logits, by a warp.
  __device__ void weigh(const float* logits) const {
    const FewMixture& mixture = args_.mixture;
    const bool mine = lane_ < mixture.per_token;
    const float logit = mine ? routed_.weights[lane_] : 0.0f, most = __shfl_sync(kAllLanes, logit, 0);
    const float score = !mine ? 0.0f : mixture.sigmoid ? 1.0f / (1.0f + expf(-logit)) : expf(logit - most);
    float by = 1.0f;
    if (mixture.normalized) {
      by = warp_sum(score) + 1e-20f;
    } else if (!mixture.sigmoid) {
      by = 0;
      for (int i = lane_; i < mixture.experts; i += kWarp) by += expf(logits[i] - most);
      by = warp_sum(by);
    }
    if (mine) routed_.weights[lane_] = score / by * mixture.scale;
  }

  __device__ int sums() const { return few_sums<N>(args_.rows); }  // of experts no more
  template <typename W>
  __device__ int up_sums() const { return kInPatches<W> ? sums() / 2 : kSumsOfRow<W> / 2; }  // from gate's sums to up's
  __device__ T* x_row(int row, int pitch) const { return reinterpret_cast<T*>(x_ + row * pitch); }

  // Numbers as products take them. Halves are a 16th of what they stand for, so that they hold what bfloat16 may grow to.
  static constexpr float kShrink = 0.0625f;
  template <typename W>
  __device__ static uint2 taken(uint2 x) {
    if constexpr (!W::kScaled) return x;
    const float2 a = unpack<T>(x.x), b = unpack<T>(x.y);
    return make_uint2(pack<__half>(a.x * kShrink, a.y * kShrink), pack<__half>(b.x * kShrink, b.y * kShrink));
  }

  static constexpr int kStep = kFewThreads * 4;  // elements of a row that the block takes at once, 4 a thread

  // Rows of cells become x, once they are there; without cells, the rows that the layers are given. With `squares`, the
  // sum of the squares of this warp's elements of each row goes to squares_.
  template <typename W>
  __device__ void copy(const uint2* cells, int k, uint32_t stamp, bool squares) {
    constexpr int kBatch = 4, kBlock = few_block<W>();
    const int pitch = few_x_pitch<W>(k), end = (k + kBlock - 1) / kBlock * kBlock;
#pragma unroll 1
    for (int r = 0; r < args_.rows; ++r) {
      float sum = 0;
#pragma unroll 1
      for (int first = threadIdx.x * 4; first < end; first += kStep * kBatch) {
        const int64_t at = static_cast<int64_t>(r) * k + first;
        uint4 seen[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          if (cells && first + j * kStep < k) seen[j] = load_cells(cells + (at + j * kStep) / 2);
        }
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          const int i = first + j * kStep;
          if (i >= end) break;
          uint2 x = make_uint2(0, 0);
          if (i < k) {
            x = cells ? await_cells(cells + (at + j * kStep) / 2, stamp, seen[j])
                      : *reinterpret_cast<const uint2*>(args_.residual + at + j * kStep);
          }
          *reinterpret_cast<uint2*>(x_row(r, pitch) + i) = squares ? x : taken<W>(x);
          const float2 a = unpack<T>(x.x), b = unpack<T>(x.y);
          sum += a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y;
        }
      }
      if (!squares) continue;
      sum = warp_sum(sum);
      if (lane_ == 0) squares_[r * kFewWarps + warp_] = sum;
    }
    sync_some(0, kFewThreads);
  }

  // Called before the block waits for the rows that it norms, so that the weight is there when they are.
  __device__ void fetch_norm(const T* weight) const {
    for (int i = threadIdx.x * 8; i < args_.hidden; i += kFewThreads * 8) Vec<T>::load(weight + i).store(norm_ + i);
  }

  // Norms the rows of x.
  template <typename W>
  __device__ void norm() {
    const int pitch = few_x_pitch<W>(args_.hidden);
#pragma unroll 1
    for (int r = 0; r < args_.rows; ++r) {
      float squares = 0;
#pragma unroll
      for (int w = 0; w < kFewWarps; ++w) squares += squares_[r * kFewWarps + w];
      const float by = rsqrtf(squares / static_cast<float>(args_.hidden) + args_.eps);
#pragma unroll 1
      for (int i = threadIdx.x * 4; i < args_.hidden; i += kStep) {
        uint2* const x = reinterpret_cast<uint2*>(x_row(r, pitch) + i);
        const uint2 scale = *reinterpret_cast<const uint2*>(norm_ + i);
        *x = taken<W>(make_uint2(normed(x->x, by, scale.x), normed(x->y, by, scale.y)));
      }
    }
    sync_some(0, kFewThreads);
  }

  __device__ static uint32_t normed(uint32_t pair, float by, uint32_t weights) {
    const float2 x = unpack<T>(pair), scale = unpack<T>(weights);
    return pack<T>(x.x * by * scale.x, x.y * by * scale.y);
  }

  // What is added to a product's pair of outputs before they are rounded (a bias) or after (the residual stream). It is
  // asked for when a tile begins, and needed when it ends.
  struct Besides {
    uint4 seen{};
    const uint2* cells = nullptr;  // two of them
    bool odd;
    float2 scales[2];  // of two rows of codes, and of those of up
  };

  template <typename W>
  __device__ Besides ask_besides(int layer, int phase, int row, int column) const {
    Besides out;
    const T* plain = nullptr;
    const int64_t at = static_cast<int64_t>(row) * args_.hidden + column;
    if (phase == kFewQkv && args_.layers[layer].qkv_bias) plain = args_.layers[layer].qkv_bias + column;
    if (phase == kFewO && layer == 0) plain = args_.residual + at;
    out.odd = at / 2 % 2;
    if constexpr (W::kScaled) {
      const float* scales = args_.layers[layer].scales[phase] + column;
      out.scales[0] = *reinterpret_cast<const float2*>(scales);
      if (phase == kFewGateUp) out.scales[1] = *reinterpret_cast<const float2*>(scales + args_.products[phase].n / 2);
    }
    if (plain) {
      out.seen.x = out.seen.z = *reinterpret_cast<const uint32_t*>(plain);
    } else if (phase == kFewO || phase == kFewDown) {
      out.cells = args_.cells[phase == kFewO ? kFewDown : kFewO] + at / 4 * 2;
      out.seen = load_cells(out.cells);
    }
    return out;
  }

  __device__ float2 await_besides(const Besides& asked, int phase) const {
    uint2 both = make_uint2(asked.seen.x, asked.seen.z);
    if (asked.cells) both = await_cells(asked.cells, phase == kFewO ? stamp_ - 1 : stamp_, asked.seen);
    return unpack<T>(asked.odd ? both.y : both.x);
  }

  // x W^T for this block's tiles of W. Sums are rounded before they are added to the residual stream, and before the
  // activation, as the product alone would be.
  //
  // The warps of a team take turns to add and write a tile's sums; only the warp whose turn it is waits for the others.
  // Each turn has its own barrier and memory, used again after `split` tiles: by then every warp has had its turn, and
  // so has waited for the warp that read that memory.
  template <typename W>
  __device__ void multiply_tiles(int layer, int phase, const FewProduct& product) {
    const FewTeam team = team_of<W>(phase, warp_);
    const int pairs_log2 = kInPatches<W> ? 3 : (phase == kFewGateUp ? 1 : 2) + W::kScaled;
    const int row = lane_ >> pairs_log2, pair = lane_ & ((1 << pairs_log2) - 1);
    float* const meeting = meeting_ + team.index * team.split * team.split * sums();
    int turn = 0;
#pragma unroll 1
    for (int tile = team.first_tile; tile < product.tiles; tile += team.tile_step) {
      const bool writes = turn == team.warp && row < args_.rows;
      const int column = ((tile << pairs_log2) + pair) * 2;
      Besides besides;
      if (writes) besides = ask_besides<W>(layer, phase, row, column);
      float* const parts = meeting + turn * team.split * sums();
      sum_tile<W>(product.k, team, phase == kFewGateUp, parts + team.warp * sums());
      const int number = 1 + team.index * team.split + turn, threads = team.split * kWarp;
      if (turn == team.warp) {
        sync_some(number, threads);
        const float* own = parts + row * kSumsOfRow<W> + pair * 2;
        if (writes) write<W>(layer, phase, product, row, column, own, team.split, besides);
      } else {
        arrive_some(number, threads);
      }
      turn = (turn + 1) & (team.split - 1);
    }
  }

  template <typename W>
  static constexpr int kSumsOfRow = kInPatches<W> ? kPatchRows : W::kScaled ? kFewCodeRows : 8;  // beside each other

  // This warp's sums of a tile, as [row of x][row of W].
  template <typename W>
  __device__ void sum_tile(int k, const FewTeam& team, bool gated, float* to) {
    if constexpr (kInPatches<W>) {
      sum_patches<W>(k, team, gated, to);
    } else if constexpr (W::kScaled) {
      sum_codes<W>(k, team, to);
    } else {
      constexpr int kBlock = few_block<W>();
      const int x_rows[1] = {min(lane_ / 4, args_.rows - 1) * few_x_pitch<W>(k)};
      const char* const x = x_ + lane_ % 4 * 16;
      const int w_lane = lane_ / 4 * kSkinnyPitch + lane_ % 4 * 16;
      SkinnySums<W, 1, 1> sums;
      sums.clear();
#pragma unroll 1
      for (int at = team.warp * kBlock; at < k; at += team.split * kBlock) {
        sums.template add<true>(x + at * 2, x_rows, reader_.next() + w_lane, 0);
        Reader::Stage::order_writes();  // the copies', which other copies may follow
        reader_.release();
      }
      if (lane_ / 4 < kFewRows) sums.store(to);
    }
  }

  // The same of codes, in halves: of a gated product 8 rows of gate and those of up.
  template <typename W>
  __device__ void sum_codes(int k, const FewTeam& team, float* to) {
    constexpr int kBlock = few_block<W>();
    const int row = lane_ / 4, part = lane_ % 4;
    const char* const x = x_ + min(row, args_.rows - 1) * few_x_pitch<W>(k) + part * 32;
    float sums[2][4] = {};
#pragma unroll 1
    for (int at = team.warp * kBlock; at < k; at += team.split * kBlock) {
      const char* const codes = reader_.next();
#pragma unroll
      for (int i = 0; i < kBlock / 64; ++i) {
        const auto load = [](const char* from) { return *reinterpret_cast<const uint4*>(from); };
        const uint4 upper = load(codes + Reader::Stage::code_place(row, 4 * i + part));
        const uint4 lower = load(codes + Reader::Stage::code_place(row + 8, 4 * i + part));
        const uint4 of_x[2] = {load(x + (at + 64 * i) * 2), load(x + (at + 64 * i) * 2 + 16)};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32_t a = word_of(upper, j), b = word_of(lower, j);
          multiply_add<__half>(sums[j % 2], {halves_of<0>(a), halves_of<0>(b), halves_of<1>(a), halves_of<1>(b)},
                               word_of(of_x[j / 2], j % 2 * 2), word_of(of_x[j / 2], j % 2 * 2 + 1));
        }
      }
      Reader::Stage::order_writes();  // the copies', which other copies may follow
      reader_.release();
    }
    for (int i = 0; i < 4; ++i) sums[0][i] += sums[1][i];
    store_sums<W>(sums[0], to);
  }

  // What a matrix product gave a lane: of rows lane / 4 of W and that + 8 the sums of two rows of x.
  template <typename W>
  __device__ void store_sums(const float (&sums)[4], float* to) const {
    const int row = lane_ % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (row + i % 2 < args_.rows) to[(row + i % 2) * kSumsOfRow<W> + lane_ / 4 + i / 2 * 8] = sums[i];
    }
  }

  // The same of a tile of patches, of which a gated product has two: gate's sums and then up's.
  template <typename W>
  __device__ void sum_patches(int k, const FewTeam& team, bool gated, float* to) {
    constexpr int kBlock = few_block<W>();
    const int x_row = lane_ % 8 < args_.rows ? lane_ % 8 : args_.rows - 1;
    const uint32_t x = shared_address(x_) + x_row * few_x_pitch<W>(k) + lane_ / 8 * 16;
    float sums[2][4] = {};
#pragma unroll 1
    for (int at = team.warp * kBlock; at < k; at += team.split * kBlock) {
      const int there = (k - at + kPatchColumns - 1) / kPatchColumns;
      if constexpr (kFewForm<W> == FewForm::kInt4) {
        GroupSums<W> of_groups;
        add_integers<W, true>(sums[0], of_groups, there, x + at * 2);
        if (gated) add_integers<W, false>(sums[1], of_groups, there, x + at * 2);
      } else {
        add_floats<W>(sums[0], there, x + at * 2);
        if (gated) add_floats<W>(sums[1], there, x + at * 2);
      }
    }
    store_sums<W>(sums[0], to);
    if (gated) store_sums<W>(sums[1], to + up_sums<W>());
  }

  // The next copy's patches. Those that it did not bring get scales of 0.
  template <typename W>
  __device__ uint32_t next_patches(int there) {
    char* const patches = reader_.next();
    if (there < W::kPatches) clear_scales<W>(patches, there);
    return shared_address(patches);
  }

  // Of a copy's columns of x, two rows a lane: the sum of each group.
  template <typename W>
  using GroupSums = float2[W::kPatches * kPatchColumns / W::Codes::kColumns];

  // Multiplies x by base + code, as codes come cheapest, and takes (base + zero point) times the sum of the group's
  // columns of x from the result; a product with ones gives that sum. Two chains of products run side by side.
  template <typename W, bool First>
  __device__ __forceinline__ void add_integers(float (&sums)[4], GroupSums<W>& of_groups, int there, uint32_t x) {
    constexpr int kColumns = W::Codes::kColumns, kGroups = kPatchColumns / kColumns;
    constexpr uint32_t kOne = std::is_same_v<T, __half> ? 0x3c003c00 : 0x3f803f80, kOnes[4] = {kOne, kOne, kOne, kOne};
    const uint32_t from = next_patches<W>(there);
#pragma unroll
    for (int chunk = 0; chunk < W::kPatches; ++chunk) {
      typename W::Codes rows[2];
      for (int i = 0; i < 2; ++i) rows[i].load(from + chunk * W::kPatchBytes, PatchLane::of(i));
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        float parts[2][4] = {}, whole[4] = {};
#pragma unroll
        for (int i = 0; i < kColumns / 32; ++i) {
          uint32_t b[4];
          load_matrices(b, x + (chunk * kPatchColumns + group * kColumns) * 2 + i * 64);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int step = group * (kColumns / 16) + i * 2 + j;
            const uint32_t a[4] = {rows[0].beside_base(step, 0), rows[1].beside_base(step, 0),
                                   rows[0].beside_base(step, 1), rows[1].beside_base(step, 1)};
            multiply_add<T>(parts[j], a, b[2 * j], b[2 * j + 1]);
            if (First) multiply_add<T>(whole, kOnes, b[2 * j], b[2 * j + 1]);
          }
        }
        float2& of_group = of_groups[chunk * kGroups + group];
        if (First) of_group = make_float2(whole[0], whole[1]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const auto integers = rows[i / 2].group(group * (kColumns / 16));
          const float sum = parts[0][i] + parts[1][i];
          const float less = fmaf(integers.zero_and_base(), i % 2 ? -of_group.y : -of_group.x, sum);
          sums[i] = fmaf(less, integers.scale, sums[i]);
        }
      }
    }
    reader_.release();
  }

  // The same of floats, whose sums over a patch's columns are scaled.
  template <typename W>
  __device__ __forceinline__ void add_floats(float (&sums)[4], int there, uint32_t x) {
    const uint32_t from = next_patches<W>(there);
#pragma unroll
    for (int chunk = 0; chunk < W::kPatches; ++chunk) {
      typename W::Codes rows[2];
      for (int i = 0; i < 2; ++i) rows[i].load(from + chunk * W::kPatchBytes, PatchLane::of(i), 7);
      float parts[2][4] = {};
#pragma unroll
      for (int i = 0; i < kPatchColumns / 32; ++i) {
        uint32_t b[4];
        load_matrices(b, x + chunk * kPatchColumns * 2 + i * 64);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int step = i * 2 + j;
          const uint32_t a[4] = {rows[0].number(step, 0), rows[1].number(step, 0), rows[0].number(step, 1),
                                 rows[1].number(step, 1)};
          multiply_add<T>(parts[j], a, b[2 * j], b[2 * j + 1]);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i] = fmaf(parts[0][i] + parts[1][i], rows[i / 2].scale(0), sums[i]);
    }
    reader_.release();
  }

  // Clears the scales of patches that a copy did not bring: their columns of x are zeros, but zero times what was there
  // before may be NaN.
  template <typename W>
  __device__ void clear_scales(char* patches, int there) const {
    constexpr int kCodes = kPatchRows * kPatchColumns * W::Codes::kBits / 8;
    for (int chunk = there; chunk < W::kPatches; ++chunk) {
      uint32_t* const words = reinterpret_cast<uint32_t*>(patches + chunk * W::kPatchBytes + kCodes);
      for (int i = lane_; i < (W::kPatchBytes - kCodes) / 4; i += kWarp) words[i] = 0;
    }
    Reader::Stage::order_writes();
    __syncwarp();
  }

  __device__ float2 sum(const float* parts, int split) const {
    float2 all = make_float2(0, 0);
#pragma unroll
    for (int w = 0; w < kFewWarps; ++w) {
      const float2 part = w < split ? *reinterpret_cast<const float2*>(parts + w * sums()) : make_float2(0, 0);
      all.x += part.x, all.y += part.y;
    }
    return all;
  }

  template <typename W>
  __device__ void write(int layer, int phase, const FewProduct& product, int row, int column, const float* parts,
                        int split, const Besides& besides) const {
    float2 out = scaled<W>(sum(parts, split), besides.scales[0]);
    const int outputs = phase == kFewGateUp ? product.n / 2 : product.n;
    const int64_t at = static_cast<int64_t>(row) * outputs + column;
    const bool streams = phase == kFewO || phase == kFewDown;
    const uint32_t own = pack<T>(out.x, out.y);
    if (streams && ranks_.split()) ranks_.send(own, phase == kFewDown, at / 2);
    const float2 added = await_besides(besides, phase);
    if (phase == kFewQkv) out.x += added.x, out.y += added.y;
    if (phase == kFewGateUp) {
      const float* up = parts + up_sums<W>();
      out = gated(rounded(out), rounded(scaled<W>(sum(up, split), besides.scales[1])));
      if constexpr (kMixture) {
        const float weight = routed_.weights[__umulhi(column, args_.mixture.of_size)];
        out.x *= weight, out.y *= weight;
      }
    }
    if (streams) {
      out = ranks_.split() ? ranks_.sum(own, phase == kFewDown, at / 2) : unpack<T>(own);
      out.x += added.x, out.y += added.y;
    }
    const uint32_t packed = pack<T>(out.x, out.y);
    store_cell(args_.cells[phase] + at / 2, packed, stamp_);
    if (phase == kFewDown && layer + 1 == args_.num_layers) *reinterpret_cast<uint32_t*>(args_.residual + at) = packed;
  }

  template <typename W>
  __device__ static float2 scaled(float2 x, float2 scales) {
    if constexpr (!W::kScaled) return x;
    return make_float2(x.x * scales.x / kShrink, x.y * scales.y / kShrink);
  }

  __device__ static float2 rounded(float2 x) { return unpack<T>(pack<T>(x.x, x.y)); }

  __device__ float2 gated(float2 gate, float2 up) const {
    const auto act = [&](float x) { return args_.gelu ? GeluTanh{}(x) : Silu{}(x); };
    return make_float2(act(gate.x) * up.x, act(gate.y) * up.y);
  }

  const FewLayersArgs<T>& args_;
  const FewColumn& column_;
  Reader& reader_;
  FewRouted& routed_;
  FewAttention<N, E, D> attention_;
  FewRanks<T> ranks_;
  char* const x_;
  T* const norm_;  // the weight of the norm that comes next
  float* const meeting_;
  float* const squares_;
  const int lane_, warp_;
  uint32_t stamp_;
};

template <typename N, typename E, int D>
__global__ void __launch_bounds__(kFewLaunched, 1)
    few_layers_kernel(const __grid_constant__ FewLayersArgs<typename N::Result> args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char shared[] __attribute__((aligned(128)));
  __shared__ FewAttentionShared<typename N::Result, D> attention;
  __shared__ FewRings rings;
  __shared__ FewRouted routed;
  start_dependents();
  wait_for_dependencies();
  char* const memory = shared + few_bytes_besides_rings<N>(args);
  const FewColumn column(args);
  FewFetcher<N, E, D> fetcher(args, column, rings, routed, memory);
  const bool computes = threadIdx.x < kFewThreads;
  const bool fetches = !computes && threadIdx.x < kFewThreads + kFewFetchers * kWarp;
  if (fetches) fetcher.init_barriers();
  __syncthreads();
  if (computes) {
    take_registers<kFewComputeRegisters>();
    FewReader<N, E, D> reader(args, rings, memory);
    FewBlock<N, E, D>(args, column, reader, routed, attention, shared).run();
  } else {
    give_registers_back<kFewFetchRegisters>();
    if (fetches) fetcher.run();
  }
#endif
}

}  // namespace raylm::cuda
