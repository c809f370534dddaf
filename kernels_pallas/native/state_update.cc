// The decode form of the Mamba2 recurrence as one pass over each state: see kernels_pallas/state_update.
#include <cmath>

#include "numbers.h"
#include "row_steps.h"

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
  row_steps(
      pool, n.rows, n.steps, n.heads, n.head_dim * n.state, read_slot, write_slot, store,
      [&](int64_t token) {
        return std::all_of(dt + token * n.heads, dt + (token + 1) * n.heads, [](float v) { return v == 0; });
      },
      [&](int64_t token, int64_t head) { std::fill_n(y + (token * n.heads + head) * n.head_dim, n.head_dim, 0.0f); },
      [&](const Stored* old, Stored* next, int64_t token, int64_t head) {
        const int64_t place = token * n.heads + head, group = token * n.groups + head / (n.heads / n.groups);
        one_step(old, next, x + place * n.head_dim, dt[place], std::exp(dt[place] * a[head]), b + group * n.state,
                 c + group * n.state, d[head], y + place * n.head_dim, n);
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
