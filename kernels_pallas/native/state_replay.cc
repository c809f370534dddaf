// The decode form of the Mamba2 recurrence from an anchor and a tail of inputs: see kernels_pallas/state_replay.
#include <algorithm>
#include <cmath>
#include <vector>

#include "numbers.h"
#include "parallel.h"
#include "product.h"

namespace native {
namespace {

namespace ffi = xla::ffi;
using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;

struct Sizes {
  int64_t rows, steps, heads, head_dim, groups, state, entries, interval;
};

struct Inputs {
  const float *x, *dt, *a, *b, *c, *d;
  const int32_t *anchor_slot, *tail_id, *anchor_length, *length, *num_tokens, *write_slot;
};

template <typename State, typename Entry>
struct Stores {
  typename State::Stored* states;
  typename Entry::Stored *x, *b;
  float* dt;
};

// y [count, outputs] = x [count, inputs] with w [outputs, inputs].
NATIVE_HOT void read_float32(const float* x, const float* w, float* y, int64_t count, int64_t inputs, int64_t outputs) {
  product<Float32>(x, w, y, count, inputs, outputs, 0, outputs);
}

NATIVE_HOT void read_bfloat16(const float* x, const uint16_t* w, float* y, int64_t count, int64_t inputs,
                              int64_t outputs) {
  product<BFloat16>(x, w, y, count, inputs, outputs, 0, outputs);
}

void read(const float* x, const float* w, float* y, int64_t count, int64_t inputs, int64_t outputs) {
  read_float32(x, w, y, count, inputs, outputs);
}

void read(const float* x, const uint16_t* w, float* y, int64_t count, int64_t inputs, int64_t outputs) {
  read_bfloat16(x, w, y, count, inputs, outputs);
}

// y [count, outputs] = x [count, inputs] with w [inputs, outputs].
NATIVE_HOT void sum_up(const float* x, const float* w, float* y, int64_t count, int64_t inputs, int64_t outputs) {
  product_transposed<Float32>(x, w, y, count, inputs, outputs, 0, outputs);
}

// One thread's view of a row: what its heads share, and room to work in.
template <typename State, typename Entry>
class Row {
 public:
  Row(const Sizes& n, const Inputs& in, const Stores<State, Entry>& store)
      : n_(n), in_(in), store_(store), most_(n.entries + n.steps), keys_(most_ * n.state), queries_(n.steps * n.state),
        scores_(n.steps * most_), values_(most_ * n.head_dim), dts_(most_), decays_(most_), weights_(n.steps * most_),
        out_(n.steps * n.head_dim), inside_(n.steps * n.head_dim), turned_(most_ * n.head_dim),
        added_(n.head_dim * n.state) {}

  void run(int64_t row, int64_t head, float* y) {
    const int64_t group = head / (n_.heads / n_.groups), count = in_.num_tokens[row];
    for (int64_t t = 0; t < n_.steps; ++t) std::fill_n(to(y, row, t, head), n_.head_dim, 0.0f);
    if (count <= 0) return;
    if (row != row_ || group != group_) gather_group(row, group);
    gather_head(row, head);
    const int64_t before = since_anchor(row), tokens = before + count;
    const int64_t size = n_.head_dim * n_.state;
    auto slot = [&](int32_t index) { return store_.states + (index * n_.heads + head) * size; };
    const typename State::Stored* anchor = in_.anchor_slot[row] > 0 ? slot(in_.anchor_slot[row]) : nullptr;

    std::fill(out_.begin(), out_.end(), 0.0f);
    if (anchor) read(queries_.data(), anchor, out_.data(), count, n_.state, n_.head_dim);
    for (int64_t t = 0; t < count; ++t) {
      float* weights = weights_.data() + t * tokens;
      std::fill_n(weights, tokens, 0.0f);
      const float whole = decayed(weights, before + t + 1);
      for (int64_t i = 0; i <= before + t; ++i) weights[i] *= scores_[t * tokens + i];
      for (int64_t p = 0; p < n_.head_dim; ++p) out_[t * n_.head_dim + p] *= whole;
    }
    sum_up(weights_.data(), values_.data(), inside_.data(), count, tokens, n_.head_dim);
    for (int64_t t = 0; t < count; ++t) {
      const float* x = values_.data() + (before + t) * n_.head_dim;
      float* out = to(y, row, t, head);
      for (int64_t p = 0; p < n_.head_dim; ++p) {
        out[p] = out_[t * n_.head_dim + p] + inside_[t * n_.head_dim + p] + in_.d[head] * x[p];
      }
    }
    const int64_t due = (in_.length[row] / n_.interval + 1) * n_.interval;
    if (in_.write_slot[row] > 0 && due <= in_.length[row] + count) {
      write(anchor, slot(in_.write_slot[row]), before + due - in_.length[row]);
    }
    append(row, head, group, before, count);
  }

 private:
  float* to(float* y, int64_t row, int64_t t, int64_t head) const {
    return y + ((row * n_.steps + t) * n_.heads + head) * n_.head_dim;
  }

  // Tokens of the tail that lie before the step's; no more than it has room for, whatever a caller says.
  int64_t since_anchor(int64_t row) const {
    return std::clamp<int64_t>(in_.length[row] - in_.anchor_length[row], 0, n_.entries);
  }

  int64_t entry(int64_t row, int64_t position) const {
    return in_.tail_id[row] * n_.entries + (position & (n_.entries - 1));
  }

  // B of all tokens since the anchor, C of the new ones, and the scores of each pair.
  void gather_group(int64_t row, int64_t group) {
    row_ = row, group_ = group;
    const int64_t before = since_anchor(row), count = in_.num_tokens[row];
    for (int64_t i = 0; i < before; ++i) {
      const auto* from = store_.b + (entry(row, in_.anchor_length[row] + i) * n_.groups + group) * n_.state;
      for (int64_t k = 0; k < n_.state; ++k) keys_[i * n_.state + k] = Entry::load(from[k]);
    }
    for (int64_t t = 0; t < count; ++t) {
      const int64_t token = ((row * n_.steps + t) * n_.groups + group) * n_.state;
      std::copy_n(in_.b + token, n_.state, keys_.data() + (before + t) * n_.state);
      std::copy_n(in_.c + token, n_.state, queries_.data() + t * n_.state);
    }
    read(queries_.data(), keys_.data(), scores_.data(), count, n_.state, before + count);
  }

  // x, dt and decay of all tokens since the anchor.
  void gather_head(int64_t row, int64_t head) {
    const int64_t before = since_anchor(row), count = in_.num_tokens[row];
    for (int64_t i = 0; i < before; ++i) {
      const int64_t at = entry(row, in_.anchor_length[row] + i) * n_.heads + head;
      for (int64_t p = 0; p < n_.head_dim; ++p) {
        values_[i * n_.head_dim + p] = Entry::load(store_.x[at * n_.head_dim + p]);
      }
      dts_[i] = store_.dt[at];
    }
    for (int64_t t = 0; t < count; ++t) {
      const int64_t at = (row * n_.steps + t) * n_.heads + head;
      std::copy_n(in_.x + at * n_.head_dim, n_.head_dim, values_.data() + (before + t) * n_.head_dim);
      dts_[before + t] = in_.dt[at];
    }
    for (int64_t i = 0; i < before + count; ++i) decays_[i] = std::exp(dts_[i] * in_.a[head]);
  }

  // weights[i] = what is left of token i's input after `tokens` tokens, times dt; returns what is left of the anchor.
  float decayed(float* weights, int64_t tokens) const {
    float left = 1;
    for (int64_t i = tokens - 1; i >= 0; --i) {
      weights[i] = left * dts_[i];
      left *= decays_[i];
    }
    return left;
  }

  // The state after `tokens` tokens.
  void write(const typename State::Stored* anchor, typename State::Stored* next, int64_t tokens) {
    const float left = decayed(weights_.data(), tokens);
    for (int64_t p = 0; p < n_.head_dim; ++p) {
      for (int64_t i = 0; i < tokens; ++i) turned_[p * tokens + i] = weights_[i] * values_[i * n_.head_dim + p];
    }
    sum_up(turned_.data(), keys_.data(), added_.data(), n_.head_dim, tokens, n_.state);
    for (int64_t i = 0; i < n_.head_dim * n_.state; ++i) {
      next[i] = State::round((anchor ? State::load(anchor[i]) * left : 0) + added_[i]);
    }
  }

  void append(int64_t row, int64_t head, int64_t group, int64_t before, int64_t count) {
    for (int64_t t = 0; t < count; ++t) {
      const int64_t place = entry(row, in_.length[row] + t), at = place * n_.heads + head;
      for (int64_t p = 0; p < n_.head_dim; ++p) {
        store_.x[at * n_.head_dim + p] = Entry::round(values_[(before + t) * n_.head_dim + p]);
      }
      store_.dt[at] = dts_[before + t];
      if (head % (n_.heads / n_.groups)) continue;  // another head of the group writes B, and none reads it here
      auto* keys = store_.b + (place * n_.groups + group) * n_.state;
      for (int64_t k = 0; k < n_.state; ++k) keys[k] = Entry::round(keys_[(before + t) * n_.state + k]);
    }
  }

  const Sizes& n_;
  const Inputs& in_;
  const Stores<State, Entry>& store_;
  int64_t row_ = -1, group_ = -1, most_;
  std::vector<float> keys_, queries_, scores_, values_, dts_, decays_, weights_, out_, inside_, turned_, added_;
};

template <typename State, typename Entry>
void replay(ffi::ThreadPool& pool, const Sizes& n, const Inputs& in, const Stores<State, Entry>& store, float* y) {
  parallel_for(pool, n.rows * n.heads, [&](int64_t begin, int64_t end) {
    Row<State, Entry> row(n, in, store);
    for (int64_t item = begin; item < end; ++item) row.run(item / n.heads, item % n.heads, y);
  });
}

ffi::Error run(ffi::ThreadPool pool, ffi::AnyBuffer states, ffi::AnyBuffer tail_x, ffi::AnyBuffer tail_b, Floats tail_dt,
               Floats x, Floats dt, Floats a, Floats b, Floats c, Floats d, Ints anchor_slot, Ints tail_id,
               Ints anchor_length, Ints length, Ints num_tokens, Ints write_slot, int64_t interval,
               ffi::ResultBuffer<ffi::F32> y, ffi::Result<ffi::AnyBuffer> new_states,
               ffi::Result<ffi::AnyBuffer> new_x, ffi::Result<ffi::AnyBuffer> new_b, ffi::ResultBuffer<ffi::F32> new_dt) {
  if (states.untyped_data() != new_states->untyped_data() || tail_x.untyped_data() != new_x->untyped_data() ||
      tail_b.untyped_data() != new_b->untyped_data() || tail_dt.typed_data() != new_dt->typed_data()) {
    return ffi::Error::Internal("state_replay: states or tails are not updated in place");
  }
  const auto shape = x.dimensions();
  const auto shared = b.dimensions();
  const Sizes n{shape[0], shape[1], shape[2], shape[3], shared[2], shared[3], tail_dt.dimensions()[1], interval};
  const Inputs in{x.typed_data(),           dt.typed_data(),      a.typed_data(),          b.typed_data(),
                  c.typed_data(),           d.typed_data(),       anchor_slot.typed_data(), tail_id.typed_data(),
                  anchor_length.typed_data(), length.typed_data(), num_tokens.typed_data(), write_slot.typed_data()};
  auto call = [&](auto state, auto entry) {
    using State = decltype(state);
    using Entry = decltype(entry);
    const Stores<State, Entry> store{static_cast<typename State::Stored*>(new_states->untyped_data()),
                                     static_cast<typename Entry::Stored*>(new_x->untyped_data()),
                                     static_cast<typename Entry::Stored*>(new_b->untyped_data()), new_dt->typed_data()};
    replay(pool, n, in, store, y->typed_data());
    return ffi::Error::Success();
  };
  const auto kind = [](const ffi::AnyBuffer& buffer) { return buffer.element_type(); };
  if (kind(tail_x) != kind(tail_b)) return ffi::Error::InvalidArgument("state_replay: a tail has one dtype for x and b");
  if (kind(states) == ffi::F32 && kind(tail_x) == ffi::F32) return call(Float32(), Float32());
  if (kind(states) == ffi::F32 && kind(tail_x) == ffi::BF16) return call(Float32(), BFloat16());
  if (kind(states) == ffi::BF16 && kind(tail_x) == ffi::F32) return call(BFloat16(), Float32());
  if (kind(states) == ffi::BF16 && kind(tail_x) == ffi::BF16) return call(BFloat16(), BFloat16());
  return ffi::Error::InvalidArgument("state_replay: states and tails must be float32 or bfloat16");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(state_replay, run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Attr<int64_t>("interval")
                                  .Ret<Floats>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<Floats>());

}  // namespace native
