// What few_layers.cuh is given, how its blocks and warps share the work, and the copies that they keep in flight.
#pragma once

#include "raylm/cuda/skinny_linear.cuh"
#include "raylm/cuda/tile/numbers.cuh"
#include "raylm/cuda/tile/patches.cuh"

namespace raylm::cuda {

constexpr int kFewWarps = 8;
constexpr int kFewBlock = 512;  // rows of x are filled up with zeros to a multiple of so many numbers

// What a product multiplies, as numbers.cuh has it: W is patches, of which a copy has Patches beside each other, x and
// results are of T.
template <typename T, typename Codes_, int Patches>
struct FewPatches {
  using Stored = unsigned char;
  using Result = T;
  using Codes = Codes_;
  static constexpr bool kScaled = false;
  static constexpr int kPatches = Patches;
};

template <typename N>
inline constexpr bool kInPatches = false;
template <typename T, typename Codes, int Patches>
inline constexpr bool kInPatches<FewPatches<T, Codes, Patches>> = true;

// Of k: what a warp takes at a time.
template <typename N>
__host__ __device__ constexpr int few_block() {
  if constexpr (kInPatches<N>) return N::kPatches * kPatchColumns;
  else return kSkinnyBlock<N>;
}
// A layer's MLP is one and the same for every row (its weights are of the attention's kind), or a mixture of experts,
// whose weights are of a kind of their own.
struct NoExperts {};
constexpr int kFewThreads = kFewWarps * kWarp;
constexpr int kFewRows = 4;
constexpr int kFewMostLayers = 128;
constexpr int kFewMostStages = 8;
constexpr int kFewMostParts = 16;  // of a column of attention
constexpr int kFewKeys = 16;       // of a unit
constexpr int kFewUnits = 2;       // of a warp, before another block takes a part
constexpr int kFewExperts = 256;   // at most
constexpr int kFewChosen = 16;     // of these, for a token

enum FewPhase { kFewQkv, kFewAttention, kFewO, kFewRouter, kFewGateUp, kFewDown, kFewPhases };

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
  int spare;        // blocks that need not work on it, as the others have no more rounds without them
};

// Of a mixture, of which a step has one row. Gate and up are those of all chosen experts, one after another; what their
// activations are multiplied by down is in one piece: [experts' columns] of each row.
struct FewMixture {
  int experts, per_token, size;  // per_token: 0 where there are none; size: columns between an expert's products
  int tiles;                     // of an expert's gate and up
  unsigned of_size, of_tiles;    // 2^32 divided by these, rounded up: by a product with it 16 bits are divided, exactly
  float scale;
  bool sigmoid, normalized;
};

// Which experts a layer's token goes to, in shared memory.
struct FewRouted {
  int chosen[kFewChosen];
  float weights[kFewChosen];
};

constexpr int kFewSums = 256;  // floats of two tiles' sums of a warp: of gate and up, in patches, 128 each

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
  bool scaled;      // attention's weights are codes with a scale a row
  int group_log2;   // columns of a group of patches
  FewMixture mixture;

  // Bytes of a row of x in shared memory, which has room for whole blocks of k.
  __host__ __device__ int x_pitch(int k) const {
    return skinny_x_pitch(scaled, (k + kFewBlock - 1) / kFewBlock * kFewBlock);
  }
  __host__ __device__ int x_bytes() const {
    int widest = 0;
    for (const FewProduct& product : products) widest = product.k > widest ? product.k : widest;
    return (rows * x_pitch(widest) + 127) / 128 * 128;
  }
  __host__ __device__ int norm_bytes() const { return (hidden * 2 + 127) / 128 * 128; }
  __host__ __device__ static constexpr int meeting_bytes() { return (kFewSums + kFewRows) * kFewWarps * 4; }  // x's squares too
};

// What the block attends to in every layer: units [begin, end) of a column.
struct FewColumn {
  int index, part, parts, row, kv_head, group, length, begin, end;
  int attending;  // blocks that attend to a step's only row, where these are few; else 0
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
    attending = args.rows == 1 && columns * parts < gridDim.x / 2 ? columns * parts : 0;
  }
};

// A warp's place in a product: which tiles of W are its team's, and where in k it begins. The teams of a block are one of
// 8 warps, or two of 4 where k is short.
//
// All blocks wait for those that attend, so these are the last to get tiles of what follows, and of o none where the
// others need no more rounds without them.
__device__ inline bool spared(const FewProduct& product, int phase, int attending) {
  return phase == kFewO && attending <= product.spare;
}

struct FewTeam {
  int split, index, warp, first_tile, tile_step;

  __device__ FewTeam(const FewProduct& product, FewPhase phase, int attending, int warp_of_block, int block) {
    const int teams_log2 = product.k > 4 * block ? 0 : 1, blocks = gridDim.x;
    const bool reversed = phase == kFewO || phase == kFewRouter;
    const int place = reversed ? blocks - 1 - static_cast<int>(blockIdx.x) : blockIdx.x;
    const int working = spared(product, phase, attending) ? blocks - attending : blocks;
    split = kFewWarps >> teams_log2;
    index = teams_log2 ? warp_of_block / (kFewWarps / 2) : 0, warp = warp_of_block - index * split;
    first_tile = place < working ? (place << teams_log2) + index : product.tiles;
    tile_step = working << teams_log2;
  }
};

// One warp's ring of copies, in the order in which it uses them through all layers: of its products' weights 8 rows by
// 512 bytes, of the cache 16 keys, then their values. N: what weights hold; E: what experts' do, or NoExperts. Experts'
// weights are not copied before it is known which experts these are: stages that could have been are owed till then.
template <typename N, typename E, int D>
class FewReader {
 public:
  using T = typename N::Result;
  static constexpr bool kMixture = !std::is_same_v<E, NoExperts>;
  template <typename P>
  static constexpr int kItem = sizeof(typename P::Stored);
  static constexpr int kStage = 8 * kSkinnyPitch;
  static constexpr int kKeyPitch = (D + 8) * 2;
  static_assert(kFewKeys * kKeyPitch <= kStage && kStage % (16 * kWarp) == 0);
  static_assert(4 * bytes_of_patch(4, 6) <= kStage && 2 * bytes_of_patch(8, 7) <= kStage);

  __device__ FewReader(const FewLayersArgs<T>& args, const FewColumn& column, const FewRouted& routed, char* stages)
      : args_(args), column_(column), routed_(routed), warp_(threadIdx.x / kWarp), lane_(threadIdx.x % kWarp),
        stages_(stages), team_(args.products[kFewQkv], kFewQkv, 0, warp_, few_block<N>()), policy_(evict_first_policy()) {
    first_block_ = block_of(column.begin + warp_);
    skip();
#pragma unroll 1
    for (int i = 0; i < args.stages; ++i) fill();
  }

  // The stage that comes next, once it has arrived. The one before is given up, and filled with the copy behind all those
  // under way.
  __device__ char* next() {
    if (holds_) fill();
    return take(owed());
  }

  // The same while the block attends, which all others wait for: stages are filled at once only if they are the cache's.
  __device__ char* next_of_cache() {
    if (phase_ == kFewAttention) {
      refill();
    } else {
      free_ += holds_;
    }
    return take(owed() + free_);
  }

  // Fills the stages that were given up. It takes a while: better done where the warp would only wait.
  __device__ void refill() {
    free_ += holds_, holds_ = false;
#pragma unroll 1
    for (; free_ > 0; --free_) fill();
  }

  // The experts of the next layer are known.
  __device__ void route() {
    ++routed_layers_;
#pragma unroll 1
    for (int owed = owed_; owed > 0; --owed) --owed_, fill();
  }

 private:
  __device__ int owed() const { return kMixture ? owed_ : 0; }

  // The oldest stage that is filled, where so many are not.
  __device__ char* take(int missing) {
    copy_wait(args_.stages - 1 - missing);
    __syncwarp();
    holds_ = true;
    int at = write_ + missing;
    if (at >= args_.stages) at -= args_.stages;
    return stages_ + at * kStage;
  }

  __device__ void fill() {
    if constexpr (kMixture) {
      if (phase_ >= kFewGateUp && layer_ >= routed_layers_ && layer_ < args_.num_layers) {
        ++owed_;
        return;
      }
    }
    __syncwarp();
    if (layer_ < args_.num_layers) {
      const uint32_t to = shared_address(stages_) + write_ * kStage;
      phase_ == kFewAttention ? load_keys(to) : load_weights(to);
      if (--left_ == 0) skip();
    }
    copy_commit();  // of nothing, at the end: stages are counted by groups
    if (++write_ == args_.stages) write_ = 0;
  }

  __device__ void load_weights(uint32_t to) {
    if constexpr (kMixture) {
      if (phase_ == kFewRouter) return load_weights<Plain<T>>(to);
      if (phase_ > kFewRouter) return load_weights<E>(to);
    }
    load_weights<N>(to);
  }

  template <typename P>
  __device__ void load_weights(uint32_t to) {
    if constexpr (kMixture && std::is_same_v<P, E>) {
      if (phase_ > kFewRouter && !up_) from_ = place();
    }
    if constexpr (kInPatches<P>) {
      load_patches<P>(to);
      if (up_) return;
    } else {
      load_rows<P>(to);
    }
    k_ += team_.split * few_block<P>(), from_ += team_.split * bytes_of_block<P>();
    if (k_ >= product_.k) k_ = team_.warp * few_block<P>(), from_ += next_tile_, tile_ += team_.tile_step;
  }

  template <typename P>
  __device__ int bytes_of_block() const {
    if constexpr (kInPatches<P>) return P::kPatches * bytes_of_patch(P::Codes::kBits, args_.group_log2);
    else return kSkinnyBytes;
  }

  // What lies beyond the weight's columns becomes zeros.
  template <typename P>
  __device__ void load_rows(uint32_t to) {
    const bool inside = k_ + lane_ * (16 / kItem<P>) < product_.k;
    to += lane_ * 16;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const char* row = (i < 4 ? from_ : from_ + half_) + i % 4 * row_bytes_;
      copy_async_once(to + i * kSkinnyPitch, row, inside, policy_);
    }
  }

  // Patches beside each other, of a gated product gate's and then up's.
  template <typename P>
  __device__ void load_patches(uint32_t to) {
    const int patch = bytes_of_patch(P::Codes::kBits, args_.group_log2);
    const int vectors = min(few_block<P>(), product_.k - k_ + kPatchColumns - 1) / kPatchColumns * patch / 16;
    const char* const from = from_ + (up_ ? half_ : 0);
#pragma unroll
    for (int i = 0; i < kStage / 16 / kWarp; ++i) {
      const int at = lane_ + i * kWarp;
      copy_async_once(to + at * 16, from + at * 16, at < vectors, policy_);
    }
    if (phase_ == kFewGateUp) up_ = !up_;
  }

  // Where experts' weights are read next: of gate and up, the tile says of which expert, of down k.
  __device__ const char* place() const {
    const FewMixture& mixture = args_.mixture;
    const bool down = phase_ == kFewDown;
    const int number = down ? __umulhi(k_, mixture.of_size) : __umulhi(tile_, mixture.of_tiles);
    const int tile = down ? tile_ : tile_ - number * mixture.tiles, k = down ? k_ - number * mixture.size : k_;
    const int64_t expert = routed_.chosen[number], rows = down ? product_.n : 2 * mixture.size;  // of each
    const char* const from = args_.layers[layer_].weights[phase_];
    if constexpr (kInPatches<E>) {
      const int patch = bytes_of_patch(E::Codes::kBits, args_.group_log2);
      return from + (expert * (rows / kPatchRows) + tile) * row_bytes_ + k / kPatchColumns * patch;
    } else {
      return from + (expert * rows + tile * (down ? 8 : 4)) * row_bytes_ + k * kItem<E> + lane_ * 16;
    }
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
    if constexpr (kMixture) {
      if (phase_ == kFewRouter) return enter<Plain<T>>();
      if (phase_ > kFewRouter) return enter<E>();
    }
    return enter<N>();
  }

  template <typename P>
  __device__ int enter() {
    constexpr int kBlock = few_block<P>(), kLog2 = kBlock == 512 ? 9 : 8;
    static_assert(kBlock == 1 << kLog2);
    const bool experts = kMixture && phase_ > kFewRouter;
    team_ = FewTeam(product_, static_cast<FewPhase>(phase_), column_.attending, warp_, kBlock);
    const bool gated = phase_ == kFewGateUp;
    const int step_log2 = (team_.split == kFewWarps ? 3 : 2) + kLog2;  // of team_.split * kBlock
    k_ = team_.warp * kBlock, tile_ = team_.first_tile;
    if (k_ >= product_.k || tile_ >= product_.tiles) return 0;
    const int each = ((product_.k - k_ - 1) >> step_log2) + 1, across = experts && !gated ? args_.mixture.size : product_.k;
    const int tiles = (product_.tiles - tile_ - 1) / team_.tile_step + 1;
    const int64_t in_half = gated ? (experts ? args_.mixture.size : product_.n / 2) : 4;
    const int copied = bytes_of_block<P>();
    if constexpr (kInPatches<P>) {
      const int patch = copied / P::kPatches;
      row_bytes_ = (across + kPatchColumns - 1) / kPatchColumns * patch;
      half_ = in_half / kPatchRows * row_bytes_, up_ = false;
    } else {
      row_bytes_ = across * kItem<P>;
      half_ = in_half * row_bytes_;
    }
    const int64_t tile = static_cast<int64_t>(row_bytes_) * (kInPatches<P> ? 1 : gated ? 4 : 8);
    from_ = args_.layers[layer_].weights[phase_] + tile_ * tile + team_.warp * copied + (kInPatches<P> ? 0 : lane_ * 16);
    next_tile_ = team_.tile_step * tile - static_cast<int64_t>(each) * team_.split * copied;
    return each * tiles * (kInPatches<P> && gated ? 2 : 1);
  }

  const FewLayersArgs<T>& args_;
  const FewColumn& column_;
  const FewRouted& routed_;
  const int warp_, lane_;
  char* const stages_;
  int write_ = 0, owed_ = 0, free_ = 0;  // stages: filled next; that wait for a route; that were given up
  int routed_layers_ = 0;
  bool holds_ = false;
  int layer_ = 0, phase_ = -1, left_ = 0;  // copies of the phase
  FewTeam team_;
  FewProduct product_;
  const char* from_;  // this lane's part of the next copy's first row
  int64_t half_;      // bytes from there to the fifth row, or from gate's patch to up's
  int64_t next_tile_;
  int row_bytes_, tile_, k_;  // of a row of W, or of patches
  int unit_, block_, first_block_;
  bool values_ = false, up_ = false;
  const uint64_t policy_;
};

}  // namespace raylm::cuda
