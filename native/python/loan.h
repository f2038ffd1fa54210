// Memory that a call lends to a delegate is there until the call's work is done: while run() runs, and in the
// host functions that were given to a stream before it returned.
#pragma once

#include <atomic>
#include <cstdint>

namespace headrace {

class Loan {
 public:
  // A new moment; moments are counted over the process. Thread-safe, as all of this.
  static uint64_t now() {
    static std::atomic<uint64_t> moments{0};
    return ++moments;
  }
  void end() { ended_ = now(); }
  // Whether run() has not returned.
  bool running() const { return ended_ == kRunning; }
  // Whether what the calling thread does now belongs to the call that lent.
  bool covers() const { return running() || (given_ != 0 && given_ < ended_); }

  // Around a host function on the thread that runs it. `given`: the moment when it was given to its stream.
  class Scope {
   public:
    explicit Scope(uint64_t given) : former_(given_) { given_ = given; }
    ~Scope() { given_ = former_; }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    uint64_t former_;
  };

 private:
  static constexpr uint64_t kRunning = UINT64_MAX;
  static inline thread_local uint64_t given_ = 0;
  std::atomic<uint64_t> ended_{kRunning};
};

}  // namespace headrace
