// Streams, events and copies, and what is ordered behind what.
//
// A kernel runs when it is launched. A copy between host and device is carried out early or late:
//   eager   when it is enqueued
//   lazy    when something runs that is ordered behind it, and not before
//   random  at a moment between the two, chosen by a seed
// A collective of several ranks (nccl.cpp) is carried out like a copy, in two parts: it reads its inputs when another rank
// needs them, or something here is ordered behind it; it writes its results when something here is ordered behind it.
// So code that lacks a wait reads or overwrites the wrong values in one of the orders. Values do not show every missing
// wait (a kernel is never late), so accesses are compared too: each stream has a vector clock, and two accesses to the same
// bytes, one of them a write, must be ordered by streams, events or the host.
#pragma once
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "clock.hpp"
#include "lock.hpp"
#include "settings.hpp"

namespace rehearsal {

using Clock = std::vector<uint64_t>;  // by stream: the number of its last work that is known to be done before

inline void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size(), 0);
  for (size_t i = 0; i < other.size(); i++) into[i] = std::max(into[i], other[i]);
}

// What is carried out later than it is enqueued.
struct Work {
  bool done = false;
  uint64_t looked_at = 0;
  std::vector<std::shared_ptr<Work>> before;
  virtual ~Work() = default;
  // Carry out what can be carried out now; false: the rest waits for other ranks. Nothing of `before` is outstanding.
  virtual bool advance() = 0;
  // What it waits for, as the text of an error.
  virtual std::string missing() const { return ""; }
};
using Works = std::vector<std::shared_ptr<Work>>;

struct Copy : Work {
  char* to;
  const char* from;
  size_t bytes;
  Copy(char* to, const char* from, size_t bytes) : to(to), from(from), bytes(bytes) {}
  bool advance() override {
    memmove(to, from, bytes);
    return true;
  }
};

struct Stream {
  int device = 0;
  size_t index = 0;
  int priority = 0;
  Clock clock;
  Works pending;  // what the next work on the stream is ordered behind
  StreamTimes times;
};

struct Event {
  Works pending;
  Clock clock;
  EventTimes times;
  int queries = 0;
};

// Who read and who wrote a range of bytes last.
struct Access {
  size_t stream = 0;
  uint64_t number = 0;  // 0: nobody
  const char* what = "";
};
struct Range {
  char* end;
  Access write;
  std::vector<Access> reads;
};

enum class When { eager, lazy, random };

class Order {
 public:
  DeviceLock mutex;
  std::string failure;  // why the devices are of no use any more; empty: they are
  const bool checks_races = settings().number("races", 1);
  const size_t real_bytes = settings().number("real_bytes", 1ull << 20);  // larger copies carry no bytes

  Order() { choose(settings().text("order", "lazy"), settings().number("seed", 0)); }

  // Carry copies out in another way from now on.
  void choose(const std::string& name, uint64_t seed) {
    synchronize_all();
    when_ = name == "eager" ? When::eager : name == "random" ? When::random : When::lazy;
    random_.seed(seed);
  }

  Stream* new_stream(int device, int priority) {
    auto* stream = new Stream();
    stream->device = device;
    stream->priority = priority;
    stream->index = streams_.size();
    streams_.push_back(stream);
    return stream;
  }

  const std::vector<Stream*>& streams() const { return streams_; }

  // The place of a new piece of work on a stream: behind all that the host knows to be done.
  void begin(Stream& stream) {
    join(stream.clock, host_);
    if (stream.clock.size() <= stream.index) stream.clock.resize(stream.index + 1, 0);
    stream.clock[stream.index]++;
  }

  // A kernel runs now: so do the copies that it is ordered behind.
  void run_kernel(Stream& stream) {
    begin(stream);
    finish(stream.pending);
    disturb();
  }

  void enqueue(Stream& stream, char* to, const char* from, size_t bytes, bool at_once) {
    auto copy = std::make_shared<Copy>(to, from, bytes <= real_bytes ? bytes : 0);
    append(stream, copy);
    if (at_once || when_ == When::eager) finish(stream.pending);
    else waiting_.push_back(copy);
    disturb();
  }

  // Enqueue what may have to wait for other ranks: this thread does not.
  void enqueue(Stream& stream, std::shared_ptr<Work> work) {
    append(stream, work);
    waiting_.push_back(work);
    progress();
  }

  // Time has passed for the device: other ranks have sent something.
  void progress() {
    if (when_ == When::eager)
      for (auto work : Works(waiting_)) advance({work});
    disturb();
  }

  // Carry work out as far as other ranks allow; return whether that is all.
  bool carry_out(std::shared_ptr<Work> work) { return advance({work}); }

  // Carry out what work is ordered behind, as far as other ranks allow; return whether that is all.
  bool reach(Work& work) { return advance(work.before); }

  // Whether other ranks are waited for with success: until `is_there`, or until one of them is overdue.
  template <typename Condition, typename Missing>
  bool await(const Condition& is_there, const Missing& missing) {
    auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds((long)(1e3 * ranks_limit_s));
    while (failure.empty() && !is_there())
      if (!mutex.wait(end) && !is_there()) fail(missing() + " within " + std::to_string((long)ranks_limit_s) + " s");
    return failure.empty();
  }

  // No work can go on: every call of the runtime returns an error with this text from now on.
  void fail(const std::string& why) {
    if (!failure.empty()) return;
    failure = why;
    fprintf(stderr, "rehearsal: %s\n", why.c_str());
    mutex.tell();
  }

  const double ranks_limit_s = settings().real("ranks_limit_s", 600);  // how long another rank is waited for

  void record(Event& event, Stream& stream) {
    join(stream.clock, host_);
    event.pending = stream.pending;
    event.clock = stream.clock;
    event.queries = 0;
    event_recorded(event.times, stream.times);
  }

  void wait(Stream& stream, Event& event) {
    for (auto& work : event.pending)
      if (!work->done) stream.pending.push_back(work);
    join(stream.clock, event.clock);
    stream_waits(stream.times, event.times);
  }

  void synchronize(Stream& stream) {
    finish(stream.pending);
    join(host_, stream.clock);
    host_waits(stream.times.free_at_ms);
  }

  void synchronize(Event& event) {
    finish(event.pending);
    join(host_, event.clock);
    host_waits(event.times.reached_at_ms);
  }

  void synchronize_all() {
    for (size_t i = 0; i < streams_.size(); i++) synchronize(*streams_[i]);  // others may be made during a wait
  }

  // Whether the host sees that all is done.
  bool query(Event& event) {
    bool ready = is_done(event.pending, event.queries, event.times.reached_at_ms);
    if (ready) join(host_, event.clock);
    return ready;
  }

  bool query(Stream& stream) {
    static int asked = 0;
    bool ready = is_done(stream.pending, asked, stream.times.free_at_ms);
    if (ready) join(host_, stream.clock);
    return ready;
  }

  // Note that work which was begun last on `stream` touches bytes; what does not fit the order is reported.
  void touch(Stream& stream, const void* at, size_t bytes, bool writes, const char* what) {
    if (!checks_races || !bytes) return;
    char *begin = (char*)at, *end = begin + bytes;
    cut(begin);
    cut(end);
    Access access{stream.index, stream.clock[stream.index], what};
    char* from = begin;
    for (auto found = ranges_.lower_bound(begin); found != ranges_.end() && found->first < end; ++found) {
      if (from < found->first) ranges_[from] = fresh(found->first, access, writes);
      judge(stream, found->second, access, writes);
      from = found->second.end;
    }
    if (from < end) ranges_[from] = fresh(end, access, writes);
  }

  // The memory is given back: another owner of these addresses has nothing to do with the accesses until now.
  void forget(const void* at, size_t bytes) {
    if (!checks_races || !bytes) return;
    char *begin = (char*)at, *end = begin + bytes;
    cut(begin);
    cut(end);
    ranges_.erase(ranges_.lower_bound(begin), ranges_.lower_bound(end));
  }

  std::vector<std::string> races;

  void forget_races() {
    races.clear();
    told_.clear();
  }

 private:
  static constexpr int kPatience = 64;

  void append(Stream& stream, std::shared_ptr<Work> work) {
    begin(stream);
    work->before = stream.pending;
    stream.pending = {work};
  }

  // Carry these out, and wait for other ranks if need be: without the lock, so the list may change meanwhile.
  void finish(Works& works) {
    Works taken = works;
    if (!advance(taken)) await([&] { return advance(taken); }, [&] { return blocked_->missing(); });
    if (!failure.empty()) works.clear();
    drop_done(works);
  }

  // Carry these out as far as other ranks allow; return whether that is all.
  bool advance(const Works& works) {
    looks_++;
    bool all = true;
    for (auto& work : works) all = carried_out(*work) && all;
    return all;
  }

  bool carried_out(Work& work) {
    if (work.done) return true;
    if (work.looked_at == looks_) return false;
    work.looked_at = looks_;
    bool ready = true;
    for (auto& earlier : work.before) ready = carried_out(*earlier) && ready;
    if (!ready) return false;
    work.before.clear();
    HostStands stands;
    work.done = work.advance();
    if (!work.done) blocked_ = &work;
    return work.done;
  }

  void disturb() {
    if (when_ != When::random) {
      if (waiting_.size() > 256) drop_done(waiting_);
      return;
    }
    drop_done(waiting_);
    while (!waiting_.empty() && random_() % 3 == 0) {
      advance({waiting_[random_() % waiting_.size()]});
      drop_done(waiting_);
    }
  }

  static void drop_done(Works& works) {
    works.erase(std::remove_if(works.begin(), works.end(), [](auto& work) { return work->done; }), works.end());
  }

  // With a clock time alone decides; else a device makes progress while the host asks.
  bool is_done(Works& works, int& asked, double at_ms) {
    if (rates().on && !is_reached(at_ms)) return false;
    drop_done(works);
    if (works.empty()) return true;
    if (!rates().on) {
      asked++;
      bool now = when_ == When::random ? random_() % 2 == 0 : asked >= kPatience;
      if (!now) return false;
      asked = 0;
    }
    return advance(Works(works));
  }

  static Range fresh(char* end, const Access& access, bool writes) {
    Range range{end, {}, {}};
    if (writes) range.write = access;
    else range.reads.push_back(access);
    return range;
  }

  void judge(Stream& stream, Range& range, const Access& access, bool writes) {
    if (!is_before(range.write, stream)) report(range.write, "writes", access, writes);
    if (writes) {
      for (auto& read : range.reads)
        if (!is_before(read, stream)) report(read, "reads", access, writes);
      range.reads.clear();
      range.write = access;
      return;
    }
    for (auto& read : range.reads)
      if (read.stream == access.stream) {
        read = access;
        return;
      }
    range.reads.push_back(access);
  }

  static bool is_before(const Access& access, const Stream& stream) {
    return !access.number || (access.stream < stream.clock.size() && stream.clock[access.stream] >= access.number);
  }

  void report(const Access& earlier, const char* did, const Access& later, bool writes) {
    std::string text = std::string(later.what) + " on stream " + std::to_string(later.stream) +
                       (writes ? " writes" : " reads") + " memory that " + earlier.what + " on stream " +
                       std::to_string(earlier.stream) + " " + did + ", and nothing orders the two";
    if (told_.insert(text).second) races.push_back(text);
  }

  void cut(char* at) {
    auto found = ranges_.upper_bound(at);
    if (found == ranges_.begin()) return;
    --found;
    if (found->first >= at || found->second.end <= at) return;
    Range rest = found->second;
    found->second.end = at;
    ranges_[at] = rest;
  }

  When when_ = When::lazy;
  std::vector<Stream*> streams_;
  Clock host_;
  Works waiting_;
  uint64_t looks_ = 0;
  Work* blocked_ = nullptr;
  std::mt19937_64 random_;
  std::map<char*, Range> ranges_;
  std::set<std::string> told_;
};

inline Order& order() {
  static Order* one = new Order();  // never destroyed: libraries call us while the process ends
  return *one;
}

}  // namespace rehearsal
