#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

// The number formats of FP4 checkpoints and of activations, exactly, for host code.
// Sources: OCP Microscaling Formats (MX) v1.0 for E2M1 and UE8M0, OCP FP8 (OFP8) for E4M3.
namespace expertd {

// E2M1 by code; bit 3 is the sign. Two codes a byte, the low nibble is the even K element.
inline constexpr float kE2m1Values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                          -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// UE8M0: 2^(byte - 127), 255 = NaN. Exact in float (2^-127 is subnormal).
inline float DecodeUe8m0(uint8_t byte) {
  if (byte == 255) return std::numeric_limits<float>::quiet_NaN();
  return std::ldexp(1.0f, static_cast<int>(byte) - 127);
}

// E4M3FN: bias 7, largest 448, 0x7f and 0xff = NaN, no infinities.
inline float DecodeE4m3(uint8_t byte) {
  const int exponent = (byte >> 3) & 15;
  const int mantissa = byte & 7;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<float>::quiet_NaN();
  const float magnitude = exponent == 0
                              ? std::ldexp(static_cast<float>(mantissa), -9)
                              : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return (byte & 0x80) ? -magnitude : magnitude;
}

inline float Bf16ToFloat(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

// Round to nearest even; NaN stays NaN.
inline uint16_t FloatToBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace expertd
