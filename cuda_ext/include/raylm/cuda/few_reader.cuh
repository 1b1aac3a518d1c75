// What few_layers.cuh is given, how its blocks and warps share the work, and the rings that copies of weights, keys and
// values come by.
#pragma once

#include "raylm/cuda/peer.cuh"
#include "raylm/cuda/pipeline/ring.cuh"
#include "raylm/cuda/skinny_linear.cuh"
#include "raylm/cuda/tile/numbers.cuh"
#include "raylm/cuda/tile/patches.cuh"

namespace raylm::cuda {

constexpr int kFewWarps = 8;

// What a product multiplies, as numbers.cuh has it: W is patches, of which a copy has Patches beside each other, x and
// results are of T.
template <typename T, typename Codes_, int Patches>
struct FewPatches {
  using Stored = unsigned char;
  using Result = T;
  using Codes = Codes_;
  static constexpr bool kScaled = false;
  static constexpr int kPatches = Patches, kPatchBytes = bytes_of_patch(Codes::kBits, Codes::kColumns == 64 ? 6 : 7);
};

// Integers of 4 bits in groups of so many columns, and floats of 8 bits with a scale for each 128.
template <typename T, int Columns, int Patches = 4>
using Int4 = FewPatches<T, Int4Codes<T, Columns>, Patches>;
template <typename T>
using Fp8 = FewPatches<T, Fp8Codes<T>, 2>;

// Experts' weights are of a kind of their own, of which a copy has 256 columns of one expert.
struct NoExperts {};
template <typename E>
inline constexpr bool kHasExperts = !std::is_same_v<E, NoExperts>;
constexpr int kFewExpertColumns = 256;

enum class FewForm { kPlain, kCodes, kInt4, kFp8 };  // of weights: numbers, 8-bit codes with a scale a row, patches

template <typename N>
inline constexpr FewForm kFewForm = N::kScaled ? FewForm::kCodes : FewForm::kPlain;
template <typename T, int Columns, int Patches>
inline constexpr FewForm kFewForm<FewPatches<T, Int4Codes<T, Columns>, Patches>> = FewForm::kInt4;
template <typename T>
inline constexpr FewForm kFewForm<Fp8<T>> = FewForm::kFp8;

template <typename N>
inline constexpr bool kInPatches = false;
template <typename T, typename Codes, int Patches>
inline constexpr bool kInPatches<FewPatches<T, Codes, Patches>> = true;

// A copy of numbers has 512 bytes of 8 rows of W, as the kernel for few rows takes them; one of codes, 256 of 16 rows.
constexpr int kFewCodeRows = 16, kFewCodeColumns = 256;

// Of k: what a warp takes at a time.
template <typename N>
__host__ __device__ constexpr int few_block() {
  if constexpr (kInPatches<N>) return N::kPatches * kPatchColumns;
  else return N::kScaled ? kFewCodeColumns : kSkinnyBytes / sizeof(typename N::Stored);
}
constexpr int kFewThreads = kFewWarps * kWarp;  // that compute
// Registers are moved between groups of four warps: four more give some to those that compute. Two of the four fetch:
// one is too slow for a large model, and with all four a small one in bfloat16 takes longer.
constexpr int kFewGiving = 4 * kWarp, kFewLaunched = kFewThreads + kFewGiving, kFewFetchers = 2;
constexpr int kFewFetchRegisters = 56, kFewComputeRegisters = 224;
constexpr int kFewLaunchRegisters = (64 << 10) / kFewLaunched / 8 * 8;
static_assert(kFewThreads * kFewComputeRegisters + kFewGiving * kFewFetchRegisters <=
              kFewLaunched * kFewLaunchRegisters);
constexpr int kFewRows = 4;
constexpr int kFewMostLayers = 128;
constexpr int kFewMostStages = 8;
constexpr int kFewMostParts = 16;  // of a column of attention
constexpr int kFewKeys = 16;       // of a unit
constexpr int kFewUnits = 2;       // of a warp, before another block takes a part
constexpr int kFewExperts = 256;   // at most
constexpr int kFewChosen = 16;     // of these, for a token

// Bytes of a row of x in shared memory, which has room for whole blocks of k.
template <typename N>
__host__ __device__ constexpr int few_x_pitch(int k) {
  constexpr int kBlock = few_block<N>();
  return skinny_x_pitch(N::kScaled, (k + kBlock - 1) / kBlock * kBlock);
}

// Floats that a warp brings of a tile. Of patches a gated product's has two below each other, gate's and up's: so many
// that large models have room for those of the step's rows only. Of codes x's rows come in twos, and so a mixture's one
// row has room for its experts' patches and its router's numbers too. Of numbers a constant is faster.
template <typename N>
__host__ __device__ constexpr int few_sums(int rows) {
  if constexpr (kInPatches<N>) return rows * 2 * kPatchRows;
  else return N::kScaled ? (rows + 1) / 2 * 2 * kFewCodeRows : kFewRows * 8;
}

enum FewPhase { kFewQkv, kFewAttention, kFewO, kFewRouter, kFewGateUp, kFewDown, kFewPhases };

// What W of a phase's product holds, as an empty object of that type. N: of all products, or, where E is of experts, of
// attention's; a router's are numbers.
template <typename N, typename E, typename Use>
__device__ __forceinline__ void for_product(int phase, const Use& use) {
  if constexpr (kHasExperts<E>) {
    if (phase == kFewRouter) return use(Plain<typename N::Result>{});
    if (phase > kFewRouter) return use(E{});
  }
  use(N{});
}

// The phase behind this one. Only mixtures have a router.
template <typename E>
__device__ inline int next_phase(int phase) {
  return phase + (!kHasExperts<E> && phase == kFewO ? 2 : 1);
}

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
  int n, k, tiles;  // tiles: of 8 rows of W; of codes 16; of patches 16, or 16 of gate and those of up
};

// Where experts' weights lie: bytes from an expert's first row to the next one's, and from a tile to the next.
struct FewStack {
  int64_t expert, tile;
};

// Of a mixture, of which a step has one row. Gate and up are those of all chosen experts, one after another; their
// activations are one row, too, that down's products take as such.
struct FewMixture {
  int experts, per_token;      // per_token: 0 where there are none
  int size;                    // columns between an expert's products
  int tiles;                   // of an expert's gate and up
  unsigned of_size, of_tiles;  // 2^32 divided by these, rounded up: a product's upper half is a quotient, of 16 bits
  float scale;
  bool sigmoid, normalized;
  FewStack gate_up, down;
};

// Which experts a layer's token goes to, in shared memory.
struct FewRouted {
  uint64_t known;  // a barrier: a phase a layer, which ends when `chosen` is that layer's
  int chosen[kFewChosen];
  float weights[kFewChosen];
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
  FewMixture mixture;
  Peers peers;  // of a model that is split; the weights are a rank's share
  int x_bytes;  // of shared memory, for rows of x

  __host__ __device__ int norm_bytes() const { return (hidden * 2 + 127) / 128 * 128; }
};

// Bytes of shared memory beside the rings: rows of x, a norm's weight, the warps' sums of tiles, those of x's squares.
template <typename N>
__host__ __device__ int few_bytes_besides_rings(const FewLayersArgs<typename N::Result>& args) {
  return args.x_bytes + args.norm_bytes() + (kFewWarps * few_sums<N>(args.rows) + kFewRows) * kFewWarps * 4;
}

// A warp's place in a product: which tiles of W are its team's, and where in k it begins. The teams of a
// block are one of 8 warps, or two of 4 where k is short. Behind a mixture's attention, which few blocks do, those are
// the last to get tiles.
struct FewTeam {
  int split, index, warp, first_tile, tile_step;

  template <typename N>
  __device__ FewTeam(N, int k, int warp_of_block, bool reversed = false) {
    const int teams_log2 = k > 4 * few_block<N>() ? 0 : 1;
    const int block = reversed ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    split = kFewWarps >> teams_log2;
    index = teams_log2 ? warp_of_block / (kFewWarps / 2) : 0, warp = warp_of_block - index * split;
    first_tile = (block << teams_log2) + index, tile_step = gridDim.x << teams_log2;
  }
};

template <typename E>
__device__ inline bool reversed_in(int phase) {
  return kHasExperts<E> && (phase == kFewO || phase == kFewRouter);
}

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

// A warp's part of a product, the same in every layer but for where its weight begins.
struct FewShare {
  int64_t half;       // bytes from a tile's first row to its second half's, maybe up's; of patches, from gate to up
  int first;          // bytes from there to the first copy
  int next_tile;      // bytes from behind a tile's last copy to the next tile's first
  int k;              // of W
  int first_column;   // of a tile's first copy
  int step;           // columns from a copy to the next
  int copies;
};

struct FewRings {
  FewShare shares[kFewWarps][kFewPhases];
  uint64_t full[kFewWarps][kFewMostStages], empty[kFewWarps][kFewMostStages];
};

// A stage of a warp's ring: of a product's weight rows, or patches beside each other; of the cache 16 keys or their
// values. N, E: what weights hold.
template <typename N, typename E, int D>
struct FewStage {
  static constexpr bool kBulk = kInPatches<N> || kInPatches<E>;  // some of the copies are bulk copies
  static constexpr int kBytes = 8 * kSkinnyPitch;
  static constexpr int kKeyPitch = (D + 8) * 2;
  static_assert(kFewKeys * kKeyPitch <= kBytes && kFewCodeRows * kFewCodeColumns <= kBytes);
  static_assert(Int4<__half, 64>::kPatches * Int4<__half, 64>::kPatchBytes <= kBytes);

  // Of codes, where a row's 16 bytes of that number are: two rows that a quarter of a warp reads at once share no bank.
  __device__ static int code_place(int row, int number) { return row * kFewCodeColumns + (number ^ row % 2 * 4) * 16; }

  // Behind writes to a stage that are no bulk copy's, before it is given up.
  __device__ static void order_writes() {
    if constexpr (kBulk) fence_shared_writes();
  }
};

// A warp's end of its ring: stages in the order in which it uses them through all layers.
template <typename N, typename E, int D>
class FewReader {
 public:
  using T = typename N::Result;
  using Stage = FewStage<N, E, D>;

  __device__ FewReader(const FewLayersArgs<T>& args, const FewRings& rings, char* memory) : ring_{args.stages} {
    const int warp = threadIdx.x / kWarp;
    stages_ = memory + warp * args.stages * Stage::kBytes;
    full_ = shared_address(rings.full[warp]), empty_ = shared_address(rings.empty[warp]);
  }

  // The stage that comes next, once it has arrived.
  __device__ char* next() const {
    barrier_wait(full_ + 8 * ring_.stage, ring_.parity);
    return stages_ + ring_.stage * Stage::kBytes;
  }

  // Gives up the stage that next() gave.
  __device__ void release() {
    barrier_arrive_warp(empty_ + 8 * ring_.stage);
    ring_.advance();
  }

 private:
  SizedRing ring_;
  char* stages_;
  uint32_t full_, empty_;
};

}  // namespace raylm::cuda
