// The calls that a simulated device was given, in order; work is held back where a test asks for it. Not
// locked: the device's lock is held around every call.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "device/faults.h"

namespace headrace::sim {

class Calls {
 public:
  explicit Calls(std::string device) : device_(std::move(device)) {}

  Status delay(const std::string& operation, int64_t at);
  void clear_delays() { delays_.clear(); }

  // A call of the thread.
  void note(const char* operation, uint64_t thread);
  // Whether the work of this call is to be held back.
  bool delayed(const char* operation);
  // Threads by first use.
  int thread_number(uint64_t thread);

  std::vector<std::pair<int, std::string>> submissions() const;

 private:
  std::string device_;
  Countdowns delays_;
  std::unordered_map<uint64_t, int> threads_;
  static constexpr size_t kMostSubmissions = 1'000'000;  // the latest; a long run must not grow without end
  std::deque<std::pair<int, const char*>> submissions_;
};

}  // namespace headrace::sim
