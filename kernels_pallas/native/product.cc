// The products of product.h with a weight stored [outputs, inputs], compiled once for all operations: for each
// instruction set with as many lanes of float32 as its registers have, which a single source text does not say.
#include <cstdlib>
#include <cstring>

#include "matrix.h"
#include "product.h"

namespace native {
namespace {

template <typename Stored>
using Product = void(const float*, const Stored*, float*, int64_t, int64_t, int64_t, int64_t, int64_t);

// One form of each product, compiled with `attributes`, whose registers hold `width` lanes.
#define NATIVE_FORM(attributes, form, width)                                                                         \
  struct form {                                                                                                      \
    attributes static void float32(const float* x, const float* w, float* y, int64_t rows, int64_t inputs,           \
                                   int64_t outputs, int64_t begin, int64_t end) {                                    \
      product<Float32, width>(x, w, y, rows, inputs, outputs, begin, end);                                           \
    }                                                                                                                \
    attributes static void bfloat16(const float* x, const uint16_t* w, float* y, int64_t rows, int64_t inputs,       \
                                    int64_t outputs, int64_t begin, int64_t end) {                                   \
      product<BFloat16Pairs, width>(x, w, y, rows, inputs, outputs, begin, end);                                     \
    }                                                                                                                \
    attributes static void int8(const float* x, const int8_t* w, float* y, int64_t rows, int64_t inputs,             \
                                int64_t outputs, int64_t begin, int64_t end) {                                       \
      product<Int8, width>(x, w, y, rows, inputs, outputs, begin, end);                                              \
    }                                                                                                                \
    attributes static void matrix(const float* columns, const uint16_t* w, float* y, int64_t rows, int64_t inputs,   \
                                  int64_t outputs, int64_t begin, int64_t end) {                                     \
      matrix_product<BFloat16Pairs, width>(columns, w, y, rows, inputs, outputs, begin, end);                        \
    }                                                                                                                \
    static constexpr int64_t kGroupRows = kGroup<width>;                                                             \
  };

struct Choice {
  const char* name;
  Product<float>* float32;
  Product<uint16_t>* bfloat16;
  Product<int8_t>* int8;
  Product<uint16_t>* matrix;
  int64_t group_rows;
};

template <typename Form>
Choice choice(const char* name) {
  return {name, Form::float32, Form::bfloat16, Form::int8, Form::matrix, Form::kGroupRows};
}

#ifdef NATIVE_DISPATCH
NATIVE_FORM(__attribute__((target("arch=x86-64-v4"))), Avx512, 16)
NATIVE_FORM(__attribute__((target("arch=x86-64-v3"))), Avx2, 8)
#endif
NATIVE_FORM(, Baseline, 4)

// The widest that the processor has, or the one that MAMBA_JAX_INSTRUCTIONS names (for tests) if it has that one too.
Choice choose() {
#ifdef NATIVE_DISPATCH
  const char* named = std::getenv("MAMBA_JAX_INSTRUCTIONS");
  const bool any = named == nullptr || *named == 0;
  const auto allowed = [&](const char* name) { return any || std::strcmp(named, name) == 0; };
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx512 && allowed("avx512")) return choice<Avx512>("avx512");
  if (avx2 && allowed("avx2")) return choice<Avx2>("avx2");
#endif
  return choice<Baseline>("baseline");
}

const Choice kChoice = choose();

}  // namespace

const char* instructions() { return kChoice.name; }

bool multiplies_bfloat16() {
#ifdef NATIVE_DISPATCH
  return std::strcmp(kChoice.name, "avx512") == 0 && __builtin_cpu_supports("avx512bf16");
#else
  return true;  // unknown: XLA chooses
#endif
}

void product_of(const float* x, const float* w, float* y, int64_t rows, int64_t inputs, int64_t outputs, int64_t begin,
                int64_t end) {
  kChoice.float32(x, w, y, rows, inputs, outputs, begin, end);
}

void product_of(const float* x, const uint16_t* w, float* y, int64_t rows, int64_t inputs, int64_t outputs,
                int64_t begin, int64_t end) {
  kChoice.bfloat16(x, w, y, rows, inputs, outputs, begin, end);
}

void product_of(const float* x, const int8_t* w, float* y, int64_t rows, int64_t inputs, int64_t outputs, int64_t begin,
                int64_t end) {
  kChoice.int8(x, w, y, rows, inputs, outputs, begin, end);
}

void matrix_product_of(const float* columns, const uint16_t* w, float* y, int64_t rows, int64_t inputs, int64_t outputs,
                       int64_t begin, int64_t end) {
  kChoice.matrix(columns, w, y, rows, inputs, outputs, begin, end);
}

int64_t group_rows() { return kChoice.group_rows; }

}  // namespace native
