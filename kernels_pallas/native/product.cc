// The products of product.h and matrix.h with a weight stored [outputs, inputs], compiled once for all operations: for
// each instruction set with as many lanes of float32 as its registers have, which a single source text does not say.
#include <cstdlib>
#include <cstring>
#include <tuple>

#include "matrix.h"
#include "product.h"
#include "tiles.h"

namespace native {
namespace {

// The products with one number format, compiled with `attributes`, whose registers hold `width` lanes.
#define NATIVE_FORM(attributes, form, width)                                                                         \
  template <typename Number>                                                                                         \
  struct form {                                                                                                      \
    using Stored = typename Number::Stored;                                                                          \
    attributes static void few(const float* x, const Stored* w, float* y, int64_t rows, int64_t inputs,              \
                               int64_t outputs, int64_t begin, int64_t end) {                                        \
      product<Number, width>(x, w, y, rows, inputs, outputs, begin, end);                                            \
    }                                                                                                                \
    attributes static void columns(const float* x, float* columns, int64_t rows, int64_t inputs) {                   \
      columns_of<Number, width>(x, columns, rows, inputs);                                                           \
    }                                                                                                                \
    attributes static void many(const float* columns, const Stored* w, float* y, int64_t rows, int64_t inputs,       \
                                int64_t outputs, int64_t begin, int64_t end) {                                       \
      matrix_product<Number, width>(columns, w, y, rows, inputs, outputs, begin, end);                               \
    }                                                                                                                \
    static constexpr Forms<Stored> all = {few, columns, many, kGroup<width>, kPanel};                                \
  };

struct Choice {
  const char* name;
  std::tuple<Forms<float>, Forms<uint16_t>, Forms<int8_t>, Forms<uint32_t>> forms;
};

template <template <typename> typename Form>
Choice choice(const char* name, const Forms<uint32_t>& dot = {}) {
  return {name, {Form<Float32>::all, Form<BFloat16Pairs>::all, Form<Int8>::all, dot}};
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
#ifdef NATIVE_TILES
  if (avx512 && allowed("amx_bf16") && tiles_permitted()) {
    return choice<Avx512>("amx_bf16", {tile_product_of_few, tile_columns, tile_product, kTileRows, kTilePanel});
  }
#endif
  if (avx512 && __builtin_cpu_supports("avx512bf16") && allowed("avx512_bf16")) {
    return choice<Avx512>("avx512_bf16", Avx512<BFloat16Dot>::all);
  }
  if (avx512 && allowed("avx512")) return choice<Avx512>("avx512");
  if (avx2 && allowed("avx2")) return choice<Avx2>("avx2");
#endif
  return choice<Baseline>("baseline");
}

const Choice kChoice = choose();

}  // namespace

template <typename Stored>
const Forms<Stored>& forms() {
  return std::get<Forms<Stored>>(kChoice.forms);
}
template const Forms<float>& forms();
template const Forms<uint16_t>& forms();
template const Forms<int8_t>& forms();
template const Forms<uint32_t>& forms();

const char* instructions() { return kChoice.name; }

bool has_wide_registers() { return std::strcmp(kChoice.name, "avx2") != 0 && std::strcmp(kChoice.name, "baseline") != 0; }

bool multiplies_bfloat16() {
#ifdef NATIVE_DISPATCH
  return forms<uint32_t>().few != nullptr;
#else
  return true;  // unknown: XLA chooses
#endif
}

}  // namespace native
