// The block types of quantised GGUF weights that have kernels, and how the values of one block are read, one by one.
//
// A block is a few float16 scales, integer scales of parts of it, and the codes of its values. `read` gives the float32
// values in ggml's order of operations, each rounded by itself: compile it without contraction to fused multiply-adds.
#pragma once

#include <cstdint>
#include <cstring>

namespace raylm {

constexpr int kMostValues = 256;  // of a block

constexpr int8_t kNonLinearValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kTwiceE2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// The float whose bits, read as IEEE half precision, are the two bytes at p.
inline float read_half(const uint8_t* p) {
  const uint32_t h = p[0] | p[1] << 8, sign = (h & 0x8000u) << 16;
  uint32_t bits = (h & 0x7fffu) << 13;
  float value;
  std::memcpy(&value, &bits, 4);
  value *= 0x1p112f;  // makes subnormals right; infinities and NaN keep the largest exponent
  if (bits < 0x7c00u << 13) std::memcpy(&bits, &value, 4);
  else bits |= 0x7f800000u;
  bits |= sign;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Half of the power of two whose exponent is the byte e, as the codes of MXFP4 are twice their values.
inline float half_of_e8m0(uint8_t e) {
  const uint32_t bits = e < 2 ? 0x00200000u << e : (e - 1u) << 23;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// A scale and a minimum of six bits each, of part s of a block of Q4_K or Q5_K.
inline void read_six_bits(const uint8_t* p, int s, int& scale, int& min) {
  if (s < 4) {
    scale = p[s] & 63;
    min = p[4 + s] & 63;
  } else {
    scale = (p[4 + s] & 15) | (p[s - 4] >> 2 & 0x30);
    min = p[4 + s] >> 4 | (p[s] >> 2 & 0x30);
  }
}

struct Q4_0 {
  static constexpr int kNumber = 2, kValues = 32, kBytes = 18;
  static constexpr const char* kName = "Q4_0";
  static void read(const uint8_t* p, float* out) {
    const float d = read_half(p);
    for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>((p[2 + i % 16] >> i / 16 * 4 & 15) - 8);
  }
};

struct Q4_1 {
  static constexpr int kNumber = 3, kValues = 32, kBytes = 20;
  static constexpr const char* kName = "Q4_1";
  static void read(const uint8_t* p, float* out) {
    const float d = read_half(p), m = read_half(p + 2);
    for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(p[4 + i % 16] >> i / 16 * 4 & 15) + m;
  }
};

struct Q5_0 {
  static constexpr int kNumber = 6, kValues = 32, kBytes = 22;
  static constexpr const char* kName = "Q5_0";
  static void read(const uint8_t* p, float* out) {
    const float d = read_half(p);
    for (int i = 0; i < 32; ++i) {
      const int code = (p[6 + i % 16] >> i / 16 * 4 & 15) | (p[2 + i / 8] >> i % 8 & 1) << 4;
      out[i] = d * static_cast<float>(code - 16);
    }
  }
};

struct Q5_1 {
  static constexpr int kNumber = 7, kValues = 32, kBytes = 24;
  static constexpr const char* kName = "Q5_1";
  static void read(const uint8_t* p, float* out) {
    const float d = read_half(p), m = read_half(p + 2);
    for (int i = 0; i < 32; ++i) {
      const int code = (p[8 + i % 16] >> i / 16 * 4 & 15) | (p[4 + i / 8] >> i % 8 & 1) << 4;
      out[i] = d * static_cast<float>(code) + m;
    }
  }
};

struct Q8_0 {
  static constexpr int kNumber = 8, kValues = 32, kBytes = 34;
  static constexpr const char* kName = "Q8_0";
  static void read(const uint8_t* p, float* out) {
    const float d = read_half(p);
    for (int i = 0; i < 32; ++i) out[i] = static_cast<float>(static_cast<int8_t>(p[2 + i])) * d;
  }
};

struct Q2_K {  // 16 scales and minima of four bits, 64 bytes of codes, d, minimum's d
  static constexpr int kNumber = 10, kValues = 256, kBytes = 84;
  static constexpr const char* kName = "Q2_K";
  static void read(const uint8_t* p, float* out) {
    const float d = read_half(p + 80), min = read_half(p + 82);
    for (int i = 0; i < 256; ++i) {
      const int part = p[i / 16], code = p[16 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
      out[i] = d * static_cast<float>(part & 15) * static_cast<float>(code) - min * static_cast<float>(part >> 4);
    }
  }
};

struct Q3_K {  // 32 bytes of the codes' highest bits, 64 of their others, 12 of scales, d
  static constexpr int kNumber = 11, kValues = 256, kBytes = 110;
  static constexpr const char* kName = "Q3_K";
  static void read(const uint8_t* p, float* out) {
    const float d = read_half(p + 108);
    const uint8_t* scales = p + 96;
    for (int i = 0; i < 256; ++i) {
      const int s = i / 16;
      const int scale = (scales[s % 8] >> s / 8 * 4 & 15) | (scales[8 + s % 4] >> s / 4 * 2 & 3) << 4;
      const int code = (p[32 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3) | (p[i % 32] >> i / 32 & 1) << 2;
      out[i] = d * static_cast<float>(scale - 32) * static_cast<float>(code - 4);
    }
  }
};

struct Q4_K {  // d, minimum's d, 12 bytes of scales and minima, 128 of codes
  static constexpr int kNumber = 12, kValues = 256, kBytes = 144;
  static constexpr const char* kName = "Q4_K";
  static void read(const uint8_t* p, float* out) {
    const float d = read_half(p), min = read_half(p + 2);
    for (int i = 0; i < 256; ++i) {
      int scale, part_min;
      read_six_bits(p + 4, i / 32, scale, part_min);
      const int code = p[16 + i / 64 * 32 + i % 32] >> i % 64 / 32 * 4 & 15;
      out[i] = d * static_cast<float>(scale) * static_cast<float>(code) - min * static_cast<float>(part_min);
    }
  }
};

struct Q5_K {  // as Q4_K, with 32 bytes of the codes' highest bits before the others
  static constexpr int kNumber = 13, kValues = 256, kBytes = 176;
  static constexpr const char* kName = "Q5_K";
  static void read(const uint8_t* p, float* out) {
    const float d = read_half(p), min = read_half(p + 2);
    for (int i = 0; i < 256; ++i) {
      int scale, part_min;
      read_six_bits(p + 4, i / 32, scale, part_min);
      const int code = (p[48 + i / 64 * 32 + i % 32] >> i % 64 / 32 * 4 & 15) | (p[16 + i % 32] >> i / 32 & 1) << 4;
      out[i] = d * static_cast<float>(scale) * static_cast<float>(code) - min * static_cast<float>(part_min);
    }
  }
};

struct Q6_K {  // 128 bytes of the codes' lower four bits, 64 of their others, 16 scales of eight bits, d
  static constexpr int kNumber = 14, kValues = 256, kBytes = 210;
  static constexpr const char* kName = "Q6_K";
  static void read(const uint8_t* p, float* out) {
    const float d = read_half(p + 208);
    for (int i = 0; i < 256; ++i) {
      const int low = p[i / 128 * 64 + i % 64] >> i % 128 / 64 * 4 & 15;
      const int high = p[128 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
      const float scale = d * static_cast<float>(static_cast<int8_t>(p[192 + i / 16]));
      out[i] = scale * static_cast<float>((low | high << 4) - 32);
    }
  }
};

struct IQ4_NL {
  static constexpr int kNumber = 20, kValues = 32, kBytes = 18;
  static constexpr const char* kName = "IQ4_NL";
  static void read(const uint8_t* p, float* out) {
    const float d = read_half(p);
    for (int i = 0; i < 32; ++i) {
      out[i] = d * static_cast<float>(kNonLinearValues[p[2 + i % 16] >> i / 16 * 4 & 15]);
    }
  }
};

struct IQ4_XS {  // d, the scales' upper two bits, their lower four, 128 bytes of codes
  static constexpr int kNumber = 23, kValues = 256, kBytes = 136;
  static constexpr const char* kName = "IQ4_XS";
  static void read(const uint8_t* p, float* out) {
    const float d = read_half(p);
    const int high = p[2] | p[3] << 8;
    for (int i = 0; i < 256; ++i) {
      const int s = i / 32, scale = (p[4 + s / 2] >> s % 2 * 4 & 15) | (high >> 2 * s & 3) << 4;
      const int8_t value = kNonLinearValues[p[8 + s * 16 + i % 16] >> i % 32 / 16 * 4 & 15];
      out[i] = d * static_cast<float>(scale - 32) * static_cast<float>(value);
    }
  }
};

struct MXFP4 {
  static constexpr int kNumber = 39, kValues = 32, kBytes = 17;
  static constexpr const char* kName = "MXFP4";
  static void read(const uint8_t* p, float* out) {
    const float d = half_of_e8m0(p[0]);
    for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(kTwiceE2M1[p[1 + i % 16] >> i / 16 * 4 & 15]);
  }
};

// Calls body(Kind{}) for the kind of that number; false where there is none.
template <typename Body>
constexpr bool with_kind(int64_t number, const Body& body) {
  switch (number) {
    case Q4_0::kNumber: return body(Q4_0{}), true;
    case Q4_1::kNumber: return body(Q4_1{}), true;
    case Q5_0::kNumber: return body(Q5_0{}), true;
    case Q5_1::kNumber: return body(Q5_1{}), true;
    case Q8_0::kNumber: return body(Q8_0{}), true;
    case Q2_K::kNumber: return body(Q2_K{}), true;
    case Q3_K::kNumber: return body(Q3_K{}), true;
    case Q4_K::kNumber: return body(Q4_K{}), true;
    case Q5_K::kNumber: return body(Q5_K{}), true;
    case Q6_K::kNumber: return body(Q6_K{}), true;
    case IQ4_NL::kNumber: return body(IQ4_NL{}), true;
    case IQ4_XS::kNumber: return body(IQ4_XS{}), true;
    case MXFP4::kNumber: return body(MXFP4{}), true;
    default: return false;
  }
}

}  // namespace raylm
