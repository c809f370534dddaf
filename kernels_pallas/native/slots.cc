// Slots of a store, of whatever dtype, copied by their indices: see kernels_pallas/slots.py. A slot is as large as a
// value that is read or written; the store may have its slots on several axes.
#include <cstring>

#include "parallel.h"

namespace native {
namespace {

constexpr int64_t kWorthSharing = 1 << 16;  // bytes: fewer are copied before another thread has woken up

// Calls copy(i) for each of `count` slots of `size` bytes.
template <typename Copy>
void for_each(ffi::ThreadPool& pool, int64_t count, int64_t size, const Copy& copy) {
  auto several = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) copy(i);
  };
  if (count * size < kWorthSharing) return several(0, count);
  parallel_for(pool, count, several);
}

ffi::Error read(ffi::ThreadPool pool, ffi::AnyBuffer store, Ints index, ffi::Result<ffi::AnyBuffer> values) {
  const int64_t count = index.element_count(), size = count ? values->size_bytes() / count : 0;
  const int64_t slots = size ? store.size_bytes() / size : 0;
  const char* from = static_cast<const char*>(store.untyped_data());
  char* to = static_cast<char*>(values->untyped_data());
  for_each(pool, count, size, [&](int64_t i) {
    const int64_t slot = index.typed_data()[i];
    if (slot > 0 && slot < slots) {
      std::memcpy(to + i * size, from + slot * size, size);
    } else {
      std::memset(to + i * size, 0, size);
    }
  });
  return ffi::Error::Success();
}

ffi::Error write(ffi::ThreadPool pool, ffi::AnyBuffer store, ffi::AnyBuffer values, Ints index,
                 ffi::Result<ffi::AnyBuffer> updated) {
  if (store.untyped_data() != updated->untyped_data()) {
    return ffi::Error::Internal("write_slots: the store is not updated in place");
  }
  const int64_t count = index.element_count(), size = count ? values.size_bytes() / count : 0;
  const int64_t slots = size ? store.size_bytes() / size : 0;
  const char* from = static_cast<const char*>(values.untyped_data());
  char* to = static_cast<char*>(updated->untyped_data());
  for_each(pool, count, size, [&](int64_t i) {
    const int64_t slot = index.typed_data()[i];
    if (slot > 0 && slot < slots) std::memcpy(to + slot * size, from + i * size, size);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(read_slots, read);

XLA_FFI_DEFINE_HANDLER_SYMBOL(write_slots, write);

}  // namespace native
