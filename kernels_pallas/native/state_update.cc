// The decode form of the Mamba2 recurrence as one pass over each state: see kernels_pallas/state_update.
#include <cmath>
#include <vector>

#include "numbers.h"
#include "parallel.h"

namespace native {
namespace {

namespace ffi = xla::ffi;
using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;

struct Sizes {
  int64_t rows, steps, heads, head_dim, groups, state;
};

// One step of one head: next = decay * old + fed (outer) b, y = next c. `next` may be `old`.
template <typename Number>
NATIVE_INLINE void step(const typename Number::Stored* old, typename Number::Stored* next, const float* x, float dt,
                        float decay, const float* b, const float* c, float skip, float* y, const Sizes& n) {
  for (int64_t p = 0; p < n.head_dim; ++p) {
    const typename Number::Stored* from = old + p * n.state;
    typename Number::Stored* to = next + p * n.state;
    const float fed = dt * x[p];
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t k = 0; k < n.state; ++k) {
      const typename Number::Stored rounded = Number::round(Number::load(from[k]) * decay + fed * b[k]);
      to[k] = rounded;
      sum += Number::load(rounded) * c[k];
    }
    y[p] = sum + skip * x[p];
  }
}

NATIVE_HOT void step_float32(const float* old, float* next, const float* x, float dt, float decay, const float* b,
                             const float* c, float skip, float* y, const Sizes& n) {
  step<Float32>(old, next, x, dt, decay, b, c, skip, y, n);
}

NATIVE_HOT void step_bfloat16(const uint16_t* old, uint16_t* next, const float* x, float dt, float decay, const float* b,
                              const float* c, float skip, float* y, const Sizes& n) {
  step<BFloat16>(old, next, x, dt, decay, b, c, skip, y, n);
}

template <typename Stored, typename Step>
void update(ffi::ThreadPool& pool, const Sizes& n, const float* x, const float* dt, const float* a, const float* b,
            const float* c, const float* d, const int32_t* read_slot, const int32_t* write_slot, float* y,
            Stored* store, const Step& one_step) {
  const int64_t size = n.head_dim * n.state;
  parallel_for(pool, n.rows * n.heads, [&](int64_t begin, int64_t end) {
    std::vector<Stored> nowhere(size);  // for states that go to slot 0
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / n.heads, head = item % n.heads, group = head / (n.heads / n.groups);
      auto slot = [&](int32_t index) { return store + (index * n.heads + head) * size; };
      const Stored* old = slot(read_slot[row]);
      if (read_slot[row] <= 0) {
        std::fill(nowhere.begin(), nowhere.end(), Stored{0});
        old = nowhere.data();
      }
      for (int64_t t = 0; t < n.steps; ++t) {
        const int64_t token = row * n.steps + t;
        const float* dts = dt + token * n.heads;
        float* out = y + (token * n.heads + head) * n.head_dim;
        Stored* next = write_slot[token] > 0 ? slot(write_slot[token]) : nowhere.data();
        if (std::all_of(dts, dts + n.heads, [](float v) { return v == 0; })) {  // padding, which may hold NaN
          if (next != old && write_slot[token] > 0) {
            std::copy_n(old, size, next);
            old = next;
          }
          std::fill_n(out, n.head_dim, 0.0f);
          continue;
        }
        one_step(old, next, x + (token * n.heads + head) * n.head_dim, dts[head], std::exp(dts[head] * a[head]),
                 b + (token * n.groups + group) * n.state, c + (token * n.groups + group) * n.state, d[head], out, n);
        old = next;
      }
    }
  });
}

ffi::Error run(ffi::ThreadPool pool, Floats x, Floats dt, Floats a, Floats b, Floats c, Floats d, ffi::AnyBuffer store,
               Ints read_slot, Ints write_slot, ffi::ResultBuffer<ffi::F32> y, ffi::Result<ffi::AnyBuffer> updated) {
  if (store.untyped_data() != updated->untyped_data()) {
    return ffi::Error::Internal("state_update: the store is not updated in place");
  }
  const auto shape = x.dimensions();
  const auto shared = b.dimensions();
  const Sizes n{shape[0], shape[1], shape[2], shape[3], shared[2], shared[3]};
  auto call = [&](auto* states, const auto& one_step) {
    update(pool, n, x.typed_data(), dt.typed_data(), a.typed_data(), b.typed_data(), c.typed_data(), d.typed_data(),
           read_slot.typed_data(), write_slot.typed_data(), y->typed_data(), states, one_step);
    return ffi::Error::Success();
  };
  switch (store.element_type()) {
    case ffi::F32:
      return call(static_cast<float*>(updated->untyped_data()), step_float32);
    case ffi::BF16:
      return call(static_cast<uint16_t*>(updated->untyped_data()), step_bfloat16);
    default:
      return ffi::Error::InvalidArgument("state_update: states must be float32 or bfloat16");
  }
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(state_update, run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Ret<Floats>()
                                  .Ret<ffi::AnyBuffer>());

}  // namespace native
