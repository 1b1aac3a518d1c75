// Attention of long runs of queries over a paged cache, for Hopper: FlashAttention-3 (Shah et al., arXiv:2407.08608).
//
// A block stays on its SM and takes tile after tile from a counter. Two of its warps fetch, keys and values, and run
// ahead into the next tile: the copy engine brings a box for each run of slots that lies in one block of the cache.
// Groups of four warps compute, 64 queries each: while wgmma multiplies the values of one step, the group takes the
// softmax of the next, whose keys have been multiplied before. The groups are not held to turns, as the paper's are: it
// was no faster.
#pragma once

#include "raylm/cuda/pipeline/ring.cuh"
#include "raylm/cuda/prefill_common.cuh"
#include "raylm/cuda/ptx/barrier.cuh"
#include "raylm/cuda/ptx/tensor_copy.cuh"
#include "raylm/cuda/ptx/warps.cuh"
#include "raylm/cuda/ptx/wgmma.cuh"

namespace raylm::cuda {

template <int D>
struct HopperShape {
  static constexpr int kGroups = D <= 64 ? 3 : 2, kRows = 64 * kGroups, kThreads = 128 * (kGroups + 1);
  static constexpr int kKeys = D <= 128 ? 128 : D <= 192 ? 96 : 64;
  static constexpr int kStages = D <= 64 ? 4 : 2, kQueryStages = D <= 128 ? 2 : 1;
  static constexpr int kHalves = (D + 63) / 64;  // the copy engine swizzles rows of at most 64 elements
  static constexpr int kFetchRegisters = kGroups == 3 ? 32 : 40, kComputeRegisters = kGroups == 3 ? 160 : 232;
  // One box has all halves of its rows, if halves of 64 elements divide the heads; the shared memory of keys and values
  // is then [groups of 8 rows][halves][8][64], otherwise [halves][rows][64].
  static constexpr bool kWhole = D % 64 == 0;
  static constexpr int kRowGroupBytes = kWhole ? kHalves * 1024 : 1024, kHalfBytes = kWhole ? 1024 : kKeys * 128;
  static constexpr int kQueryBytes = kRows * kHalves * 128, kStageBytes = kKeys * kHalves * 128;
  static constexpr int kMatrixBytes = kQueryStages * kQueryBytes + 2 * kStages * kStageBytes;
  static constexpr int kSharedBytes = kMatrixBytes + 1024 + 1024;  // barriers and tiles, alignment
};

template <typename T>
struct HopperParams {
  CUtensorMap q;     // [tokens, heads, head size]
  CUtensorMap k, v;  // [blocks, slots / 8, heads * halves or heads, 8, 64 or head size]
  PrefillParams<T> p;
  int* next_tile;  // 0 at the start
  int box_slots;   // slots in a box of k and v: divides the block size and kKeys
};

// The block's shared memory: matrices first, then this.
template <int D>
struct HopperShared {
  using Shape = HopperShape<D>;
  // The fetching warps are at most kStages tiles of one step each ahead of the products with keys, which are at most a
  // tile ahead of those with values: when a place is used again, all have read it.
  static constexpr int kTiles = Shape::kStages + 2;
  uint64_t q_full[Shape::kQueryStages], q_empty[Shape::kQueryStages], tile_full[kTiles], v_arrived;
  uint64_t k_full[Shape::kStages], k_empty[Shape::kStages], v_full[Shape::kStages], v_empty[Shape::kStages];
  Tile tiles[kTiles];

  template <int N>
  static __device__ void init(uint64_t (&barriers)[N], int arrivals) {
    for (int i = 0; i < N; ++i) barrier_init(shared_address(&barriers[i]), arrivals);
  }

  __device__ void init() {
    constexpr int kWarps = 4 * Shape::kGroups;
    init(q_full, 1), init(k_full, 1), init(v_full, 1), init(tile_full, 1);
    init(q_empty, kWarps), init(k_empty, kWarps), init(v_empty, kWarps);
    barrier_init(shared_address(&v_arrived), 1);
    barrier_init_done();
  }
};

// Addresses of what lies in shared memory.
template <int D>
struct HopperLayout {
  using Shape = HopperShape<D>;
  uint32_t q, k, v;
  HopperShared<D>* shared;

  __device__ explicit HopperLayout(unsigned char* memory) {
    const uint32_t start = shared_address(memory), pad = (1024 - start % 1024) % 1024;
    q = start + pad;
    k = q + Shape::kQueryStages * Shape::kQueryBytes;
    v = k + Shape::kStages * Shape::kStageBytes;
    shared = reinterpret_cast<HopperShared<D>*>(memory + pad + Shape::kMatrixBytes);
  }
};

// What is fetched of kKeys keys: rows [from, to), in boxes; each lane has one, and this is its place in the cache.
struct FetchPlan {
  int first_key, from, to, block, slot;
};

// A warp that fetches keys (and queries) or values.
template <typename T, int D>
struct Fetcher {
  using Shape = HopperShape<D>;
  const HopperParams<T>& params;
  const HopperLayout<D>& at;
  int lane;
  Tile tile;
  Ring<Shape::kStages> ring;
  Ring<HopperShared<D>::kTiles> tiles;
  Ring<Shape::kQueryStages> q;
  int arrived_parity = 0;

  static __device__ uint32_t address(uint64_t& barrier) { return shared_address(&barrier); }

  // The lane's box: its first row, and which half of the elements, where a box is not whole.
  __device__ int box_row() const { return (Shape::kWhole ? lane : lane / Shape::kHalves) * params.box_slots; }
  __device__ int box_half() const { return Shape::kWhole ? 0 : lane % Shape::kHalves; }
  static __device__ int offset(int row, int half) {
    return row / 8 * Shape::kRowGroupBytes + half * Shape::kHalfBytes + row % 8 * 128;
  }

  __device__ int last_step() const { return (tile.end_key(Shape::kRows) - 1) / Shape::kKeys; }
  __device__ int first_step() const { return tile.first_key(params.p.window) / Shape::kKeys; }

  // Of step n, the boxes that hold a key of the sequence that some query of the tile sees.
  __device__ FetchPlan plan(int n) const {
    const int box = params.box_slots, first_key = n * Shape::kKeys, row = box_row();
    FetchPlan plan{first_key, max((tile.first_key(params.p.window) & -box) - first_key, 0),
                   min(((tile.seq_len + box - 1) & -box) - first_key, Shape::kKeys), 0, 0};
    if (row >= plan.from && row < plan.to) {
      const AttentionParams<T>& a = params.p.attention;
      const unsigned key = first_key + row, column = key / static_cast<unsigned>(params.p.block_size);
      plan.block = a.block_table[tile.seq * a.block_table_stride + column];
      plan.slot = key - column * params.p.block_size;
    }
    return plan;
  }

  __device__ void load(const FetchPlan& plan, const CUtensorMap& map, uint32_t stage, uint32_t barrier) const {
    if (lane == 0) barrier_arrive_expecting(barrier, (plan.to - plan.from) * Shape::kHalves * 128);
    __syncwarp();
    const int row = box_row(), half = box_half(), head = tile.head / params.p.group;
    if (row >= plan.from && row < plan.to) {
      load_box(stage + offset(row, half), map, barrier,
                       {half * 64, 0, Shape::kWhole ? head * Shape::kHalves : head, plan.slot / 8, plan.block});
    }
  }

  __device__ void load_keys(const FetchPlan& plan) {
    barrier_wait(address(at.shared->k_empty[ring.stage]), ring.parity ^ 1);
    load(plan, params.k, at.k + ring.stage * Shape::kStageBytes, address(at.shared->k_full[ring.stage]));
    ring.advance();
  }

  __device__ void zero_rows(uint32_t stage, int from, int to) const {
    for (int i = lane; i < (to - from) * Shape::kHalves * 8; i += kWarp) {
      const int row = from + i / (8 * Shape::kHalves), half = i / 8 % Shape::kHalves;
      const uint32_t vector = stage + offset(row, half) + i % 8 * 16;
      store_shared_zeros(vector);
    }
    fence_shared_writes();
    __syncwarp();
  }

  // Values that no query sees have the weight 0, but 0 times the NaN of an unused slot is NaN. So rows that are not
  // fetched become zeros, and the rest of the sequence's last box when the box has arrived.
  __device__ void load_values(const FetchPlan& plan) {
    barrier_wait(address(at.shared->v_empty[ring.stage]), ring.parity ^ 1);
    const uint32_t stage = at.v + ring.stage * Shape::kStageBytes, full = address(at.shared->v_full[ring.stage]);
    const int end = min(tile.seq_len - plan.first_key, Shape::kKeys);
    if (plan.from > 0) zero_rows(stage, 0, plan.from);
    if (plan.to < Shape::kKeys) zero_rows(stage, plan.to, Shape::kKeys);
    if (plan.to <= end) {
      load(plan, params.v, stage, full);
    } else {
      const uint32_t arrived = address(at.shared->v_arrived);
      load(plan, params.v, stage, arrived);
      barrier_wait(arrived, arrived_parity);
      arrived_parity ^= 1;
      zero_rows(stage, end, plan.to);
      if (lane == 0) barrier_arrive(full);
    }
    ring.advance();
  }

  __device__ void load_queries() {
    barrier_wait(address(at.shared->q_empty[q.stage]), q.parity ^ 1);
    const uint32_t full = address(at.shared->q_full[q.stage]);
    if (lane == 0) barrier_arrive_expecting(full, Shape::kQueryBytes);
    __syncwarp();
    if (lane < Shape::kHalves) {
      load_box(at.q + q.stage * Shape::kQueryBytes + lane * Shape::kRows * 128, params.q, full,
                       {lane * 64, tile.head, tile.query_start + tile.first_row});
    }
    q.advance();
  }

  // Calls body with the plan of every step, and looks the next one up before.
  template <typename Body>
  __device__ void for_steps(const Body& body) {
    FetchPlan next = plan(last_step());
    for (int n = last_step(); n >= first_step(); --n) {
      const FetchPlan current = next;
      if (n > first_step()) next = plan(n - 1);
      body(current, n);
    }
  }

  __device__ void publish_tile() {
    if (lane == 0) {
      at.shared->tiles[tiles.stage] = tile;
      barrier_arrive(address(at.shared->tile_full[tiles.stage]));
    }
    tiles.advance();
  }

  // Chooses the tiles, too.
  __device__ void run_keys() {
    TileSearch search(params.p, Shape::kRows);
    tile = search.find(blockIdx.x);
    for (publish_tile(); tile.seq >= 0; publish_tile()) {
      const int number = lane == 0 ? gridDim.x + atomicAdd(params.next_tile, 1) : 0;
      for_steps([&](const FetchPlan& plan, int n) {
        load_keys(plan);
        if (n == last_step()) load_queries();
      });
      tile = search.find(__shfl_sync(kAllLanes, number, 0));
    }
  }

  __device__ void run_values() {
    for (;; tiles.advance()) {
      barrier_wait(address(at.shared->tile_full[tiles.stage]), tiles.parity);
      tile = at.shared->tiles[tiles.stage];
      if (tile.seq < 0) break;
      for_steps([&](const FetchPlan& plan, int) { load_values(plan); });
    }
  }
};

// One of the groups that compute: 64 rows of the tile.
template <typename T, int D>
struct Computer {
  using Shape = HopperShape<D>;
  static constexpr int kKeys = Shape::kKeys;
  const HopperParams<T>& params;
  const HopperLayout<D>& at;
  int group;
  Ring<Shape::kStages> k, v;
  Ring<Shape::kQueryStages> q;
  Ring<HopperShared<D>::kTiles> tiles;

  static __device__ uint32_t address(uint64_t& barrier) { return shared_address(&barrier); }

  static __device__ void release(uint64_t& barrier) {
    if (threadIdx.x % kWarp == 0) barrier_arrive(address(barrier));
  }

  // scores = Q K^T, begun only.
  __device__ __forceinline__ void multiply_keys(float (&scores)[kKeys / 2]) const {
    const uint32_t rows = at.q + q.stage * Shape::kQueryBytes + group * 64 * 128;
    const uint64_t queries = matrix_descriptor(rows, 1024, 0);
    const uint64_t keys = matrix_descriptor(at.k + k.stage * Shape::kStageBytes, Shape::kRowGroupBytes, 0);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < D / 16; ++d) {
      const int q_offset = d / 4 * Shape::kRows * 128 + d % 4 * 32;
      const int k_offset = d / 4 * Shape::kHalfBytes + d % 4 * 32;
      multiply_transposed<T, kKeys>(scores, queries + (q_offset >> 4), keys + (k_offset >> 4), d != 0);
    }
    wgmma_commit();
  }

  // out += weights V, begun only.
  __device__ __forceinline__ void multiply_values(float (&out)[D / 2], const uint32_t (&weights)[kKeys / 4]) const {
    const uint64_t values = matrix_descriptor(at.v + v.stage * Shape::kStageBytes, Shape::kRowGroupBytes,
                                                      Shape::kHalfBytes);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      multiply<T, D>(out, weights + 4 * n, values + n * (2 * Shape::kRowGroupBytes >> 4));
    }
    wgmma_commit();
  }

  // Soft cap and mask, for the keys of step n.
  __device__ __forceinline__ void shape_scores(float (&scores)[kKeys / 2], int group_position, int n) const {
    const PrefillParams<T>& p = params.p;
    if (p.tanh_scale != 0) soft_cap_scores(scores, p.tanh_scale);
    const bool future = (n + 1) * kKeys > group_position + 1;
    const bool past = p.window > 0 && n * kKeys <= group_position + 63 - p.window;
    if (future || past) {
      const int row = threadIdx.x % 128 / kWarp * 16 + threadIdx.x % kWarp / 4;
      mask_scores(scores, group_position + row, n * kKeys, p.window);
    }
  }

  static __device__ __forceinline__ void pack_weights(uint32_t (&weights)[kKeys / 4],
                                                      const float (&scores)[kKeys / 2]) {
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) weights[i] = pack<T>(scores[2 * i], scores[2 * i + 1]);
  }

  __device__ __forceinline__ void compute_tile(const Tile& tile) {
    const int last = (tile.end_key(Shape::kRows) - 1) / kKeys, first = tile.first_key(params.p.window) / kKeys;
    const int group_position = tile.position() + group * 64;
    float out[D / 2] = {}, scores[kKeys / 2], shrink[2];
    uint32_t weights[kKeys / 4];
    OnlineSoftmax softmax;

    barrier_wait(address(at.shared->k_full[k.stage]), k.parity);
    multiply_keys(scores);
    wgmma_wait<0>();
    settle(scores);
    finish_keys(last == first);
    shape_scores(scores, group_position, last);
    softmax.update(scores, params.p.exp2_scale, shrink);
    pack_weights(weights, scores);
    for (int n = last - 1; n >= first; --n) {
      barrier_wait(address(at.shared->k_full[k.stage]), k.parity);
      multiply_keys(scores);
      barrier_wait(address(at.shared->v_full[v.stage]), v.parity);
      multiply_values(out, weights);
      wgmma_wait<1>();
      settle(scores);
      finish_keys(n == first);
      shape_scores(scores, group_position, n);
      softmax.update(scores, params.p.exp2_scale, shrink);
      finish_values(out);
      scale_rows(out, shrink);
      pack_weights(weights, scores);
    }
    barrier_wait(address(at.shared->v_full[v.stage]), v.parity);
    multiply_values(out, weights);
    finish_values(out);
    const int row = group * 64 + threadIdx.x % 128 / kWarp * 16 + threadIdx.x % kWarp / 4;
    write_rows(params.p, tile, tile.first_row + row, out, softmax);
  }

  __device__ __forceinline__ void finish_keys(bool last) {
    release(at.shared->k_empty[k.stage]);
    k.advance();
    if (last) {
      release(at.shared->q_empty[q.stage]);
      q.advance();
    }
  }

  __device__ __forceinline__ void finish_values(float (&out)[D / 2]) {
    wgmma_wait<0>();
    settle(out);
    release(at.shared->v_empty[v.stage]);
    v.advance();
  }

  __device__ __forceinline__ void run() {
    for (;; tiles.advance()) {
      barrier_wait(address(at.shared->tile_full[tiles.stage]), tiles.parity);
      const Tile tile = at.shared->tiles[tiles.stage];
      if (tile.seq < 0) break;
      barrier_wait(address(at.shared->q_full[q.stage]), q.parity);
      compute_tile(tile);
    }
  }
};

// One block for each SM.
template <typename T, int D>
__global__ void __launch_bounds__(HopperShape<D>::kThreads, 1)
    prefill_hopper_kernel(const __grid_constant__ HopperParams<T> params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ unsigned char memory[];
  using Shape = HopperShape<D>;
  const HopperLayout<D> at(memory);
  if (threadIdx.x == 0) at.shared->init();
  __syncthreads();
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (warp < 4) {
    give_registers_back<Shape::kFetchRegisters>();
    if (warp == 0) {
      Fetcher<T, D>{params, at, lane}.run_keys();
    } else if (warp == 1) {
      Fetcher<T, D>{params, at, lane}.run_values();
    } else if (warp == 2) {
      zero_surplus_rows(params.p, blockIdx.x * kWarp + lane, gridDim.x * kWarp);
    }
  } else {
    take_registers<Shape::kComputeRegisters>();
    Computer<T, D>{params, at, warp / 4 - 1}.run();
  }
#endif
}

}  // namespace raylm::cuda
