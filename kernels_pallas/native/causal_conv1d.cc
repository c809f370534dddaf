// The causal convolution of packed rows: see kernels_pallas/causal_conv1d. A token's bits do not depend on the tokens
// around it, except through their inputs.
#include <algorithm>
#include <vector>

#include "exponential.h"
#include "numbers.h"
#include "parallel.h"

namespace native {
namespace {

constexpr char kSilu[] = "silu";
constexpr int64_t kBlock = 64;               // channels that are computed together
constexpr int64_t kWorthSharing = 32 << 10;  // products: fewer are computed before another thread has woken up

// y [channels] of one token; seen[i]: the input [channels] that tap i meets.
template <typename Number, bool silu>
NATIVE_INLINE void convolve(const typename Number::Stored* const* seen, const float* taps, const float* bias,
                            int64_t width, int64_t channels, typename Number::Stored* y) {
  for (int64_t first = 0; first < channels; first += kBlock) {
    const int64_t count = std::min(kBlock, channels - first);
    float sum[kBlock] = {};
    for (int64_t i = 0; i < width; ++i) {
      const typename Number::Stored* x = seen[i] + first;
      const float* tap = taps + i * channels + first;
      for (int64_t k = 0; k < count; ++k) sum[k] += tap[k] * Number::load(x[k]);
    }
    for (int64_t k = 0; k < count; ++k) {
      const float total = sum[k] + bias[first + k];
      y[first + k] = Number::round(silu ? total / (1.0f + exponential(-total)) : total);
    }
  }
}

#define CONVOLVE(Number)                                                                                         \
  NATIVE_HOT void convolve(const Number::Stored* const* seen, const float* taps, const float* bias, int64_t width, \
                           int64_t channels, bool silu, Number::Stored* y) {                                       \
    if (silu) return convolve<Number, true>(seen, taps, bias, width, channels, y);                                 \
    convolve<Number, false>(seen, taps, bias, width, channels, y);                                                 \
  }
CONVOLVE(Float32)
CONVOLVE(BFloat16)

// x [tokens, channels]; window [rows, width - 1, channels]: a row's inputs before its first token. Inputs of tokens
// that lie before their row are zeros.
ffi::Error run(ffi::ThreadPool pool, ffi::Attr<bool, kSilu> silu, ffi::AnyBuffer x, Floats taps, Floats bias,
               ffi::AnyBuffer window, Ints token_row, Ints row_start, ffi::Result<ffi::AnyBuffer> y) {
  const int64_t tokens = x.dimensions()[0], width = taps.dimensions()[0], channels = taps.dimensions()[1];
  if (window.element_type() != x.element_type()) {
    return ffi::Error::InvalidArgument("causal_conv1d: windows must have the dtype of x");
  }
  return with_floats(x.element_type(), "causal_conv1d: x must be float32 or bfloat16", [&](auto number) {
    using Stored = typename decltype(number)::Stored;
    const auto* inputs = static_cast<const Stored*>(x.untyped_data());
    const auto* windows = static_cast<const Stored*>(window.untyped_data());
    auto* outputs = static_cast<Stored*>(y->untyped_data());
    const int32_t *rows = token_row.typed_data(), *starts = row_start.typed_data();
    const std::vector<Stored> zeros(channels);
    parallel_for(
        pool, tokens,
        [&](int64_t begin, int64_t end) {
          std::vector<const Stored*> seen(width);
          for (int64_t t = begin; t < end; ++t) {
            const int64_t row = rows[t], local = t - starts[row];
            for (int64_t i = 0; i < width; ++i) {
              const int64_t at = local + i - (width - 1);
              seen[i] = local < 0 ? zeros.data()
                        : at < 0  ? windows + (row * (width - 1) + at + width - 1) * channels
                                  : inputs + (starts[row] + at) * channels;
            }
            convolve(seen.data(), taps.typed_data(), bias.typed_data(), width, channels, *silu, outputs + t * channels);
          }
        },
        std::max<int64_t>(kWorthSharing / std::max<int64_t>(width * channels, 1), 1));
    return ffi::Error::Success();
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(causal_conv1d, run);

}  // namespace native
