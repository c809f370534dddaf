// Products of a few tokens with the weights of their experts: see kernels_pallas/grouped_matmul.
#include <vector>

#include "dense.h"

namespace native {
namespace {

constexpr int64_t kPiece = 64;  // outputs that one thread computes at a time

struct Group {
  int64_t expert, first, tokens;
};

// Groups of few tokens are shared out together, groups of many tokens one after the other.
template <typename Number>
void multiply(ffi::ThreadPool& pool, const std::vector<Group>& groups, const float* x,
              const typename Number::Stored* w, float* y, int64_t tokens, int64_t inputs, int64_t outputs) {
  const auto many = [&](const Group& group) { return group.tokens > kFewRows && outputs >= kFewOutputs; };
  std::vector<Group> few;
  for (const Group& group : groups) {
    if (!many(group)) {
      few.push_back(group);
    } else {
      dense_product<Number>(pool, x + group.first * inputs, w + group.expert * inputs * outputs,
                            y + group.first * outputs, group.tokens, inputs, outputs);
    }
  }
  if (few.empty()) return;
  std::vector<float> room;
  const float* ordered = in_order<Number>(x, tokens, inputs, room);
  const int64_t pieces = (outputs + kPiece - 1) / kPiece;
  parallel_for(pool, static_cast<int64_t>(few.size()) * pieces, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const Group& group = few[item / pieces];
      const int64_t from = item % pieces * kPiece;
      product_of(ordered + group.first * inputs, w + group.expert * inputs * outputs, y + group.first * outputs,
                 group.tokens, inputs, outputs, from, std::min(from + kPiece, outputs));
    }
  });
}

ffi::Error run(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Buffer<ffi::S32, 1> sizes,
               ffi::Result<Matrix> y) {
  const int64_t tokens = y->dimensions()[0], outputs = y->dimensions()[1];
  std::vector<Group> groups;
  int64_t first = 0;
  for (int64_t expert = 0; expert < static_cast<int64_t>(sizes.element_count()); ++expert) {
    const int64_t count = std::min<int64_t>(sizes.typed_data()[expert], tokens - first);
    if (count > 0) groups.push_back({expert, first, count});
    first += std::max<int64_t>(count, 0);
  }
  std::fill(y->typed_data() + first * outputs, y->typed_data() + tokens * outputs, 0.0f);
  return with_number(x, w, [&](auto number, const float* values, const auto* weights, int64_t inputs) {
    multiply<decltype(number)>(pool, groups, values, weights, y->typed_data(), tokens, inputs, outputs);
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(grouped_matmul, run);

}  // namespace native
