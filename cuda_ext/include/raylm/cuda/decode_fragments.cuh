// How a warp of decode attention takes keys and values from shared memory into its products.
//
// A cache of codes (8-bit floats) is copied as it is and multiplied as half: a code becomes one exactly, two of them in one
// instruction, while numbers of bfloat16 would take five. So queries become half where they are loaded (an exact step for
// magnitudes from 2^-14 to 65504, which queries have), and so do weights, which are at most 2^kSlack. Matrices come out of
// shared memory in units of 16 bits, two codes: a lane gets other rows or columns of a matrix than with 16-bit numbers.
// Scales of the cache stand in AttentionParams.
#pragma once

#include "raylm/cuda/ptx/matrix.cuh"
#include "raylm/cuda/ptx/shared.cuh"
#include "raylm/cuda/tile/numbers.cuh"

namespace raylm::cuda {

// How a lane's registers hold what a warp multiplies; `chunk` is 16 elements of a head. Each product is of a matrix [16,
// 16] from the cache, keys x elements for scores and elements x keys for values, with a matrix [16, 8] of queries or
// weights, whose columns are rows of queries.
template <typename T, typename C>
struct DecodeFragments {
  using Number = T;  // that is multiplied

  // Where the lane's first elements of a chunk of its query are, and those.
  __device__ static int query_offset(int lane) { return lane % 4 * 2; }
  __device__ static uint2 query(const T* q, int head_dim, int chunk) {
    const uint32_t* from = reinterpret_cast<const uint32_t*>(q + chunk * 16);
    return make_uint2(chunk * 16 < head_dim ? from[0] : 0, chunk * 16 + 8 < head_dim ? from[4] : 0);
  }

  // Which element of a chunk the rows lane / 4 and + 8 of a product with values are.
  __device__ static int element(int lane, bool second) { return second * 8 + lane / 4; }

  // Calls body(chunk, matrix) for every chunk. `keys`, `values`: addresses of kDecodeKeys rows in Places
  // (decode_layout.cuh).
  template <int D, typename Places, typename Body>
  __device__ static void for_keys(uint32_t keys, int lane, const Body& body) {
    const uint32_t from = keys + Places::at(lane % 16, lane / 16);
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      uint32_t a[4];
      load_matrices(a, Places::behind(from, i));
      body(i, a);
    }
  }

  template <int D, typename Places, typename Body>
  __device__ static void for_values(uint32_t values, int lane, const Body& body) {
    const uint32_t from = values + Places::at(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      uint32_t a[4];
      load_matrices_transposed(a, Places::behind(from, i));
      body(i, a);
    }
  }
};

// A matrix of 8 x 8 units from shared memory has 8 keys and a chunk: a lane gets 4 neighbouring codes of a key, or
// transposed 2 codes of each of 2 keys. The sum over a chunk takes its elements in any order, so queries' are taken in
// that of the codes; rows of the product with values are even elements first, then odd ones.
template <typename T>
struct DecodeFragments<T, Code> {
  using Number = __half;

  __device__ static int query_offset(int lane) { return lane % 4 * 4; }
  __device__ static uint2 query(const T* q, int head_dim, int chunk) {
    if (chunk * 16 >= head_dim) return make_uint2(0, 0);
    const uint2 pairs = *reinterpret_cast<const uint2*>(q + chunk * 16);
    return make_uint2(to_halves<T>(pairs.x), to_halves<T>(pairs.y));
  }

  __device__ static int element(int lane, bool second) { return lane / 4 * 2 + second; }

  // Lane l gives the address of key l % 16 in chunk l / 16 of two.
  template <int D, typename Places, typename Body>
  __device__ static void for_keys(uint32_t keys, int lane, const Body& body) {
    const uint32_t from = keys + Places::at(lane % 16, lane / 16);
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
      uint32_t x[4];
      load_matrices(x, Places::behind(from, i));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t low = x[2 * h], high = x[2 * h + 1];  // keys 0 to 7, 8 to 15
        const uint32_t a[4] = {halves_of<0>(low), halves_of<0>(high), halves_of<1>(low), halves_of<1>(high)};
        body(2 * i + h, a);
      }
    }
  }

  template <int D, typename Places, typename Body>
  __device__ static void for_values(uint32_t values, int lane, const Body& body) {
    constexpr unsigned kEvenFirst = 0x3120;  // bytes 0, 2, 1, 3: the even element of both keys, then the odd one
    const uint32_t from = values + Places::at(lane % 16, lane / 16);
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
      uint32_t x[4];
      load_matrices_transposed(x, Places::behind(from, i));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t low = __byte_perm(x[2 * h], 0, kEvenFirst), high = __byte_perm(x[2 * h + 1], 0, kEvenFirst);
        const uint32_t a[4] = {halves_of<0>(low), halves_of<1>(low), halves_of<0>(high), halves_of<1>(high)};
        body(2 * i + h, a);
      }
    }
  }
};

}  // namespace raylm::cuda
