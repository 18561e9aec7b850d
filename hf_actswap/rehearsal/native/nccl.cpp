// The functions of NCCL that PyTorch's process groups call, between processes of one machine. Declared without NVIDIA's
// header: only numbers and addresses pass.
//
// An operation is work of its stream like a copy (order.hpp), carried out by sockets (wire.hpp). With a clock, it begins
// when the last rank has reached it, so a launch waits until the other ranks have launched it too; it takes its bytes at the
// rate of the link between devices.
#include <cstring>
#include <random>
#include <utility>

#include "reduction.hpp"
#include "wire.hpp"

namespace rehearsal {

namespace {

constexpr int kSuccess = 0, kSystemError = 2, kInvalidArgument = 4, kInvalidUsage = 5, kRemoteError = 6;
constexpr double kGoodbyeLimitS = 5;

const char* name_of(Kind kind) {
  static const char* names[] = {"all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "send"};
  return names[(int)kind];
}

std::string text_of(const Signature& what) {
  std::string text = std::string(name_of(what.kind)) + " of " + std::to_string(what.count) + " " + type_of(what.type).name;
  if (what.kind == Kind::broadcast || what.kind == Kind::reduce) text += " with root " + std::to_string(what.root);
  static const char* reductions[] = {"sum", "product", "max", "min", "average", "scaled sum"};
  bool reduces = what.kind == Kind::all_reduce || what.kind == Kind::reduce || what.kind == Kind::reduce_scatter;
  return reduces ? text + " (" + reductions[what.reduction] + ")" : text;
}

std::string& last_error() {
  static thread_local std::string text;
  return text;
}

int failed(int error, const std::string& why) {
  last_error() = "rehearsal: " + why;
  return error;
}

// Factors of reductions that multiply first, by their number less `kScaledSum`.
std::vector<double>& factors() {
  static auto* all = new std::vector<double>();
  return *all;
}

// One call: what this rank gives to an operation and gets from it.
struct Part {
  std::shared_ptr<Communicator> in;
  Signature what;
  const char* from;  // null: it receives only
  char* to;          // null: it sends only
  double factor = 1;
  int peer = -1;
  Place place, place_there;  // of what it gets; the name that a pair's other rank has for what it gives

  uint64_t bytes() const { return what.count * type_of(what.type).bytes; }
  bool is_pair() const { return what.kind == Kind::pair; }
  bool is_root() const { return in->rank == what.root; }

  bool gives(int rank) const {
    if (is_pair()) return from && rank == peer;
    if (what.kind == Kind::broadcast) return is_root();
    return what.kind != Kind::reduce || rank == what.root;
  }
  bool gets(int rank) const {
    if (is_pair()) return to && rank == peer;
    if (what.kind == Kind::broadcast) return rank == what.root;
    return what.kind != Kind::reduce || is_root();
  }
  bool is_divided() const { return what.kind == Kind::reduce_scatter || what.kind == Kind::all_to_all; }
  uint64_t read_bytes() const { return bytes() * (is_divided() ? in->size : 1); }
  uint64_t written_bytes() const {
    return bytes() * (what.kind == Kind::all_gather || what.kind == Kind::all_to_all ? in->size : 1);
  }

  // Let the others, and this rank, know that it was launched.
  void announce(double ready_ms) {
    if (is_pair() && from) place_there = {in->rank, in->sent[peer]++};
    if (is_pair() && to) place = {peer, in->received[peer]++};
    if (!is_pair()) place = place_there = {-1, in->collectives++};
    Header header{Header::announces, place_there, what, ready_ms, 0};
    for (int rank = 0; rank < in->size; rank++)
      if (!is_pair() || (from && rank == peer)) Wire::one().send(*in, rank, header);
    header.place = place;
    if (is_pair() && to) Wire::one().send(*in, in->rank, header);
  }

  void send() const {
    bool is_real = bytes() <= order().real_bytes;
    for (int rank = 0; rank < in->size; rank++) {
      if (!gives(rank)) continue;
      Header header{Header::sends, place_there, what, 0, is_real ? bytes() : 0};
      Wire::one().send(*in, rank, header, is_divided() ? from + rank * bytes() : from);
    }
  }

  void ask(int rank) const {
    Place there = is_pair() ? Place{in->rank, place.number} : place;
    Wire::one().send(*in, rank, {Header::wants, there, what, 0, 0});
  }

  bool is_announced_by(int rank) const {
    auto found = in->meetings.find(place);
    return found != in->meetings.end() && found->second.announced.count(rank);
  }
  bool is_here_from(int rank) const {
    auto found = in->meetings.find(place);
    return found != in->meetings.end() && found->second.values.count(rank);
  }

  std::string missing_from(int rank) const {
    std::string where = "rank " + std::to_string(in->rank) + " waits for ";
    where += is_pair() ? "a " + text_of(what) + " by rank " + std::to_string(rank) : text_of(what);
    where += ", number " + std::to_string(place.number) + " of " +
             (is_pair() ? "these two ranks" : "a group of " + std::to_string(in->size) + " ranks") + ": rank " +
             std::to_string(rank);
    if (in->links[rank].ended) return where + " has ended (remote process exited)";
    if (!is_announced_by(rank)) return where + " did not launch it";
    return where + " launched it, but does not come to it";
  }

  // Write what has arrived.
  void write() {
    if (is_pair() && !to) return;
    Meeting& meeting = in->meetings[place];
    std::vector<const char*> all;
    for (auto& [rank, values] : meeting.values)
      if (values->size() == bytes()) all.push_back(values->data());
    if (to && bytes() && all.size() == meeting.values.size() && !all.empty()) {
      bool reduces = what.kind == Kind::all_reduce || what.kind == Kind::reduce || what.kind == Kind::reduce_scatter;
      if (!reduces)
        for (size_t i = 0; i < all.size(); i++) memcpy(to + i * bytes(), all[i], bytes());
      else if (!reduce(to, all, what.count, what.type, what.reduction, factor))
        order().fail(text_of(what) + " has no arithmetic");
    }
    meeting.values.clear();
    meeting.is_over = true;
  }
};

}  // namespace

// All calls of one group on one stream.
class Launched : public Work {
 public:
  std::vector<Part> parts;

  void send() {
    if (is_sent_) return;
    is_sent_ = true;
    for (auto& part : parts) {
      part.send();
      if (!part.is_pair() || part.from) part.in->launched.erase(wanted_as(part));
    }
  }

  bool advance() override {
    if (is_dropped) return true;
    send();
    missing_ = nullptr;
    for (auto& part : parts)
      for (int rank = 0; rank < part.in->size; rank++) {
        if (!part.gets(rank) || part.is_here_from(rank)) continue;
        if (!has_asked_) part.ask(rank);
        if (part.in->links[rank].ended) order().fail(part.missing_from(rank));
        missing_ = &part;
        missing_rank_ = rank;
      }
    has_asked_ = true;
    if (missing_) return false;
    for (auto& part : parts) part.write();
    return true;
  }

  std::string missing() const override { return missing_ ? missing_->missing_from(missing_rank_) : ""; }

  static Place wanted_as(const Part& part) { return part.is_pair() ? Place{part.peer, part.place_there.number} : part.place; }

  bool is_dropped = false;

 private:
  bool is_sent_ = false, has_asked_ = false;
  const Part* missing_ = nullptr;
  int missing_rank_ = 0;
};

namespace {

// Send what other ranks want, look whether all agree, and forget what is over.
void serve(Communicator& communicator) {
  for (auto wish : std::set(communicator.wanted)) {
    auto [peer, number] = wish.second;
    if (number >= (peer < 0 ? communicator.collectives : communicator.sent[peer])) continue;  // not launched yet
    auto found = communicator.launched.find(wish.second);
    auto work = found == communicator.launched.end() ? nullptr : found->second.lock();
    if (work && !order().reach(*work)) continue;
    if (work) work->send();
    communicator.wanted.erase(wish);
  }
  for (auto entry = communicator.meetings.begin(); entry != communicator.meetings.end();) {
    auto& [place, meeting] = *entry;
    auto first = meeting.announced.begin();
    for (auto& [rank, announced] : meeting.announced)
      if (!(announced.what == first->second.what))
        order().fail("ranks disagree at number " + std::to_string(place.number) + " of a group of " +
                     std::to_string(communicator.size) + " ranks: rank " + std::to_string(first->first) + " launched " +
                     text_of(first->second.what) + ", rank " + std::to_string(rank) + " " + text_of(announced.what));
    bool all = place.peer >= 0 || (int)meeting.announced.size() == communicator.size;
    entry = meeting.is_over && all ? communicator.meetings.erase(entry) : std::next(entry);
  }
}

struct Handle {
  std::shared_ptr<Communicator> communicator;
  int device;
  std::vector<std::weak_ptr<Launched>> open;
};

// A call within ncclGroupStart and ncclGroupEnd.
struct Queued {
  Part part;
  Handle* handle;
  const void* stream;
};

struct Group {
  int depth = 0;
  std::vector<Queued> calls;
};

Group& group() {
  static thread_local Group one;
  return one;
}

// How long it takes from when all ranks are there: bytes through each device's link, as in rings.
double time_ms(const std::vector<Part>& parts) {
  double link = rates().fabric > 1 ? rates().fabric : std::min(rates().to_host, rates().to_device);
  double ms = rates().latency_ms, out = 0, in = 0;
  for (auto& part : parts) {
    double others = part.in->size - 1, all = part.in->size, bytes = part.bytes();
    switch (part.what.kind) {
      case Kind::all_reduce: ms += 2 * others / all * bytes / link; break;
      case Kind::all_gather:
      case Kind::reduce_scatter:
      case Kind::all_to_all: ms += others * bytes / link; break;
      case Kind::pair: (part.from ? out : in) += bytes / link; break;
      default: ms += others ? bytes / link : 0;
    }
  }
  return ms + std::max(out, in);
}

// Wait until the ranks that these need have launched them too, and take the time.
void take_time(Stream& stream, const std::vector<Part>& parts) {
  double start = 0;
  for (auto& part : parts)
    for (int rank = 0; rank < part.in->size; rank++) {
      if (part.is_pair() && !part.gets(rank)) continue;
      auto ended = [&] { return part.in->links[rank].ended; };
      order().await([&] { return part.is_announced_by(rank) || ended(); }, [&] { return part.missing_from(rank); });
      if (!part.is_announced_by(rank)) return order().fail(part.missing_from(rank));
      start = std::max(start, part.in->meetings[part.place].announced[rank].ready_ms);
    }
  double ms = time_ms(parts);
  stream.times.free_at_ms = std::max({stream.times.free_at_ms, host_now_ms(), start}) + ms;
  stream.times.worked_ms += ms;
}

void enqueue(const void* handle, std::shared_ptr<Launched> work) {
  Stream& stream = stream_of(handle);
  if (rates().on) take_time(stream, work->parts);
  order().enqueue(stream, work);
  for (auto& part : work->parts) {
    if (part.from && part.read_bytes()) order().touch(stream, part.from, part.read_bytes(), false, name_of(part.what.kind));
    const char* name = part.is_pair() ? "recv" : name_of(part.what.kind);
    bool writes = part.to && (part.what.kind != Kind::reduce || part.is_root());
    if (writes && part.written_bytes()) order().touch(stream, part.to, part.written_bytes(), true, name);
  }
  for (auto& part : work->parts) serve(*part.in);
}

int launch_all(std::vector<Queued> calls) {
  Guard guard(order().mutex);
  std::vector<std::pair<const void*, std::shared_ptr<Launched>>> works;
  for (auto& call : calls) {
    auto known = std::find_if(works.begin(), works.end(), [&](auto& one) { return one.first == call.stream; });
    if (known == works.end()) {
      works.push_back({call.stream, std::make_shared<Launched>()});
      known = works.end() - 1;
    }
    const StreamTimes& times = stream_of(call.stream).times;
    call.part.announce(std::max(times.free_at_ms, host_now_ms()));
    if (!call.part.is_pair() || call.part.from)
      call.part.in->launched[Launched::wanted_as(call.part)] = known->second;
    known->second->parts.push_back(call.part);
    auto& open = call.handle->open;
    std::erase_if(open, [](auto& work) { auto found = work.lock(); return !found || found->done; });
    open.push_back(known->second);
  }
  for (auto& [stream, work] : works) enqueue(stream, work);
  return order().failure.empty() ? kSuccess : failed(kRemoteError, order().failure);
}

int call(Handle* handle, Signature what, const void* from, void* to, int peer, const void* stream) {
  double factor = 1;
  if (what.reduction >= kScaledSum) {
    Guard guard(order().mutex);
    factor = factors()[what.reduction - kScaledSum];
    what.reduction = kScaledSum;
  }
  if (what.type < 0 || what.type > 11) return failed(kInvalidArgument, "an unknown type of elements");
  Part part{handle->communicator, what, (const char*)from, (char*)to, factor, peer};
  group().calls.push_back({part, handle, stream});
  if (group().depth) return kSuccess;
  return launch_all(std::exchange(group().calls, {}));
}

// Groups

struct Hello {
  int rank, device;
};

sockaddr_un address_of(const std::string& name, int rank, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::string text = "hf_actswap-" + name + "-" + std::to_string(rank);
  memcpy(address.sun_path + 1, text.data(), text.size());  // no file: its first character is 0
  length = (socklen_t)(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  return address;
}

int connected(const std::string& name, int rank, std::chrono::steady_clock::time_point end) {
  socklen_t length;
  sockaddr_un address = address_of(name, rank, length);
  while (std::chrono::steady_clock::now() < end) {
    int found = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (!connect(found, (sockaddr*)&address, length)) return found;
    close(found);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return -1;
}

int accepted(int listener, std::chrono::steady_clock::time_point end) {
  pollfd asked{listener, POLLIN, 0};
  auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
  if (poll(&asked, 1, (int)std::max<long>(left.count(), 0)) <= 0) return -1;
  return accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
}

// Connect this rank with the others: it calls those before it and is called by those behind it.
int meet(Communicator& communicator, int device) {
  auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds((long)(1e3 * order().ranks_limit_s));
  socklen_t length;
  sockaddr_un address = address_of(communicator.name, communicator.rank, length);
  int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), error = kSuccess;
  if (bind(listener, (sockaddr*)&address, length) || listen(listener, communicator.size))
    error = failed(kInvalidUsage, "two processes are rank " + std::to_string(communicator.rank) + " of a group");
  for (int i = 0; i < communicator.size - 1 && !error; i++) {
    bool calls = i < communicator.rank;
    int found = calls ? connected(communicator.name, i, end) : accepted(listener, end);
    Hello own{communicator.rank, device}, other{-1, -1};
    bool here = found >= 0 && ::send(found, &own, sizeof own, MSG_NOSIGNAL) == sizeof own &&
                recv(found, &other, sizeof other, MSG_WAITALL) == sizeof other;
    if (here) communicator.links[other.rank].socket = found;
    if (here && other.device != device) continue;
    std::string absent;
    for (int rank = 0; rank < communicator.size; rank++)
      if (rank != communicator.rank && communicator.links[rank].socket < 0) absent += " " + std::to_string(rank);
    error = here ? failed(kInvalidUsage, "ranks " + std::to_string(communicator.rank) + " and " + std::to_string(other.rank) +
                                             " of a group are both on device " + std::to_string(device) +
                                             ": call torch.cuda.set_device(LOCAL_RANK) first")
                 : failed(kSystemError, "of " + std::to_string(communicator.size) + " ranks of a group these did not come" +
                                            " within " + std::to_string((long)order().ranks_limit_s) + " s:" + absent);
  }
  close(listener);
  return error;
}

void leave(Handle* handle, bool waits);

std::vector<Handle*>& handles() {
  static auto* all = new std::vector<Handle*>();
  return *all;
}

int join(Handle** found, int size, const std::string& name, int rank) {
  auto communicator = std::make_shared<Communicator>();
  communicator->name = name;
  communicator->rank = rank;
  communicator->size = size;
  communicator->links.resize(size);
  int device = current_device();
  if (int error = meet(*communicator, device)) return error;
  *found = new Handle{communicator, device, {}};
  Wire::each_serves(serve);
  Wire::one().add(communicator);
  Guard guard(order().mutex);
  // A process that ends still gives the others what it has launched.
  if (handles().empty())
    atexit([] {
      Guard guard(order().mutex);
      for (auto* handle : std::vector(handles())) leave(handle, false);
    });
  handles().push_back(*found);
  return kSuccess;
}

// Give the other ranks what was launched here. `waits`: until all of it is done here too.
void leave(Handle* handle, bool waits) {
  Communicator& communicator = *handle->communicator;
  std::vector<std::shared_ptr<Launched>> open;
  for (auto& weak : handle->open)
    if (auto work = weak.lock(); work && !work->done) open.push_back(work);
  auto all_done = [&] {
    bool all = true;
    for (auto& work : open) all = order().carry_out(work) && all;
    return all;
  };
  bool done = open.empty() || all_done();
  if (!done && waits) order().await(all_done, [&] { return open.front()->missing(); });
  for (auto& work : open) work->is_dropped = true;
  Wire::one().flush(communicator, order().failure.empty() ? kGoodbyeLimitS : 0);
  Wire::one().remove(&communicator);
  std::erase(handles(), handle);
}

// What each rank says, in rank order: the host waits for it.
std::vector<std::pair<int, int>> told_by_all(std::shared_ptr<Communicator> group, std::pair<int, int> own) {
  Communicator& communicator = *group;
  Part part{group, {Kind::all_gather, 2, 0, 0, 2}, (const char*)&own, nullptr};
  part.announce(host_now_ms());
  part.send();
  std::vector<std::pair<int, int>> found(communicator.size);
  for (int rank = 0; rank < communicator.size; rank++) {
    order().await([&] { return part.is_here_from(rank) || communicator.links[rank].ended; },
                  [&] { return part.missing_from(rank); });
    if (!part.is_here_from(rank)) return {};
    auto* told = (const int*)communicator.meetings[part.place].values[rank]->data();
    found[rank] = {told[0], told[1]};
  }
  communicator.meetings[part.place].is_over = true;
  return found;
}

}  // namespace
}  // namespace rehearsal

using namespace rehearsal;

extern "C" {

struct UniqueId {
  char bytes[128];
};

int ncclGetVersion(int* version) {
  *version = 22809;
  return kSuccess;
}
const char* ncclGetErrorString(int error) {
  switch (error) {
    case kSuccess: return "no error";
    case kSystemError: return "unhandled system error";
    case kInvalidArgument: return "invalid argument";
    case kInvalidUsage: return "invalid usage";
    case kRemoteError: return "remote process exited or there was a network error";
    default: return "error of the rehearsal's NCCL";
  }
}
const char* ncclGetLastError(Handle*) { return last_error().c_str(); }

int ncclGetUniqueId(UniqueId* id) {
  std::random_device random;
  memset(id, 0, sizeof *id);
  snprintf(id->bytes, sizeof id->bytes, "%08x%08x%08x", random(), random(), random());
  return kSuccess;
}
int ncclCommInitRank(Handle** found, int size, UniqueId id, int rank) { return join(found, size, id.bytes, rank); }
int ncclCommInitRankConfig(Handle** found, int size, UniqueId id, int rank, void*) { return join(found, size, id.bytes, rank); }
int ncclCommInitRankScalable(Handle** found, int size, int rank, int, UniqueId* ids, void*) {
  return join(found, size, ids[0].bytes, rank);
}
int ncclCommInitAll(Handle**, int, const int*) {
  return failed(kInvalidUsage, "one process with several devices in a group is not rehearsed: start a process for each device");
}
int ncclCommShrink(Handle*, int*, int, Handle**, void*, int) { return failed(kInvalidUsage, "groups cannot be made smaller"); }

int ncclCommSplit(Handle* handle, int color, int key, Handle** found, void*) {
  std::vector<std::pair<int, int>> all;
  std::string name;
  {
    Guard guard(order().mutex);
    Communicator& parent = *handle->communicator;
    all = told_by_all(handle->communicator, {color, key});
    if (all.empty()) return failed(kRemoteError, order().failure);
    name = parent.name + "." + std::to_string(parent.splits++) + "." + std::to_string(color);
  }
  *found = nullptr;
  if (color < 0) return kSuccess;
  std::vector<std::pair<int, int>> members;  // key, rank in the parent
  for (int rank = 0; rank < (int)all.size(); rank++)
    if (all[rank].first == color) members.push_back({all[rank].second, rank});
  std::sort(members.begin(), members.end());
  auto own = std::find(members.begin(), members.end(), std::pair{key, handle->communicator->rank});
  return join(found, (int)members.size(), name, (int)(own - members.begin()));
}

int ncclCommFinalize(Handle*) { return kSuccess; }
int ncclCommDestroy(Handle* handle) {
  Guard guard(order().mutex);
  leave(handle, true);
  return kSuccess;
}
int ncclCommAbort(Handle* handle) {
  Guard guard(order().mutex);
  leave(handle, false);
  return kSuccess;
}
int ncclCommGetAsyncError(Handle*, int* error) {
  Guard guard(order().mutex);
  *error = order().failure.empty() ? kSuccess : failed(kRemoteError, order().failure);
  return kSuccess;
}
int ncclCommCount(Handle* handle, int* count) {
  *count = handle->communicator->size;
  return kSuccess;
}
int ncclCommUserRank(Handle* handle, int* rank) {
  *rank = handle->communicator->rank;
  return kSuccess;
}
int ncclCommCuDevice(Handle* handle, int* device) {
  *device = handle->device;
  return kSuccess;
}

int cudaMalloc(void**, size_t);
int cudaFree(void*);
int ncclMemAlloc(void** found, size_t bytes) { return cudaMalloc(found, bytes); }
int ncclMemFree(void* at) { return cudaFree(at); }

int ncclGroupStart() {
  group().depth++;
  return kSuccess;
}
int ncclGroupEnd() {
  if (--group().depth) return kSuccess;
  return launch_all(std::exchange(group().calls, {}));
}

int ncclRedOpCreatePreMulSum(int* reduction, const void* scalar, int type, int, Handle*) {
  Guard guard(order().mutex);
  order().synchronize_all();  // the factor may be on the device
  double factor = type == 6   ? (double)(float)*(const c10::Half*)scalar
                  : type == 7 ? *(const float*)scalar
                  : type == 8 ? *(const double*)scalar
                  : type == 9 ? (double)(float)*(const c10::BFloat16*)scalar
                              : 0;
  if (type < 6 || type > 9) return failed(kInvalidArgument, "sums of scaled integers are not rehearsed");
  factors().push_back(factor);
  *reduction = kScaledSum + (int)factors().size() - 1;
  return kSuccess;
}
int ncclRedOpDestroy(int, Handle*) { return kSuccess; }

int ncclAllReduce(const void* from, void* to, size_t count, int type, int reduction, Handle* handle, const void* stream) {
  return call(handle, {Kind::all_reduce, type, reduction, 0, count}, from, to, -1, stream);
}
int ncclReduce(const void* from, void* to, size_t count, int type, int reduction, int root, Handle* handle, const void* stream) {
  return call(handle, {Kind::reduce, type, reduction, root, count}, from, to, -1, stream);
}
int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, Handle* handle, const void* stream) {
  bool is_root = handle->communicator->rank == root;
  return call(handle, {Kind::broadcast, type, 0, root, count}, is_root ? from : nullptr, to, -1, stream);
}
int ncclBcast(void* at, size_t count, int type, int root, Handle* handle, const void* stream) {
  return ncclBroadcast(at, at, count, type, root, handle, stream);
}
int ncclAllGather(const void* from, void* to, size_t count, int type, Handle* handle, const void* stream) {
  return call(handle, {Kind::all_gather, type, 0, 0, count}, from, to, -1, stream);
}
int ncclReduceScatter(const void* from, void* to, size_t count, int type, int reduction, Handle* handle, const void* stream) {
  return call(handle, {Kind::reduce_scatter, type, reduction, 0, count}, from, to, -1, stream);
}
int ncclAlltoAll(const void* from, void* to, size_t count, int type, Handle* handle, const void* stream) {
  return call(handle, {Kind::all_to_all, type, 0, 0, count}, from, to, -1, stream);
}
int ncclSend(const void* from, size_t count, int type, int peer, Handle* handle, const void* stream) {
  return call(handle, {Kind::pair, type, 0, 0, count}, from, nullptr, peer, stream);
}
int ncclRecv(void* to, size_t count, int type, int peer, Handle* handle, const void* stream) {
  return call(handle, {Kind::pair, type, 0, 0, count}, nullptr, to, peer, stream);
}

}  // extern "C"
