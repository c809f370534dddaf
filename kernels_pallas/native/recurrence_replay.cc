// The linear recurrence, without erasing, from an anchor and a tail: see kernels_pallas/recurrence.
#include <algorithm>
#include <cmath>
#include <vector>

#include "numbers.h"
#include "parallel.h"
#include "product.h"
#include "replay_sums.h"

namespace native {
namespace {

constexpr char kInterval[] = "interval";

struct Sizes {
  int64_t rows, steps, heads, head_dim, groups, state, entries, interval;
};

struct Inputs {
  const float *query, *key, *value, *log_decay, *strength, *skip;
  const int32_t *anchor_slot, *tail_id, *anchor_length, *length, *num_tokens, *write_slot;
};

template <typename State, typename Entry>
struct Stores {
  typename State::Stored* states;
  typename Entry::Stored *value, *key;
  float *log_decay, *strength;
};

void score(const Tokens& in) {
  const int64_t tokens = in.before + in.count;
  forms<float>().few(in.queries, in.keys, in.scores, in.count, in.state, tokens, 0, tokens);
}

NATIVE_HOT void read(const Tokens& in, const float* anchor) { read_anchor<Float32>(in, anchor); }

NATIVE_HOT void read(const Tokens& in, const uint16_t* anchor) { read_anchor<BFloat16>(in, anchor); }

NATIVE_HOT void all_outputs(const Tokens& in, float skip, float* y, int64_t apart) {
  weigh(in);
  int64_t t = 0;
  for (; t + 4 <= in.count; t += 4) outputs<4>(in, t, skip, y, apart);
  for (; t + 2 <= in.count; t += 2) outputs<2>(in, t, skip, y, apart);
  for (; t < in.count; ++t) outputs<1>(in, t, skip, y, apart);
}

NATIVE_HOT void write(const Tokens& in, int64_t tokens, const float* anchor, float* next) {
  write_state<Float32>(in, tokens, anchor, next);
}

NATIVE_HOT void write(const Tokens& in, int64_t tokens, const uint16_t* anchor, uint16_t* next) {
  write_state<BFloat16>(in, tokens, anchor, next);
}

// One thread's view of the heads of a row: what they share, and room to work in.
template <typename State, typename Entry>
class Heads {
 public:
  Heads(const Sizes& n, const Inputs& in, const Stores<State, Entry>& store, float* y)
      : n_(n), in_(in), store_(store), y_(y) {
    const int64_t most = n.entries + n.steps;
    const std::pair<float**, int64_t> arrays[] = {
        {&now_.keys, most * n.state},      {&now_.queries, n.steps * n.state}, {&now_.scores, n.steps * most},
        {&now_.values, most * n.head_dim}, {&now_.strengths, most},                  {&now_.decays, most},
        {&now_.weights, n.steps * most},   {&now_.whole, n.steps},             {&now_.read, n.steps * n.head_dim}};
    int64_t total = 0;
    for (const auto& [array, size] : arrays) total += size + kBehind;
    room_.resize(total);
    float* next = room_.data();
    for (const auto& [array, size] : arrays) *array = next, next += size + kBehind;
    now_.most = most, now_.head_dim = n.head_dim, now_.state = n.state;
  }

  // Heads [begin, end) of a row.
  void run(int64_t row, int64_t begin, int64_t end) {
    const int64_t count = std::clamp<int64_t>(in_.num_tokens[row], 0, n_.steps), shared = n_.heads / n_.groups;
    for (int64_t t = count; t < n_.steps; ++t) std::fill(to(row, t, begin), to(row, t, end), 0.0f);
    if (!count) return;
    now_.count = count;
    // no more tokens of the tail than it has room for, whatever a caller says
    now_.before = std::clamp<int64_t>(in_.length[row] - in_.anchor_length[row], 0, n_.entries);
    const int64_t due = (in_.length[row] / n_.interval + 1) * n_.interval - in_.length[row];
    for (int64_t head = begin; head < end; ++head) {
      const int64_t group = head / shared;
      if (head == begin || head % shared == 0) gather_group(row, group);
      gather_head(row, head, head + 1 < end);
      auto slot = [&](int32_t index) { return store_.states + (index * n_.heads + head) * n_.head_dim * n_.state; };
      const typename State::Stored* anchor = in_.anchor_slot[row] > 0 ? slot(in_.anchor_slot[row]) : nullptr;
      if (anchor) {
        read(now_, anchor);
      } else {
        std::fill_n(now_.read, count * n_.head_dim, 0.0f);
      }
      all_outputs(now_, in_.skip[head], to(row, 0, head), n_.heads * n_.head_dim);
      append(row, head);
      if (head % shared == 0) append_group(row, group);  // no other head reads these entries here
      if (in_.write_slot[row] > 0 && due <= count) write(now_, now_.before + due, anchor, slot(in_.write_slot[row]));
    }
  }

 private:
  float* to(int64_t row, int64_t t, int64_t head) const {
    return y_ + ((row * n_.steps + t) * n_.heads + head) * n_.head_dim;
  }

  int64_t entry(int64_t row, int64_t position) const {
    return in_.tail_id[row] * n_.entries + (position & (n_.entries - 1));
  }

  // Keys of all tokens since the anchor, queries of the new ones, and the scores of each pair.
  void gather_group(int64_t row, int64_t group) {
    for (int64_t i = 0; i < now_.before; ++i) {
      const auto* from = store_.key + (entry(row, in_.anchor_length[row] + i) * n_.groups + group) * n_.state;
      for (int64_t k = 0; k < n_.state; ++k) now_.keys[i * n_.state + k] = Entry::load(from[k]);
    }
    for (int64_t t = 0; t < now_.count; ++t) {
      const int64_t token = ((row * n_.steps + t) * n_.groups + group) * n_.state;
      std::copy_n(in_.key + token, n_.state, now_.keys + (now_.before + t) * n_.state);
      std::copy_n(in_.query + token, n_.state, now_.queries + t * n_.state);
    }
    score(now_);
  }

  // Value, strength and decay of all tokens since the anchor. The next head's values are fetched ahead: of each entry they
  // are a short piece, which the processor does not foresee.
  void gather_head(int64_t row, int64_t head, bool another) {
    constexpr int64_t kLine = 64 / sizeof(typename Entry::Stored);
    for (int64_t i = 0; i < now_.before; ++i) {
      const int64_t at = entry(row, in_.anchor_length[row] + i) * n_.heads + head;
      const auto* from = store_.value + at * n_.head_dim;
      for (int64_t p = 0; p < n_.head_dim; ++p) now_.values[i * n_.head_dim + p] = Entry::load(from[p]);
      for (int64_t p = 0; another && p < n_.head_dim; p += kLine) __builtin_prefetch(from + n_.head_dim + p);
      now_.strengths[i] = store_.strength[at], now_.decays[i] = std::exp(store_.log_decay[at]);
    }
    for (int64_t t = 0; t < now_.count; ++t) {
      const int64_t at = (row * n_.steps + t) * n_.heads + head;
      std::copy_n(in_.value + at * n_.head_dim, n_.head_dim, now_.values + (now_.before + t) * n_.head_dim);
      now_.strengths[now_.before + t] = in_.strength[at];
      now_.decays[now_.before + t] = std::exp(in_.log_decay[at]);
    }
  }

  void append(int64_t row, int64_t head) {
    for (int64_t t = 0; t < now_.count; ++t) {
      const int64_t at = entry(row, in_.length[row] + t) * n_.heads + head;
      const float* value = now_.values + (now_.before + t) * n_.head_dim;
      for (int64_t p = 0; p < n_.head_dim; ++p) store_.value[at * n_.head_dim + p] = Entry::round(value[p]);
      const int64_t token = (row * n_.steps + t) * n_.heads + head;
      store_.strength[at] = in_.strength[token], store_.log_decay[at] = in_.log_decay[token];
    }
  }

  void append_group(int64_t row, int64_t group) {
    for (int64_t t = 0; t < now_.count; ++t) {
      const float* key = now_.keys + (now_.before + t) * n_.state;
      auto* kept = store_.key + (entry(row, in_.length[row] + t) * n_.groups + group) * n_.state;
      for (int64_t k = 0; k < n_.state; ++k) kept[k] = Entry::round(key[k]);
    }
  }

  const Sizes& n_;
  const Inputs& in_;
  const Stores<State, Entry>& store_;
  float* y_;
  std::vector<float> room_;
  Tokens now_;
};

ffi::Error run(ffi::ThreadPool pool, ffi::AnyBuffer states, ffi::AnyBuffer tail_value, ffi::AnyBuffer tail_key,
               Floats tail_log_decay, Floats tail_strength, Floats query, Floats key, Floats value, Floats log_decay,
               Floats strength, Floats skip, Ints anchor_slot, Ints tail_id, Ints anchor_length, Ints length,
               Ints num_tokens, Ints write_slot, ffi::Attr<int64_t, kInterval> interval, ffi::ResultBuffer<ffi::F32> y,
               ffi::Result<ffi::AnyBuffer> new_states, ffi::Result<ffi::AnyBuffer> new_value,
               ffi::Result<ffi::AnyBuffer> new_key, ffi::ResultBuffer<ffi::F32> new_log_decay,
               ffi::ResultBuffer<ffi::F32> new_strength) {
  if (states.untyped_data() != new_states->untyped_data() || tail_value.untyped_data() != new_value->untyped_data() ||
      tail_key.untyped_data() != new_key->untyped_data() ||
      tail_log_decay.typed_data() != new_log_decay->typed_data() ||
      tail_strength.typed_data() != new_strength->typed_data()) {
    return ffi::Error::Internal("recurrence_replay: states or tails are not updated in place");
  }
  const auto shape = value.dimensions();
  const auto shared = key.dimensions();
  const Sizes n{shape[0], shape[1], shape[2], shape[3], shared[2], shared[3], tail_strength.dimensions()[1], *interval};
  const Inputs in{query.typed_data(),       key.typed_data(),           value.typed_data(),  log_decay.typed_data(),
                  strength.typed_data(),    skip.typed_data(),          anchor_slot.typed_data(),
                  tail_id.typed_data(),     anchor_length.typed_data(), length.typed_data(), num_tokens.typed_data(),
                  write_slot.typed_data()};
  if (tail_value.element_type() != tail_key.element_type()) {
    return ffi::Error::InvalidArgument("recurrence_replay: a tail has one dtype for values and keys");
  }
  constexpr char kRefused[] = "recurrence_replay: states and tails must be float32 or bfloat16";
  return with_floats(states.element_type(), kRefused, [&](auto state) {
    return with_floats(tail_value.element_type(), kRefused, [&](auto entry) {
      using State = decltype(state);
      using Entry = decltype(entry);
      const Stores<State, Entry> store{static_cast<typename State::Stored*>(new_states->untyped_data()),
                                       static_cast<typename Entry::Stored*>(new_value->untyped_data()),
                                       static_cast<typename Entry::Stored*>(new_key->untyped_data()),
                                       new_log_decay->typed_data(), new_strength->typed_data()};
      parallel_for(pool, n.rows * n.heads, [&](int64_t begin, int64_t end) {
        Heads<State, Entry> heads(n, in, store, y->typed_data());
        for (int64_t next; begin < end; begin = next) {
          const int64_t row = begin / n.heads, first = row * n.heads;
          next = std::min(end, first + n.heads);
          heads.run(row, begin - first, next - first);
        }
      });
      return ffi::Error::Success();
    });
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(recurrence_replay, run);

}  // namespace native
