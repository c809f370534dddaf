// Products of a few tokens with the weights of their experts: see kernels_pallas/grouped_matmul.
#include <vector>

#include "parallel.h"
#include "product.h"

namespace native {
namespace {

namespace ffi = xla::ffi;
using Matrix = ffi::Buffer<ffi::F32, 2>;

constexpr int64_t kPiece = 64;  // outputs that one thread computes at a time

template <typename Stored>
void by_outputs(const float* x, const Stored* w, float* y, int64_t rows, int64_t inputs, int64_t outputs, int64_t begin,
                int64_t end) {
  product_of(x, w, y, rows, inputs, outputs, begin, end);
}

struct Group {
  int64_t expert, first, tokens;
};

ffi::Error run(ffi::ThreadPool pool, Matrix x, ffi::AnyBuffer w, ffi::Buffer<ffi::S32, 1> sizes,
               ffi::Result<Matrix> y) {
  const int64_t tokens = x.dimensions()[0], inputs = x.dimensions()[1], outputs = y->dimensions()[1];
  std::vector<Group> groups;
  int64_t first = 0;
  for (int64_t expert = 0; expert < static_cast<int64_t>(sizes.element_count()); ++expert) {
    const int64_t count = std::min<int64_t>(sizes.typed_data()[expert], tokens - first);
    if (count > 0) groups.push_back({expert, first, count});
    first += std::max<int64_t>(count, 0);
  }
  std::fill(y->typed_data() + first * outputs, y->typed_data() + tokens * outputs, 0.0f);
  const int64_t pieces = (outputs + kPiece - 1) / kPiece;
  auto call = [&](const float* values, const auto* weights, const auto& part) {
    parallel_for(pool, static_cast<int64_t>(groups.size()) * pieces, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        const Group& group = groups[item / pieces];
        const int64_t from = item % pieces * kPiece;
        part(values + group.first * inputs, weights + group.expert * inputs * outputs,
             y->typed_data() + group.first * outputs, group.tokens, inputs, outputs, from,
             std::min(from + kPiece, outputs));
      }
    });
    return ffi::Error::Success();
  };
  std::vector<float> room;
  switch (w.element_type()) {
    case ffi::F32:
      return call(x.typed_data(), static_cast<const float*>(w.untyped_data()), by_outputs<float>);
    case ffi::BF16:
      return call(in_order<BFloat16Pairs>(x.typed_data(), tokens, inputs, room),
                  static_cast<const uint16_t*>(w.untyped_data()), by_outputs<uint16_t>);
    case ffi::S8:
      return call(in_order<Int8>(x.typed_data(), tokens, inputs, room), static_cast<const int8_t*>(w.untyped_data()),
                  by_outputs<int8_t>);
    default:
      return ffi::Error::InvalidArgument("grouped_matmul: weights must be float32, bfloat16 or int8");
  }
}

}  // namespace

using Sizes = ffi::Buffer<ffi::S32, 1>;
XLA_FFI_DEFINE_HANDLER_SYMBOL(grouped_matmul, run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Matrix>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Sizes>()
                                  .Ret<Matrix>());

}  // namespace native
