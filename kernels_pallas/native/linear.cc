// A dense product, which streams its weight once from memory: see kernels_pallas/linear.
#include <memory>

#include "matrix.h"
#include "parallel.h"
#include "product.h"

namespace native {
namespace {

namespace ffi = xla::ffi;
using Matrix = ffi::Buffer<ffi::F32, 2>;

constexpr int64_t kPiece = 64 << 10;  // bytes of the weight: fewer are read before another thread has woken up

constexpr int64_t kFewRows = 24;  // with more, widening each block of a weight once for all rows is faster

// y [rows, outputs] = x w^T for many rows.
void multiply_many(ffi::ThreadPool& pool, const float* x, const uint16_t* w, float* y, int64_t rows, int64_t inputs,
                   int64_t outputs) {
  const int64_t most = std::min(kMostRows, (rows + group_rows() - 1) / group_rows() * group_rows());
  const std::unique_ptr<float[]> room(new float[most * inputs + kLanes]);
  // Vectors that cross lines of the cache take twice as long to load.
  auto* columns = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(room.get()) + 63) / 64 * 64);
  for (int64_t first = 0; first < rows; first += most) {
    const int64_t several = std::min(most, rows - first);
    parallel_for(pool, (several + group_rows() - 1) / group_rows(), [&](int64_t begin, int64_t end) {
      columns_of<BFloat16Pairs>(x + first * inputs, columns, several, inputs, group_rows(), begin, end);
    });
    parallel_for(pool, (outputs + kPanel - 1) / kPanel, [&](int64_t begin, int64_t end) {
      matrix_product_of(columns, w, y + first * outputs, several, inputs, outputs, begin * kPanel,
                        std::min(end * kPanel, outputs));
    });
  }
}

ffi::Error run(ffi::ThreadPool pool, Matrix x, ffi::AnyBuffer w, ffi::Result<Matrix> y) {
  const int64_t rows = x.dimensions()[0], inputs = x.dimensions()[1], outputs = w.dimensions()[0];
  auto call = [&](const float* values, const auto* weight) {
    const int64_t blocks = (outputs + kOutputs - 1) / kOutputs;
    const int64_t bytes = std::max<int64_t>(kOutputs * inputs * sizeof *weight, 1);
    parallel_for(
        pool, blocks,
        [&](int64_t begin, int64_t end) {
          product_of(values, weight, y->typed_data(), rows, inputs, outputs, begin * kOutputs,
                     std::min(end * kOutputs, outputs));
        },
        std::max<int64_t>(kPiece / bytes, 1));
    return ffi::Error::Success();
  };
  std::vector<float> room;
  switch (w.element_type()) {
    case ffi::F32:
      return call(x.typed_data(), static_cast<const float*>(w.untyped_data()));
    case ffi::BF16: {
      const auto* weight = static_cast<const uint16_t*>(w.untyped_data());
      if (rows <= kFewRows) return call(in_order<BFloat16Pairs>(x.typed_data(), rows, inputs, room), weight);
      multiply_many(pool, x.typed_data(), weight, y->typed_data(), rows, inputs, outputs);
      return ffi::Error::Success();
    }
    case ffi::S8:
      return call(in_order<Int8>(x.typed_data(), rows, inputs, room), static_cast<const int8_t*>(w.untyped_data()));
    default:
      return ffi::Error::InvalidArgument("linear: weights must be float32, bfloat16 or int8");
  }
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    linear, run, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Matrix>().Arg<ffi::AnyBuffer>().Ret<Matrix>());

}  // namespace native
