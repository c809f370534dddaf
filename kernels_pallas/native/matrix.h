// Products of many rows with a weight: each block of the weight is widened once for all rows.
//
// x comes as columns [groups of rows, inputs, rows of a group]: the rows of a group are the lanes of its vectors, so
// that sums need no adding up over lanes and a vector of x is multiplied with kTall outputs once it is loaded.
#pragma once

#include <algorithm>
#include <vector>

#include "product.h"

namespace native {

constexpr int64_t kTall = 6;           // outputs whose sums with a group of rows are kept in registers
constexpr int64_t kPanel = 48;         // outputs of a block, which stays in the second cache
constexpr int64_t kPanelInputs = 256;  // its inputs: of them, the columns of a group stay in the first cache
constexpr int64_t kMostRows = 256;     // rows whose sums with a block stay in the second cache

template <int64_t width>
constexpr int64_t kGroup = 2 * width;  // rows of a group

// Groups [begin, end) of x [rows, inputs] as columns, in the order of `in_order`; rows that do not exist are 0.
template <typename Number>
inline void columns_of(const float* x, float* columns, int64_t rows, int64_t inputs, int64_t group_rows, int64_t begin,
                       int64_t end) {
  constexpr int64_t kVectors = Vectors<Number>::kVectors, kStep = kLanes * kVectors;
  for (int64_t group = begin; group < end; ++group) {
    const float* first = x + group * group_rows * inputs;
    const int64_t several = std::min(group_rows, rows - group * group_rows);
    float* to = columns + group * inputs * group_rows;
    for (int64_t i = 0; i < inputs; i += kStep, to += kStep * group_rows) {
      const int64_t count = std::min(kStep, inputs - i);
      for (int64_t t = 0; t < group_rows; ++t) {
        const float* row = first + t * inputs + i;
        if (t >= several) {
          for (int64_t k = 0; k < count; ++k) to[k * group_rows + t] = 0;
        } else if (count < kStep) {
          for (int64_t k = 0; k < count; ++k) to[k * group_rows + t] = row[k];
        } else {
          for (int64_t k = 0; k < kStep; ++k) to[k * group_rows + t] = row[k % kLanes * kVectors + k / kLanes];
        }
      }
    }
  }
}

// sums [kTall, kGroup] += w [kTall, :count] columns [:count, kGroup]; rows of w are kPanelInputs apart.
template <int64_t width>
NATIVE_INLINE void multiply_group(const float* columns, const float* w, int64_t count, float* sums) {
  using Floats = typename Registers<width>::Floats;
  Floats low[kTall], high[kTall];
#pragma GCC unroll 6
  for (int64_t o = 0; o < kTall; ++o) {
    low[o] = load<width>(sums + o * kGroup<width>);
    high[o] = load<width>(sums + o * kGroup<width> + width);
  }
  for (int64_t i = 0; i < count; ++i, columns += kGroup<width>) {
    const Floats x_low = load<width>(columns), x_high = load<width>(columns + width);
#pragma GCC unroll 6
    for (int64_t o = 0; o < kTall; ++o) {
      low[o] += w[o * kPanelInputs + i] * x_low;
      high[o] += w[o * kPanelInputs + i] * x_high;
    }
  }
#pragma GCC unroll 6
  for (int64_t o = 0; o < kTall; ++o) {
    store<width>(sums + o * kGroup<width>, low[o]);
    store<width>(sums + o * kGroup<width> + width, high[o]);
  }
}

// Outputs [begin, end) of y [rows, outputs], from `columns` and w [outputs, inputs].
template <typename Number, int64_t width>
NATIVE_INLINE void matrix_product(const float* columns, const typename Number::Stored* w, float* y, int64_t rows,
                                  int64_t inputs, int64_t outputs, int64_t begin, int64_t end) {
  constexpr int64_t kVectors = Vectors<Number>::kVectors, kStep = kLanes * kVectors;
  static_assert(kPanelInputs % kStep == 0 && kPanel % kTall == 0);
  const int64_t groups = (rows + kGroup<width> - 1) / kGroup<width>;
  alignas(64) float wide[kPanel * kPanelInputs] = {};
  std::vector<float> sums(groups * kPanel * kGroup<width>);
  for (int64_t first = begin; first < end; first += kPanel) {
    const int64_t several = std::min(kPanel, end - first);
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (int64_t from = 0; from < inputs; from += kPanelInputs) {
      const int64_t count = std::min(kPanelInputs, inputs - from);
      for (int64_t o = 0; o < several; ++o) {
        const typename Number::Stored* row = w + (first + o) * inputs + from;
        float* to = wide + o * kPanelInputs;
        int64_t i = 0;
        for (; i + kStep <= count; i += kStep) {
          __builtin_prefetch(row + kPanelInputs + i, 0, 2);
#pragma GCC unroll 1
          for (int64_t part = 0; part < kLanes; part += width) {
#pragma GCC unroll 4
            for (int64_t k = 0; k < kVectors; ++k) {
              typename Registers<width>::Floats value;
              Vectors<Number>::template widen<width>(row + i, k, part, value);
              store<width>(to + i + k * kLanes + part, value);
            }
          }
        }
        for (; i < count; ++i) to[i] = Number::load(row[i]);
      }
      for (int64_t group = 0; group < groups; ++group) {
        // The columns of the next group are fetched meanwhile: each part of them is a short stream.
        constexpr int64_t kShare = kPanelInputs * kGroup<width> * kTall / kPanel;
        const int64_t next = group + 1 < groups ? (group + 1) * inputs + from : from + kPanelInputs;
        for (int64_t o = 0; o < several; o += kTall) {
          const float* ahead = columns + next * kGroup<width> + o / kTall * kShare;
          for (int64_t k = 0; k < kShare; k += kLanes) __builtin_prefetch(ahead + k, 0, 2);
          multiply_group<width>(columns + (group * inputs + from) * kGroup<width>, wide + o * kPanelInputs, count,
                                sums.data() + (group * kPanel + o) * kGroup<width>);
        }
      }
    }
    for (int64_t t = 0; t < rows; ++t) {
      const float* sum = sums.data() + t / kGroup<width> * kPanel * kGroup<width> + t % kGroup<width>;
      for (int64_t o = 0; o < several; ++o) y[t * outputs + first + o] = sum[o * kGroup<width>];
    }
  }
}

}  // namespace native
