// Exponentials and functions of them, for each element of an array: see kernels_pallas/fixed_order.py. Every element is
// computed by the same instructions, whatever its place and the size of the array.
#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "exponential.h"
#include "parallel.h"

namespace native {
namespace {

constexpr char kFunction[] = "function";
constexpr int64_t kBlock = 64;               // elements that are computed together; the last ones are padded
constexpr int64_t kWorthSharing = 16 << 10;  // elements: fewer are computed before another thread has woken up

// log(1 + x) = 2 artanh(x / (2 + x)) for x in [0, 1], by the series of artanh.
NATIVE_INLINE float log_one_plus(float x) {
  const float s = x / (2.0f + x), square = s * s;
  float series = 1.0f / 17;
  series = series * square + 1.0f / 15;
  series = series * square + 1.0f / 13;
  series = series * square + 1.0f / 11;
  series = series * square + 1.0f / 9;
  series = series * square + 1.0f / 7;
  series = series * square + 1.0f / 5;
  series = series * square + 1.0f / 3;
  return 2.0f * (s + s * (square * series));
}

NATIVE_INLINE float logarithm(float x) { return std::log(x); }
NATIVE_INLINE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }
NATIVE_INLINE float silu(float x) { return x / (1.0f + exponential(-x)); }
NATIVE_INLINE float softplus(float x) { return (x < 0.0f ? 0.0f : x) + log_one_plus(exponential(x < 0.0f ? x : -x)); }

#define BLOCK(function)                                               \
  NATIVE_HOT void block_of_##function(const float* x, float* y) {     \
    for (int64_t i = 0; i < kBlock; ++i) y[i] = function(x[i]);       \
  }
BLOCK(exponential)
BLOCK(logarithm)
BLOCK(sigmoid)
BLOCK(silu)
BLOCK(softplus)

ffi::Error each(ffi::ThreadPool& pool, void (*block)(const float*, float*), const float* x, float* y, int64_t count) {
  auto several = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i * kBlock, size = std::min(kBlock, count - first);
      if (size == kBlock) {
        block(x + first, y + first);
      } else {
        float padded[kBlock] = {}, results[kBlock];
        std::copy_n(x + first, size, padded);
        block(padded, results);
        std::copy_n(results, size, y + first);
      }
    }
  };
  parallel_for(pool, (count + kBlock - 1) / kBlock, several, kWorthSharing / kBlock);
  return ffi::Error::Success();
}

ffi::Error run(ffi::ThreadPool pool, ffi::Attr<std::string_view, kFunction> function, Floats x, ffi::Result<Floats> y) {
  const std::pair<std::string_view, void (*)(const float*, float*)> blocks[] = {{"exp", block_of_exponential},
                                                                                {"log", block_of_logarithm},
                                                                                {"sigmoid", block_of_sigmoid},
                                                                                {"silu", block_of_silu},
                                                                                {"softplus", block_of_softplus}};
  for (const auto& [name, block] : blocks) {
    if (*function == name) return each(pool, block, x.typed_data(), y->typed_data(), x.element_count());
  }
  return ffi::Error::InvalidArgument("elementwise: unknown function");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(elementwise, run);

}  // namespace native
