// exp of float32, by the same instructions wherever it is called.
#pragma once

#include <limits>

#include "numbers.h"

namespace native {

// exp(x) = 2^n exp(r) with |r| <= log(2) / 2 and the Taylor series of exp(r); 0 where it is below the normal numbers.
NATIVE_INLINE float exponential(float x) {
  constexpr float kLowest = -87.3f, kHighest = 88.73f;
  constexpr float kLog2High = 0.693145751953125f, kLog2Low = 1.42860682030941723e-6f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float inside = x < kLowest ? kLowest : x > kHighest ? kHighest : x;
  const float n = (inside * 1.44269504088896341f + kRound) - kRound;
  const float r = (inside - n * kLog2High) - n * kLog2Low;
  float series = 1.0f / 5040;
  series = series * r + 1.0f / 720;
  series = series * r + 1.0f / 120;
  series = series * r + 1.0f / 24;
  series = series * r + 1.0f / 6;
  series = series * r + 0.5f;
  series = series * (r * r) + r;
  // Twice, because 2^128 is not a number.
  const int32_t power = x == x ? static_cast<int32_t>(n) : 0, half = power >> 1;
  const int32_t bits[] = {(half + 127) << 23, (power - half + 127) << 23};
  float first, second;
  std::memcpy(&first, bits, sizeof first);
  std::memcpy(&second, bits + 1, sizeof second);
  const float result = (series + 1.0f) * first * second;
  return x < kLowest ? 0.0f : x > kHighest ? std::numeric_limits<float>::infinity() : result;
}

}  // namespace native
