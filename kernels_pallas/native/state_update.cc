// The decode form of the Mamba2 recurrence as one pass over each state: see kernels_pallas/state_update.
#include <cmath>

#include "product.h"
#include "row_steps.h"

namespace native {
namespace {

namespace ffi = xla::ffi;
using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;

struct Sizes {
  int64_t rows, steps, heads, head_dim, groups, state;
};

// `count` tokens of one head, one after the other. Numbers of tokens lie `heads` or `groups` vectors apart.
struct Tokens {
  int64_t count;
  const float *x, *dt, *decay, *b, *c;  // `decay` has a number for each token, side by side
  float skip;
  float* y;
};

// next = decay * old + dt x (outer) b and y = next c + skip x for one token; `next` may be `old`.
template <typename Number>
NATIVE_INLINE void one_step(const typename Number::Stored* old, typename Number::Stored* next, const Tokens& t,
                            int64_t token, const Sizes& n) {
  const float *x = t.x + token * n.heads * n.head_dim, *b = t.b + token * n.groups * n.state;
  const float *c = t.c + token * n.groups * n.state, dt = t.dt[token * n.heads], decay = t.decay[token];
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
    t.y[token * n.heads * n.head_dim + p] = sum + t.skip * x[p];
  }
}

// The same for all tokens with `several` rows of a state of `vectors` vectors in registers meanwhile.
template <int64_t vectors, int64_t several>
NATIVE_INLINE void steps_in_registers(const float* old, float* next, const Tokens& t, const Sizes& n) {
  using Floats = Registers<kLanes>::Floats;
  for (int64_t p = 0; p < n.head_dim; p += several) {
    Floats state[several][vectors];
#pragma GCC unroll 8
    for (int64_t r = 0; r < several; ++r) {
#pragma GCC unroll 16
      for (int64_t k = 0; k < vectors; ++k) state[r][k] = load<kLanes>(old + ((p + r) * vectors + k) * kLanes);
    }
    const float *x = t.x + p, *b = t.b, *c = t.c, *dt = t.dt;
    float* y = t.y + p;
    for (int64_t token = 0; token < t.count; ++token) {
      const float decay = t.decay[token];
      Floats sum[several] = {}, fed[several];
#pragma GCC unroll 8
      for (int64_t r = 0; r < several; ++r) fed[r] = *dt * x[r] - Floats{};
#pragma GCC unroll 16
      for (int64_t k = 0; k < vectors; ++k) {
        const Floats one = load<kLanes>(b + k * kLanes), other = load<kLanes>(c + k * kLanes);
#pragma GCC unroll 8
        for (int64_t r = 0; r < several; ++r) {
          state[r][k] = state[r][k] * decay + fed[r] * one;
          sum[r] += state[r][k] * other;
        }
      }
#pragma GCC unroll 8
      for (int64_t r = 0; r < several; ++r) y[r] = total_of(sum[r]) + t.skip * x[r];
      x += n.heads * n.head_dim, y += n.heads * n.head_dim, dt += n.heads;
      b += n.groups * n.state, c += n.groups * n.state;
    }
#pragma GCC unroll 8
    for (int64_t r = 0; r < several; ++r) {
#pragma GCC unroll 16
      for (int64_t k = 0; k < vectors; ++k) store<kLanes>(next + ((p + r) * vectors + k) * kLanes, state[r][k]);
    }
  }
}

NATIVE_HOT void steps(const float* old, float* next, const Tokens& t, const Sizes& n) {
  static const bool wide = has_wide_registers();
  if (wide && n.state == 4 * kLanes && n.head_dim % 4 == 0) return steps_in_registers<4, 4>(old, next, t, n);
  if (wide && n.state == 8 * kLanes && n.head_dim % 2 == 0) return steps_in_registers<8, 2>(old, next, t, n);
  if (wide && n.state == 16 * kLanes) return steps_in_registers<16, 1>(old, next, t, n);
  for (int64_t token = 0; token < t.count; ++token, old = next) one_step<Float32>(old, next, t, token, n);
}

NATIVE_HOT void steps(const uint16_t* old, uint16_t* next, const Tokens& t, const Sizes& n) {
  for (int64_t token = 0; token < t.count; ++token, old = next) one_step<BFloat16>(old, next, t, token, n);
}

template <typename Stored>
void update(ffi::ThreadPool& pool, const Sizes& n, const float* x, const float* dt, const float* a, const float* b,
            const float* c, const float* d, const int32_t* read_slot, const int32_t* write_slot, float* y,
            Stored* store) {
  row_steps(
      pool, n.rows, n.steps, n.heads, n.head_dim * n.state, read_slot, write_slot, store,
      [&](int64_t token) {
        return std::all_of(dt + token * n.heads, dt + (token + 1) * n.heads, [](float v) { return v == 0; });
      },
      [&](int64_t token, int64_t head) { std::fill_n(y + (token * n.heads + head) * n.head_dim, n.head_dim, 0.0f); },
      [&](const Stored* old, Stored* next, int64_t token, int64_t count, int64_t head) {
        constexpr int64_t kMost = 64;  // tokens whose decays are computed at a time
        float decay[kMost];
        for (const int64_t end = token + count; token < end; token += kMost, old = next) {
          const int64_t several = std::min(kMost, end - token);
          const int64_t place = token * n.heads + head, group = token * n.groups + head / (n.heads / n.groups);
          for (int64_t i = 0; i < several; ++i) decay[i] = std::exp(dt[place + i * n.heads] * a[head]);
          steps(old, next,
                Tokens{several, x + place * n.head_dim, dt + place, decay, b + group * n.state, c + group * n.state,
                       d[head], y + place * n.head_dim},
                n);
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
  auto call = [&](auto* states) {
    update(pool, n, x.typed_data(), dt.typed_data(), a.typed_data(), b.typed_data(), c.typed_data(), d.typed_data(),
           read_slot.typed_data(), write_slot.typed_data(), y->typed_data(), states);
    return ffi::Error::Success();
  };
  switch (store.element_type()) {
    case ffi::F32:
      return call(static_cast<float*>(updated->untyped_data()));
    case ffi::BF16:
      return call(static_cast<uint16_t*>(updated->untyped_data()));
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
