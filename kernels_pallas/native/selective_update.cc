// The decode form of the Mamba-1 recurrence as one pass over each state: see kernels_pallas/selective_scan.
#include "exponential.h"
#include "row_steps.h"

namespace native {
namespace {

constexpr int64_t kChannels = 256;  // of a part, which one thread computes

// One step of `count` channels: next = exp(dt a) * old + fed b, y = the sum over the state of next c. Rows of old, next
// and a are `apart`; `next` may be `old`.
NATIVE_HOT void step(const float* old, float* next, const float* dt, const float* a, const float* fed, const float* b,
                     const float* c, float* y, int64_t count, int64_t state, int64_t apart) {
  std::fill_n(y, count, 0.0f);
  for (int64_t s = 0; s < state; ++s) {
    const float* from = old + s * apart;
    const float* rate = a + s * apart;
    float* to = next + s * apart;
    for (int64_t i = 0; i < count; ++i) {
      const float value = from[i] * exponential(dt[i] * rate[i]) + fed[i] * b[s];
      to[i] = value;
      y[i] += value * c[s];
    }
  }
}

ffi::Error run(ffi::ThreadPool pool, Floats fed, Floats dt, Floats a, Floats b, Floats c, Ints real,
               Floats states, Ints read_slot, Ints write_slot, ffi::ResultBuffer<ffi::F32> y,
               ffi::ResultBuffer<ffi::F32> updated) {
  if (states.typed_data() != updated->typed_data()) {
    return ffi::Error::Internal("selective_update: the store is not updated in place");
  }
  const auto shape = fed.dimensions();
  const int64_t rows = shape[0], steps = shape[1], inner = shape[2], state = b.dimensions()[2];
  const Layout layout{state, kChannels, inner};
  row_steps(
      pool, rows, steps, layout, read_slot.typed_data(), write_slot.typed_data(), updated->typed_data(),
      [&](int64_t token) { return real.typed_data()[token] == 0; },
      [&](int64_t token, int64_t part) {
        std::fill_n(y->typed_data() + token * inner + part * kChannels, layout.count(part), 0.0f);
      },
      [&](const float* old, float* next, int64_t token, int64_t count, int64_t part) {
        const int64_t first = part * kChannels;
        for (int64_t last = token + count; token < last; ++token, old = next) {
          const int64_t place = token * inner + first;
          step(old, next, dt.typed_data() + place, a.typed_data() + first, fed.typed_data() + place,
               b.typed_data() + token * state, c.typed_data() + token * state, y->typed_data() + place,
               layout.count(part), state, inner);
        }
      });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(selective_update, run);

}  // namespace native
