// Number formats that arrays are stored in, and how each is read and written as float32.
#pragma once

#include <cstdint>
#include <cstring>

// One build runs everywhere: hot loops are compiled for several instruction sets, chosen when the library is loaded.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define NATIVE_DISPATCH
#define NATIVE_HOT __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define NATIVE_HOT
#endif
#define NATIVE_INLINE inline __attribute__((always_inline))
#define NATIVE_LAMBDA __attribute__((always_inline))

namespace native {

struct Float32 {
  using Stored = float;
  static NATIVE_INLINE float load(Stored value) { return value; }
  static NATIVE_INLINE Stored round(float value) { return value; }
};

struct BFloat16 {
  using Stored = uint16_t;
  static NATIVE_INLINE float load(Stored value) {
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
  }
  // To nearest, ties to even; NaN stays NaN.
  static NATIVE_INLINE Stored round(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<Stored>(value == value ? rounded : (bits >> 16) | 0x40u);
  }
};

// Weights in bfloat16, which products load in pairs.
struct BFloat16Pairs : BFloat16 {};

// Two numbers in bfloat16 as one of 32 bits, for products of bfloat16 with bfloat16.
struct BFloat16Dot {
  using Stored = uint32_t;
};

// Integers; the caller multiplies by their scale.
struct Int8 {
  using Stored = int8_t;
  static NATIVE_INLINE float load(Stored value) { return static_cast<float>(value); }
};

}  // namespace native
