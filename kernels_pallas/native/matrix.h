// Products of many rows with a weight, with the bits that `product` gives for few rows.
//
// In `product`, each lane adds up the inputs that meet it. Here the lanes are rows, so that a vector of x is multiplied
// with kTall outputs once it is loaded. The inputs that meet one lane of `product` are a *class*: an output's classes
// are added up one after the other, each in the order of `product`, and their sums combined as `total` combines lanes.
//
// Class c has its inputs at the vectors 0, 1, ... of a row. A row's depth is the number of its vectors.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>

#include "product.h"

namespace native {

constexpr int64_t kTall = 6;        // outputs whose sums with a group of rows are kept in registers
constexpr int64_t kPanel = 48;      // outputs whose weights are widened and put in order at a time
constexpr int64_t kMostRows = 256;  // rows whose columns are made at a time

// Columns of a group up to this size stay in the first cache while all classes of kTall outputs are added up. Of larger
// ones, each class is multiplied with a whole panel.
constexpr int64_t kNearBytes = 32 << 10;

template <int64_t width>
constexpr int64_t kGroup = 2 * width;  // rows of a group

template <typename Number, int64_t width>
NATIVE_INLINE int64_t depth_of(int64_t inputs) {
  constexpr int64_t kStep = kLanes * Vectors<Number>::kVectors;
  return (inputs + kStep - 1) / kStep * (kStep / width);
}

// One after the other, a number of the first and of the second vector, from their halves `half`.
template <int64_t width, int64_t half, size_t... lane>
NATIVE_INLINE void interleave(const typename Registers<width>::Floats& first,
                              const typename Registers<width>::Floats& second, typename Registers<width>::Floats& to,
                              std::index_sequence<lane...>) {
#ifdef __clang__
  to = __builtin_shufflevector(first, second, (lane % 2 * width + half * width / 2 + lane / 2)...);
#else
  to = __builtin_shuffle(first, second,
                         typename Registers<width>::Integers{(lane % 2 * width + half * width / 2 + lane / 2)...});
#endif
}

// Number j of vector i becomes number i of vector j. Each round moves a bit of the vector's number to the lane's.
template <int64_t width>
NATIVE_INLINE void transpose(typename Registers<width>::Floats (&vectors)[width]) {
  using Lanes = std::make_index_sequence<width>;
#pragma GCC unroll 4
  for (int64_t round = 1; round < width; round *= 2) {
    typename Registers<width>::Floats next[width];
#pragma GCC unroll 8
    for (int64_t i = 0; i < width / 2; ++i) {
      interleave<width, 0>(vectors[i], vectors[i + width / 2], next[2 * i], Lanes());
      interleave<width, 1>(vectors[i], vectors[i + width / 2], next[2 * i + 1], Lanes());
    }
#pragma GCC unroll 16
    for (int64_t i = 0; i < width; ++i) vectors[i] = next[i];
  }
}

// Up to kGroup rows of x [rows, inputs] as columns [classes, depth, kGroup]; rows that do not exist are 0.
template <typename Number, int64_t width>
NATIVE_INLINE void columns_of(const float* x, float* columns, int64_t rows, int64_t inputs) {
  constexpr int64_t kVectors = Vectors<Number>::kVectors, kStep = kLanes * kVectors;
  const int64_t depth = depth_of<Number, width>(inputs);
  alignas(64) float ordered[width][kStep];
  for (int64_t first = 0; first < kGroup<width>; first += width) {
    for (int64_t i = 0, vector = 0; i < inputs; i += kStep) {
      for (int64_t t = 0; t < width; ++t) {
        const float* from = x + (first + t) * inputs + i;
        if (first + t >= rows) {
          std::fill(ordered[t], ordered[t] + kStep, 0.0f);
        } else if (i + kStep > inputs) {
          last_step<Number>(from, inputs - i, ordered[t]);
        } else {
          for (int64_t k = 0; k < kVectors; ++k) {
            for (int64_t lane = 0; lane < kLanes; ++lane) ordered[t][k * kLanes + lane] = from[lane * kVectors + k];
          }
        }
      }
      for (int64_t part = 0; part < kLanes; part += width) {
        for (int64_t k = 0; k < kVectors; ++k, ++vector) {
          typename Registers<width>::Floats block[width];
#pragma GCC unroll 16
          for (int64_t t = 0; t < width; ++t) block[t] = load<width>(ordered[t] + k * kLanes + part);
          transpose<width>(block);
#pragma GCC unroll 16
          for (int64_t c = 0; c < width; ++c) {
            store<width>(columns + (c * depth + vector) * kGroup<width> + first, block[c]);
          }
        }
      }
    }
  }
}

// `several` rows of w [outputs, inputs] as wide [classes, kPanel, apart]; apart is the depth, rounded up to `width`.
template <typename Number, int64_t width>
NATIVE_INLINE void widen_panel(const typename Number::Stored* w, float* wide, int64_t several, int64_t inputs,
                               int64_t apart) {
  using Stored = typename Number::Stored;
  constexpr int64_t kVectors = Vectors<Number>::kVectors, kStep = kLanes * kVectors, kOfStep = kStep / width;
  constexpr int64_t kSteps = (width + kOfStep - 1) / kOfStep;  // of a block of `width` vectors or more
  constexpr int64_t kBlocks = kSteps * kOfStep / width;
  const int64_t whole = inputs / kStep;
  Stored last[kStep];
  const Stored zeros[kStep] = {};
  for (int64_t o = 0; o < several; ++o) {
    const Stored* row = w + o * inputs;
    if (whole * kStep < inputs) padded_copy(row + whole * kStep, inputs - whole * kStep, kStep, last);
    for (int64_t first = 0; first * kOfStep < apart; first += kSteps) {
      typename Registers<width>::Floats block[kBlocks][width];
#pragma GCC unroll 16
      for (int64_t step = 0; step < kSteps; ++step) {
        const int64_t at = first + step;
        const Stored* from = at < whole ? row + at * kStep : at * kStep < inputs ? last : zeros;
#pragma GCC unroll 16
        for (int64_t v = 0; v < kOfStep; ++v) {
          Vectors<Number>::template widen<width>(from, v % kVectors, v / kVectors * width,
                                                 block[(step * kOfStep + v) / width][(step * kOfStep + v) % width]);
        }
      }
#pragma GCC unroll 4
      for (int64_t b = 0; b < kBlocks; ++b) {
        if (first * kOfStep + b * width >= apart) break;
        transpose<width>(block[b]);
#pragma GCC unroll 16
        for (int64_t c = 0; c < width; ++c) {
          store<width>(wide + (c * kPanel + o) * apart + first * kOfStep + b * width, block[b][c]);
        }
      }
    }
  }
}

// The number in all lanes, as bits: it may be two numbers in bfloat16.
template <int64_t width>
NATIVE_INLINE void broadcast(const float* at, typename Registers<width>::Floats& to) {
  int32_t bits;
  std::memcpy(&bits, at, sizeof bits);
  const typename Registers<width>::Integers lanes = bits - typename Registers<width>::Integers{};
  std::memcpy(&to, &lanes, sizeof to);
}

// sums [kTall, kGroup] of one class: w [kTall, depth] times columns [depth, kGroup].
template <typename Number, int64_t width>
NATIVE_INLINE void multiply_class(const float* columns, const float* w, int64_t apart, int64_t depth, float* sums) {
  using Floats = typename Registers<width>::Floats;
  Floats low[kTall] = {}, high[kTall] = {};
  for (int64_t i = 0; i < depth; ++i, columns += kGroup<width>) {
    const Floats x_low = load<width>(columns), x_high = load<width>(columns + width);
#pragma GCC unroll 6
    for (int64_t o = 0; o < kTall; ++o) {
      Floats weight;
      broadcast<width>(w + o * apart + i, weight);
      Vectors<Number>::template add<width>(low[o], weight, x_low);
      Vectors<Number>::template add<width>(high[o], weight, x_high);
    }
  }
#pragma GCC unroll 6
  for (int64_t o = 0; o < kTall; ++o) {
    store<width>(sums + o * kGroup<width>, low[o]);
    store<width>(sums + o * kGroup<width> + width, high[o]);
  }
}

// The sums of the classes, each `apart` numbers behind the one before, added up as `total` adds up lanes.
template <int64_t width>
NATIVE_INLINE void total_of_classes(const float* sums, int64_t apart, float* to) {
  typename Registers<width>::Floats lanes[width];
#pragma GCC unroll 16
  for (int64_t c = 0; c < width; ++c) lanes[c] = load<width>(sums + c * apart);
#pragma GCC unroll 4
  for (int64_t half = width / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int64_t c = 0; c < half; ++c) lanes[c] = lanes[c] + lanes[c + half];
  }
  store<width>(to, lanes[0]);
}

// y [rows, outputs], whose rows are `apart` numbers apart, from sums [outputs, kGroup].
template <int64_t width>
NATIVE_INLINE void store_rows(const float* sums, float* y, int64_t rows, int64_t outputs, int64_t apart) {
  for (int64_t first = 0; first < rows; first += width) {
    const int64_t several = std::min(width, rows - first);
    int64_t o = 0;
    for (; o + width <= outputs; o += width) {
      typename Registers<width>::Floats block[width];
#pragma GCC unroll 16
      for (int64_t k = 0; k < width; ++k) block[k] = load<width>(sums + (o + k) * kGroup<width> + first);
      transpose<width>(block);
      float rest[width][width];
#pragma GCC unroll 16
      for (int64_t t = 0; t < width; ++t) store<width>(rest[t], block[t]);
      for (int64_t t = 0; t < several; ++t) std::memcpy(y + (first + t) * apart + o, rest[t], sizeof rest[t]);
    }
    for (; o < outputs; ++o) {
      for (int64_t t = 0; t < several; ++t) y[(first + t) * apart + o] = sums[o * kGroup<width> + first + t];
    }
  }
}

// Outputs [begin, end) of y [rows, outputs], from the columns of each group of rows and w [outputs, inputs].
template <typename Number, int64_t width>
NATIVE_INLINE void matrix_product(const float* columns, const typename Number::Stored* w, float* y, int64_t rows,
                                  int64_t inputs, int64_t outputs, int64_t begin, int64_t end) {
  static_assert(kPanel % kTall == 0);
  const int64_t depth = depth_of<Number, width>(inputs), apart = (depth + width - 1) / width * width;
  const int64_t near = depth * width * kGroup<width> * static_cast<int64_t>(sizeof(float)) <= kNearBytes ? kTall : kPanel;
  const std::unique_ptr<float[]> room(new float[width * kPanel * (apart + kGroup<width>)]());
  float *wide = room.get(), *sums = wide + width * kPanel * apart;
  alignas(64) float totals[kPanel * kGroup<width>];
  for (int64_t first = begin; first < end; first += kPanel) {
    const int64_t several = std::min(kPanel, end - first);
    widen_panel<Number, width>(w + first * inputs, wide, several, inputs, apart);
    const float* group = columns;
    for (int64_t t = 0; t < rows; t += kGroup<width>, group += width * depth * kGroup<width>) {
      for (int64_t from = 0; from < several; from += near) {
        const int64_t to = std::min(from + near, several);
        for (int64_t c = 0; c < width; ++c) {
          for (int64_t o = from; o < to; o += kTall) {
            multiply_class<Number, width>(group + c * depth * kGroup<width>, wide + (c * kPanel + o) * apart, apart,
                                          depth, sums + (c * near + o - from) * kGroup<width>);
          }
        }
        for (int64_t o = from; o < to; ++o) {
          const float* one = sums + (o - from) * kGroup<width>;
          total_of_classes<width>(one, near * kGroup<width>, totals + o * kGroup<width>);
          total_of_classes<width>(one + width, near * kGroup<width>, totals + o * kGroup<width> + width);
        }
      }
      store_rows<width>(totals, y + t * outputs + first, std::min(kGroup<width>, rows - t), several, outputs);
    }
  }
}

}  // namespace native
