// The decode form of the Mamba-1 recurrence as one pass over each state: see kernels_pallas/selective_scan.
#include "exponential.h"
#include "row_steps.h"

namespace native {
namespace {

namespace ffi = xla::ffi;
using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;

constexpr int64_t kChannels = 256;  // of a piece, which one thread computes

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

ffi::Error run(ffi::ThreadPool pool, Floats fed, Floats dt, Floats a, Floats b, Floats c, ffi::Buffer<ffi::S32> real,
               Floats states, Ints read_slot, Ints write_slot, ffi::ResultBuffer<ffi::F32> y,
               ffi::ResultBuffer<ffi::F32> updated) {
  if (states.typed_data() != updated->typed_data()) {
    return ffi::Error::Internal("selective_update: the store is not updated in place");
  }
  const auto shape = fed.dimensions();
  const int64_t rows = shape[0], steps = shape[1], inner = shape[2], state = b.dimensions()[2];
  const int64_t pieces = (inner + kChannels - 1) / kChannels, size = state * inner;
  const int32_t *read = read_slot.typed_data(), *write = write_slot.typed_data();
  const std::vector<Chain> chains = chains_of(rows, read);
  parallel_for(pool, chains.size() * pieces, [&](int64_t begin, int64_t end) {
    std::vector<float> nowhere(size);  // for states that go to slot 0
    for (int64_t item = begin; item < end; ++item) {
      const Chain chain = chains[item / pieces];
      const int64_t first = item % pieces * kChannels, count = std::min(kChannels, inner - first);
      auto slot = [&](int32_t index) { return updated->typed_data() + index * size + first; };
      const float* old = slot(read[chain.first]);
      if (read[chain.first] <= 0) {
        std::fill(nowhere.begin(), nowhere.end(), 0.0f);
        old = nowhere.data();
      }
      for (int64_t token = chain.first * steps; token < chain.last * steps; ++token) {
        const int32_t into = write[token];
        float* next = into > 0 ? slot(into) : nowhere.data();
        float* out = y->typed_data() + token * inner + first;
        if (real.typed_data()[token] == 0) {  // padding, which may hold NaN
          std::fill_n(out, count, 0.0f);
          if (next == old || into <= 0) continue;
          for (int64_t s = 0; s < state; ++s) std::copy_n(old + s * inner, count, next + s * inner);
        } else {
          const int64_t place = token * inner + first;
          step(old, next, dt.typed_data() + place, a.typed_data() + first, fed.typed_data() + place,
               b.typed_data() + token * state, c.typed_data() + token * state, out, count, state, inner);
        }
        old = next;
      }
    }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(selective_update, run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Ints>()
                                  .Arg<Floats>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Ret<Floats>()
                                  .Ret<Floats>());

}  // namespace native
