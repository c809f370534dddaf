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

// One step of one head: kept = decay * old, next = kept + beta * (v - kept k) (outer) k, y = next q. decay is
// one number, or one for each channel of the keys. `next` may be `old`.
NATIVE_HOT void step(const float* old, float* next, const float* q, const float* k, const float* v, const float* decay,
                     float beta, float* y, const Sizes& n) {
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
      [&](const float* old, float* next, int64_t token, int64_t head) {
        const int64_t place = token * n.heads + head, group = token * n.groups + head / (n.heads / n.groups);
        step(old, next, q.typed_data() + group * n.state, k.typed_data() + group * n.state,
             v.typed_data() + place * n.head_dim, decay.typed_data() + place * n.decays, strength[place],
             out + place * n.head_dim, n);
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
