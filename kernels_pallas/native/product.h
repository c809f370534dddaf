// Products of a few rows with a weight that is streamed once from memory, whichever way round it is stored.
#pragma once

#include <algorithm>
#include <vector>

#include "numbers.h"

namespace native {

constexpr int64_t kLanes = 16;
// Inputs of a block, which is multiplied before the next rows: one of x and two of weights stay in the first cache.
constexpr int64_t kInputs = 1024;
constexpr int64_t kBytes = 2048;
constexpr int64_t kOutputs = 4;  // outputs whose sums are kept in registers

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
typedef float Half __attribute__((vector_size(kLanes / 2 * sizeof(float))));
typedef float Quarter __attribute__((vector_size(kLanes / 4 * sizeof(float))));

struct Lanes {
  float lane[kLanes];
};

// How each number format is loaded (at: the first of kLanes * kVectors numbers) and widened to `width` lanes of vector
// k, from lane `part` on. kTakenApart: the vectors hold the numbers in another order.
// (Vectors go by reference: how they are passed by value depends on the instruction set.)
template <typename Number>
struct Vectors;

template <int64_t width>
struct Registers {
  typedef float Floats __attribute__((vector_size(width * sizeof(float))));
  typedef uint16_t Shorts __attribute__((vector_size(width * sizeof(uint16_t))));
  typedef uint32_t Words __attribute__((vector_size(width * sizeof(uint32_t))));
  typedef int32_t Integers __attribute__((vector_size(width * sizeof(int32_t))));
};

template <>
struct Vectors<Float32> {
  static constexpr int64_t kVectors = 1;
  static constexpr bool kTakenApart = false;
  template <int64_t width>
  static NATIVE_INLINE void widen(const float* at, int64_t, int64_t part, typename Registers<width>::Floats& value) {
    std::memcpy(&value, at + part, sizeof value);
  }
};

template <>
struct Vectors<BFloat16> {
  static constexpr int64_t kVectors = 2;
  static constexpr bool kTakenApart = false;
  template <int64_t width>
  static NATIVE_INLINE void widen(const uint16_t* at, int64_t k, int64_t part,
                                  typename Registers<width>::Floats& value) {
    typename Registers<width>::Shorts loaded;
    std::memcpy(&loaded, at + k * kLanes + part, sizeof loaded);
    const auto bits = __builtin_convertvector(loaded, typename Registers<width>::Words) << 16;
    std::memcpy(&value, &bits, sizeof value);
  }
};

// Four int8 are loaded as one 32-bit number, of which shifts take one each: compilers turn bytes into float32 number by
// number or in many small steps, and multiplying int8 is then slower than float32. Vector k has the numbers k, k + 4,
// k + 8, ...; `in_order` brings the inputs into the same order.
template <>
struct Vectors<Int8> {
  static constexpr int64_t kVectors = 4;
  static constexpr bool kTakenApart = true;
  template <int64_t width>
  static NATIVE_INLINE void widen(const int8_t* at, int64_t k, int64_t part, typename Registers<width>::Floats& value) {
    typename Registers<width>::Integers loaded;
    std::memcpy(&loaded, at + kVectors * part, sizeof loaded);
    value = __builtin_convertvector((loaded << static_cast<int32_t>(24 - 8 * k)) >> 24,
                                    typename Registers<width>::Floats);
  }
};

// Rows of x as vectors meet them; a rest that fills no vectors stays as it is. `room` holds them if they are others.
template <typename Number>
inline const float* in_order(const float* x, int64_t rows, int64_t inputs, std::vector<float>& room) {
  constexpr int64_t kVectors = Vectors<Number>::kVectors, kBlock = kLanes * kVectors;
  if (!Vectors<Number>::kTakenApart) return x;
  room.assign(x, x + rows * inputs);
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t i = t * inputs; i + kBlock <= (t + 1) * inputs; i += kBlock) {
      for (int64_t k = 0; k < kVectors; ++k) {
        for (int64_t lane = 0; lane < kLanes; ++lane) room[i + k * kLanes + lane] = x[i + lane * kVectors + k];
      }
    }
  }
  return room.data();
}

// By halves: added up one after the other, sixteen lanes would take longer than many a product.
NATIVE_INLINE float total(const Lanes& value) {
  Half halves[2];
  std::memcpy(halves, value.lane, sizeof halves);
  halves[0] += halves[1];
  Quarter quarters[2];
  std::memcpy(quarters, halves, sizeof quarters);
  quarters[0] += quarters[1];
  return (quarters[0][0] + quarters[0][2]) + (quarters[0][1] + quarters[0][3]);
}

// sums[o][t] += w[o][:count] x[t][:count] by lanes, for `outputs` rows of w and `rows` rows of x (`in_order`), `inputs`
// apart. Meanwhile as long a piece of the first `fetched` rows from `ahead` is fetched. The sums of `width` lanes at a
// time are kept in registers; each lane adds up the same numbers in the same order at every width.
template <typename Number, int64_t outputs, int64_t rows, int64_t width = kLanes>
NATIVE_INLINE void multiply(const float* x, const typename Number::Stored* w, const typename Number::Stored* ahead,
                            int64_t fetched, int64_t inputs, int64_t count, Lanes* sums, int64_t apart) {
  constexpr int64_t kVectors = Vectors<Number>::kVectors, kStep = kLanes * kVectors;
  using Floats = typename Registers<width>::Floats;
  for (int64_t part = 0; part < kLanes; part += width) {
    Floats sum[outputs][rows];
    for (int64_t o = 0; o < outputs; ++o) {
      for (int64_t t = 0; t < rows; ++t) std::memcpy(&sum[o][t], sums[o * apart + t].lane + part, sizeof sum[o][t]);
    }
    for (int64_t i = 0; i + kStep <= count; i += kStep) {
      if (part == 0) {
        for (int64_t o = 0; o < fetched; ++o) __builtin_prefetch(ahead + o * inputs + i);
      }
      for (int64_t k = 0; k < kVectors; ++k) {
        Floats weight[outputs];
        for (int64_t o = 0; o < outputs; ++o) {
          Vectors<Number>::template widen<width>(w + o * inputs + i, k, part, weight[o]);
        }
        for (int64_t t = 0; t < rows; ++t) {
          Floats value;
          std::memcpy(&value, x + t * inputs + i + k * kLanes + part, sizeof value);
          for (int64_t o = 0; o < outputs; ++o) sum[o][t] += weight[o] * value;
        }
      }
    }
    // Unrolled, the sums stay in registers.
#pragma GCC unroll 4
    for (int64_t o = 0; o < outputs; ++o) {
#pragma GCC unroll 4
      for (int64_t t = 0; t < rows; ++t) std::memcpy(sums[o * apart + t].lane + part, &sum[o][t], sizeof sum[o][t]);
    }
  }
  const int64_t i = count / kStep * kStep;
  if (i == count) return;
  for (int64_t o = 0; o < outputs; ++o) {
    for (int64_t t = 0; t < rows; ++t) {
      float rest = 0;
      for (int64_t k = i; k < count; ++k) rest += Number::load(w[o * inputs + k]) * x[t * inputs + k];
      sums[o * apart + t].lane[0] += rest;
    }
  }
}

// The same for any number of rows of x: as many at a time as have their sums in registers, and what is left. Each time
// fetches its share, so that memory is never idle; `ahead` may be null.
template <typename Number, int64_t outputs, int64_t width>
NATIVE_INLINE void multiply_rows(const float* x, const typename Number::Stored* w,
                                 const typename Number::Stored* ahead, int64_t rows, int64_t inputs, int64_t count,
                                 Lanes* sums) {
  constexpr int64_t kRows = width == kLanes ? 4 : 2;
  const int64_t times = (rows + kRows - 1) / kRows;
  for (int64_t time = 0; time < times; ++time) {
    const int64_t t = time * kRows, from = outputs * time / times;
    const int64_t fetched = ahead == nullptr ? 0 : outputs * (time + 1) / times - from;
    const typename Number::Stored* next = ahead == nullptr ? w : ahead + from * inputs;
    const float* values = x + t * inputs;
    switch (std::min(rows - t, kRows)) {
      case 4:
        multiply<Number, outputs, kRows, width>(values, w, next, fetched, inputs, count, sums + t, rows);
        break;
      case 3:
        multiply<Number, outputs, std::min<int64_t>(kRows, 3), width>(values, w, next, fetched, inputs, count, sums + t,
                                                                      rows);
        break;
      case 2:
        multiply<Number, outputs, 2, width>(values, w, next, fetched, inputs, count, sums + t, rows);
        break;
      default:
        multiply<Number, outputs, 1, width>(values, w, next, fetched, inputs, count, sums + t, rows);
    }
  }
}

// Outputs [begin, end) of y [rows, outputs]; x is `in_order`.
//
// Processors foresee one long stream, not several rows of a weight side by side that end after a page: unless the next
// block is fetched by hand, half of the time goes by waiting for memory.
template <typename Number, int64_t width>
NATIVE_INLINE void product(const float* x, const typename Number::Stored* w, float* y, int64_t rows, int64_t inputs,
                           int64_t outputs, int64_t begin, int64_t end) {
  constexpr int64_t kStep = kLanes * Vectors<Number>::kVectors;
  constexpr int64_t kMost = std::min(kInputs, kBytes / static_cast<int64_t>(sizeof(typename Number::Stored)));
  const int64_t blocks = std::max<int64_t>((inputs + kMost - 1) / kMost, 1);  // as long as each other
  const int64_t block = std::max((inputs / blocks + kStep - 1) / kStep * kStep, kStep);
  std::vector<Lanes> sums(kOutputs * rows);
  for (int64_t o = begin; o < end; o += kOutputs) {
    const int64_t several = std::min(kOutputs, end - o);
    std::fill(sums.begin(), sums.end(), Lanes{});
    for (int64_t i = 0; i < inputs; i += block) {
      const int64_t count = std::min(block, inputs - i);
      const typename Number::Stored* weight = w + o * inputs + i;
      if (several == kOutputs) {
        const typename Number::Stored* ahead = nullptr;
        if (i + block < inputs) {
          ahead = weight + block;
        } else if (o + 2 * kOutputs <= end) {
          ahead = w + (o + kOutputs) * inputs;
        }
        multiply_rows<Number, kOutputs, width>(x + i, weight, ahead, rows, inputs, count, sums.data());
      } else {
        for (int64_t k = 0; k < several; ++k) {
          multiply_rows<Number, 1, width>(x + i, weight + k * inputs, nullptr, rows, inputs, count,
                                          sums.data() + k * rows);
        }
      }
    }
    for (int64_t k = 0; k < several; ++k) {
      for (int64_t t = 0; t < rows; ++t) y[t * outputs + o + k] = total(sums[k * rows + t]);
    }
  }
}

// The same with the weight stored [inputs, outputs], `apart` outputs in a row of it.
template <typename Number>
NATIVE_INLINE void product_transposed(const float* x, const typename Number::Stored* w, float* y, int64_t rows,
                                      int64_t inputs, int64_t apart, int64_t begin, int64_t end) {
  for (int64_t t = 0; t < rows; ++t) std::fill(y + t * apart + begin, y + t * apart + end, 0.0f);
  // Outputs at a time: a stretch of each row of the weight, long enough to stream, whose sums stay in the first cache.
  constexpr int64_t kStretch = 1024;
  for (int64_t from = begin; from < end; from += kStretch) {
    const int64_t to = std::min(from + kStretch, end);
    int64_t i = 0;
    for (; i + kOutputs <= inputs; i += kOutputs) {
      const typename Number::Stored* w0 = w + i * apart;
      const typename Number::Stored *w1 = w0 + apart, *w2 = w1 + apart, *w3 = w2 + apart;
      for (int64_t t = 0; t < rows; ++t) {
        const float* value = x + t * inputs + i;
        float* sum = y + t * apart;
#pragma omp simd
        for (int64_t o = from; o < to; ++o) {
          sum[o] += Number::load(w0[o]) * value[0] + Number::load(w1[o]) * value[1] + Number::load(w2[o]) * value[2] +
                    Number::load(w3[o]) * value[3];
        }
      }
    }
    for (; i < inputs; ++i) {
      const typename Number::Stored* weight = w + i * apart;
      for (int64_t t = 0; t < rows; ++t) {
        const float value = x[t * inputs + i];
        float* sum = y + t * apart;
#pragma omp simd
        for (int64_t o = from; o < to; ++o) sum[o] += Number::load(weight[o]) * value;
      }
    }
  }
}

// `product` for weights in float32, bfloat16 and int8 (x `in_order`), in product.cc: the templates take seconds to
// compile for each instruction set, so no other file instantiates them.
void product_of(const float* x, const float* w, float* y, int64_t rows, int64_t inputs, int64_t outputs, int64_t begin,
                int64_t end);
void product_of(const float* x, const uint16_t* w, float* y, int64_t rows, int64_t inputs, int64_t outputs,
                int64_t begin, int64_t end);
void product_of(const float* x, const int8_t* w, float* y, int64_t rows, int64_t inputs, int64_t outputs, int64_t begin,
                int64_t end);

// The instruction set that `product_of` runs with: "avx512", "avx2" or "baseline".
const char* instructions();

}  // namespace native
