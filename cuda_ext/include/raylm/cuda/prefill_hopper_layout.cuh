// What the warps of Hopper's prefill kernel (prefill_hopper.cuh) share: its sizes, its shared memory, and the tiles.
#pragma once

#include "raylm/cuda/pipeline/ring.cuh"
#include "raylm/cuda/prefill_common.cuh"
#include "raylm/cuda/ptx/barrier.cuh"
#include "raylm/cuda/ptx/tensor_copy.cuh"
#include "raylm/cuda/tile/numbers.cuh"

namespace raylm::cuda {

// For heads of D elements, over a cache of C: the queries' type, or codes.
template <typename C, int D>
struct HopperShape {
  static constexpr bool kCodes = std::is_same_v<C, Code>;
  static constexpr int kGroups = D <= 64 ? 3 : 2, kRows = 64 * kGroups, kThreads = 128 * (kGroups + 1);
  static constexpr int kKeys = D <= 128 ? 128 : D <= 192 ? 96 : 64;
  static constexpr int kStages = D <= 64 ? 4 : 2, kQueryStages = D <= 128 ? 2 : 1;
  static constexpr int kHalves = (D + 63) / 64;  // the copy engine swizzles rows of at most 64 elements
  static constexpr int kFetchers = kCodes ? 2 : 1;  // warps that bring keys, and as many that bring values
  // Registers a thread, once warps have exchanged them. A block that asks for more than it was launched with waits forever;
  // it is launched with 65,536 / kThreads a thread, rounded down to a multiple of 8.
  static constexpr int kFetchRegisters = kGroups == 3 && !kCodes ? 32 : 56;
  static constexpr int kComputeRegisters = kGroups == 2 ? 224 : kCodes ? 152 : 160;
  static_assert(kFetchRegisters + kGroups * kComputeRegisters <= (kGroups + 1) * (65536 / kThreads / 8 * 8));
  // One box has all halves of its rows, if halves of 64 elements divide the heads; the shared memory of keys and values
  // is then [groups of 8 rows][halves][8][64], otherwise [halves][rows][64].
  static constexpr bool kWhole = D % 64 == 0;
  static constexpr int kRowGroupBytes = kWhole ? kHalves * 1024 : 1024, kHalfBytes = kWhole ? 1024 : kKeys * 128;
  static constexpr int kQueryBytes = kRows * kHalves * 128, kStageBytes = kKeys * kHalves * 128;
  static constexpr int kMatrixBytes = kQueryStages * kQueryBytes + 2 * kStages * kStageBytes;
  // Codes are staged in parts before they become numbers. A part is a quarter of a step's rows; each of the four fetching
  // warps has two.
  static constexpr int kParts = 8, kPartRows = kKeys / 4, kPartBytes = kCodes ? kPartRows * D : 0;
  static constexpr int kStagedBytes = kMatrixBytes + kParts * kPartBytes;
  static constexpr int kSharedBytes = kStagedBytes + 1024 + 1024;  // barriers and tiles, alignment

  // The type of the products' operands: over codes half (decode_fragments.cuh says why), for queries too.
  template <typename T>
  using Number = std::conditional_t<kCodes, __half, T>;

  // In a stage: where a row's half of the elements begins, and its vectors of 16 bytes, as the copy engine swizzles them.
  static __device__ constexpr int offset(int row, int half) {
    return row / 8 * kRowGroupBytes + half * kHalfBytes + row % 8 * 128;
  }
  static __device__ int vector_offset(int row, int vector) {
    return offset(row, vector / 8) + (vector % 8 ^ row % 8) * 16;
  }

  // One warp calls it.
  static __device__ void zero_rows(uint32_t stage, int from, int to) {
    for (int i = threadIdx.x % kWarp; i < (to - from) * kHalves * 8; i += kWarp) {
      store_shared(stage + vector_offset(from + i / (8 * kHalves), i % (8 * kHalves)), make_uint4(0, 0, 0, 0));
    }
  }

  // The steps of a tile, each of kKeys keys, are walked from the last to the first.
  static __device__ int last_step(const Tile& tile) { return (tile.end_key(kRows) - 1) / kKeys; }
  static __device__ int first_step(const Tile& tile, int window) { return tile.first_key(window) / kKeys; }
};

// What a launch's blocks share to divide its tiles among them. Zeros at the start, and again when the last block has ended.
struct TileCounters {
  int taken;  // beside the first tile of each block
  int ended;  // blocks that have none left
};

template <typename T>
struct HopperParams {
  CUtensorMap q;  // [tokens, heads, head size]
  // [blocks, slots / 8, heads * halves or heads, 8, 64 or head size]; codes: [blocks, slots / 8, heads, 8, head size]
  CUtensorMap k, v;
  PrefillParams<T> p;
  TileCounters* tiles;
  int box_slots;   // slots in a box of k and v: divides the block size and kKeys, of codes kPartRows
};

// The block's shared memory: matrices and parts first, then this.
template <typename C, int D>
struct HopperShared {
  using Shape = HopperShape<C, D>;
  // The fetching warps are at most kStages steps ahead of the products with keys, which are at most a tile ahead of those
  // with values, and a tile is chosen at most a step ahead: when a place is used again, all have read it.
  static constexpr int kTiles = Shape::kStages + 3;
  uint64_t q_full[Shape::kQueryStages], q_empty[Shape::kQueryStages], tile_full[kTiles], v_arrived;
  uint64_t k_full[Shape::kStages], k_empty[Shape::kStages], v_full[Shape::kStages], v_empty[Shape::kStages];
  uint64_t part_full[Shape::kParts];
  Tile tiles[kTiles];

  template <int N>
  static __device__ void init(uint64_t (&barriers)[N], int arrivals) {
    for (int i = 0; i < N; ++i) barrier_init(shared_address(&barriers[i]), arrivals);
  }

  __device__ void init() {
    constexpr int kWarps = 4 * Shape::kGroups;
    init(q_full, 1), init(tile_full, 1), init(part_full, 1);
    init(k_full, Shape::kFetchers), init(v_full, Shape::kFetchers);
    init(q_empty, kWarps), init(k_empty, kWarps), init(v_empty, kWarps);
    barrier_init(shared_address(&v_arrived), 1);
    barrier_init_done();
  }
};

// Addresses of what lies in shared memory.
template <typename C, int D>
struct HopperLayout {
  using Shape = HopperShape<C, D>;
  uint32_t q, k, v, parts;
  HopperShared<C, D>* shared;

  __device__ explicit HopperLayout(unsigned char* memory) {
    const uint32_t start = shared_address(memory), pad = (1024 - start % 1024) % 1024;
    q = start + pad;
    k = q + Shape::kQueryStages * Shape::kQueryBytes;
    v = k + Shape::kStages * Shape::kStageBytes;
    parts = v + Shape::kStages * Shape::kStageBytes;
    shared = reinterpret_cast<HopperShared<C, D>*>(memory + pad + Shape::kStagedBytes);
  }
};

// The block's tiles as one warp sees them, in order. The warp that chooses them publishes each for the others.
template <typename C, int D>
struct TileQueue {
  HopperShared<C, D>& shared;
  Ring<HopperShared<C, D>::kTiles> place;

  // seq is -1 after the last tile.
  __device__ Tile take() {
    barrier_wait(shared_address(&shared.tile_full[place.stage]), place.parity);
    const Tile tile = shared.tiles[place.stage];
    place.advance();
    return tile;
  }

  __device__ void publish(const Tile& tile) {
    if (threadIdx.x % kWarp == 0) {
      shared.tiles[place.stage] = tile;
      barrier_arrive(shared_address(&shared.tile_full[place.stage]));
    }
    place.advance();
  }
};

// The warp that chooses: a block begins with the tile of its number and then takes whichever is next in the grid.
template <typename T, typename C, int D>
struct TileChooser {
  const HopperParams<T>& params;
  TileQueue<C, D> queue;
  TileSearch search;
  int number;

  __device__ TileChooser(const HopperParams<T>& params, HopperShared<C, D>& shared)
      : params(params), queue{shared}, search(params.p, HopperShape<C, D>::kRows), number(blockIdx.x) {}

  // The next number is asked for at once, long before it is needed.
  __device__ Tile take() {
    const Tile tile = search.find(__shfl_sync(kAllLanes, number, 0));
    queue.publish(tile);
    if (threadIdx.x % kWarp != 0) return tile;
    if (tile.seq >= 0) {
      number = gridDim.x + atomicAdd(&params.tiles->taken, 1);
    } else if (atomicAdd(&params.tiles->ended, 1) == static_cast<int>(gridDim.x) - 1) {
      *params.tiles = {};
    }
    return tile;
  }
};

}  // namespace raylm::cuda
