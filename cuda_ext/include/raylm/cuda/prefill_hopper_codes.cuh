// The fetching warps of Hopper's prefill kernel (prefill_hopper.cuh) over a cache of codes. The copy engine brings codes;
// the warps convert them to half, exactly, and write them where wgmma reads keys and values. A conversion to bfloat16 takes
// twice the instructions.
#pragma once

#include "raylm/cuda/prefill_hopper_fetch.cuh"

namespace raylm::cuda {

// One warp: it brings half of each step's keys, or of its values, in two parts. It converts one part while the copy engine
// brings the other, and requests a part of the next step (or of the next tile) as soon as it has converted this step's.
template <typename T, int D>
struct CodeFetcher {
  using Shape = HopperShape<Code, D>;
  static constexpr int kRows = Shape::kPartRows, kRowVectors = D / 16;  // of 16 codes
  static_assert(kWarp % kRowVectors == 0 && kRows % 8 == 0);
  static constexpr int kTurnRows = kWarp / kRowVectors, kTurns = kRows / kTurnRows;  // rows that a warp reads at a time
  static constexpr int kAhead = 4;  // of a lane's vectors, read before the first is stored
  const HopperParams<T>& params;
  const HopperLayout<Code, D>& at;
  const CUtensorMap& map;
  uint32_t stages;        // shared memory of the keys' or values' stages
  uint64_t *full, *empty;  // their barriers
  int warp;               // 0 to 3
  Ring<Shape::kStages> ring;
  int part_parity = 0;

  __device__ static int lane() { return threadIdx.x % kWarp; }
  __device__ int first_row(int part) const { return (warp % 2 * 2 + part) * kRows; }
  __device__ uint32_t codes(int part) const { return at.parts + (warp * 2 + part) * Shape::kPartBytes; }
  __device__ uint32_t arrived(int part) const { return shared_address(&at.shared->part_full[warp * 2 + part]); }

  __device__ FetchPlan plan(const Tile& tile, int n) const {
    return plan_fetch<Code, D>(params, tile, n, first_row(0) + lane() * params.box_slots);
  }

  // After all lanes have read what the part held before.
  __device__ void request(int part, const Tile& tile, const FetchPlan& plan) const {
    const int first = first_row(part), rows = min(plan.to, first + kRows) - max(plan.from, first);
    __syncwarp();
    if (lane() == 0) barrier_arrive_expecting(arrived(part), max(rows, 0) * D);
    __syncwarp();
    if (plan.has_box() && plan.row >= first && plan.row < first + kRows) {
      load_box(codes(part) + (plan.row - first) * D, map, arrived(part),
               {0, 0, tile.head / params.p.group, plan.slot / 8, plan.block});
    }
  }

  // A lane reads vectors of 16 codes and writes each as two vectors of 8 numbers. Columns 4 to 7 of every 8 write their second
  // vector first: the eight lanes that write at a time then reach all banks.
  __device__ void make_numbers(int part) const {
    const int column = lane() % kRowVectors, row = lane() / kRowVectors;
    const bool swaps = column / 4 % 2;
    const uint32_t to = stages + ring.stage * Shape::kStageBytes + Shape::offset(first_row(part), 0);
    const uint32_t one = to + Shape::vector_offset(row, 2 * column + swaps);
    const uint32_t other = to + Shape::vector_offset(row, 2 * column + !swaps);
#pragma unroll
    for (int i = 0; i < kTurns; i += kAhead) {
      uint4 x[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) x[j] = load_shared(codes(part) + ((i + j) * kWarp + lane()) * 16);
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        // A later turn's row has other bits than `row`, so the swizzle's XOR with them can be applied afterwards.
        const int below = (i + j) * kTurnRows, turn = below % 8 * 16, further = Shape::offset(below, 0);
        store_numbers((one ^ turn) + further, swaps ? x[j].z : x[j].x, swaps ? x[j].w : x[j].y);
        store_numbers((other ^ turn) + further, swaps ? x[j].x : x[j].z, swaps ? x[j].y : x[j].w);
      }
    }
  }

  __device__ static void store_numbers(uint32_t to, uint32_t low, uint32_t high) {
    store_shared(to, make_uint4(halves_of<0>(low), halves_of<1>(low), halves_of<0>(high), halves_of<1>(high)));
  }

  // Zeros the part's rows outside of [from, end). Their weight is 0, but unused slots may hold codes of NaN.
  __device__ void zero_others(int part, int from, int end) const {
    const uint32_t stage = stages + ring.stage * Shape::kStageBytes;
    const int first = first_row(part), last = first + kRows;
    if (first >= from && last <= end) return;
    __syncwarp();
    Shape::zero_rows(stage, first, min(from, last));
    Shape::zero_rows(stage, max(end, first), last);
  }

  // `begin` is called when a tile's first step is there.
  template <typename Tiles, typename Begin>
  __device__ void run(Tiles& tiles, const Begin& begin) {
    const int window = params.p.window;
    Tile tile = tiles.take();
    if (tile.seq < 0) return;
    int n = Shape::last_step(tile);
    FetchPlan current = plan(tile, n);
    for (int part = 0; part < 2; ++part) request(part, tile, current);
    for (bool begins = true; tile.seq >= 0;) {
      const bool ends = n == Shape::first_step(tile, window);
      const Tile following = ends ? tiles.take() : tile;
      const int next = ends ? Shape::last_step(following) : n - 1;
      FetchPlan ahead{};
      if (following.seq >= 0) ahead = plan(following, next);
      const int end = tile.seq_len - current.first_key;
      barrier_wait(shared_address(&empty[ring.stage]), ring.parity ^ 1);
      for (int part = 0; part < 2; ++part) {
        barrier_wait(arrived(part), part_parity);
        make_numbers(part);
        zero_others(part, current.from, end);
        if (following.seq >= 0) request(part, following, ahead);
      }
      fence_shared_writes();
      __syncwarp();
      if (lane() == 0) barrier_arrive(shared_address(&full[ring.stage]));
      if (begins) begin(tile);
      part_parity ^= 1;
      ring.advance();
      tile = following, n = next, current = ahead, begins = ends;
    }
  }
};

// Warps 0 and 1 bring keys, and the first of them queries; 2 and 3 bring values.
template <typename T, int D>
__device__ void fetch_codes(const HopperParams<T>& params, const HopperLayout<Code, D>& at, int warp) {
  HopperShared<Code, D>& shared = *at.shared;
  const bool keys = warp < 2;
  CodeFetcher<T, D> fetcher{params, at, keys ? params.k : params.v, keys ? at.k : at.v,
                            keys ? shared.k_full : shared.v_full, keys ? shared.k_empty : shared.v_empty, warp};
  if (warp == 0) {
    TileChooser<T, Code, D> tiles(params, shared);
    QueryFetcher<T, Code, D> queries{params, at};
    fetcher.run(tiles, [&](const Tile& tile) { queries.load(tile); });
  } else {
    TileQueue<Code, D> tiles{shared};
    fetcher.run(tiles, [](const Tile&) {});
  }
}

}  // namespace raylm::cuda
