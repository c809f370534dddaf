// A few steps of a recurrence for many rows, from slots to slots: see kernels_pallas/recurrence.
#pragma once

#include <vector>

#include "parallel.h"

namespace native {

// Rows that follow each other: a row whose slot to read is negative goes on from the state of the row before it.
struct Chain {
  int64_t first, last;  // rows [first, last)
};

inline std::vector<Chain> chains_of(int64_t rows, const int32_t* read_slot) {
  std::vector<Chain> chains;
  for (int64_t row = 0; row < rows; ++row) {
    if (row == 0 || read_slot[row] >= 0) chains.push_back({row, row});
    chains.back().last = row + 1;
  }
  return chains;
}

// How a state lies in its slot: in `rows` rows of `apart` numbers, whose parts of up to `width` numbers depend on no other.
struct Layout {
  int64_t rows, width, apart;

  int64_t parts() const { return (apart + width - 1) / width; }
  int64_t count(int64_t part) const { return std::min(width, apart - part * width); }
};

// For each chain and part of the states, runs steps(old, next, token, count, part) for `count` tokens from `token` on, of
// which only the last may write a slot; `next`, which receives the state after them, may be `old`. A token for which
// is_padding(token) is true changes no state: padding(token, part) is called for it. Slot 0 reads as zeros and is not
// written.
template <typename Stored, typename IsPadding, typename Padding, typename Steps>
void row_steps(ffi::ThreadPool& pool, int64_t rows, int64_t steps, const Layout& layout, const int32_t* read_slot,
               const int32_t* write_slot, Stored* store, const IsPadding& is_padding, const Padding& padding,
               const Steps& run_steps) {
  const std::vector<Chain> chains = chains_of(rows, read_slot);
  const int64_t parts = layout.parts();
  parallel_for(pool, chains.size() * parts, [&](int64_t begin, int64_t end) {
    std::vector<Stored> nowhere((layout.rows - 1) * layout.apart + layout.width);  // for states that go to slot 0
    for (int64_t item = begin; item < end; ++item) {
      const Chain chain = chains[item / parts];
      const int64_t part = item % parts, last = chain.last * steps;
      auto slot = [&](int32_t index) { return store + index * layout.rows * layout.apart + part * layout.width; };
      const Stored* old = slot(read_slot[chain.first]);
      if (read_slot[chain.first] <= 0) {
        std::fill(nowhere.begin(), nowhere.end(), Stored{0});
        old = nowhere.data();
      }
      for (int64_t token = chain.first * steps; token < last;) {
        int64_t until = token + 1;
        if (is_padding(token)) {  // which may hold NaN
          if (write_slot[token] > 0 && slot(write_slot[token]) != old) {
            Stored* next = slot(write_slot[token]);
            for (int64_t row = 0; row < layout.rows; ++row) {
              std::copy_n(old + row * layout.apart, layout.count(part), next + row * layout.apart);
            }
            old = next;
          }
          padding(token, part);
        } else {
          while (until < last && write_slot[until - 1] <= 0 && !is_padding(until)) ++until;
          const int32_t target = write_slot[until - 1];
          Stored* next = target > 0 ? slot(target) : nowhere.data();
          run_steps(old, next, token, until - token, part);
          old = next;
        }
        token = until;
      }
    }
  });
}

}  // namespace native
