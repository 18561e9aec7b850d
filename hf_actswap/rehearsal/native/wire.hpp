// What ranks send each other: one socket for each two ranks of a communicator, served by a thread of the process.
//
// A rank announces each operation when it is launched, with all that the others must agree with. It sends values when they
// are wanted: when it carries the operation out itself, or another rank asks for them. So a rank that nobody waits for is as
// late as it may be, and one that has nothing more to launch still serves the others, as a device does.
#pragma once
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "device.hpp"

namespace rehearsal {

enum class Kind : int32_t { all_reduce, broadcast, reduce, all_gather, reduce_scatter, all_to_all, pair };

// What all ranks of an operation must agree with.
struct Signature {
  Kind kind;
  int32_t type, reduction, root;
  uint64_t count;
  bool operator==(const Signature&) const = default;
};

// An operation of a communicator: the number of a collective, or of what this rank gets from `peer`.
struct Place {
  int32_t peer = -1;
  uint64_t number = 0;
  auto operator<=>(const Place&) const = default;
};

using Bytes = std::shared_ptr<std::vector<char>>;

// What is known of an operation here.
struct Meeting {
  struct Announced {
    Signature what;
    double ready_ms;
  };
  std::map<int, Announced> announced;  // by rank
  std::map<int, Bytes> values;         // by rank
  bool is_over = false;
};

struct Header {
  enum What : int32_t { announces, sends, wants } what;
  Place place;  // as the receiver names it; of `wants`, as the rank names it that wants it
  Signature signature;
  double ready_ms;
  uint64_t bytes;
};

struct Link {
  int socket = -1;
  bool ended = false;
  std::vector<char> in;
  std::deque<Bytes> out;
  size_t written = 0;  // of the first of `out`
};

class Launched;  // what reads the values of an operation (nccl.cpp)

struct Communicator {
  std::string name;
  int rank = 0, size = 1, splits = 0;
  std::vector<Link> links;
  std::map<Place, Meeting> meetings;
  std::map<Place, std::weak_ptr<Launched>> launched;  // with what others get from it, until it is sent
  std::set<std::pair<int, Place>> wanted;             // by these ranks, and not sent yet
  uint64_t collectives = 0;
  std::map<int, uint64_t> sent, received;  // numbers of pairs, by rank
};

class Wire {
 public:
  static Wire& one() {
    static Wire* wire = new Wire();  // never destroyed: the thread runs until the process ends
    return *wire;
  }

  void add(std::shared_ptr<Communicator> communicator) {
    Guard guard(order().mutex);
    communicators_.push_back(communicator);
    if (!started_) std::thread([this] { serve(); }).detach();
    started_ = true;
    wake();
  }

  void remove(Communicator* gone) {
    std::erase_if(communicators_, [&](auto& one) { return one.get() == gone; });
    for (auto& link : gone->links) end(link);
    wake();
  }

  void send(Communicator& communicator, int to, const Header& header, const char* values = nullptr) {
    auto message = std::make_shared<std::vector<char>>(sizeof header + header.bytes);
    memcpy(message->data(), &header, sizeof header);
    if (header.bytes) memcpy(message->data() + sizeof header, values, header.bytes);
    if (to == communicator.rank) return receive(communicator, to, header, message->data() + sizeof header);
    Link& link = communicator.links[to];
    if (link.socket < 0) return;
    link.out.push_back(message);
    wake();
  }

  // Send what is left to send, for a limited time.
  void flush(Communicator& communicator, double limit_s) {
    auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds((long)(1e3 * limit_s));
    auto is_left = [&] {
      for (auto& link : communicator.links)
        if (link.socket >= 0 && !link.out.empty()) return true;
      return false;
    };
    while (is_left() && order().mutex.wait(end)) {
    }
  }

  static void each_serves(void (*call)(Communicator&)) { one().serves_ = call; }

 private:
  Wire() {
    if (pipe2(pipe_, O_CLOEXEC | O_NONBLOCK)) pipe_[0] = pipe_[1] = -1;
    // A process that this one forks must not keep its connections open.
    pthread_atfork(nullptr, nullptr, [] {
      for (auto& communicator : one().communicators_)
        for (auto& link : communicator->links) end(link);
    });
  }

  static void end(Link& link) {
    if (link.socket >= 0) close(link.socket);
    link.socket = -1;
    link.ended = true;
    link.out.clear();
  }

  void wake() {
    char any = 0;
    if (write(pipe_[1], &any, 1) < 0) return;  // full: it wakes anyway
  }

  void serve() {
    for (double before_ms = 0;;) {
      std::vector<pollfd> asked{{pipe_[0], POLLIN, 0}};
      {
        Guard guard(order().mutex);
        for (auto& communicator : communicators_)
          for (auto& link : communicator->links)
            if (link.socket >= 0)
              asked.push_back({link.socket, (short)(POLLIN | (link.out.empty() ? 0 : POLLOUT)), 0});
        double now_ms = thread_ms();
        if (rates().on) host_shift_ms().fetch_add(before_ms - now_ms);  // it is no time of the program
        before_ms = now_ms;
      }
      poll(asked.data(), asked.size(), -1);
      char dropped[256];
      while (read(pipe_[0], dropped, sizeof dropped) > 0) {
      }
      Guard guard(order().mutex);
      for (auto& communicator : std::vector(communicators_)) {
        for (int rank = 0; rank < communicator->size; rank++) exchange(*communicator, rank);
        serves_(*communicator);
      }
      order().progress();
      order().mutex.tell();
    }
  }

  static double thread_ms() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
  }

  void exchange(Communicator& communicator, int rank) {
    Link& link = communicator.links[rank];
    if (link.socket < 0) return;
    while (!link.out.empty()) {
      auto& message = *link.out.front();
      ssize_t done = ::send(link.socket, message.data() + link.written, message.size() - link.written,
                            MSG_DONTWAIT | MSG_NOSIGNAL);
      if (done < 0 && errno != EAGAIN && errno != EINTR) return end(link);
      if (done < 0 || (link.written += done) < message.size()) break;
      link.out.pop_front();
      link.written = 0;
    }
    static thread_local std::vector<char> piece(1 << 20);
    for (;;) {
      ssize_t done = recv(link.socket, piece.data(), piece.size(), MSG_DONTWAIT);
      if (done > 0) {
        link.in.insert(link.in.end(), piece.data(), piece.data() + done);
        continue;
      }
      bool lost = done == 0 || (errno != EAGAIN && errno != EINTR);
      take_messages(communicator, rank, link);
      return lost ? end(link) : void();
    }
  }

  void take_messages(Communicator& communicator, int rank, Link& link) {
    size_t at = 0;
    for (Header header; link.in.size() - at >= sizeof header;) {
      memcpy(&header, link.in.data() + at, sizeof header);
      if (link.in.size() - at < sizeof header + header.bytes) break;
      receive(communicator, rank, header, link.in.data() + at + sizeof header);
      at += sizeof header + header.bytes;
    }
    link.in.erase(link.in.begin(), link.in.begin() + at);
  }

  static void receive(Communicator& communicator, int from, const Header& header, const char* values) {
    if (header.what == Header::wants) {
      communicator.wanted.insert({from, header.place});
      return;
    }
    Meeting& meeting = communicator.meetings[header.place];
    if (header.what == Header::announces) meeting.announced[from] = {header.signature, header.ready_ms};
    else meeting.values[from] = std::make_shared<std::vector<char>>(values, values + header.bytes);
  }

  int pipe_[2];
  bool started_ = false;
  std::vector<std::shared_ptr<Communicator>> communicators_;
  void (*serves_)(Communicator&) = nullptr;
};

}  // namespace rehearsal
