// Vectors as wide as the instruction set this file is compiled for, in GCC's and Clang's vector extension.
//
// Everything here has internal linkage: the same kernels are compiled once per instruction set, and the linker must
// never merge a function of one with that of another.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

namespace raylm {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float Vec __attribute__((vector_size(kWidth * 4)));
typedef int32_t VecI __attribute__((vector_size(kWidth * 4)));
typedef uint32_t VecU __attribute__((vector_size(kWidth * 4)));
typedef uint16_t VecU16 __attribute__((vector_size(kWidth * 2)));

// Storage types. Both are two bytes; arithmetic is always in float.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

#define RAYLM_INLINE inline __attribute__((always_inline))

RAYLM_INLINE Vec splat(float value) { return Vec{} + value; }

template <typename To, typename From>
RAYLM_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

RAYLM_INLINE Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

RAYLM_INLINE void store(float* p, Vec v) { std::memcpy(p, &v, sizeof(v)); }

RAYLM_INLINE VecU load_u16(const void* p) {
  VecU16 v;
  std::memcpy(&v, p, sizeof(v));
  return __builtin_convertvector(v, VecU);
}

RAYLM_INLINE void store_u16(void* p, VecU v) {
  const VecU16 narrow = __builtin_convertvector(v, VecU16);
  std::memcpy(p, &narrow, sizeof(narrow));
}

RAYLM_INLINE Vec load(const BFloat16* p) { return bit_cast<Vec>(load_u16(p) << 16); }

RAYLM_INLINE void store(BFloat16* p, Vec v) {
  const VecU bits = bit_cast<VecU>(v);
  const VecU rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const VecU is_nan = bit_cast<VecU>(v != v);
  store_u16(p, (is_nan & 0x7fc0u) | (~is_nan & rounded));
}

// Half precision through integer arithmetic, for instruction sets that would need a library call. The bits are below 2^16.
RAYLM_INLINE Vec half_to_float(VecU h) {
  const VecU magnitude = (h & 0x7fffu) << 13;
  const VecU sign = (h & 0x8000u) << 16;
  // Rebiasing by a multiplication makes subnormals right; infinities and NaN keep the largest exponent.
  const Vec scaled = bit_cast<Vec>(magnitude) * 0x1p112f;
  const VecU special = bit_cast<VecU>(magnitude >= (0x7c00u << 13));
  return bit_cast<Vec>(sign | (special & (magnitude | 0x7f800000u)) | (~special & bit_cast<VecU>(scaled)));
}

RAYLM_INLINE Vec load(const Float16* p) {
#if defined(__AVX512F__)
  return bit_cast<Vec>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__AVX2__)
  return bit_cast<Vec>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  return half_to_float(load_u16(p));
#endif
}

RAYLM_INLINE void store(Float16* p, Vec v) {
  const VecU bits = bit_cast<VecU>(v);
  const VecU sign = (bits >> 16) & 0x8000u;
  const VecU magnitude = bits & 0x7fffffffu;
  const VecU normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Adding 0.5 leaves a subnormal half's bits at the bottom of the mantissa, rounded by the addition itself.
  const VecU subnormal = bit_cast<VecU>(bit_cast<Vec>(magnitude) + 0.5f) - 0x3f000000u;
  const VecU is_subnormal = bit_cast<VecU>(magnitude < (113u << 23));
  const VecU is_large = bit_cast<VecU>(magnitude >= 0x477ff000u);
  const VecU is_nan = bit_cast<VecU>(magnitude > 0x7f800000u);
  VecU half = (is_subnormal & subnormal) | (~is_subnormal & normal);
  half = (is_large & 0x7c00u) | (~is_large & half);
  half = (is_nan & 0x7e00u) | (~is_nan & half);
  store_u16(p, sign | half);
}

// The first n < kWidth elements at p; the rest are zero.
template <typename T>
RAYLM_INLINE Vec load_part(const T* p, int64_t n) {
  T buffer[kWidth] = {};
  std::memcpy(buffer, p, n * sizeof(T));
  return load(buffer);
}

template <typename T>
RAYLM_INLINE void store_part(T* p, Vec v, int64_t n) {
  T buffer[kWidth];
  store(buffer, v);
  std::memcpy(p, buffer, n * sizeof(T));
}

// Calls body(offset, load, store) over n elements: whole vectors first, then the rest as one partial vector. `load`
// and `store` take a pointer that the body has already moved to the offset.
template <typename Body>
RAYLM_INLINE void for_each_vec(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    body(
        i, [](const auto* p) { return load(p); }, [](auto* p, Vec v) { store(p, v); });
  }
  if (const int64_t rest = n - i; rest > 0) {
    body(
        i, [rest](const auto* p) { return load_part(p, rest); },
        [rest](auto* p, Vec v) { store_part(p, v, rest); });
  }
}

// Element i of the result is element i ^ Step of v.
template <int Step>
RAYLM_INLINE Vec swap_lanes(Vec v) {
#if defined(__clang__)
  Vec r;
  for (int i = 0; i < kWidth; ++i) r[i] = v[i ^ Step];
  return r;
#else
  VecI mask;
  for (int i = 0; i < kWidth; ++i) mask[i] = i ^ Step;
  return __builtin_shuffle(v, mask);
#endif
}

// Adds neighbours Step apart: those of a where i & Step is 0, those of b elsewhere.
template <int Step>
RAYLM_INLINE Vec add_pairs(Vec a, Vec b) {
#if defined(__clang__)
  Vec r;
  for (int i = 0; i < kWidth; ++i) r[i] = (i & Step) ? b[i] + b[i ^ Step] : a[i] + a[i ^ Step];
  return r;
#else
  VecI keep, cross;
  for (int i = 0; i < kWidth; ++i) {
    keep[i] = (i & Step) ? kWidth + i : i;
    cross[i] = (i & Step) ? kWidth + (i ^ Step) : (i ^ Step);
  }
  return __builtin_shuffle(a, b, keep) + __builtin_shuffle(a, b, cross);
#endif
}

// The sums of four vectors, in the first four elements of the result.
RAYLM_INLINE Vec sum4(Vec a, Vec b, Vec c, Vec d) {
  Vec v = add_pairs<2>(add_pairs<1>(a, b), add_pairs<1>(c, d));
  if constexpr (kWidth >= 16) v += swap_lanes<8>(v);
  if constexpr (kWidth >= 8) v += swap_lanes<4>(v);
  return v;
}

RAYLM_INLINE float sum(Vec v) { return sum4(v, v, v, v)[0]; }

// a * b + c, rounded once where the instruction set can: where it matters that two functions round alike.
RAYLM_INLINE Vec fused_multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return bit_cast<Vec>(_mm512_fmadd_ps(bit_cast<__m512>(a), bit_cast<__m512>(b), bit_cast<__m512>(c)));
#elif defined(__FMA__)
  return bit_cast<Vec>(_mm256_fmadd_ps(bit_cast<__m256>(a), bit_cast<__m256>(b), bit_cast<__m256>(c)));
#else
  return a * b + c;
#endif
}

RAYLM_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }
RAYLM_INLINE Vec min(Vec a, Vec b) { return a < b ? a : b; }

RAYLM_INLINE float max_element(Vec v) {
  if constexpr (kWidth >= 16) v = max(v, swap_lanes<8>(v));
  if constexpr (kWidth >= 8) v = max(v, swap_lanes<4>(v));
  v = max(v, swap_lanes<2>(v));
  return max(v, swap_lanes<1>(v))[0];
}

// e^x within 2 units in the last place: x = n ln 2 + r, a polynomial in r (Cephes' expf), then n added to the exponent.
// Anything below -87.3 gives a number that is zero for every purpose here, +-inf and large numbers saturate.
RAYLM_INLINE Vec exp(Vec x) {
  x = min(splat(88.7f), max(splat(-87.3f), x));  // in this order NaN stays NaN
  const Vec magic = splat(0x1.8p23f);  // adding it rounds to an integer, kept in the low bits of the mantissa
  const Vec shifted = x * 1.44269504f + magic;
  const Vec n = shifted - magic;
  const Vec r = x - n * 0.693359375f - n * -2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return bit_cast<Vec>(bit_cast<VecI>(p) + (bit_cast<VecI>(shifted) << 23));
}

RAYLM_INLINE Vec tanh(Vec x) { return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f); }

}  // namespace
}  // namespace raylm
