// What decode attention's kernels are launched with, and how their shared memory is divided.
#pragma once

#include "raylm/cuda/attention.cuh"
#include "raylm/cuda/decode_parts.cuh"
#include "raylm/cuda/decode_schedule.cuh"
#include "raylm/cuda/ptx/tensor_copy.cuh"
#include "raylm/cuda/tile/numbers.cuh"

namespace raylm::cuda {

constexpr int kDecodeWarps = kDecodeThreads / kWarp;

// Where a unit of keys is among a sequence's blocks of the cache, which have `units` each. A division would take half as long
// as a warp's products with the unit.
struct BlockUnits {
  unsigned units, reciprocal;  // 2^32 / units, rounded up: exact as long as sequences have fewer than 2^32 / units units

  __device__ unsigned block(unsigned unit) const { return units == 1 ? unit : __umulhi(unit, reciprocal); }
  __device__ int slot(unsigned unit) const { return static_cast<int>(unit - block(unit) * units) * kDecodeKeys; }
};

// The cache as the copy engine sees it: parts of 128 bytes of a row, in groups of 8 slots of all KV heads' parts. A box has
// two groups of a KV head.
struct DecodeBoxes {
  CUtensorMap k, v;
};

// The grid is (columns, slots); a column is a KV head and a chunk of rows. A sequence's rows are its pairs of a query
// token and a head of the group.
template <typename T, DecodePart Part, bool Boxes>
struct DecodeParams {
  struct Nothing {};
  AttentionParams<T> attention;
  DecodeLine<Part> batch;
  DecodeParts parts;
  BlockUnits blocks;
  int64_t num_tokens;
  const float* alibi_slopes;  // [num_heads], for the kernel that is Biased
  bool deep;                  // of the stages one more
  bool early;  // lengths and block tables may be read while the kernels ahead still run; for the launch of all keys
  // Written by the launch of prefixes, read by that of what follows them.
  std::conditional_t<Part == DecodePart::kAll, Nothing, PrefixSums> prefixes;
  std::conditional_t<Boxes, DecodeBoxes, Nothing> boxes;
};

// Where the keys of a warp's part of a tile lie in shared memory, or the values, a row each, in chunks of 16 bytes. Here as
// lanes copy them, a chunk at a time (sm_80): the same chunk of 8 rows is in 8 different banks.
template <typename C, int D>
struct PiecePlaces {
  static constexpr int kPitch = D * static_cast<int>(sizeof(C)) + 16;
  static constexpr int bytes(int rows) { return rows * kPitch; }
  __device__ static uint32_t at(int row, int chunk) { return row * kPitch + chunk * 16; }
  // The address of the chunk 2 * pairs behind the one at `first`, which is chunk 0 or 1 of its row.
  __device__ static uint32_t behind(uint32_t first, int pairs) { return first + pairs * 32; }
};

// The same as the copy engine brings them in a box (sm_90): groups of 8 rows; of each group, one KB after the other, 128 bytes
// of each of its rows, swizzled. The first KB begins at a multiple of 1,024.
template <typename C, int D>
struct BoxPlaces {
  static constexpr int kParts = D * static_cast<int>(sizeof(C)) / 128;
  static constexpr int bytes(int rows) { return rows * kParts * 128; }
  __device__ static uint32_t at(int row, int chunk) {
    return (row / 8 * kParts + chunk / 8) * 1024 + row % 8 * 128 + (chunk % 8 ^ row % 8) * 16;
  }
  __device__ static uint32_t behind(uint32_t first, int pairs) { return (first ^ pairs % 4 * 32) + pairs / 4 * 1024; }
};

// Whether rows of D elements of C come in boxes. A row of codes has no room for its float sums without a pitch.
template <typename C, int D>
constexpr bool kComeInBoxes = sizeof(C) == 2 && D % 64 == 0;

// For a cache of C, head sizes up to D and 8 * N rows in a warp, whose keys come in boxes or lane by lane. Sizes are in bytes.
template <typename C, int D, int N, bool Boxes>
struct DecodeLayout {
  using Places = std::conditional_t<Boxes, BoxPlaces<C, D>, PiecePlaces<C, D>>;
  static constexpr bool kCodes = std::is_same_v<C, Code>;
  static constexpr int kVector = 16 / static_cast<int>(sizeof(C));  // copied at a time
  static constexpr int kChunks = D / kVector;                       // of 16 bytes, in a row
  static constexpr int kTensor = Places::bytes(kDecodeKeys);
  static constexpr int kPart = 2 * kTensor;  // a warp's K, then its V
  static constexpr int kStage = kDecodeWarps * kPart;
  static constexpr int kRows = kDecodeWarps * N * 8;  // that a block can take
  // Blocks on a multiprocessor and stages of its copies: as many as registers and shared memory allow, blocks first. Where
  // so many blocks have no work, one stage more.
  static constexpr int kBlocks = D <= 64 ? 4 : D <= 128 ? 3 : D <= 192 ? 2 : 1;
  __host__ __device__ static constexpr int stages(bool deep) { return (D <= 64 ? 3 : 2) + kCodes + deep; }
  static constexpr int kAlign = Boxes ? 1024 : 16;
  static constexpr int bytes(bool deep) { return stages(deep) * kStage + kAlign - 16; }
  // Where warps' sums are joined: floats of a row, and how many groups of 8 rows a warp's part of a stage has room for.
  static constexpr int kSumPitch = D + 8;
  static constexpr int kPass = N == 1 || 2 * 8 * kSumPitch * sizeof(float) > kPart ? 1 : 2;
  static_assert(kPass * 8 * kSumPitch * sizeof(float) <= kPart);
};

}  // namespace raylm::cuda
