// A dense product, which streams its weight once from memory: see kernels_pallas/linear.
#include "dense.h"

namespace native {
namespace {

ffi::Error run(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Result<Matrix> y) {
  const int64_t rows = y->dimensions()[0], outputs = y->dimensions()[1];
  return with_number(x, w, [&](auto number, const float* values, const auto* weight, int64_t inputs) {
    dense_product<decltype(number)>(pool, values, weight, y->typed_data(), rows, inputs, outputs);
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(linear, run);

}  // namespace native
