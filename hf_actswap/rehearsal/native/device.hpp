// The present device of a thread, its default stream, and what the runtime tells the arithmetic.
#pragma once
#include <atomic>

#include "memory.hpp"
#include "order.hpp"

namespace rehearsal {

inline int& current_device() {
  static thread_local int device = 0;
  return device;
}

// A handle of the runtime as a stream; small numbers are the default stream of the present device.
inline Stream& stream_of(const void* handle) {
  if ((size_t)handle > 2) return *(Stream*)handle;
  static std::vector<Stream*>* defaults = new std::vector<Stream*>();
  Guard guard(order().mutex);
  while ((int)defaults->size() < memory().devices)
    defaults->push_back(order().new_stream((int)defaults->size(), 0));
  return *(*defaults)[current_device()];
}

struct Counts {
  std::atomic<long long> launches{0}, products{0}, copies{0}, to_device{0}, to_host{0};
};

inline Counts& counts() {
  static Counts* one = new Counts();
  return *one;
}

inline void launch(const void* handle) {
  Stream& stream = stream_of(handle);
  counts().launches++;
  Guard guard(order().mutex);
  order().run_kernel(stream);
  kernel_launched(stream.times);
}

inline void launch_product(const void* handle, double m, double n, double k, double batch, bool half) {
  Stream& stream = stream_of(handle);
  counts().products++;
  Guard guard(order().mutex);
  order().run_kernel(stream);
  product_launched(stream.times, 2 * m * n * k * batch, half);
}

}  // namespace rehearsal
