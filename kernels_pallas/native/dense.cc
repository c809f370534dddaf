// Products with weights that are streamed once from memory, on XLA's threads: a dense one (kernels_pallas/linear), and
// those of a few tokens with the weights of their experts (kernels_pallas/grouped_matmul). A row's bits do not depend on
// the number of rows.
#include <memory>
#include <vector>

#include "matrix.h"
#include "parallel.h"
#include "product.h"

namespace native {
namespace {

constexpr int64_t kFewRows = 24;           // up to which streaming the weight as it is stored is faster
constexpr int64_t kFewOutputs = 16;        // the same for outputs
constexpr int64_t kPieceBytes = 64 << 10;  // of a weight: fewer are read before another thread has woken up
constexpr int64_t kPieceTerms = 1 << 18;   // multiplications that are worth another thread
constexpr int64_t kGroupPiece = 64;        // outputs of a group of few tokens that one thread computes at a time

// y [rows, outputs] = x w^T. With `BFloat16Dot`, x has pairs of bfloat16 as well, and `inputs` counts pairs.
template <typename Number>
void dense_product(ffi::ThreadPool& pool, const float* x, const typename Number::Stored* w, float* y, int64_t rows,
                   int64_t inputs, int64_t outputs) {
  using Stored = typename Number::Stored;
  const Forms<Stored>& form = forms<Stored>();
  if (rows <= kFewRows || outputs < kFewOutputs) {
    std::vector<float> room;
    const float* ordered = in_order<Number>(x, rows, inputs, room);
    const int64_t bytes = std::max<int64_t>(kOutputs * inputs * sizeof(Stored), 1);
    parallel_for(
        pool, (outputs + kOutputs - 1) / kOutputs,
        [&](int64_t begin, int64_t end) {
          form.few(ordered, w, y, rows, inputs, outputs, begin * kOutputs, std::min(end * kOutputs, outputs));
        },
        std::max<int64_t>(kPieceBytes / bytes, 1));
    return;
  }
  const int64_t most = std::min(kMostRows, (rows + form.group_rows - 1) / form.group_rows * form.group_rows);
  constexpr int64_t kStep = kLanes * Vectors<Number>::kVectors;
  const int64_t padded = (inputs + kStep - 1) / kStep * kStep, panels = (outputs + form.panel - 1) / form.panel;
  const std::unique_ptr<float[]> room(new float[most * padded + kLanes]);
  // Vectors that cross lines of the cache take twice as long to load.
  auto* columns = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(room.get()) + 63) / 64 * 64);
  for (int64_t first = 0; first < rows; first += most) {
    const int64_t several = std::min(most, rows - first), groups = (several + form.group_rows - 1) / form.group_rows;
    parallel_for(
        pool, groups,
        [&](int64_t begin, int64_t end) {
          for (int64_t t = begin * form.group_rows; t < std::min(end * form.group_rows, several); t += form.group_rows) {
            form.columns(x + (first + t) * inputs, columns + t * padded, several - t, inputs);
          }
        },
        std::max<int64_t>(kPieceTerms / (form.group_rows * padded * kLanes), 1));
    // Few panels are shared out by groups of rows as well: each thread then widens the weights again.
    const int64_t parts = std::clamp<int64_t>(2 * pool.num_threads() / panels, 1, groups);
    parallel_for(
        pool, panels * parts,
        [&](int64_t begin, int64_t end) {
          for (int64_t item = begin; item < end;) {
            const int64_t part = item / panels, next = std::min(end, (part + 1) * panels);
            const int64_t from = groups * part / parts * form.group_rows;
            const int64_t to = std::min(groups * (part + 1) / parts * form.group_rows, several);
            form.many(columns + from * padded, w, y + (first + from) * outputs, to - from, inputs, outputs,
                      item % panels * form.panel, std::min((item % panels + next - item) * form.panel, outputs));
            item = next;
          }
        },
        std::max<int64_t>(kPieceTerms / (std::min(form.panel, outputs) * padded * several / parts), 1));
  }
}

// Calls call(number, x, w, inputs) for the number format of a product of x [rows, inputs] with weights w.
template <typename Call>
ffi::Error with_number(const ffi::AnyBuffer& x, const ffi::AnyBuffer& w, const Call& call) {
  const auto* values = static_cast<const float*>(x.untyped_data());
  const int64_t inputs = x.dimensions()[1];
  const bool dot = forms<uint32_t>().few != nullptr && inputs % 2 == 0;
  if (x.element_type() == ffi::BF16 && w.element_type() == ffi::BF16 && dot) {
    call(BFloat16Dot(), values, static_cast<const uint32_t*>(w.untyped_data()), inputs / 2);
  } else if (x.element_type() == ffi::F32 && w.element_type() == ffi::F32) {
    call(Float32(), values, static_cast<const float*>(w.untyped_data()), inputs);
  } else if (x.element_type() == ffi::F32 && w.element_type() == ffi::BF16) {
    call(BFloat16Pairs(), values, static_cast<const uint16_t*>(w.untyped_data()), inputs);
  } else if (x.element_type() == ffi::F32 && w.element_type() == ffi::S8) {
    call(Int8(), values, static_cast<const int8_t*>(w.untyped_data()), inputs);
  } else {
    return ffi::Error::InvalidArgument(
        "products need x in float32 and weights in float32, bfloat16 or int8, or both in bfloat16 with an even number "
        "of inputs on a processor with AVX512_BF16 or AMX");
  }
  return ffi::Error::Success();
}

ffi::Error dense(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Result<Matrix> y) {
  const int64_t rows = y->dimensions()[0], outputs = y->dimensions()[1];
  return with_number(x, w, [&](auto number, const float* values, const auto* weight, int64_t inputs) {
    dense_product<decltype(number)>(pool, values, weight, y->typed_data(), rows, inputs, outputs);
  });
}

struct Group {
  int64_t expert, first, tokens;
};

// Groups of few tokens are shared out together, groups of many tokens one after the other.
template <typename Number>
void multiply_groups(ffi::ThreadPool& pool, const std::vector<Group>& groups, const float* x,
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
  const auto few_rows = forms<typename Number::Stored>().few;
  const int64_t pieces = (outputs + kGroupPiece - 1) / kGroupPiece;
  parallel_for(pool, static_cast<int64_t>(few.size()) * pieces, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const Group& group = few[item / pieces];
      const int64_t from = item % pieces * kGroupPiece;
      few_rows(ordered + group.first * inputs, w + group.expert * inputs * outputs, y + group.first * outputs,
               group.tokens, inputs, outputs, from, std::min(from + kGroupPiece, outputs));
    }
  });
}

ffi::Error grouped(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Buffer<ffi::S32, 1> sizes,
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
    multiply_groups<decltype(number)>(pool, groups, values, weights, y->typed_data(), tokens, inputs, outputs);
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(linear, dense);

XLA_FFI_DEFINE_HANDLER_SYMBOL(grouped_matmul, grouped);

}  // namespace native
