// One operation of the simulated device: what it does, what it waits for, what became of it.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "headrace/device.h"

namespace headrace::sim {

struct Block;

enum class OpKind : uint8_t {
  kAllocate,
  kFree,
  kCopy,
  kFill,
  kCall,
  kRecord,
  kWait,
  kUpload,
  kLaunch,    // a graph's launch begins
  kLaunched,  // and ends
};

// Whether skipping it loses something: the others only order, or keep the books of memory.
constexpr bool is_work(OpKind kind) {
  return kind == OpKind::kCopy || kind == OpKind::kFill || kind == OpKind::kCall;
}

// What an operation does. A node of a graph has one, and each launch does it again.
struct Action {
  OpKind kind;
  void* to = nullptr;
  const void* from = nullptr;
  size_t nbytes = 0;
  uint8_t byte = 0;
  HostFunction function = {};
  std::vector<Access> accesses = {};
  std::vector<std::shared_ptr<Block>> blocks = {};  // what it touches; memory stays until it ran
  PartitionRef partition = {};
};
using ActionRef = std::shared_ptr<const Action>;

// That an operation failed, or that work was skipped because one before it had. Told: a wait returned it.
struct Failure {
  std::shared_ptr<const Status> status;  // of the operation that failed
  uint64_t root = 0;                     // its number
  uint64_t told_at = UINT64_MAX;         // the last operation enqueued before it was told
  std::vector<std::shared_ptr<Failure>> causes;

  bool told() const { return told_at != UINT64_MAX; }
};
using FailureRef = std::shared_ptr<Failure>;

struct Op {
  enum class State : uint8_t { kPending, kRunning, kDone };

  // What it is, for whoever checks the order.
  uint64_t id = 0;  // in order of submission
  OpKind kind;
  StreamHandle stream = 0;
  int thread = 0;       // by first use
  uint64_t launch = 0;  // the launch of a graph that it belongs to; 0: none
  ActionRef action;     // until it ran

  // What the schedule knows.
  State state = State::kPending;
  bool held = false;
  size_t unmet = 0;                        // operations before it that are not done
  std::vector<std::shared_ptr<Op>> after;  // those, until it is done
  std::vector<Op*> before;                 // who waits for it
  std::vector<FailureRef> inherited;
  uint64_t mark = 0;  // of the last walk that met it

  // What became of it.
  std::vector<FailureRef> failures;  // its own, or for what is not work, those it inherited
  int64_t at_ns = 0;                 // the clock when it was done

  bool done() const { return state == State::kDone; }
  // Done, and nothing of it is left to tell.
  bool settled() const {
    return done() && std::all_of(failures.begin(), failures.end(), [](auto& f) { return f->told(); });
  }
};
using OpRef = std::shared_ptr<Op>;

// The device's lock, and what has to be destroyed after it is released: functions may own Python objects,
// whose destruction takes the GIL or calls the device.
class Guard {
 public:
  explicit Guard(std::mutex& mutex) : lock_(mutex) {}
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

  void discard(std::shared_ptr<const void> object) { discarded_.push_back(std::move(object)); }
  // Destroys what was discarded, with the lock released meanwhile.
  void flush() {
    if (discarded_.empty()) return;
    lock_.unlock();
    discarded_.clear();
    lock_.lock();
  }
  void unlock() { lock_.unlock(); }
  void lock() { lock_.lock(); }
  void wait(std::condition_variable& changed) { changed.wait(lock_); }

 private:
  std::vector<std::shared_ptr<const void>> discarded_;
  std::unique_lock<std::mutex> lock_;  // after it, so released before
};

}  // namespace headrace::sim
