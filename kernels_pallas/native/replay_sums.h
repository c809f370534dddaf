// The sums of a replay, for one head: outputs of new tokens, and a state that is due.
//
// Loops take whole vectors. Lanes beyond the end of a row of an array hold other rows' numbers and are never kept; so
// every array has room for a few vectors behind its end.
#pragma once

#include <algorithm>

#include "numbers.h"
#include "product.h"

namespace native {

constexpr int64_t kDown = 4, kAcross = 2;  // of a state that is written: rows and vectors whose sums are in registers
constexpr int64_t kBehind = kAcross * kLanes;

// What a head has of its tokens since the anchor: those of the tail, `before`, and `count` new ones.
struct Tokens {
  int64_t before, count, most, head_dim, state;
  float *keys, *queries, *scores;  // [before + count, state], [count, state], [count, before + count]
  float *values, *strengths, *decays;  // [before + count, head_dim], and [before + count] each
  float *weights, *whole;          // what each token counts [count, most] and the anchor [count]
  float* read;                     // queries times S(anchor) [count, head_dim]
};

using Vector = Registers<kLanes>::Floats;

NATIVE_INLINE void fetch(const float* from, Vector& value) { std::memcpy(&value, from, sizeof value); }

// weights[i] = what is left of token i's value after `tokens` tokens, times its strength; returns what is left of the anchor.
NATIVE_INLINE float decayed(const Tokens& in, float* weights, int64_t tokens) {
  float left = 1;
  for (int64_t i = tokens - 1; i >= 0; --i) {
    weights[i] = left * in.strengths[i];
    left *= in.decays[i];
  }
  return left;
}

// Queries times S(anchor) of a few rows of the anchor from p on, and of `several` new tokens from t on, in registers.
template <typename State, int64_t several>
NATIVE_INLINE void read_rows(const Tokens& in, const typename State::Stored* rows, int64_t p, int64_t t) {
  alignas(Vector) float sums[kOutputs * several * kLanes] = {};
  multiply<State, kOutputs, several, kLanes>(in.queries + t * in.state, rows, rows, 0, in.state, in.state, sums,
                                             several);
  for (int64_t s = 0; s < several; ++s) {
    for (int64_t o = 0; o < kOutputs; ++o) {
      in.read[(t + s) * in.head_dim + p + o] = total<kLanes>(sums + (o * several + s) * kLanes);
    }
  }
}

// Queries times S(anchor) of all new tokens. A few rows at a time are short pieces side by side, which the processor does not
// foresee: unless they are fetched ahead, reading an anchor takes four times as long.
template <typename State>
NATIVE_INLINE void read_anchor(const Tokens& in, const typename State::Stored* anchor) {
  constexpr int64_t kAhead = 4096 / sizeof(*anchor), kLine = 64 / sizeof(*anchor);
  int64_t p = 0;
  for (; p + kOutputs <= in.head_dim; p += kOutputs) {
    const typename State::Stored* rows = anchor + p * in.state;
    for (int64_t k = 0; k < kOutputs * in.state; k += kLine) __builtin_prefetch(rows + kAhead + k);
    int64_t t = 0;
    for (; t + 4 <= in.count; t += 4) read_rows<State, 4>(in, rows, p, t);
    for (; t + 2 <= in.count; t += 2) read_rows<State, 2>(in, rows, p, t);
    for (; t < in.count; ++t) read_rows<State, 1>(in, rows, p, t);
  }
  for (; p < in.head_dim; ++p) {
    for (int64_t t = 0; t < in.count; ++t) {
      alignas(Vector) float sum[kLanes] = {};
      const typename State::Stored* row = anchor + p * in.state;
      multiply<State, 1, 1, kLanes>(in.queries + t * in.state, row, row, 0, in.state, in.state, sum, 1);
      in.read[t * in.head_dim + p] = total<kLanes>(sum);
    }
  }
}

// What each token's input, and the anchor, counts in each new token's output.
NATIVE_INLINE void weigh(const Tokens& in) {
  for (int64_t t = 0; t < in.count; ++t) {
    float* weights = in.weights + t * in.most;
    in.whole[t] = decayed(in, weights, in.before + t + 1);
    const float* scores = in.scores + t * (in.before + in.count);
    for (int64_t i = 0; i <= in.before + t; ++i) weights[i] *= scores[i];
  }
}

// y [count, head_dim], `apart` from token to token, of `several` new tokens from t on: each vector of x is loaded once
// for all of them. Sums go from token to token, so that y is the same bits with however many tokens a row came.
template <int64_t several>
NATIVE_INLINE void outputs(const Tokens& in, int64_t t, float skip, float* y, int64_t apart) {
  const int64_t first = in.before + t;
  for (int64_t p = 0; p < in.head_dim; p += kLanes) {
    Vector sum[several], value;
    for (int64_t s = 0; s < several; ++s) {
      fetch(in.values + (first + s) * in.head_dim + p, value);
      sum[s] = skip * value;
      fetch(in.read + (t + s) * in.head_dim + p, value);
      sum[s] += in.whole[t + s] * value;
    }
    const float* weights = in.weights + t * in.most;
    for (int64_t i = 0; i <= first; ++i) {
      fetch(in.values + i * in.head_dim + p, value);
      for (int64_t s = 0; s < several; ++s) sum[s] += weights[s * in.most + i] * value;
    }
    for (int64_t i = 1; i < several; ++i) {  // which the tokens before it do not see
      fetch(in.values + (first + i) * in.head_dim + p, value);
      for (int64_t s = i; s < several; ++s) sum[s] += weights[s * in.most + first + i] * value;
    }
    const int64_t lanes = std::min(kLanes, in.head_dim - p);
#pragma GCC unroll 4
    for (int64_t s = 0; s < several; ++s) {
      float* out = y + (t + s) * apart + p;
      if (lanes == kLanes) {
        std::memcpy(out, &sum[s], sizeof sum[s]);
      } else {
        std::memcpy(out, &sum[s], lanes * sizeof(float));
      }
    }
  }
}

// next = left * old + added; without `old`, added alone.
template <typename State>
NATIVE_INLINE void add_to(const typename State::Stored* old, float left, const float* added,
                          typename State::Stored* next, int64_t count) {
  if (old) {
#pragma omp simd
    for (int64_t k = 0; k < count; ++k) next[k] = State::round(State::load(old[k]) * left + added[k]);
  } else {
#pragma omp simd
    for (int64_t k = 0; k < count; ++k) next[k] = State::round(added[k]);
  }
}

// The state after `tokens` tokens. Sums go from token to token, so that it is the same bits in whichever step it is
// due. Spends values and weights.
template <typename State>
NATIVE_INLINE void write_state(const Tokens& in, int64_t tokens, const typename State::Stored* anchor,
                               typename State::Stored* next) {
  const float left = decayed(in, in.weights, tokens);
  for (int64_t i = 0; i < tokens; ++i) {
    for (int64_t p = 0; p < in.head_dim; ++p) in.values[i * in.head_dim + p] *= in.weights[i];
  }
  float added[kDown * kBehind];
  constexpr int64_t kLine = 64 / sizeof(*next);
  for (int64_t p = 0; p < in.head_dim; p += kDown) {
    for (int64_t k = 0; k < kDown * in.state; k += kLine) __builtin_prefetch(next + (p + kDown) * in.state + k, 1);
    for (int64_t k = 0; k < in.state; k += kBehind) {
      Vector sum[kDown][kAcross] = {};
      for (int64_t i = 0; i < tokens; ++i) {
        Vector key[kAcross];
        for (int64_t v = 0; v < kAcross; ++v) fetch(in.keys + i * in.state + k + v * kLanes, key[v]);
        for (int64_t q = 0; q < kDown; ++q) {
          for (int64_t v = 0; v < kAcross; ++v) sum[q][v] += in.values[i * in.head_dim + p + q] * key[v];
        }
      }
#pragma GCC unroll 4
      for (int64_t q = 0; q < kDown; ++q) {
#pragma GCC unroll 2
        for (int64_t v = 0; v < kAcross; ++v) {
          std::memcpy(added + q * kBehind + v * kLanes, &sum[q][v], sizeof sum[q][v]);
        }
      }
      const int64_t columns = std::min(kBehind, in.state - k), at = p * in.state + k;
      for (int64_t q = 0; q < std::min(kDown, in.head_dim - p); ++q) {
        const int64_t row = at + q * in.state;
        const typename State::Stored* from = anchor ? anchor + row : nullptr;
        if (columns == kBehind) {
          add_to<State>(from, left, added + q * kBehind, next + row, kBehind);
        } else {
          add_to<State>(from, left, added + q * kBehind, next + row, columns);
        }
      }
    }
  }
}

}  // namespace native
