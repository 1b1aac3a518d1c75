// Products of weights in patches of 8-bit numbers and rows of x that have been rounded to such numbers, with a scale each.
//
// A lane's words of a patch are wgmma's left operand as they lie, provided that x's numbers come in the order of a patch's
// codes (rounded_rows.cuh). Integers have one scale for all columns of a row: their sums are integers, and are scaled at
// the end. Floats (e4m3) have one for each patch: wgmma adds up 128 products of them, with fewer bits than a float32 has,
// and what is scaled then is added in float32.
#pragma once

#include "raylm/cuda/ptx/wgmma.cuh"
#include "raylm/cuda/tile/patches.cuh"

namespace raylm::cuda {

template <typename Byte_>
struct RowBytes {
  using Byte = Byte_;
  static constexpr bool kCodes = true, kOneWord = true, kScalesPatches = std::is_same_v<Byte, __nv_fp8_e4m3>;
  static constexpr int kBits = 8;
  static constexpr float kFactor = 1.0f;

  uint4 codes[2];  // of 64 columns each
  float of_row;

  __device__ void load(uint32_t patch, const PatchLane& lane) {
    for (int i = 0; i < 2; ++i) codes[i] = load_shared(patch + i * 1024 + lane.codes);
    const uint32_t word = load_shared_word(patch + 2048 + lane.word);
    of_row = __uint_as_float(kScalesPatches ? word : word & ~0xffu);  // beside integers' scales stand zero points
  }

  // Those of 16 columns.
  __device__ uint32_t word(int step) const { return word_of(codes[step / 4], step % 4); }
};

template <typename T>
using Int8Rows = RowBytes<signed char>;
template <typename T>
using Fp8Rows = RowBytes<__nv_fp8_e4m3>;

// Whether a form multiplies x that has been rounded.
template <typename Form>
constexpr bool kRounded = false;
template <typename Byte>
constexpr bool kRounded<RowBytes<Byte>> = true;

// The sums of 64 rows of W, 16 of a warp, and N rows of x, as wgmma leaves them.
template <typename Form, int N>
struct RoundedSums {
  static constexpr int kPart = N < 64 ? N : 64;  // of floats: rows of x whose partial sums are scaled together
  ByteSum<typename Form::Byte> totals[N / 2];
  float of_rows[2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& total : totals) total = 0;
    settle(totals);
  }

  // Adds the products of a patch's 128 columns; x's lie at `box`. A lane has two rows of W, `low` and `high`, each of a patch
  // that is counted from `patches`. Products of integers are still in flight on return: do not write `a` before the next
  // wgmma_wait.
  __device__ __forceinline__ void add(uint32_t (&a)[4][4], uint32_t patches, const PatchLane& low, const PatchLane& high,
                                      uint32_t box) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      Form row;
      row.load(patches, r ? high : low);
      of_rows[r] = row.of_row;
#pragma unroll
      for (int i = 0; i < 8; ++i) a[i / 2][i % 2 * 2 + r] = row.word(i);
    }
    if constexpr (Form::kScalesPatches) {
#pragma unroll
      for (int first = 0; first < N; first += kPart) {
        float parts[kPart / 2];
        multiply<kPart>(parts, a, box + first * 128, false);
        wgmma_wait<0>();
        settle(parts);
#pragma unroll
        for (int i = 0; i < kPart / 2; ++i) {
          totals[first / 2 + i] = fmaf(parts[i], of_rows[i / 2 % 2], totals[first / 2 + i]);
        }
      }
    } else {
      multiply<N>(totals, a, box, true);
    }
  }

  // The result number i, of a row of x with that scale.
  __device__ __forceinline__ float scaled(int i, float of_x) const {
    return static_cast<float>(totals[i]) * (Form::kScalesPatches ? of_x : of_rows[i / 2 % 2] * of_x);
  }

 private:
  template <int Rows>
  __device__ static __forceinline__ void multiply(ByteSum<typename Form::Byte> (&sums)[Rows / 2],
                                                  const uint32_t (&a)[4][4], uint32_t box, bool adds) {
    const uint64_t right = matrix_descriptor(box, 1024, 0);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) multiply_bytes<typename Form::Byte, Rows>(sums, a[k], right + 2 * k, adds || k > 0);
    wgmma_commit();
  }
};

}  // namespace raylm::cuda
