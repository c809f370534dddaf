// A few steps of a recurrence for many rows, from slots to slots: see kernels_pallas/state_update.
#pragma once

#include <vector>

#include "parallel.h"

namespace native {

// The states are [slots, heads, size]. For each row and head, runs one_step(old, next, token, head) for the row's
// tokens in order; `next` may be `old`. A token for which is_padding(token) is true changes no state: padding(token,
// head) is called for it. Slot 0 reads as zeros and is not written.
template <typename Stored, typename IsPadding, typename Padding, typename Step>
void row_steps(xla::ffi::ThreadPool& pool, int64_t rows, int64_t steps, int64_t heads, int64_t size,
               const int32_t* read_slot, const int32_t* write_slot, Stored* store, const IsPadding& is_padding,
               const Padding& padding, const Step& one_step) {
  parallel_for(pool, rows * heads, [&](int64_t begin, int64_t end) {
    std::vector<Stored> nowhere(size);  // for states that go to slot 0
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / heads, head = item % heads;
      auto slot = [&](int32_t index) { return store + (index * heads + head) * size; };
      const Stored* old = slot(read_slot[row]);
      if (read_slot[row] <= 0) {
        std::fill(nowhere.begin(), nowhere.end(), Stored{0});
        old = nowhere.data();
      }
      for (int64_t t = 0; t < steps; ++t) {
        const int64_t token = row * steps + t;
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
