// What the device's memory holds: the live blocks of PyTorch's allocator, the op and the part of a step that asked for
// each, and which of them were live when there were most bytes.
#pragma once
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <vector>

namespace rehearsal {

// The functions that PyTorch is running on this thread, outermost first.
inline std::vector<const char*>& running() {
  static thread_local std::vector<const char*> names;
  return names;
}

constexpr const char* kOfEngine = "autograd::engine::evaluate_function: ";

inline bool is_op(const char* name) { return strstr(name, "::") && strncmp(name, "autograd::", 10) != 0; }

// The op as the program called it: the outermost one below the last node of backward or function in Python.
inline std::string op_now() {
  const auto& names = running();
  const char* found = nullptr;
  for (auto name = names.rbegin(); name != names.rend() && (is_op(*name) || !found); ++name) {
    found = *name;
    if (!is_op(*name)) break;
  }
  if (!found) return "";
  return strncmp(found, kOfEngine, strlen(kOfEngine)) ? found : found + strlen(kOfEngine);
}

struct Held {
  size_t bytes = 0;
  uint64_t serial = 0;
  const std::string *op = nullptr, *phase = nullptr, *kind = nullptr;
};

class Ledger {
 public:
  std::atomic<bool> on{false}, in_optimizer{false};
  std::atomic<int> steps{0};

  std::string phase_now() const {
    if (in_optimizer) return "optimizer";
    for (const char* name : running())
      if (!strncmp(name, kOfEngine, strlen(kOfEngine))) return "backward";
    return at::GradMode::is_enabled() ? "forward" : "without gradients";
  }

  void took(int device, uint64_t at, size_t bytes) {
    std::string op = op_now(), phase = phase_now();
    std::lock_guard<std::mutex> guard(mutex_);
    Books& books = books_[device];
    bytes = (bytes + 511) / 512 * 512;
    books.live[at] = {bytes, ++serial_, known(op), known(phase), known("")};
    books.allocated += bytes;
    if (books.allocated <= books.peak) return;
    books.peak = books.allocated;
    books.gone.clear();
    books.peak_serial = serial_;
    books.peak_step = steps;
    books.peak_op = known(op), books.peak_phase = known(phase);
  }

  void gave_back(int device, uint64_t at) {
    std::lock_guard<std::mutex> guard(mutex_);
    Books& books = books_[device];
    auto found = books.live.find(at);
    if (found == books.live.end()) return;
    books.allocated -= found->second.bytes;
    if (found->second.serial <= books.peak_serial) books.gone.push_back(found->second);
    books.live.erase(found);
  }

  void reserved(int device, int64_t bytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    Books& books = books_[device];
    books.reserved += bytes;
    if (books.reserved > books.reserved_peak) books.reserved_peak = books.reserved;
  }

  // Say what the blocks are in which these addresses lie.
  void mark(const uint64_t* addresses, size_t count, const char* kind) {
    std::lock_guard<std::mutex> guard(mutex_);
    const std::string* name = known(kind);
    for (size_t i = 0; i < count; i++)
      for (auto& [device, books] : books_) {
        auto found = books.live.upper_bound(addresses[i]);
        if (found == books.live.begin()) continue;
        --found;
        if (addresses[i] < found->first + found->second.bytes) found->second.kind = name;
      }
  }

  // A line about the device, then one for each group of blocks of the same size, op, phase and kind. Empty: nothing was
  // ever taken. `at_peak`: the blocks that were live when there were most bytes, else those that are live now.
  std::string text(int device, bool at_peak) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto known_books = books_.find(device);
    if (known_books == books_.end()) return "";
    const Books& books = known_books->second;
    std::map<std::tuple<const std::string*, const std::string*, const std::string*, size_t>, long> groups;
    auto add = [&](const Held& held) { groups[{held.kind, held.phase, held.op, held.bytes}]++; };
    for (const auto& [at, held] : books.live)
      if (!at_peak || held.serial <= books.peak_serial) add(held);
    if (at_peak)
      for (const Held& held : books.gone) add(held);
    std::string lines = line({std::to_string(books.peak), std::to_string(books.peak_step),
                              books.peak_phase ? *books.peak_phase : "", books.peak_op ? *books.peak_op : "",
                              std::to_string(books.reserved_peak), std::to_string(books.allocated),
                              std::to_string(books.reserved)});
    for (const auto& [group, count] : groups) {
      const auto& [kind, phase, op, bytes] = group;
      lines += line({std::to_string(bytes), std::to_string(count), *kind, *phase, *op});
    }
    return lines;
  }

 private:
  struct Books {
    std::map<uint64_t, Held> live;
    std::vector<Held> gone;  // since the peak, of what was live then
    size_t allocated = 0, peak = 0;
    int64_t reserved = 0, reserved_peak = 0;
    uint64_t peak_serial = 0;
    int peak_step = 0;
    const std::string *peak_phase = nullptr, *peak_op = nullptr;
  };

  static std::string line(const std::vector<std::string>& words) {
    std::string found;
    for (const auto& word : words) found += (found.empty() ? "" : "\t") + word;
    return found + "\n";
  }

  const std::string* known(const std::string& text) { return &*names_.insert(text).first; }

  std::mutex mutex_;
  std::map<int, Books> books_;
  std::set<std::string> names_;
  uint64_t serial_ = 0;
};

inline Ledger& ledger() {
  static Ledger* one = new Ledger();  // never destroyed: libraries call us while the process ends
  return *one;
}

inline void begin_ledger() {
  ledger().on = true;
  auto entered = [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
    running().push_back(function.name());
    return nullptr;
  };
  auto left = [](const at::RecordFunction&, at::ObserverContext*) {
    if (!running().empty()) running().pop_back();
  };
  at::addGlobalCallback(at::RecordFunctionCallback(entered, left)
                            .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
}

}  // namespace rehearsal
