// The warps of Hopper's prefill kernel (prefill_hopper.cuh) that bring queries, keys and values to shared memory: the copy
// engine brings a box for each run of slots that lies in one block of the cache.
#pragma once

#include "raylm/cuda/prefill_hopper_layout.cuh"

namespace raylm::cuda {

// What is fetched of a step's keys: rows [from, to), in boxes, of which a lane has one: its first row, and its place in
// the cache.
struct FetchPlan {
  int first_key, from, to, row, block, slot;

  __device__ bool has_box() const { return row >= from && row < to; }
};

// Of step n, the boxes that hold a key of the sequence that some query of the tile sees. `row` is that of the lane's box.
template <typename C, int D, typename T>
__device__ FetchPlan plan_fetch(const HopperParams<T>& params, const Tile& tile, int n, int row) {
  constexpr int kKeys = HopperShape<C, D>::kKeys;
  const int box = params.box_slots, first_key = n * kKeys;
  FetchPlan plan{first_key, max((tile.first_key(params.p.window) & -box) - first_key, 0),
                 min(((tile.seq_len + box - 1) & -box) - first_key, kKeys), row, 0, 0};
  if (plan.has_box()) {
    const AttentionParams<T>& a = params.p.attention;
    const unsigned key = first_key + row, column = key / static_cast<unsigned>(params.p.block_size);
    plan.block = a.block_table[tile.seq * a.block_table_stride + column];
    plan.slot = key - column * params.p.block_size;
  }
  return plan;
}

template <typename T, typename C, int D>
struct QueryFetcher {
  using Shape = HopperShape<C, D>;
  const HopperParams<T>& params;
  const HopperLayout<C, D>& at;
  Ring<Shape::kQueryStages> place;

  __device__ void load(const Tile& tile) {
    const int lane = threadIdx.x % kWarp;
    barrier_wait(shared_address(&at.shared->q_empty[place.stage]), place.parity ^ 1);
    const uint32_t full = shared_address(&at.shared->q_full[place.stage]);
    if (lane == 0) barrier_arrive_expecting(full, Shape::kQueryBytes);
    __syncwarp();
    if (lane < Shape::kHalves) {
      load_box(at.q + place.stage * Shape::kQueryBytes + lane * Shape::kRows * 128, params.q, full,
               {lane * 64, tile.head, tile.query_start + tile.first_row});
    }
    place.advance();
  }
};

// A warp that fetches keys (and chooses tiles and fetches queries) or values, as numbers.
template <typename T, int D>
struct Fetcher {
  using Shape = HopperShape<T, D>;
  const HopperParams<T>& params;
  const HopperLayout<T, D>& at;
  int lane = threadIdx.x % kWarp;
  Tile tile{};
  Ring<Shape::kStages> ring{};
  int arrived_parity = 0;

  static __device__ uint32_t address(uint64_t& barrier) { return shared_address(&barrier); }

  // A lane has all halves of its box, or one where a box is not whole.
  __device__ FetchPlan plan(int n) const {
    return plan_fetch<T, D>(params, tile, n, (Shape::kWhole ? lane : lane / Shape::kHalves) * params.box_slots);
  }

  __device__ void load(const FetchPlan& plan, const CUtensorMap& map, uint32_t stage, uint32_t barrier) const {
    if (lane == 0) barrier_arrive_expecting(barrier, (plan.to - plan.from) * Shape::kHalves * 128);
    __syncwarp();
    const int half = Shape::kWhole ? 0 : lane % Shape::kHalves, head = tile.head / params.p.group;
    if (plan.has_box()) {
      load_box(stage + Shape::offset(plan.row, half), map, barrier,
               {half * 64, 0, Shape::kWhole ? head * Shape::kHalves : head, plan.slot / 8, plan.block});
    }
  }

  __device__ void load_keys(const FetchPlan& plan) {
    barrier_wait(address(at.shared->k_empty[ring.stage]), ring.parity ^ 1);
    load(plan, params.k, at.k + ring.stage * Shape::kStageBytes, address(at.shared->k_full[ring.stage]));
    ring.advance();
  }

  __device__ void zero_rows(uint32_t stage, int from, int to) const {
    Shape::zero_rows(stage, from, to);
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

  // Calls body with the plan of every step, and looks the next one up before.
  template <typename Body>
  __device__ void for_steps(const Body& body) {
    const int first = Shape::first_step(tile, params.p.window), last = Shape::last_step(tile);
    FetchPlan next = plan(last);
    for (int n = last; n >= first; --n) {
      const FetchPlan current = next;
      if (n > first) next = plan(n - 1);
      body(current, n == last);
    }
  }

  __device__ void run_keys() {
    TileChooser<T, T, D> tiles(params, *at.shared);
    QueryFetcher<T, T, D> queries{params, at};
    for (tile = tiles.take(); tile.seq >= 0; tile = tiles.take()) {
      for_steps([&](const FetchPlan& plan, bool begins) {
        load_keys(plan);
        if (begins) queries.load(tile);
      });
    }
  }

  __device__ void run_values() {
    TileQueue<T, D> tiles{*at.shared};
    for (tile = tiles.take(); tile.seq >= 0; tile = tiles.take()) {
      for_steps([&](const FetchPlan& plan, bool) { load_values(plan); });
    }
  }
};

}  // namespace raylm::cuda
