// Work shared out over XLA's own CPU threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#include "numbers.h"
#include "xla/ffi/api/ffi.h"

// The bindings of a handler follow from its signature: of arguments and results by themselves, of XLA's threads by this.
template <>
struct xla::ffi::CtxBinding<xla::ffi::ThreadPool> {
  using Ctx = xla::ffi::ThreadPool;
};

namespace native {

namespace ffi = xla::ffi;
using Floats = ffi::Buffer<ffi::F32>;
using Matrix = ffi::Buffer<ffi::F32, 2>;
using Ints = ffi::Buffer<ffi::S32>;

// Calls call(number) with the format of numbers of this type; `refused` says what is expected where it is another.
template <typename Call>
ffi::Error with_floats(ffi::DataType type, const char* refused, const Call& call) {
  if (type == ffi::F32) return call(Float32());
  if (type == ffi::BF16) return call(BFloat16());
  return ffi::Error::InvalidArgument(refused);
}

// Calls body(begin, end) for pieces of [0, items), on the pool's threads and this one; returns when all are done.
//
// This thread works as well and waits only for pieces that another thread has begun, never for a thread to become free:
// several operations may run at once, and their waiting must not fill the pool. A helper that comes late finds nothing
// left and touches nothing but the counters, which it keeps alive.
// `least`: items that are worth a piece of their own.
template <typename Body>
void parallel_for(ffi::ThreadPool& pool, int64_t items, const Body& body, int64_t least = 1) {
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  const int64_t most = std::min(items, threads == 1 ? int64_t{1} : threads * 4);
  const int64_t pieces = std::clamp<int64_t>(items / least, std::min<int64_t>(most, 1), most);
  if (pieces <= 1) {
    if (items > 0) body(int64_t{0}, items);
    return;
  }
  struct Progress {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
    std::mutex mutex;
    std::condition_variable finished;
  };
  auto progress = std::make_shared<Progress>();
  auto work = [progress, pieces, items, &body] {
    for (int64_t piece; (piece = progress->next.fetch_add(1)) < pieces;) {
      body(items * piece / pieces, items * (piece + 1) / pieces);
      if (progress->done.fetch_add(1) + 1 == pieces) {
        std::lock_guard<std::mutex> lock(progress->mutex);
        progress->finished.notify_all();
      }
    }
  };
  for (int64_t helper = 1; helper < std::min(threads, pieces); ++helper) pool.Schedule([work] { work(); });
  work();
  std::unique_lock<std::mutex> lock(progress->mutex);
  progress->finished.wait(lock, [&] { return progress->done.load() == pieces; });
}

}  // namespace native
