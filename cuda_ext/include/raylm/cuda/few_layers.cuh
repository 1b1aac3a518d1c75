// All layers of a decode step of up to four rows in one kernel, for dense models of the usual kind (norm, attention
// with rotary embedding, norm, gated MLP): so that nothing waits for a kernel to end and the next one to begin.
//
// One block lives on each multiprocessor, and all go through the phases of a layer together: q, k and v; attention; o;
// gate and up; down. What a block will read of weights and of the cache's older keys and values depends on no result:
// some of its warps fetch it (few_fetcher.cuh), into a ring for each warp that computes (few_reader.cuh), across the
// end of a phase into the next ones.
// Results pass between the blocks in cells that say of which layer they are (ptx/cell.cuh), so nobody waits for a
// barrier, only for what it reads. Each phase has cells of its own, the same for every layer: whoever reads some
// contributes to what must be there before they are written again.
//
// The products are those of skinny_linear.cuh: x in shared memory, W read once, k shared out among warps whose sums are
// added in their order. Weights may be codes of 8 bits with a scale a row: rows of x are halves then, of which none is
// rounded but to these. That a whole model fits one persistent kernel is an old idea (Hazy Research, "Look Ma, No
// Bubbles!", 2025); here the order is fixed, so there are no tasks to interpret.
#pragma once

#include "raylm/cuda/few_attention.cuh"
#include "raylm/cuda/few_fetcher.cuh"

namespace raylm::cuda {

template <typename N, int D>
class FewBlock {
 public:
  using T = typename N::Result;
  static constexpr bool kInt4 = kFewForm<N> == FewForm::kInt4;
  static constexpr int kBlock = few_block(kFewForm<N>);
  static constexpr int kSumsOfRow = kInt4 ? kPatchRows : 8;  // of x, beside each other

  __device__ FewBlock(const FewLayersArgs<T>& args, const FewColumn& column, FewReader<N, D>& reader,
                      FewAttentionShared<T, D>& shared, char* x)
      : args_(args), column_(column), reader_(reader), attention_(args, column, reader, shared), x_(x),
        norm_(reinterpret_cast<T*>(x + args.x_bytes())),
        meeting_(reinterpret_cast<float*>(x + args.x_bytes() + args.norm_bytes())),
        squares_(meeting_ + kFewWarps * kFewWarps * sums()), lane_(threadIdx.x % kWarp),
        warp_(threadIdx.x / kWarp) {}

  __device__ void run() {
    // Cells that are not of this launch have other stamps, but for those of 2^32 layers ago.
    stamp_ = args_.launches[1] * args_.num_layers;
#pragma unroll 1
    for (int layer = 0; layer < args_.num_layers; ++layer) {
      ++stamp_;
#pragma unroll 1
      for (int phase = kFewQkv; phase < kFewPhases; ++phase) {
        if (phase != kFewAttention) multiply(layer, phase);
        else if (column_.works) attention_.run(args_.layers[layer], stamp_);
      }
    }
    leave();
  }

 private:
  // The last block to end counts the launch.
  __device__ void leave() const {
    if (threadIdx.x == 0 && atomicAdd(args_.launches, 1) + 1 == gridDim.x) args_.launches[0] = 0, ++args_.launches[1];
  }

  __device__ void multiply(int layer, int phase) {
    const FewProduct& product = args_.products[phase];
    if (FewTeam(product.k, 0, kBlock).first_tile >= product.tiles) return;  // no tile of it is this block's
    const bool norms = phase == kFewQkv || phase == kFewGateUp;
    if (norms) fetch_norm(phase == kFewQkv ? args_.layers[layer].attention_norm : args_.layers[layer].mlp_norm);
    if (phase == kFewQkv) {
      copy(layer == 0 ? nullptr : args_.cells[kFewDown], product.k, stamp_ - 1, norms);
    } else {
      copy(args_.cells[phase - 1], product.k, stamp_, norms);
    }
    if (norms) norm();
    multiply_tiles(layer, phase, product);
    sync_some(0, kFewThreads);  // x has been read
  }

  __device__ int sums() const { return few_sums(kFewForm<N>, args_.rows); }
  __device__ int up_sums() const { return kInt4 ? sums() / 2 : 4; }  // from gate's sums to up's
  __device__ static int x_pitch(int k) { return few_x_pitch(kFewForm<N>, k); }
  __device__ T* x_row(int row, int pitch) const { return reinterpret_cast<T*>(x_ + row * pitch); }

  // Numbers as products take them. Halves are a 16th of what they stand for, so that they hold what bfloat16 may grow to.
  static constexpr float kShrink = N::kScaled ? 0.0625f : 1.0f;
  __device__ static uint2 taken(uint2 x) {
    if constexpr (!N::kScaled) return x;
    const float2 a = unpack<T>(x.x), b = unpack<T>(x.y);
    return make_uint2(pack<__half>(a.x * kShrink, a.y * kShrink), pack<__half>(b.x * kShrink, b.y * kShrink));
  }

  static constexpr int kStep = kFewThreads * 4;  // elements of a row that the block takes at once, 4 a thread

  // Rows of cells become x, once they are there; without cells, the rows that the layers are given. With `squares`, the
  // sum of the squares of this warp's elements of each row goes to squares_.
  __device__ void copy(const uint2* cells, int k, uint32_t stamp, bool squares) {
    constexpr int kBatch = 4;
    const int pitch = x_pitch(k), end = (k + kBlock - 1) / kBlock * kBlock;
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
          *reinterpret_cast<uint2*>(x_row(r, pitch) + i) = squares ? x : taken(x);
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
  __device__ void norm() {
    const int pitch = x_pitch(args_.hidden);
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
        *x = taken(make_uint2(normed(x->x, by, scale.x), normed(x->y, by, scale.y)));
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

  __device__ Besides ask_besides(int layer, int phase, int row, int column) const {
    Besides out;
    const T* plain = nullptr;
    const int64_t at = static_cast<int64_t>(row) * args_.hidden + column;
    if (phase == kFewQkv && args_.layers[layer].qkv_bias) plain = args_.layers[layer].qkv_bias + column;
    if (phase == kFewO && layer == 0) plain = args_.residual + at;
    out.odd = at / 2 % 2;
    if constexpr (N::kScaled) {
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
  __device__ void multiply_tiles(int layer, int phase, const FewProduct& product) {
    const FewTeam team(product.k, warp_, kBlock);
    const int pairs_log2 = kInt4 ? 3 : phase == kFewGateUp ? 1 : 2;
    const int row = lane_ >> pairs_log2, pair = lane_ & ((1 << pairs_log2) - 1);
    float* const meeting = meeting_ + team.index * team.split * team.split * sums();
    int turn = 0;
#pragma unroll 1
    for (int tile = team.first_tile; tile < product.tiles; tile += team.tile_step) {
      const bool writes = turn == team.warp && row < args_.rows;
      const int column = ((tile << pairs_log2) + pair) * 2;
      Besides besides;
      if (writes) besides = ask_besides(layer, phase, row, column);
      float* const parts = meeting + turn * team.split * sums();
      sum_tile(product.k, team, phase == kFewGateUp, parts + team.warp * sums());
      const int number = 1 + team.index * team.split + turn, threads = team.split * kWarp;
      if (turn == team.warp) {
        sync_some(number, threads);
        const float* own = parts + row * kSumsOfRow + pair * 2;
        if (writes) write(layer, phase, product, row, column, own, team.split, besides);
      } else {
        arrive_some(number, threads);
      }
      turn = (turn + 1) & (team.split - 1);
    }
  }

  // This warp's sums of a tile, as [row of x][row of W].
  __device__ void sum_tile(int k, const FewTeam& team, bool gated, float* to) {
    if constexpr (kInt4) {
      sum_patches(k, team, gated, to);
    } else {
      const int x_rows[1] = {min(lane_ / 4, args_.rows - 1) * x_pitch(k)};
      const char* const x = x_ + lane_ % 4 * (N::kScaled ? 32 : 16);
      const int w_lane = lane_ / 4 * kSkinnyPitch + lane_ % 4 * 16;
      SkinnySums<N, 1, 1> sums;
      sums.clear();
#pragma unroll 1
      for (int at = team.warp * kBlock; at < k; at += team.split * kBlock) {
        sums.template add<true>(x + at * 2, x_rows, reader_.next() + w_lane, 0);
        reader_.release();
      }
      if (lane_ / 4 < kFewRows) sums.store(to);
    }
  }

  // The same of a tile of patches, of which a gated product has two: gate's sums and then up's.
  __device__ void sum_patches(int k, const FewTeam& team, bool gated, float* to) {
    const int x_row = lane_ % 8 < args_.rows ? lane_ % 8 : args_.rows - 1;
    const uint32_t x = shared_address(x_) + x_row * x_pitch(k) + lane_ / 8 * 16;
    float sums[2][4] = {};
#pragma unroll 1
    for (int at = team.warp * kBlock; at < k; at += team.split * kBlock) {
      const int there = (k - at + kPatchColumns - 1) / kPatchColumns;
      GroupSums of_groups;
      add_patches<true>(sums[0], of_groups, there, x + at * 2);
      if (gated) add_patches<false>(sums[1], of_groups, there, x + at * 2);
    }
    const int row = lane_ % 4 * 2, column = lane_ / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (row + i % 2 >= args_.rows || (half == 1 && !gated)) continue;
        to[half * up_sums() + (row + i % 2) * kSumsOfRow + column + i / 2 * 8] = sums[half][i];
      }
    }
  }

  // Of a copy's columns of x, two rows a lane: the sum of each group, which has 64 columns or more.
  using GroupSums = float2[kFewPatches * kPatchColumns / 64];

  // Multiplies x by base + code, as codes come cheapest, and takes (base + zero point) times the sum of the group's
  // columns of x from the result; a product with ones gives that sum. Two chains of products run side by side.
  template <bool First>
  __device__ __forceinline__ void add_patches(float (&sums)[4], GroupSums& of_groups, int there, uint32_t x) {
    constexpr int kGroups = kPatchColumns / N::kColumns, kPatch = N::kPatchBytes;
    constexpr uint32_t kOne = std::is_same_v<T, __half> ? 0x3c003c00 : 0x3f803f80, kOnes[4] = {kOne, kOne, kOne, kOne};
    char* const patches = reader_.next();
    if (there < kFewPatches) clear_scales(patches, there);
    const uint32_t from = shared_address(patches);
#pragma unroll
    for (int chunk = 0; chunk < kFewPatches; ++chunk) {
      typename N::Codes rows[2];
      for (int i = 0; i < 2; ++i) rows[i].load(from + chunk * kPatch, PatchLane::of(i));
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        float parts[2][4] = {}, whole[4] = {};
#pragma unroll
        for (int i = 0; i < N::kColumns / 32; ++i) {
          uint32_t b[4];
          load_matrices(b, x + (chunk * kPatchColumns + group * N::kColumns) * 2 + i * 64);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int step = group * (N::kColumns / 16) + i * 2 + j;
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
          const auto integers = rows[i / 2].group(group * (N::kColumns / 16));
          const float sum = parts[0][i] + parts[1][i];
          const float less = fmaf(integers.zero_and_base(), i % 2 ? -of_group.y : -of_group.x, sum);
          sums[i] = fmaf(less, integers.scale, sums[i]);
        }
      }
    }
    reader_.release();
  }

  // Clears the scales of patches that a copy did not bring: their columns of x are zeros, but zero times what was there
  // before may be NaN.
  __device__ void clear_scales(char* patches, int there) const {
    constexpr int kCodes = kPatchRows * kPatchColumns / 2;
    for (int chunk = there; chunk < kFewPatches; ++chunk) {
      uint32_t* const words = reinterpret_cast<uint32_t*>(patches + chunk * N::kPatchBytes + kCodes);
      for (int i = lane_; i < (N::kPatchBytes - kCodes) / 4; i += kWarp) words[i] = 0;
    }
    FewStage<N, D>::order_writes();
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

  __device__ void write(int layer, int phase, const FewProduct& product, int row, int column, const float* parts,
                        int split, const Besides& besides) const {
    float2 out = scaled(sum(parts, split), besides.scales[0]);
    const float2 added = await_besides(besides, phase);
    if (phase == kFewQkv) out.x += added.x, out.y += added.y;
    if (phase == kFewGateUp) {
      const float* up = parts + up_sums();
      out = gated(rounded(out), rounded(scaled(sum(up, split), besides.scales[1])));
    }
    if (phase == kFewO || phase == kFewDown) out = rounded(out), out.x += added.x, out.y += added.y;
    const int outputs = phase == kFewGateUp ? product.n / 2 : product.n;
    const int64_t at = static_cast<int64_t>(row) * outputs + column;
    const uint32_t packed = pack<T>(out.x, out.y);
    store_cell(args_.cells[phase] + at / 2, packed, stamp_);
    if (phase == kFewDown && layer + 1 == args_.num_layers) *reinterpret_cast<uint32_t*>(args_.residual + at) = packed;
  }

  __device__ static float2 scaled(float2 x, float2 scales) {
    if constexpr (!N::kScaled) return x;
    return make_float2(x.x * scales.x / kShrink, x.y * scales.y / kShrink);
  }

  __device__ static float2 rounded(float2 x) { return unpack<T>(pack<T>(x.x, x.y)); }

  __device__ float2 gated(float2 gate, float2 up) const {
    const auto act = [&](float x) { return args_.gelu ? GeluTanh{}(x) : Silu{}(x); };
    return make_float2(act(gate.x) * up.x, act(gate.y) * up.y);
  }

  const FewLayersArgs<T>& args_;
  const FewColumn& column_;
  FewReader<N, D>& reader_;
  FewAttention<N, D> attention_;
  char* const x_;
  T* const norm_;  // the weight of the norm that comes next
  float* const meeting_;
  float* const squares_;
  const int lane_, warp_;
  uint32_t stamp_;
};

template <typename N, int D>
__global__ void __launch_bounds__(kFewLaunched, 1)
    few_layers_kernel(const __grid_constant__ FewLayersArgs<typename N::Result> args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char shared[] __attribute__((aligned(128)));
  __shared__ FewAttentionShared<typename N::Result, D> attention;
  __shared__ FewRings rings;
  start_dependents();
  wait_for_dependencies();
  char* const memory = shared + args.bytes_besides_rings();
  const FewColumn column(args);
  FewFetcher<N, D> fetcher(args, column, rings, memory);
  const bool computes = threadIdx.x < kFewThreads;
  const bool fetches = !computes && threadIdx.x < kFewThreads + kFewFetchers * kWarp;
  if (fetches) fetcher.init_barriers();
  __syncthreads();
  if (computes) {
    take_registers<kFewComputeRegisters>();
    FewReader<N, D> reader(args, rings, memory);
    FewBlock<N, D>(args, column, reader, attention, shared).run();
  } else {
    give_registers_back<kFewFetchRegisters>();
    if (fetches) fetcher.run();
  }
#endif
}

}  // namespace raylm::cuda
