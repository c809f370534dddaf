// Products of bfloat16 with bfloat16 on AMX, whose registers are tiles of 16 rows of 64 bytes.
//
// A tile of w (16 outputs, 32 inputs) lies in memory as AMX takes it. One of x (32 inputs, 16 rows) has pairs of inputs
// as rows; `tile_columns` makes it. One instruction adds their product to a tile of sums (16 outputs, 16 rows), for each
// sum in the same order (Intel SDM, TDPBF16PS), so a row's bits do not depend on the rows next to it. Denormal numbers
// count as 0.
#pragma once

#include "matrix.h"

#if defined(NATIVE_DISPATCH) && __has_include(<amxbf16intrin.h>)  // the assembler is as new as the compiler
#define NATIVE_TILES
#define NATIVE_AVX512 inline __attribute__((target("arch=x86-64-v4")))

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace native {

constexpr int64_t kTile = 16;                 // rows of a tile, and 32-bit numbers in each
constexpr int64_t kTileRows = 2 * kTile;      // rows of x that are multiplied at a time
constexpr int64_t kTilePanel = 4 * kTile;     // outputs that one thread computes at least

// Whether the processor has AMX for bfloat16 and the kernel permits this process to use it.
inline bool tiles_permitted() {
  constexpr unsigned kBFloat16 = 1u << 22, kTiles = 1u << 24;  // of leaf 7
  constexpr long kRequest = 0x1023, kTileData = 18;            // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kBFloat16) && (d & kTiles) &&
         syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

// Sets the shapes of all tiles while it exists. The thread belongs to XLA, which may use shapes of its own.
class TileShapes {
 public:
  TileShapes() {
    alignas(64) uint8_t shapes[64] = {1};  // palette
    for (int64_t tile = 0; tile < 8; ++tile) {
      shapes[16 + 2 * tile] = kTile * sizeof(float);  // bytes of a row
      shapes[48 + tile] = kTile;                      // rows
    }
    asm volatile("sttilecfg %0" : "=m"(before_));
    asm volatile("ldtilecfg %0" : : "m"(shapes));
  }
  ~TileShapes() { asm volatile("ldtilecfg %0" : : "m"(before_)); }

 private:
  alignas(64) uint8_t before_[64];
};

#define TILE_ZERO(tile) asm volatile("tilezero %%tmm" #tile : :)
#define TILE_LOAD(tile, at, apart) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(at), "r"((apart) * sizeof(float)) : "memory")
#define TILE_STORE(tile, at, apart) \
  asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(at), "r"((apart) * sizeof(float)) : "memory")
#define TILE_MULTIPLY(w, x, sums) asm volatile("tdpbf16ps %%tmm" #x ", %%tmm" #w ", %%tmm" #sums : :)

// Up to kTileRows rows of x [rows, pairs] as tiles [steps, 2, pair, row]; tiles without a row are left out.
NATIVE_AVX512 void tile_columns(const float* x, float* columns, int64_t rows, int64_t pairs) {
  for (int64_t first = 0; first < std::min(rows, kTileRows); first += kTile) {
    float* to = columns + first * kTile;
    for (int64_t i = 0; i < pairs; i += kTile, to += kTileRows * kTile) {
      typename Registers<kTile>::Floats block[kTile] = {};
      for (int64_t t = 0; t < std::min(rows - first, kTile); ++t) {
        const float* from = x + (first + t) * pairs + i;
        float last[kTile];
        if (i + kTile > pairs) padded_copy(from, pairs - i, kTile, last);
        block[t] = load<kTile>(i + kTile > pairs ? last : from);
      }
      transpose<kTile>(block);
#pragma GCC unroll 16
      for (int64_t k = 0; k < kTile; ++k) store<kTile>(to + k * kTile, block[k]);
    }
  }
}

// Rows of w that fill tiles, from output o on: `w` itself, or a copy in `room` with zeros; `apart` is set.
inline const uint32_t* tile_rows(const uint32_t* w, int64_t o, int64_t end, int64_t pairs, uint32_t* room,
                                 int64_t& apart) {
  apart = pairs;
  if (o + kTile <= end && pairs % kTile == 0) return w + o * pairs;
  apart = (pairs + kTile - 1) / kTile * kTile;
  for (int64_t k = 0; k < kTile; ++k) padded_copy(w + (o + k) * pairs, o + k < end ? pairs : 0, apart, room + k * apart);
  return room;
}

// Outputs [begin, end) of y [rows, outputs], from the tiles of each kTileRows rows and w [outputs, pairs].
NATIVE_AVX512 void tile_product(const float* columns, const uint32_t* w, float* y, int64_t rows, int64_t pairs,
                                int64_t outputs, int64_t begin, int64_t end) {
  const TileShapes shapes;
  const int64_t steps = (pairs + kTile - 1) / kTile;
  const std::unique_ptr<uint32_t[]> room(new uint32_t[2 * kTile * steps * kTile]);
  alignas(64) float sums[2 * kTile * kTileRows];
  for (int64_t o = begin; o < end; o += 2 * kTile) {
    const bool two_outputs = o + kTile < end;
    int64_t apart, next_apart = 0;
    const uint32_t* weights = tile_rows(w, o, end, pairs, room.get(), apart);
    const uint32_t* next = two_outputs
                               ? tile_rows(w, o + kTile, end, pairs, room.get() + kTile * steps * kTile, next_apart)
                               : nullptr;
    const float* x = columns;
    for (int64_t t = 0; t < rows; t += kTileRows) {
      const bool two_rows = t + kTile < rows;
      TILE_ZERO(0);
      TILE_ZERO(1);
      TILE_ZERO(2);
      TILE_ZERO(3);
      for (int64_t step = 0; step < steps; ++step, x += kTileRows * kTile) {
        TILE_LOAD(4, weights + step * kTile, apart);
        TILE_LOAD(6, x, kTile);
        TILE_MULTIPLY(4, 6, 0);
        if (two_rows) {
          TILE_LOAD(7, x + kTile * kTile, kTile);
          TILE_MULTIPLY(4, 7, 1);
        }
        if (two_outputs) {
          TILE_LOAD(5, next + step * kTile, next_apart);
          TILE_MULTIPLY(5, 6, 2);
          if (two_rows) TILE_MULTIPLY(5, 7, 3);
        }
      }
      TILE_STORE(0, sums, kTileRows);
      TILE_STORE(1, sums + kTile, kTileRows);
      TILE_STORE(2, sums + kTile * kTileRows, kTileRows);
      TILE_STORE(3, sums + kTile * kTileRows + kTile, kTileRows);
      store_rows<kTile>(sums, y + t * outputs + o, std::min(kTileRows, rows - t), std::min(2 * kTile, end - o), outputs);
    }
  }
}

// Few rows: each thread makes the tiles of x by itself.
NATIVE_AVX512 void tile_product_of_few(const float* x, const uint32_t* w, float* y, int64_t rows, int64_t pairs,
                                       int64_t outputs, int64_t begin, int64_t end) {
  const int64_t size = kTileRows * ((pairs + kTile - 1) / kTile * kTile);
  const std::unique_ptr<float[]> room(new float[(rows + kTileRows - 1) / kTileRows * size + kTile]);
  auto* columns = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(room.get()) + 63) / 64 * 64);
  for (int64_t t = 0; t < rows; t += kTileRows) {
    tile_columns(x + t * pairs, columns + t / kTileRows * size, rows - t, pairs);
  }
  tile_product(columns, w, y, rows, pairs, outputs, begin, end);
}

}  // namespace native

#endif  // NATIVE_TILES
