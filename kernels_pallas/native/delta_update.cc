// The decode form of the gated delta rule as one pass over each state: see kernels_pallas/delta_update.
//
// Sums run by kLanes lanes and then over what is left, whatever the instruction set: a row's bits depend on nothing else.
#include "product.h"
#include "row_steps.h"

namespace native {
namespace {

namespace ffi = xla::ffi;
using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;
using Lanes = Registers<kLanes>::Floats;

struct Sizes {
  int64_t rows, steps, heads, head_dim, groups, state, decays;
};

// `count` tokens of one head, one after the other. Vectors of tokens lie `groups` or `heads` vectors apart.
struct Tokens {
  int64_t count;
  const float *q, *k, *v, *decay, *beta;
  float* y;

  NATIVE_INLINE void next(const Sizes& n) {
    q += n.groups * n.state, k += n.groups * n.state;
    v += n.heads * n.head_dim, y += n.heads * n.head_dim;
    decay += n.heads * n.decays, beta += n.heads;
  }
};

// One step of one head: kept = decay * old, next = kept + beta * (v - kept k) (outer) k, y = next q. decay is
// one number, or one for each channel of the keys. `next` may be `old`.
NATIVE_INLINE void one_step(const float* old, float* next, const Tokens& t, const Sizes& n) {
  const float *q = t.q, *k = t.k, *v = t.v, *decay = t.decay, beta = *t.beta;
  float* y = t.y;
  const int64_t whole = n.state / kLanes * kLanes, apart = n.decays > 1;
  for (int64_t p = 0; p < n.head_dim; ++p) {
    const float* from = old + p * n.state;
    float* to = next + p * n.state;
    Lanes sum = {};
    float lanes[kLanes], rest = 0;
    for (int64_t i = 0; i < whole; i += kLanes) {
      Lanes kept = load<kLanes>(from + i);
      if (apart) {
        kept *= load<kLanes>(decay + i);
      } else {
        kept *= *decay;
      }
      store<kLanes>(to + i, kept);
      sum += kept * load<kLanes>(k + i);
    }
    for (int64_t i = whole; i < n.state; ++i) {
      to[i] = from[i] * decay[i * apart];
      rest += to[i] * k[i];
    }
    store<kLanes>(lanes, sum);
    const float written = beta * (v[p] - (total<kLanes>(lanes) + rest));
    sum = Lanes{};
    rest = 0;
    for (int64_t i = 0; i < whole; i += kLanes) {
      const Lanes one = load<kLanes>(to + i) + written * load<kLanes>(k + i);
      store<kLanes>(to + i, one);
      sum += one * load<kLanes>(q + i);
    }
    for (int64_t i = whole; i < n.state; ++i) {
      to[i] += written * k[i];
      rest += to[i] * q[i];
    }
    store<kLanes>(lanes, sum);
    y[p] = total<kLanes>(lanes) + rest;
  }
}

// The same for all tokens with `several` rows of a state of `vectors` vectors in registers meanwhile.
template <int64_t vectors, int64_t several, bool apart>
NATIVE_INLINE void steps_in_registers(const float* old, float* next, const Tokens& tokens, const Sizes& n) {
  for (int64_t p = 0; p < n.head_dim; p += several) {
    Lanes state[several][vectors];
#pragma GCC unroll 4
    for (int64_t r = 0; r < several; ++r) {
#pragma GCC unroll 16
      for (int64_t i = 0; i < vectors; ++i) state[r][i] = load<kLanes>(old + ((p + r) * vectors + i) * kLanes);
    }
    Tokens t = tokens;
    for (int64_t token = 0; token < tokens.count; ++token, t.next(n)) {
      const Lanes all = *t.decay - Lanes{};
      Lanes sum[several] = {};
#pragma GCC unroll 16
      for (int64_t i = 0; i < vectors; ++i) {
        const Lanes key = load<kLanes>(t.k + i * kLanes);
        const Lanes decay = apart ? load<kLanes>(t.decay + i * kLanes) : all;
#pragma GCC unroll 4
        for (int64_t r = 0; r < several; ++r) {
          state[r][i] *= decay;
          sum[r] += state[r][i] * key;
        }
      }
      Lanes written[several], out[several] = {};
#pragma GCC unroll 4
      for (int64_t r = 0; r < several; ++r) written[r] = *t.beta * (t.v[p + r] - total_of(sum[r])) - Lanes{};
#pragma GCC unroll 16
      for (int64_t i = 0; i < vectors; ++i) {
        const Lanes key = load<kLanes>(t.k + i * kLanes), query = load<kLanes>(t.q + i * kLanes);
#pragma GCC unroll 4
        for (int64_t r = 0; r < several; ++r) {
          state[r][i] += written[r] * key;
          out[r] += state[r][i] * query;
        }
      }
#pragma GCC unroll 4
      for (int64_t r = 0; r < several; ++r) t.y[p + r] = total_of(out[r]);
    }
#pragma GCC unroll 4
    for (int64_t r = 0; r < several; ++r) {
#pragma GCC unroll 16
      for (int64_t i = 0; i < vectors; ++i) store<kLanes>(next + ((p + r) * vectors + i) * kLanes, state[r][i]);
    }
  }
}

template <bool apart>
NATIVE_INLINE void steps_as(const float* old, float* next, Tokens t, const Sizes& n) {
  if (n.state == 4 * kLanes && n.head_dim % 4 == 0) return steps_in_registers<4, 4, apart>(old, next, t, n);
  if (n.state == 8 * kLanes && n.head_dim % 2 == 0) return steps_in_registers<8, 2, apart>(old, next, t, n);
  if (n.state == 16 * kLanes) return steps_in_registers<16, 1, apart>(old, next, t, n);
  for (int64_t token = 0; token < t.count; ++token, t.next(n), old = next) one_step(old, next, t, n);
}

NATIVE_HOT void steps(const float* old, float* next, const Tokens& t, const Sizes& n) {
  return n.decays > 1 ? steps_as<true>(old, next, t, n) : steps_as<false>(old, next, t, n);
}

ffi::Error run(ffi::ThreadPool pool, Floats q, Floats k, Floats v, Floats decay, Floats beta, Floats states,
               Ints read_slot, Ints write_slot, ffi::ResultBuffer<ffi::F32> y, ffi::ResultBuffer<ffi::F32> updated) {
  if (states.typed_data() != updated->typed_data()) {
    return ffi::Error::Internal("delta_update: the store is not updated in place");
  }
  const auto shape = v.dimensions();
  const auto shared = k.dimensions();
  const Sizes n{shape[0], shape[1], shape[2], shape[3], shared[2], shared[3], decay.dimensions()[3]};
  const float* strength = beta.typed_data();
  float* out = y->typed_data();
  row_steps(
      pool, n.rows, n.steps, n.heads, n.head_dim * n.state, read_slot.typed_data(), write_slot.typed_data(),
      updated->typed_data(),
      [&](int64_t token) {
        return std::all_of(strength + token * n.heads, strength + (token + 1) * n.heads, [](float b) { return b == 0; });
      },
      [&](int64_t token, int64_t head) { std::fill_n(out + (token * n.heads + head) * n.head_dim, n.head_dim, 0.0f); },
      [&](const float* old, float* next, int64_t token, int64_t count, int64_t head) {
        const int64_t place = token * n.heads + head, group = token * n.groups + head / (n.heads / n.groups);
        steps(old, next,
              Tokens{count, q.typed_data() + group * n.state, k.typed_data() + group * n.state,
                     v.typed_data() + place * n.head_dim, decay.typed_data() + place * n.decays, strength + place,
                     out + place * n.head_dim},
              n);
      });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(delta_update, run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Ret<Floats>()
                                  .Ret<Floats>());

}  // namespace native
