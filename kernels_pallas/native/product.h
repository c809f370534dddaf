// Products of a few rows with a weight that is streamed once from memory, whichever way round it is stored.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "numbers.h"

namespace native {

constexpr int64_t kLanes = 16;
// Inputs of a block, which is multiplied before the next rows: one of x and two of weights stay in the first cache.
constexpr int64_t kInputs = 1024;
constexpr int64_t kBytes = 2048;
constexpr int64_t kOutputs = 4;  // outputs whose sums are kept in registers

template <int64_t width>
struct Registers {
  typedef float Floats __attribute__((vector_size(width * sizeof(float))));
  typedef uint16_t Shorts __attribute__((vector_size(width * sizeof(uint16_t))));
  typedef uint32_t Words __attribute__((vector_size(width * sizeof(uint32_t))));
  typedef int32_t Integers __attribute__((vector_size(width * sizeof(int32_t))));
};

// One instruction each; compilers copy bytes by registers of any size.
template <int64_t width>
NATIVE_INLINE typename Registers<width>::Floats load(const float* at) {
  typedef float Unaligned __attribute__((vector_size(width * sizeof(float)), aligned(4), may_alias));
  return *reinterpret_cast<const Unaligned*>(at);
}

template <int64_t width>
NATIVE_INLINE void store(float* at, const typename Registers<width>::Floats& value) {
  typedef float Unaligned __attribute__((vector_size(width * sizeof(float)), aligned(4), may_alias));
  *reinterpret_cast<Unaligned*>(at) = value;
}

// What a product does with two vectors: sum += weight * value.
struct Multiply {
  template <int64_t width>
  static NATIVE_INLINE void add(typename Registers<width>::Floats& sum, const typename Registers<width>::Floats& weight,
                                const typename Registers<width>::Floats& value) {
    sum += weight * value;
  }
};

// How each number format is loaded (at: the first of kLanes * kVectors numbers) and widened to `width` lanes of vector
// k, from lane `part` on. kTakenApart: the vectors hold the numbers in another order.
// (Vectors go by reference: how they are passed by value depends on the instruction set.)
template <typename Number>
struct Vectors;

template <>
struct Vectors<Float32> : Multiply {
  static constexpr int64_t kVectors = 1;
  static constexpr bool kTakenApart = false;
  template <int64_t width>
  static NATIVE_INLINE void widen(const float* at, int64_t, int64_t part, typename Registers<width>::Floats& value) {
    value = load<width>(at + part);
  }
};

template <>
struct Vectors<BFloat16> : Multiply {
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

// Several numbers of a weight are loaded as one 32-bit number, of which a shift or a mask takes each: compilers turn
// shorts and bytes into float32 in many small steps, and multiplying them is then slower than float32. Of n numbers in
// 32 bits, vector k has the numbers k, k + n, k + 2 n, ...; `in_order` brings the inputs into the same order.
template <>
struct Vectors<BFloat16Pairs> : Multiply {
  static constexpr int64_t kVectors = 2;
  static constexpr bool kTakenApart = true;
  template <int64_t width>
  static NATIVE_INLINE void widen(const uint16_t* at, int64_t k, int64_t part,
                                  typename Registers<width>::Floats& value) {
    typename Registers<width>::Words loaded;
    std::memcpy(&loaded, at + kVectors * part, sizeof loaded);
    loaded = k == 0 ? loaded << 16 : loaded & 0xffff0000u;
    std::memcpy(&value, &loaded, sizeof value);
  }
};

template <>
struct Vectors<Int8> : Multiply {
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

// Both operands in bfloat16, two numbers in each lane, for an instruction that adds both products to a float32. It takes
// denormal numbers for 0.
template <>
struct Vectors<BFloat16Dot> {
  static constexpr int64_t kVectors = 1;
  static constexpr bool kTakenApart = false;
  template <int64_t width>
  static NATIVE_INLINE void widen(const uint32_t* at, int64_t, int64_t part,
                                  typename Registers<width>::Floats& value) {
    value = load<width>(reinterpret_cast<const float*>(at) + part);
  }
#ifdef NATIVE_DISPATCH
  template <int64_t width>
  static NATIVE_INLINE void add(typename Registers<width>::Floats& sum, const typename Registers<width>::Floats& weight,
                                const typename Registers<width>::Floats& value) {
    // The compiler has this instruction only in functions for such a processor, which templates are not. It keeps an
    // array of sums in memory if the instruction writes an element.
    auto next = sum;
    asm("vdpbf16ps %2, %1, %0" : "+v"(next) : "v"(weight), "v"(value));
    sum = next;
  }
#endif
};

// A copy of `count` numbers with zeros behind them, `size` in all.
template <typename Stored>
inline void padded_copy(const Stored* from, int64_t count, int64_t size, Stored* to) {
  std::memcpy(to, from, count * sizeof(Stored));
  std::memset(to + count, 0, (size - count) * sizeof(Stored));
}

// The last `count` numbers of a row of x as vectors meet them, with zeros for those that are missing.
template <typename Number>
inline void last_step(const float* from, int64_t count, float* to) {
  constexpr int64_t kVectors = Vectors<Number>::kVectors;
  std::fill(to, to + kLanes * kVectors, 0.0f);
  for (int64_t i = 0; i < count; ++i) {
    to[Vectors<Number>::kTakenApart ? i % kVectors * kLanes + i / kVectors : i] = from[i];
  }
}

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

// By halves: added up one after the other, lanes would take longer than many a product.
template <int64_t width>
NATIVE_INLINE float total(const float* lanes) {
  if constexpr (width == 1) {
    return *lanes;
  } else {
    float half[width / 2];
    store<width / 2>(half, load<width / 2>(lanes) + load<width / 2>(lanes + width / 2));
    return total<width / 2>(half);
  }
}

// The same sum of a vector in a register, which never leaves it.
template <size_t... lane>
NATIVE_INLINE float total_of(typename Registers<kLanes>::Floats value, std::index_sequence<lane...>) {
#pragma GCC unroll 4
  for (int32_t half = kLanes / 2; half > 0; half /= 2) {
    const Registers<kLanes>::Integers other = {static_cast<int32_t>((lane + half) % kLanes)...};
#ifdef __clang__
    Registers<kLanes>::Floats turned;
    for (int64_t i = 0; i < kLanes; ++i) turned[i] = value[other[i]];
    value += turned;
#else
    value += __builtin_shuffle(value, other);
#endif
  }
  return value[0];
}
NATIVE_INLINE float total_of(const Registers<kLanes>::Floats& value) {
  return total_of(value, std::make_index_sequence<kLanes>());
}

// sums[o][t] += w[o][:count] x[t][:count] by `width` lanes, for `outputs` rows of w and `rows` rows of x (`in_order`),
// `inputs` apart. Meanwhile as long a piece of the first `fetched` rows from `ahead` is fetched. Sums stay in registers,
// for which every loop over them is unrolled.
template <typename Number, int64_t outputs, int64_t rows, int64_t width>
NATIVE_INLINE void multiply(const float* x, const typename Number::Stored* w, const typename Number::Stored* ahead,
                            int64_t fetched, int64_t inputs, int64_t count, float* sums, int64_t apart) {
  constexpr int64_t kVectors = Vectors<Number>::kVectors, kStep = kLanes * kVectors;
  using Stored = typename Number::Stored;
  using Floats = typename Registers<width>::Floats;
  Floats sum[outputs][rows];
#pragma GCC unroll 4
  for (int64_t o = 0; o < outputs; ++o) {
#pragma GCC unroll 4
    for (int64_t t = 0; t < rows; ++t) sum[o][t] = load<width>(sums + (o * apart + t) * width);
  }
  const auto step = [&](const float* x, int64_t x_apart, const Stored* w, int64_t w_apart) NATIVE_LAMBDA {
    // Unrolled, this loop takes more registers than there are.
#pragma GCC unroll 1
    for (int64_t part = 0; part < kLanes; part += width) {
#pragma GCC unroll 4
      for (int64_t k = 0; k < kVectors; ++k) {
        Floats value[rows];
#pragma GCC unroll 4
        for (int64_t t = 0; t < rows; ++t) value[t] = load<width>(x + t * x_apart + k * kLanes + part);
#pragma GCC unroll 4
        for (int64_t o = 0; o < outputs; ++o) {
          Floats weight;
          Vectors<Number>::template widen<width>(w + o * w_apart, k, part, weight);
#pragma GCC unroll 4
          for (int64_t t = 0; t < rows; ++t) Vectors<Number>::template add<width>(sum[o][t], weight, value[t]);
        }
      }
    }
  };
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    // Into the second cache: the first can wait for fewer lines at a time than memory needs.
    for (int64_t o = 0; o < fetched; ++o) __builtin_prefetch(ahead + o * inputs + i, 0, 2);
    step(x + i, inputs, w + i, inputs);
  }
  if (i < count) {
    float values[rows][kStep];
    Stored weights[outputs][kStep];
    for (int64_t t = 0; t < rows; ++t) last_step<Number>(x + t * inputs + i, count - i, values[t]);
    for (int64_t o = 0; o < outputs; ++o) padded_copy(w + o * inputs + i, count - i, kStep, weights[o]);
    step(values[0], kStep, weights[0], kStep);
  }
#pragma GCC unroll 4
  for (int64_t o = 0; o < outputs; ++o) {
#pragma GCC unroll 4
    for (int64_t t = 0; t < rows; ++t) store<width>(sums + (o * apart + t) * width, sum[o][t]);
  }
}

// The same for kOutputs outputs and any number of rows of x: as many at a time as have their sums in registers, and
// what is left. Each time fetches its share, so that memory is never idle; `ahead` may be null.
template <typename Number, int64_t width>
NATIVE_INLINE void multiply_rows(const float* x, const typename Number::Stored* w,
                                 const typename Number::Stored* ahead, int64_t rows, int64_t inputs, int64_t count,
                                 float* sums) {
  constexpr int64_t kRows = width == kLanes ? 4 : 2;
  const int64_t times = (rows + kRows - 1) / kRows;
  for (int64_t time = 0; time < times; ++time) {
    const int64_t t = time * kRows, from = kOutputs * time / times;
    const int64_t fetched = ahead == nullptr ? 0 : kOutputs * (time + 1) / times - from;
    const typename Number::Stored* next = ahead == nullptr ? w : ahead + from * inputs;
    const float* values = x + t * inputs;
    float* into = sums + t * width;
    switch (std::min(rows - t, kRows)) {
      case 4:
        multiply<Number, kOutputs, kRows, width>(values, w, next, fetched, inputs, count, into, rows);
        break;
      case 3:
        multiply<Number, kOutputs, std::min<int64_t>(kRows, 3), width>(values, w, next, fetched, inputs, count, into,
                                                                       rows);
        break;
      case 2:
        multiply<Number, kOutputs, 2, width>(values, w, next, fetched, inputs, count, into, rows);
        break;
      default:
        multiply<Number, kOutputs, 1, width>(values, w, next, fetched, inputs, count, into, rows);
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
  using Stored = typename Number::Stored;
  constexpr int64_t kStep = kLanes * Vectors<Number>::kVectors;
  constexpr int64_t kMost = std::min(kInputs, kBytes / static_cast<int64_t>(sizeof(Stored)));
  const int64_t blocks = std::max<int64_t>((inputs + kMost - 1) / kMost, 1);  // as long as each other
  const int64_t block = std::max((inputs / blocks + kStep - 1) / kStep * kStep, kStep);
  std::vector<Stored> padded;  // with zeros, to kOutputs outputs
  if (outputs < kOutputs) {
    padded.assign(w, w + outputs * inputs);
    padded.resize(kOutputs * inputs);
    w = padded.data();
  }
  std::vector<float> sums(kOutputs * rows * width);
  for (int64_t o = begin; o < end; o += kOutputs) {
    // Where fewer than kOutputs are left, some before them are computed again.
    const int64_t first = std::max<int64_t>(std::min(o, outputs - kOutputs), 0);
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (int64_t i = 0; i < inputs; i += block) {
      const int64_t count = std::min(block, inputs - i);
      const Stored* weight = w + first * inputs + i;
      const Stored* ahead = nullptr;
      if (i + block < inputs) {
        ahead = weight + block;
      } else if (o + 2 * kOutputs <= end) {
        ahead = w + (o + kOutputs) * inputs;
      }
      multiply_rows<Number, width>(x + i, weight, ahead, rows, inputs, count, sums.data());
    }
    for (int64_t k = o; k < std::min(o + kOutputs, end); ++k) {
      const float* sum = sums.data() + (k - first) * rows * width;
      for (int64_t t = 0; t < rows; ++t) y[t * outputs + k] = total<width>(sum + t * width);
    }
  }
}

// Products with weights in one format, compiled once for all operations in product.cc: the templates take seconds to
// compile for each instruction set.
template <typename Stored>
struct Forms {
  // `product` with the widest registers of the processor, or `tile_product_of_few` in tiles.h; x is `in_order`
  void (*few)(const float* x, const Stored* w, float* y, int64_t rows, int64_t inputs, int64_t outputs, int64_t begin,
              int64_t end);
  // `columns_of` and `matrix_product` in matrix.h, or `tile_columns` and `tile_product` in tiles.h
  void (*columns)(const float* x, float* columns, int64_t rows, int64_t inputs);
  void (*many)(const float* columns, const Stored* w, float* y, int64_t rows, int64_t inputs, int64_t outputs,
               int64_t begin, int64_t end);
  int64_t group_rows;  // rows of a group of columns
  int64_t panel;       // outputs that one thread computes at least
};

// Of float, uint16_t (bfloat16), int8_t, and uint32_t (`BFloat16Dot`; null pointers without AVX512_BF16 and AMX).
template <typename Stored>
const Forms<Stored>& forms();

// Whether the processor multiplies bfloat16 itself; XLA is then faster with many rows.
bool multiplies_bfloat16();

// Whether a vector of kLanes numbers is a register, of which there are 32.
bool has_wide_registers();

// The instruction set of products: "amx_bf16", "avx512_bf16", "avx512", "avx2" or "baseline".
const char* instructions();

}  // namespace native
