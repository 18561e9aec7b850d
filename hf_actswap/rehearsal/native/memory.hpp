// Memory of the devices, and host memory that is page-locked. Device memory is the process's own, mapped without backing:
// pages that nobody writes cost nothing, so a device may be larger than this machine.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <map>
#include <mutex>
#include <vector>

#include "settings.hpp"

namespace rehearsal {

struct Block {
  size_t bytes;
  int device;
};

inline char* map_pages(size_t bytes) {
  void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return found == MAP_FAILED ? nullptr : (char*)found;
}

class Memory {
 public:
  const int devices = (int)settings().number("devices", 1);
  const size_t total = settings().number("bytes", 80ull << 30);
  // Less what the driver keeps for itself once a process uses the device.
  const size_t limit = total - settings().number("context_bytes", 0);

  Memory() : used_(devices, 0), peak_(devices, 0), host_(0), host_peak_(0) {}

  // A block of device memory; nullptr: the device has no more.
  char* take(size_t bytes, int device) {
    std::lock_guard<std::mutex> guard(mutex_);
    bytes = (bytes + 511) / 512 * 512;
    if (!bytes) bytes = 512;
    if (!count(bytes, device)) return nullptr;
    char* pages = map_pages(bytes);
    if (pages) blocks_[pages] = {bytes, device};
    else used_[device] -= bytes;
    return pages;
  }

  // Bytes that were given back; 0: no such block.
  size_t give_back(void* at) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = blocks_.find((char*)at);
    if (found == blocks_.end()) return 0;
    size_t bytes = found->second.bytes;
    used_[found->second.device] -= bytes;
    munmap(at, bytes);
    blocks_.erase(found);
    return bytes;
  }

  // Physical memory of the driver's virtual memory management; 0: the device has no more.
  unsigned long long create(size_t bytes, int device) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (!count(bytes, device)) return 0;
    physical_[++last_handle_] = {bytes, device};
    return last_handle_;
  }

  void release(unsigned long long handle) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = physical_.find(handle);
    if (found == physical_.end()) return;
    used_[found->second.device] -= found->second.bytes;
    physical_.erase(found);
  }

  // A range of addresses; its device is known when something is mapped into it.
  char* reserve(size_t bytes, int device) {
    char* pages = map_pages(bytes);
    std::lock_guard<std::mutex> guard(mutex_);
    if (pages) blocks_[pages] = {bytes, device};
    return pages;
  }

  void unreserve(void* at, size_t bytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    munmap(at, bytes);
    blocks_.erase((char*)at);
  }

  char* take_host(size_t bytes) {
    char* pages = map_pages(bytes ? bytes : 1);
    if (pages) lock_pages(pages, bytes ? bytes : 1, kOwn);
    return pages;
  }

  // Forget what programs have locked and not unlocked before they unmapped it: a fault of theirs, which must not meet the
  // next owner of the addresses in a test.
  void forget_registered() {
    std::lock_guard<std::mutex> guard(mutex_);
    for (auto found = locked_.begin(); found != locked_.end();)
      if (found->second.device == kRegistered) found = locked_.erase(found);
      else ++found;
  }

  bool lock_pages(void* at, size_t bytes, int kind = kRegistered) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (within(locked_, at)) return false;
    locked_[(char*)at] = {bytes, kind};
    host_ += bytes;
    if (host_ > host_peak_) host_peak_ = host_;
    return true;
  }

  // Bytes that were unlocked; 0: they were not locked.
  size_t unlock_pages(void* at, bool unmap) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = locked_.find((char*)at);
    if (found == locked_.end()) return 0;
    size_t bytes = found->second.bytes;
    host_ -= bytes;
    if (unmap) munmap(at, bytes);
    locked_.erase(found);
    return bytes;
  }

  // The device that has this address; -1: none.
  int device_of(const void* at) {
    std::lock_guard<std::mutex> guard(mutex_);
    const Block* block = within(blocks_, at);
    return block ? block->device : -1;
  }

  bool is_locked(const void* at) {
    std::lock_guard<std::mutex> guard(mutex_);
    return within(locked_, at) != nullptr;
  }

  size_t used(int device) {
    std::lock_guard<std::mutex> guard(mutex_);
    return used_[device];
  }

  size_t peak(int device) { return peak_[device]; }
  size_t host() { return host_; }
  size_t host_peak() { return host_peak_; }

 private:
  static constexpr int kOwn = -1, kRegistered = -2;  // host memory, in place of a device

  bool count(size_t bytes, int device) {
    if (device < 0 || device >= devices || used_[device] + bytes > limit) return false;
    used_[device] += bytes;
    if (used_[device] > peak_[device]) peak_[device] = used_[device];
    return true;
  }

  static const Block* within(const std::map<char*, Block>& blocks, const void* at) {
    auto found = blocks.upper_bound((char*)at);
    if (found == blocks.begin()) return nullptr;
    --found;
    return (char*)at < found->first + found->second.bytes ? &found->second : nullptr;
  }

  std::mutex mutex_;
  std::map<char*, Block> blocks_, locked_;
  std::map<unsigned long long, Block> physical_;
  unsigned long long last_handle_ = 0;
  std::vector<size_t> used_, peak_;
  size_t host_, host_peak_;
};

inline Memory& memory() {
  static Memory* one = new Memory();  // never destroyed: libraries call us while the process ends
  return *one;
}

}  // namespace rehearsal
