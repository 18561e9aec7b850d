// The times of streams, events and the host. Every call of the runtime that takes time on a device passes through here.
//
// Without a clock all times are the host's wall clock, and work takes no time. With it (`clock=1`) each stream has a time at
// which all that it was given is done:
//   a matrix product   its FLOP at the device's rate (its sizes are arguments of cuBLAS)
//   any other op       the bytes of its tensors at the memory's rate, or FLOP of attention or of grouped products, but at
//                      least its launches
//   a copy             its bytes at the link's rate; a device has one engine for each direction, and the two slow each other
// Nothing begins before the host has launched it. The host's time is the processor time of this process, so that other
// programs on the machine do not lengthen it, less what the rehearsal itself took, plus what the host would have waited: a
// wait moves it forward at once. What it waits for elsewhere (files, other processes) is not counted.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <ctime>
#include <cstddef>
#include <map>

#include "settings.hpp"

namespace rehearsal {

enum class Direction { on_device, to_device, to_host, between_devices };

struct StreamTimes {
  double free_at_ms = 0;  // when all that the stream was given is done
  double launched_ms = 0;  // of this, what kernels took whose op has not been told yet (`op_ran`)
  double worked_ms = 0;  // time of all its kernels
};

struct EventTimes {
  double reached_at_ms = 0;  // when the device reaches the recording
};

struct Rates {
  bool on = settings().number("clock", 0);
  double half_flop = settings().real("half_flop_per_ms", 1), full_flop = settings().real("full_flop_per_ms", 1);
  double attention_flop = settings().real("attention_flop_per_ms", 1);
  double bytes = settings().real("bytes_per_ms", 1), launch_ms = settings().real("launch_ms", 0);
  double to_host = settings().real("out_bytes_per_ms", 1), to_device = settings().real("in_bytes_per_ms", 1);
  double to_host_beside = settings().real("out_beside_in_bytes_per_ms", 1);
  double to_device_beside = settings().real("in_beside_out_bytes_per_ms", 1);
  double fabric = settings().real("fabric_bytes_per_ms", 1), latency_ms = settings().real("latency_ms", 0);
  double lock_ms_per_byte = settings().real("lock_ms_per_gib", 0) / (1ull << 30);
};

inline const Rates& rates() {
  static const Rates* one = new Rates();
  return *one;
}

inline double wall_ms() {
  using namespace std::chrono;
  return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

inline double processor_ms() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

// What to add to the processor time: the host's waits, less the time that the rehearsal took.
inline std::atomic<double>& host_shift_ms() {
  static auto* one = new std::atomic<double>(wall_ms() - processor_ms());
  return *one;
}

inline double host_now_ms() { return rates().on ? processor_ms() + host_shift_ms().load() : wall_ms(); }

// The host's time stands still while one of these exists. Threads of one process seldom work at once in a training: while
// backward runs, the thread that called it waits.
class HostStands {
 public:
  HostStands() : began_ms_(depth()++ ? 0 : processor_ms()) {}
  ~HostStands() {
    if (--depth() == 0 && rates().on) host_shift_ms().fetch_add(began_ms_ - processor_ms());
  }

 private:
  static int& depth() {
    static thread_local int one = 0;
    return one;
  }
  double began_ms_;
};

inline void host_waits(double until_ms) {
  double ahead = rates().on ? until_ms - host_now_ms() : 0;
  if (ahead > 0) host_shift_ms().fetch_add(ahead);
}

inline void work(StreamTimes& stream, double ms) {
  stream.free_at_ms = std::max(stream.free_at_ms, host_now_ms()) + ms;
  stream.worked_ms += ms;
}

inline void kernel_takes(StreamTimes& stream, double ms) {
  if (!rates().on) return;
  work(stream, ms);
  stream.launched_ms += ms;
}

// A kernel was launched. What it computes is not known here: `op_ran` follows for the op that launched it.
inline void kernel_launched(StreamTimes& stream) { kernel_takes(stream, rates().launch_ms); }

// A matrix product was launched; `half`: its inputs have two bytes or fewer.
inline void product_launched(StreamTimes& stream, double flop, bool half) {
  kernel_takes(stream, std::max(flop / (half ? rates().half_flop : rates().full_flop), rates().launch_ms));
}

// An op of PyTorch has launched its kernels: the bytes that it moves; FLOP of fused attention, or of a product that is not
// cuBLAS's, otherwise 0.
inline void op_ran(StreamTimes& stream, double bytes, double attention_flop, double product_flop, bool half) {
  if (!rates().on) return;
  double share = half ? 1 : rates().full_flop / rates().half_flop;
  double arithmetic_ms = attention_flop / (rates().attention_flop * share) + product_flop / (rates().half_flop * share);
  double ms = std::max(bytes / rates().bytes, arithmetic_ms);
  bool has_kernel = stream.launched_ms > 0 || arithmetic_ms > 0;
  if (has_kernel && ms > stream.launched_ms) work(stream, ms - stream.launched_ms);
  stream.launched_ms = 0;
}

// The engines of one device, one for each direction.
struct Engines {
  double to_device_free_at_ms = 0, to_host_free_at_ms = 0;
};

inline void copy_enqueued(StreamTimes& stream, int device, Direction direction, size_t bytes) {
  if (!rates().on) return;
  if (direction == Direction::on_device) return kernel_takes(stream, std::max(2 * bytes / rates().bytes, rates().launch_ms));
  if (direction == Direction::between_devices) return work(stream, bytes / rates().fabric + rates().latency_ms);
  static auto* all = new std::map<int, Engines>();  // under the lock of the order
  Engines& engines = (*all)[device];
  bool in = direction == Direction::to_device;
  double& own = in ? engines.to_device_free_at_ms : engines.to_host_free_at_ms;
  double other = in ? engines.to_host_free_at_ms : engines.to_device_free_at_ms;
  double alone = in ? rates().to_device : rates().to_host;
  double beside = in ? rates().to_device_beside : rates().to_host_beside;
  double start = std::max({stream.free_at_ms, host_now_ms(), own}) + rates().latency_ms;
  double both_ms = std::min(std::max(other - start, 0.0), bytes / beside);
  own = stream.free_at_ms = start + both_ms + (bytes - both_ms * beside) / alone;
}

// Page-locking takes the host time.
inline void pages_locked(size_t bytes) { host_waits(host_now_ms() + bytes * rates().lock_ms_per_byte); }

inline void event_recorded(EventTimes& event, const StreamTimes& stream) {
  event.reached_at_ms = std::max(host_now_ms(), stream.free_at_ms);
}

inline void stream_waits(StreamTimes& stream, const EventTimes& event) {
  stream.free_at_ms = std::max(stream.free_at_ms, event.reached_at_ms);
}

// Whether the device has reached this time, as a query of the host sees it. Between two queries that fail the host has done
// nothing else: all that has passed on the wall is its time.
inline bool is_reached(double at_ms) {
  static thread_local double queried_at_ms = 0, processor_then_ms = 0;
  double wall = wall_ms(), processor = processor_ms();
  if (at_ms > host_now_ms() && queried_at_ms) {
    double asleep = (wall - queried_at_ms) - (processor - processor_then_ms);
    if (asleep > 0) host_waits(std::min(at_ms, host_now_ms() + asleep));
  }
  bool reached = at_ms <= host_now_ms();
  queried_at_ms = reached ? 0 : wall;
  processor_then_ms = processor;
  return reached;
}

inline double elapsed_ms(const EventTimes& from, const EventTimes& to) { return to.reached_at_ms - from.reached_at_ms; }

}  // namespace rehearsal
