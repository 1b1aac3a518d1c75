// What few_layers.cuh is given, how its blocks and warps share the work, and the copies that they keep in flight.
#pragma once

#include "raylm/cuda/skinny_linear.cuh"
#include "raylm/cuda/tile/numbers.cuh"
#include "raylm/cuda/tile/patches.cuh"

namespace raylm::cuda {

constexpr int kFewWarps = 8;
constexpr int kFewPatches = 4;  // beside each other, of a copy

// What a product multiplies, as numbers.cuh has it: W is patches of integers of 4 bits, x and results are of T.
template <typename T>
struct Int4 {
  using Stored = unsigned char;
  using Result = T;
  static constexpr bool kScaled = false;
};

enum class FewForm { kPlain, kCodes, kInt4 };  // of weights: numbers, 8-bit codes with a scale a row, patches

template <typename N>
inline constexpr FewForm kFewForm = N::kScaled ? FewForm::kCodes : FewForm::kPlain;
template <typename T>
inline constexpr FewForm kFewForm<Int4<T>> = FewForm::kInt4;

// Of k: what a warp takes at a time, as the kernel for few rows does.
__host__ __device__ constexpr int few_block(FewForm form) {
  return form == FewForm::kPlain   ? kSkinnyBytes / 2
         : form == FewForm::kCodes ? kSkinnyBytes
                                   : kFewPatches * kPatchColumns;
}
constexpr int kFewThreads = kFewWarps * kWarp;
constexpr int kFewRows = 4;
constexpr int kFewMostLayers = 128;
constexpr int kFewMostStages = 8;
constexpr int kFewMostParts = 16;  // of a column of attention
constexpr int kFewKeys = 16;       // of a unit
constexpr int kFewUnits = 2;       // of a warp, before another block takes a part

enum FewPhase { kFewQkv, kFewAttention, kFewO, kFewGateUp, kFewDown, kFewPhases };

template <typename T>
struct FewLayer {
  const char* weights[kFewPhases];  // [n, k] of each product: of T, or codes, or patches
  const float* scales[kFewPhases];  // of the rows of codes
  const T* qkv_bias;             // or null
  const T* q_norm;               // or null, and so k_norm
  const T* k_norm;
  const T* attention_norm;
  const T* mlp_norm;
  T* k_cache;
  T* v_cache;
};

struct FewStrides {
  int64_t block, slot, head;
};

// A step's rows: one token each. `positions` are those of the tokens, `seq_lens` one more.
struct FewStep {
  const int64_t* positions;
  const int64_t* slots;
  const int32_t* seq_lens;
  const int32_t* block_table;
  int64_t block_table_stride;
  const float* cos_sin;  // [max_position, head_dim]
  int64_t max_position, num_slots;
  int block_log2;  // of the tokens in a block: at least kFewKeys
  FewStrides k_strides, v_strides;
};

struct FewProduct {
  int n, k, tiles;  // tiles: of 8 rows of W; of patches, 16, or 16 of gate and those of up
};

template <typename T>
struct FewLayersArgs {
  FewLayer<T> layers[kFewMostLayers];
  FewProduct products[kFewPhases];
  FewStep step;
  int num_layers, rows, hidden, num_heads, num_kv_heads;
  float eps, scale;
  bool gelu;
  T* residual;                // [rows, hidden]: what the layers are given, and what they make of it
  uint2* cells[kFewPhases];   // [rows, outputs / 2] of each phase
  float* part_sums;           // [columns, kFewMostParts, 8, head_dim], each divided by its softmax's denominator
  float* part_logs;           // [columns, kFewMostParts, 8]: the logarithm to base 2 of that denominator
  unsigned* arrivals;         // [columns]: parts so far; 0 but in a kernel
  unsigned* launches;         // [2]: blocks that have ended, 0 but in a kernel; launches so far
  int stages;
  FewForm form;
  int group_log2;  // columns of a group of patches

  // Bytes of a row of x in shared memory, which has room for whole blocks of k.
  __host__ __device__ int x_pitch(int k) const {
    const int block = few_block(form);
    return skinny_x_pitch(form == FewForm::kCodes, (k + block - 1) / block * block);
  }
  __host__ __device__ int x_bytes() const {
    int widest = 0;
    for (const FewProduct& product : products) widest = product.k > widest ? product.k : widest;
    return (rows * x_pitch(widest) + 127) / 128 * 128;
  }
  __host__ __device__ int norm_bytes() const { return (hidden * 2 + 127) / 128 * 128; }
  // Floats of two tiles' sums of a warp, or, of patches, twice as many: gate's and up's are in two.
  __host__ __device__ int sums() const { return form == FewForm::kInt4 ? 256 : 128; }
  __host__ __device__ int meeting_bytes() const { return (sums() + kFewRows) * kFewWarps * 4; }  // x's squares too
};

// A warp's place in a product: which tiles of 8 rows of W are its team's, and where in k it begins. The teams of a
// block are one of 8 warps, or two of 4 where k is short.
struct FewTeam {
  int split, index, warp, first_tile, tile_step;

  __device__ FewTeam(int k, int warp_of_block, int block) {
    const int teams_log2 = k > 4 * block ? 0 : 1;
    split = kFewWarps >> teams_log2;
    index = teams_log2 ? warp_of_block / (kFewWarps / 2) : 0, warp = warp_of_block - index * split;
    first_tile = (blockIdx.x << teams_log2) + index, tile_step = gridDim.x << teams_log2;
  }
};

// What the block attends to in every layer: units [begin, end) of a column.
struct FewColumn {
  int index, part, parts, row, kv_head, group, length, begin, end;
  bool works;

  template <typename T>
  __device__ explicit FewColumn(const FewLayersArgs<T>& args) {
    const int columns = args.rows * args.num_kv_heads, most = min(gridDim.x / columns, kFewMostParts);
    index = blockIdx.x % columns, part = blockIdx.x / columns;
    row = index / args.num_kv_heads, kv_head = index % args.num_kv_heads;
    group = args.num_heads / args.num_kv_heads;
    length = args.step.seq_lens[row];
    const int units = (length + kFewKeys - 1) / kFewKeys, whole = kFewWarps * kFewUnits;
    const int wanted = max(1, min(most, (units + whole - 1) / whole)), size = max(1, (units + wanted - 1) / wanted);
    parts = max(1, (units + size - 1) / size);
    works = part < parts;
    begin = part * size, end = works ? min(units, begin + size) : begin;
  }
};

// One warp's ring of copies, in the order in which it uses them through all layers: of its products' weights 8 rows by
// 512 bytes, of the cache 16 keys, then their values. N: what weights hold.
template <typename N, int D>
class FewReader {
 public:
  using T = typename N::Result;
  static constexpr int kItem = sizeof(typename N::Stored), kBlock = few_block(kFewForm<N>);
  static constexpr int kStage = 8 * kSkinnyPitch;
  static constexpr int kKeyPitch = (D + 8) * 2;
  static_assert(kFewKeys * kKeyPitch <= kStage && kFewPatches * bytes_of_patch(4, 6) <= kStage && kStage % (16 * kWarp) == 0);

  __device__ FewReader(const FewLayersArgs<T>& args, const FewColumn& column, char* stages)
      : args_(args), column_(column), warp_(threadIdx.x / kWarp), lane_(threadIdx.x % kWarp), stages_(stages),
        team_(args.hidden, warp_, kBlock), policy_(evict_first_policy()) {
    first_block_ = block_of(column.begin + warp_);
    skip();
#pragma unroll 1
    for (int i = 0; i < args.stages; ++i) fill();
  }

  // The stage that comes next, once it has arrived. The one before is given up.
  __device__ char* next() {
    refill();
    copy_wait(args_.stages - 1);
    __syncwarp();
    holds_ = true;
    return stages_ + at_ * kStage;
  }

  // Fills the stage that next() gave with the copy behind all those under way. It takes a while: better done where the
  // warp would only wait.
  __device__ void refill() {
    if (holds_) fill();
    holds_ = false;
  }

 private:
  __device__ void fill() {
    __syncwarp();
    if (layer_ < args_.num_layers) {
      const uint32_t to = shared_address(stages_) + at_ * kStage;
      if (phase_ != kFewAttention) {
        load_weights(to);
      } else {
        load_keys(to);
      }
      if (--left_ == 0) skip();
    }
    copy_commit();  // of nothing, at the end: stages are counted by groups
    if (++at_ == args_.stages) at_ = 0;
  }

  // What lies beyond the weight's columns becomes zeros.
  __device__ void load_weights(uint32_t to) {
    if constexpr (kFewForm<N> == FewForm::kInt4) return load_patches(to);
    const bool inside = k_ + lane_ * (16 / kItem) < product_.k;
    to += lane_ * 16;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const char* row = (i < 4 ? from_ : from_ + half_) + i % 4 * product_.k * kItem;
      copy_async_once(to + i * kSkinnyPitch, row, inside, policy_);
    }
    const int step = team_.split * kBlock;
    k_ += step, from_ += step * kItem;
    if (k_ >= product_.k) k_ = team_.warp * kBlock, from_ += next_tile_;
  }

  // Patches beside each other, of a gated product gate's and then up's.
  __device__ void load_patches(uint32_t to) {
    const int patch = bytes_of_patch(4, args_.group_log2);
    const int vectors = min(kBlock, product_.k - k_ + kPatchColumns - 1) / kPatchColumns * patch / 16;
    const char* const from = from_ + (up_ ? half_ : 0);
#pragma unroll
    for (int i = 0; i < kStage / 16 / kWarp; ++i) {
      const int at = lane_ + i * kWarp;
      copy_async_once(to + at * 16, from + at * 16, at < vectors, policy_);
    }
    if (phase_ == kFewGateUp) up_ = !up_;
    if (up_) return;
    k_ += team_.split * kBlock, from_ += team_.split * kFewPatches * patch;
    if (k_ >= product_.k) k_ = team_.warp * kBlock, from_ += next_tile_;
  }

  // Keys up to the token's own one, which is not in the cache yet; zeros from there on.
  __device__ void load_keys(uint32_t to) {
    constexpr int kChunks = D / 8, kAtOnce = kWarp / kChunks;
    const FewStrides& strides = values_ ? args_.step.v_strides : args_.step.k_strides;
    const T* from = values_ ? args_.layers[layer_].v_cache : args_.layers[layer_].k_cache;
    const int chunk = lane_ % kChunks, keys = column_.length - 1 - unit_ * kFewKeys;
    int key = lane_ / kChunks;
    const int slot = (unit_ * kFewKeys & ((1 << args_.step.block_log2) - 1)) + key;
    from += block_ * strides.block + slot * strides.slot + column_.kv_head * strides.head + chunk * 8;
    to += key * kKeyPitch + chunk * 16;
#pragma unroll
    for (int i = 0; i < kFewKeys / kAtOnce; ++i) {
      copy_async(to, from, key < keys);
      key += kAtOnce, to += kAtOnce * kKeyPitch, from += kAtOnce * strides.slot;
    }
    values_ = !values_;
    if (!values_) unit_ += kFewWarps, block_ = block_of(unit_);
  }

  __device__ int block_of(int unit) const {
    if (unit >= column_.end) return 0;
    const int at = unit * kFewKeys >> args_.step.block_log2;
    return args_.step.block_table[column_.row * args_.step.block_table_stride + at];
  }

  // To the next phase in which the warp has something to copy.
  __device__ void skip() {
#pragma unroll 1
    do {
      if (++phase_ == kFewPhases) phase_ = 0, ++layer_;
      if (layer_ < args_.num_layers) left_ = enter();
    } while (layer_ < args_.num_layers && left_ == 0);
  }

  // How many copies the warp has in the phase.
  __device__ int enter() {
    if (phase_ == kFewAttention) {
      unit_ = column_.begin + warp_, block_ = first_block_, values_ = false;
      return unit_ < column_.end ? 2 * ((column_.end - unit_ - 1) / kFewWarps + 1) : 0;
    }
    product_ = args_.products[phase_];
    team_ = FewTeam(product_.k, warp_, kBlock);
    const bool gated = phase_ == kFewGateUp;
    const int step_log2 = (team_.split == kFewWarps ? 11 : 10) + (kBlock > 256);  // of team_.split * kBlock
    k_ = team_.warp * kBlock;
    if (k_ >= product_.k || team_.first_tile >= product_.tiles) return 0;
    const int each = ((product_.k - k_ - 1) >> step_log2) + 1;
    const int tiles = (product_.tiles - team_.first_tile - 1) / team_.tile_step + 1;
    if constexpr (kFewForm<N> == FewForm::kInt4) {
      const int64_t patch = bytes_of_patch(4, args_.group_log2), copied = kFewPatches * patch;
      const int64_t row = (product_.k + kPatchColumns - 1) / kPatchColumns * patch;
      half_ = product_.n / 2 / kPatchRows * row, up_ = false;
      from_ = args_.layers[layer_].weights[phase_] + team_.first_tile * row + team_.warp * copied;
      next_tile_ = team_.tile_step * row - each * team_.split * copied;
      return each * tiles * (gated ? 2 : 1);
    }
    const int64_t row = static_cast<int64_t>(product_.k) * kItem, tile = (gated ? 4 : 8) * row;
    half_ = (gated ? product_.n / 2 : 4) * row;
    from_ = args_.layers[layer_].weights[phase_] + team_.first_tile * tile + k_ * kItem + lane_ * 16;
    next_tile_ = team_.tile_step * tile - (each << step_log2) * kItem;
    return each * tiles;
  }

  const FewLayersArgs<T>& args_;
  const FewColumn& column_;
  const int warp_, lane_;
  char* const stages_;
  int at_ = 0;
  bool holds_ = false;
  int layer_ = 0, phase_ = -1, left_ = 0;  // copies of the phase
  FewTeam team_;
  FewProduct product_;
  const char* from_;  // this lane's part of the next copy's first row
  int64_t half_;      // bytes from there to the fifth row, or from gate's patch to up's
  int64_t next_tile_;
  int k_;
  int unit_, block_, first_block_;
  bool values_ = false, up_ = false;
  const uint64_t policy_;
};

}  // namespace raylm::cuda
