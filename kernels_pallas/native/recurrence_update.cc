// The decode form of the linear recurrence as one pass over each state: see kernels_pallas/recurrence.
#include "product.h"
#include "row_steps.h"

namespace native {
namespace {

using Lanes = Registers<kLanes>::Floats;

constexpr char kErase[] = "erase";
constexpr int64_t kBlock = 64;  // tokens of a head, whose keys and queries stay in the cache for all rows of its state

struct Sizes {
  int64_t rows, steps, heads, head_dim, groups, state, decays;
};

// `count` tokens of one head, one after the other. Vectors of tokens lie `groups` or `heads` vectors apart.
struct Tokens {
  int64_t count;
  const float *query, *key, *value, *decay, *strength;
  float skip;
  float* y;

  NATIVE_INLINE void next(const Sizes& n) {
    query += n.groups * n.state, key += n.groups * n.state;
    value += n.heads * n.head_dim, y += n.heads * n.head_dim;
    decay += n.heads * n.decays, strength += n.heads;
  }
};

// One step of one head: kept = decay * old, next = kept + strength * (value - kept key) (outer) key, with nothing taken
// off the value unless `erase`, and y = next query + skip value. decay is one number, or, if `apart`, one for each channel
// of the keys. `next` may be `old`.
template <typename Number, bool erase, bool apart>
NATIVE_INLINE void one_step(const typename Number::Stored* old, typename Number::Stored* next, const Tokens& t,
                            const Sizes& n) {
  const float *query = t.query, *key = t.key, *decay = t.decay;
  for (int64_t p = 0; p < n.head_dim; ++p) {
    const typename Number::Stored* from = old + p * n.state;
    typename Number::Stored* to = next + p * n.state;
    float found = 0, out = 0;
    if (erase) {
#pragma omp simd reduction(+ : found)
      for (int64_t i = 0; i < n.state; ++i) found += Number::load(from[i]) * decay[apart ? i : 0] * key[i];
    }
    const float written = *t.strength * (t.value[p] - found);
#pragma omp simd reduction(+ : out)
    for (int64_t i = 0; i < n.state; ++i) {
      const auto rounded = Number::round(Number::load(from[i]) * decay[apart ? i : 0] + written * key[i]);
      to[i] = rounded;
      out += Number::load(rounded) * query[i];
    }
    t.y[p] = out + t.skip * t.value[p];
  }
}

// The same for all tokens with `several` rows of a state of `vectors` vectors in registers meanwhile.
template <int64_t vectors, int64_t several, bool erase, bool apart>
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
      Lanes found[several] = {}, written[several], out[several] = {};
      if (erase) {
#pragma GCC unroll 16
        for (int64_t i = 0; i < vectors; ++i) {
          const Lanes key = load<kLanes>(t.key + i * kLanes);
          const Lanes decay = apart ? load<kLanes>(t.decay + i * kLanes) : all;
#pragma GCC unroll 4
          for (int64_t r = 0; r < several; ++r) {
            state[r][i] *= decay;
            found[r] += state[r][i] * key;
          }
        }
      }
#pragma GCC unroll 4
      for (int64_t r = 0; r < several; ++r) {
        written[r] = *t.strength * (t.value[p + r] - (erase ? total_of(found[r]) : 0)) - Lanes{};
      }
#pragma GCC unroll 16
      for (int64_t i = 0; i < vectors; ++i) {
        const Lanes key = load<kLanes>(t.key + i * kLanes), query = load<kLanes>(t.query + i * kLanes);
        const Lanes decay = apart ? load<kLanes>(t.decay + i * kLanes) : all;
#pragma GCC unroll 4
        for (int64_t r = 0; r < several; ++r) {
          state[r][i] = (erase ? state[r][i] : state[r][i] * decay) + written[r] * key;
          out[r] += state[r][i] * query;
        }
      }
#pragma GCC unroll 4
      for (int64_t r = 0; r < several; ++r) t.y[p + r] = total_of(out[r]) + t.skip * t.value[p + r];
    }
#pragma GCC unroll 4
    for (int64_t r = 0; r < several; ++r) {
#pragma GCC unroll 16
      for (int64_t i = 0; i < vectors; ++i) store<kLanes>(next + ((p + r) * vectors + i) * kLanes, state[r][i]);
    }
  }
}

template <typename Number, bool erase, bool apart>
NATIVE_INLINE void steps_as(const typename Number::Stored* old, typename Number::Stored* next, Tokens t,
                            const Sizes& n) {
  if constexpr (std::is_same_v<Number, Float32>) {
    static const bool wide = has_wide_registers();
    if (wide || erase) {
      if (n.state == 4 * kLanes && n.head_dim % 4 == 0) return steps_in_registers<4, 4, erase, apart>(old, next, t, n);
      if (n.state == 8 * kLanes && n.head_dim % 2 == 0) return steps_in_registers<8, 2, erase, apart>(old, next, t, n);
      if (n.state == 16 * kLanes) return steps_in_registers<16, 1, erase, apart>(old, next, t, n);
    }
  }
  for (int64_t token = 0; token < t.count; ++token, t.next(n), old = next) {
    one_step<Number, erase, apart>(old, next, t, n);
  }
}

template <typename Number>
NATIVE_INLINE void steps_of(const typename Number::Stored* old, typename Number::Stored* next, const Tokens& t,
                            const Sizes& n, bool erase) {
  const bool apart = n.decays > 1;
  if (erase) return apart ? steps_as<Number, true, true>(old, next, t, n) : steps_as<Number, true, false>(old, next, t, n);
  return apart ? steps_as<Number, false, true>(old, next, t, n) : steps_as<Number, false, false>(old, next, t, n);
}

NATIVE_HOT void steps(const float* old, float* next, const Tokens& t, const Sizes& n, bool erase) {
  steps_of<Float32>(old, next, t, n, erase);
}

NATIVE_HOT void steps(const uint16_t* old, uint16_t* next, const Tokens& t, const Sizes& n, bool erase) {
  steps_of<BFloat16>(old, next, t, n, erase);
}

ffi::Error run(ffi::ThreadPool pool, Floats query, Floats key, Floats value, Floats decay, Floats strength, Floats skip,
               ffi::AnyBuffer store, Ints read_slot, Ints write_slot, ffi::Attr<bool, kErase> erase, ffi::ResultBuffer<ffi::F32> y,
               ffi::Result<ffi::AnyBuffer> updated) {
  if (store.untyped_data() != updated->untyped_data()) {
    return ffi::Error::Internal("recurrence_update: the store is not updated in place");
  }
  const auto shape = value.dimensions();
  const auto shared = key.dimensions();
  const Sizes n{shape[0], shape[1], shape[2], shape[3], shared[2], shared[3], decay.dimensions()[3]};
  const float* given = strength.typed_data();
  float* out = y->typed_data();
  constexpr char kRefused[] = "recurrence_update: states must be float32 or bfloat16";
  return with_floats(store.element_type(), kRefused, [&](auto number) {
    using Stored = typename decltype(number)::Stored;
    row_steps(
        pool, n.rows, n.steps, {1, n.head_dim * n.state, n.heads * n.head_dim * n.state}, read_slot.typed_data(),
        write_slot.typed_data(), static_cast<Stored*>(updated->untyped_data()),
        [&](int64_t token) {
          return std::all_of(given + token * n.heads, given + (token + 1) * n.heads, [](float s) { return s == 0; });
        },
        [&](int64_t token, int64_t head) { std::fill_n(out + (token * n.heads + head) * n.head_dim, n.head_dim, 0.0f); },
        [&](const Stored* old, Stored* next, int64_t token, int64_t count, int64_t head) {
          for (const int64_t end = token + count; token < end; token += kBlock, old = next) {
            const int64_t place = token * n.heads + head, group = token * n.groups + head / (n.heads / n.groups);
            steps(old, next,
                  Tokens{std::min(kBlock, end - token), query.typed_data() + group * n.state,
                         key.typed_data() + group * n.state, value.typed_data() + place * n.head_dim,
                         decay.typed_data() + place * n.decays, given + place, skip.typed_data()[head],
                         out + place * n.head_dim},
                  n, *erase);
          }
        });
    return ffi::Error::Success();
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(recurrence_update, run);

}  // namespace native
