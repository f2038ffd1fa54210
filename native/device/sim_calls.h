// The calls that a simulated device was given: counted, in order, and made to fail or to be held back where a
// test asks for it. Not locked: the device's lock is held around every call.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "headrace/device.h"

namespace headrace::sim {

class Calls {
 public:
  explicit Calls(std::string device) : device_(std::move(device)) {}

  Status inject(const SimFault& fault);
  Status delay(const std::string& operation, int64_t at);
  void clear_faults();

  // Counts a call of the thread, and fails it if a fault was asked for.
  Status begin(const char* operation, uint64_t thread);
  // Whether the work of this call is to be held back.
  bool delayed(const char* operation);
  // Threads by first use.
  int thread_number(uint64_t thread);

  int64_t count(const std::string& operation) const;
  std::vector<std::pair<int, std::string>> submissions() const;

 private:
  struct Countdown {
    std::string operation;
    int64_t left;
    ErrorCode code;
  };
  // Counts the matching ones down; the first that has come is taken out.
  static bool due(std::vector<Countdown>& countdowns, const char* operation, ErrorCode* code);

  std::string device_;
  std::vector<Countdown> faults_;
  std::vector<Countdown> delays_;
  std::map<std::string, int64_t> counts_;
  std::unordered_map<uint64_t, int> threads_;
  static constexpr size_t kMostSubmissions = 1'000'000;  // the latest; a long run must not grow without end
  std::deque<std::pair<int, const char*>> submissions_;
};

}  // namespace headrace::sim
