// The tiles of products with weights in patches (patched_linear.cuh): what a block's warps take and what it keeps in shared
// memory.
#pragma once

#include "raylm/cuda/tile/patches.cuh"

namespace raylm::cuda {

constexpr int kMostPatchedStages = 8, kMostPatchedXStages = 4;
constexpr int kCopied = 4;  // patches beside each other, at most, of a copy

constexpr int kMostSplit = 8;  // blocks of a cluster

// Where sums meet: a block's own, and behind them those that the others of a cluster send, each for a share of the rows.
template <typename Shape>
constexpr int meeting_bytes(int split) {
  const int sent = split > 1 ? split * ((Shape::kRows + split - 1) / split) * Shape::kWidth * 4 : 0;
  return Shape::kMeets ? Shape::kAreas * Shape::kAreaBytes + sent : 0;
}

template <int Rows, int Width, int Chunks, int Warps>
struct PatchedFewShape {
  static constexpr bool kWide = false, kMovesRegisters = false, kMeets = true;
  static constexpr int kRows = Rows, kEights = Rows / 8;
  static constexpr int kWidth = Width, kTall = 2;  // rows of W: of a tile; those of a warp, in sixteens
  static constexpr int kChunks = Chunks, kColumns = Chunks * kPatchColumns;  // of a stage
  static constexpr int kThreads = Warps * kWarp, kFetching = kWarp;  // that multiply; others
  static constexpr int kTeam = Width / (16 * kTall);  // warps that have the same part of a stage's columns
  static constexpr int kParts = Warps / kTeam, kPartChunks = Chunks / kParts;
  static constexpr int kAreas = kParts > 4 ? kParts / 4 : 1;  // where sums meet
  static constexpr int kPatches = kWidth / kPatchRows * Chunks;  // of a stage
  static constexpr int kCopies = Chunks / kCopied;  // of patches beside each other
  static constexpr int kBoxBytes = kRows * 128, kBoxes = kColumns / 64, kXBytes = kBoxes * kBoxBytes;
  static constexpr int kXStages = 0;  // x is in the others
  static constexpr int kPitch = kWidth + 4;  // of sums that meet
  static constexpr int kAreaBytes = kRows * kPitch * 4;
  static_assert(kTeam * kParts == Warps && kPartChunks * kParts == Chunks && kCopies * kCopied == Chunks);
  static_assert(kWidth / kPatchRows * kCopies <= kWarp && kBoxes <= kWarp);
  __host__ __device__ static constexpr int stage_bytes(int patch) { return kXBytes + kPatches * patch; }
  static constexpr int shared_bytes(int patch, int stages, int split) {
    return 1024 + stages * stage_bytes(patch) + meeting_bytes<PatchedFewShape>(split);  // 1024: alignment
  }
};

// For more rows, by wgmma. `Boxes`: of x, 128 bytes a row, for the columns of a patch; there is one where x is rounded.
template <int Rows, int Width, int Chunks, int Warps, int Boxes = 2>
struct PatchedWideShape {
  static constexpr bool kWide = true, kMovesRegisters = Rows > 128;
  static constexpr int kRows = Rows, kEights = Rows / 8;
  static constexpr int kWidth = Width, kTall = 1;
  static constexpr int kChunks = Chunks, kColumns = Chunks * kPatchColumns;
  static constexpr int kThreads = Warps * kWarp, kFetching = (kMovesRegisters ? 4 : 2) * kWarp;
  static constexpr int kTeam = Width / kPatchRows, kParts = Warps / kTeam, kAreas = Rows <= 32 && kParts > 1 ? 2 : 1;
  static constexpr int kPatches = kTeam * Chunks, kCopies = 1;
  static constexpr int kXChunks = Rows <= 64 && Boxes > 1 ? Chunks : 1;  // of a stage of x
  static constexpr int kBoxes = kXChunks * Boxes, kXBytes = kBoxes * Rows * 128;
  static constexpr int kXStages = kXBytes > (32 << 10) ? 2 : Rows > 32 && Boxes > 1 ? 3 : 4;
  static constexpr int kPitch = kWidth + 4;
  static constexpr int kAreaBytes = kRows * kPitch * 4;
  // Parts' sums meet in every tile, in shared memory of their own. Without parts, a cluster's meet in blocks with one tile,
  // where stages were.
  static constexpr bool kMeets = kParts > 1;
  static_assert(kTeam * kParts == Warps && kTeam % 4 == 0 && kXChunks % kParts == 0);
  static_assert(Chunks <= kCopied && kTeam <= kWarp && kXStages <= kMostPatchedXStages);
  __host__ __device__ static constexpr int stage_bytes(int patch) { return kPatches * patch; }
  static_assert(kMeets || kAreaBytes <= kXStages * kXBytes + kPatches * bytes_of_patch(Boxes > 1 ? 4 : 8, 7));
  static constexpr int shared_bytes(int patch, int stages, int split) {
    return 1024 + kXStages * kXBytes + stages * stage_bytes(patch) + meeting_bytes<PatchedWideShape>(split);
  }
};

}  // namespace raylm::cuda
