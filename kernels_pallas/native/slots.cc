// Slots of a store, of whatever dtype, copied by their indices: see kernels_pallas/slots.py. A slot is as large as a
// value that is read or written; the store may have its slots on several axes.
#include <cstring>

#include "parallel.h"

namespace native {
namespace {

constexpr int64_t kWorthSharing = 1 << 16;  // bytes: fewer are copied before another thread has woken up

// Calls copy(slot, value, size) for each index: where the slot is, null if there is none, and the value of `size` bytes.
template <typename Copy>
ffi::Error for_each(ffi::ThreadPool& pool, const ffi::AnyBuffer& store, const ffi::AnyBuffer& values, const Ints& index,
                    const Copy& copy) {
  const int64_t count = index.element_count(), size = count ? values.size_bytes() / count : 0;
  const int64_t slots = size ? store.size_bytes() / size : 0;
  char *first = static_cast<char*>(store.untyped_data()), *value = static_cast<char*>(values.untyped_data());
  auto several = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t slot = index.typed_data()[i];
      copy(slot > 0 && slot < slots ? first + slot * size : nullptr, value + i * size, size);
    }
  };
  if (count * size < kWorthSharing) {
    several(0, count);
  } else {
    parallel_for(pool, count, several);
  }
  return ffi::Error::Success();
}

ffi::Error read(ffi::ThreadPool pool, ffi::AnyBuffer store, Ints index, ffi::Result<ffi::AnyBuffer> values) {
  return for_each(pool, store, *values, index, [](const char* slot, char* value, int64_t size) {
    if (slot != nullptr) {
      std::memcpy(value, slot, size);
    } else {
      std::memset(value, 0, size);
    }
  });
}

ffi::Error write(ffi::ThreadPool pool, ffi::AnyBuffer store, ffi::AnyBuffer values, Ints index,
                 ffi::Result<ffi::AnyBuffer> updated) {
  if (store.untyped_data() != updated->untyped_data()) {
    return ffi::Error::Internal("write_slots: the store is not updated in place");
  }
  return for_each(pool, store, values, index, [](char* slot, const char* value, int64_t size) {
    if (slot != nullptr) std::memcpy(slot, value, size);
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(read_slots, read);

XLA_FFI_DEFINE_HANDLER_SYMBOL(write_slots, write);

}  // namespace native
