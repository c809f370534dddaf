// A few steps of a recurrence for many rows, from slots to slots: see kernels_pallas/state_update.
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

// The states are [slots, heads, size]. For each chain and head, runs one_step(old, next, token, head) for the tokens of
// its rows in order; `next` may be `old`. A token for which is_padding(token) is true changes no state: padding(token,
// head) is called for it. Slot 0 reads as zeros and is not written.
template <typename Stored, typename IsPadding, typename Padding, typename Step>
void row_steps(xla::ffi::ThreadPool& pool, int64_t rows, int64_t steps, int64_t heads, int64_t size,
               const int32_t* read_slot, const int32_t* write_slot, Stored* store, const IsPadding& is_padding,
               const Padding& padding, const Step& one_step) {
  const std::vector<Chain> chains = chains_of(rows, read_slot);
  parallel_for(pool, chains.size() * heads, [&](int64_t begin, int64_t end) {
    std::vector<Stored> nowhere(size);  // for states that go to slot 0
    for (int64_t item = begin; item < end; ++item) {
      const Chain chain = chains[item / heads];
      const int64_t head = item % heads;
      auto slot = [&](int32_t index) { return store + (index * heads + head) * size; };
      const Stored* old = slot(read_slot[chain.first]);
      if (read_slot[chain.first] <= 0) {
        std::fill(nowhere.begin(), nowhere.end(), Stored{0});
        old = nowhere.data();
      }
      for (int64_t token = chain.first * steps; token < chain.last * steps; ++token) {
        Stored* next = write_slot[token] > 0 ? slot(write_slot[token]) : nowhere.data();
        if (is_padding(token)) {  // which may hold NaN
          if (next != old && write_slot[token] > 0) {
            std::copy_n(old, size, next);
            old = next;
          }
          padding(token, head);
          continue;
        }
        one_step(old, next, token, head);
        old = next;
      }
    }
  });
}

}  // namespace native
