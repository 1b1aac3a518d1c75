// How decode attention's warps bring keys and values from the cache to shared memory.
#pragma once

#include "raylm/cuda/decode_layout.cuh"
#include "raylm/cuda/ptx/barrier.cuh"
#include "raylm/cuda/ptx/copy.cuh"

namespace raylm::cuda {

// A warp copies 16 keys of each tile, and their values, to its own part of a stage.
template <typename T, typename C, int D, int N, DecodePart Part, bool Boxes>
struct DecodeCopies {
  using Cursor = DecodeCursor<Part>;
  using Layout = DecodeLayout<C, D, N, Boxes>;
  using Places = typename Layout::Places;
  static constexpr int kBarriers = Boxes ? Layout::stages(true) * kDecodeWarps : 1;  // of each stage, of each warp
  const DecodeParams<T, Part, Boxes>& p;
  unsigned char* stages;
  uint32_t barriers;
  int kv_head, lane, warp;

  __device__ unsigned char* part(int stage, int of_warp) const {
    return stages + stage * Layout::kStage + of_warp * Layout::kPart;
  }
  __device__ uint32_t barrier(int stage) const { return barriers + (stage * kDecodeWarps + warp) * 8; }

  __device__ void init_barriers() const {
    for (int i = 0; i < kBarriers; ++i) barrier_init(barriers + i * 8, 1);
    barrier_init_done();
  }

  // The block of the cache that holds this warp's keys of the cursor's tile.
  __device__ int cache_block(const Cursor& cursor) const {
    const int unit = cursor.unit + warp;
    if (cursor.done() || unit >= cursor.stop) return 0;
    int seq = cursor.seq;
    if constexpr (Part == DecodePart::kPrefixes) seq = p.batch.prefixes.members[seq];
    return p.attention.block_table[seq * p.attention.block_table_stride + p.blocks.block(unit)];
  }

  // Keys outside the sequence become zeros: their slots may hold NaN, which no weight of 0 would remove from the sum.
  __device__ void start(const Cursor& cursor, int block, int stage) const {
    const int unit = cursor.unit + warp, key = unit * kDecodeKeys, slot = p.blocks.slot(unit);
    if constexpr (Boxes) {
      if (lane == 0) copy_boxes(unit < cursor.stop, block, slot, stage);
    } else if (unit < cursor.stop) {
      copy_pieces(cursor.now.low - key, cursor.now.high - key, block, slot, stage);
    }
  }

  // Of rows [from, to) of 16.
  __device__ void copy_pieces(int from, int to, int block, int slot, int stage) const {
    const AttentionParams<T>& a = p.attention;
    const int64_t k_first = block * a.k_block_stride + slot * a.k_slot_stride + kv_head * a.k_head_stride;
    const int64_t v_first = block * a.v_block_stride + slot * a.v_slot_stride + kv_head * a.v_head_stride;
    const C* k = static_cast<const C*>(a.k_cache) + k_first;
    const C* v = static_cast<const C*>(a.v_cache) + v_first;
    const uint32_t shared = shared_address(part(stage, warp));
#pragma unroll
    for (int i = 0; i < kDecodeKeys * Layout::kChunks / kWarp; ++i) {
      const int row = (i * kWarp + lane) / Layout::kChunks, chunk = (i * kWarp + lane) % Layout::kChunks;
      const int d = chunk * Layout::kVector;
      const bool read = row >= from && row < to && d < a.head_dim;
      const uint32_t at = shared + Places::at(row, chunk);
      copy_async(at, k + row * a.k_slot_stride + d, read);
      copy_async(at + Layout::kTensor, v + row * a.v_slot_stride + d, read);
    }
  }

  // A barrier's phase ends in every round of the stages, whether there is anything to copy or not.
  __device__ void copy_boxes(bool any, int block, int slot, int stage) const {
    if (!any) return barrier_arrive(barrier(stage));
    barrier_arrive_expecting(barrier(stage), Layout::kPart);
    const uint32_t to = shared_address(part(stage, warp));
    const int at[5] = {0, 0, kv_head * Places::kParts, slot / 8, block};
    load_box(to, p.boxes.k, barrier(stage), at);
    load_box(to + Layout::kTensor, p.boxes.v, barrier(stage), at);
  }

  // Behind what was started for a tile, or what would have been.
  __device__ void commit() const {
    if constexpr (!Boxes) copy_commit();
  }

  // Until what this warp copied of the tile is there.
  __device__ void wait(const Cursor& at, int stage, int parity) const {
    if constexpr (Boxes) {
      barrier_wait(barrier(stage), parity);
      clear_outside(at, stage);
    } else if (p.deep) {
      copy_wait<Layout::stages(true) - 2>();
    } else {
      copy_wait<Layout::stages(false) - 2>();
    }
  }

  // Scores of keys outside of the sequence are hidden; values become zeros.
  __device__ void clear_outside(const Cursor& at, int stage) const {
    const int key = (at.unit + warp) * kDecodeKeys, from = at.now.low - key, to = at.now.high - key;
    if (at.unit + warp >= at.stop || (from <= 0 && to >= kDecodeKeys)) return;
    const uint32_t values = shared_address(part(stage, warp)) + Layout::kTensor;
    for (int i = lane; i < kDecodeKeys * Layout::kChunks; i += kWarp) {
      const int row = i / Layout::kChunks;
      if (row < from || row >= to) store_shared(values + Places::at(row, i % Layout::kChunks), make_uint4(0, 0, 0, 0));
    }
    fence_shared_writes();
  }
};

}  // namespace raylm::cuda
