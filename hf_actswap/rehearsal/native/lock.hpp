// The lock of a process's device. A thread may take it again; while it waits for other ranks it lets go of it altogether,
// so that other threads go on.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace rehearsal {

class DeviceLock {
 public:
  void lock() {
    if (owner_.load() == std::this_thread::get_id()) {
      depth_++;
      return;
    }
    mutex_.lock();
    owner_ = std::this_thread::get_id();
    depth_ = 1;
  }

  void unlock() {
    if (--depth_) return;
    owner_ = std::thread::id();
    mutex_.unlock();
  }

  // Wait, without the lock, for news of other ranks; false: there was none until then. The thread has the lock.
  bool wait(std::chrono::steady_clock::time_point until) {
    int depth = depth_;
    owner_ = std::thread::id();
    std::unique_lock<std::mutex> own(mutex_, std::adopt_lock);
    bool came = news_.wait_until(own, until) == std::cv_status::no_timeout;
    own.release();
    owner_ = std::this_thread::get_id();
    depth_ = depth;
    return came;
  }

  void tell() { news_.notify_all(); }

 private:
  std::mutex mutex_;
  std::condition_variable news_;
  std::atomic<std::thread::id> owner_{};
  int depth_ = 0;
};

using Guard = std::lock_guard<DeviceLock>;

}  // namespace rehearsal
