// Calls of a device's operations: counted, and made to fail where a test asks for it, whichever maker is
// behind.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "headrace/device.h"

namespace headrace {

// Calls that are to be met: the `left`-th from now on of one operation, or of any.
class Countdowns {
 public:
  void add(std::string operation, int64_t left, ErrorCode code);
  void clear() { list_.clear(); }
  // Counts the matching ones down; the first that has come is taken out.
  bool due(const char* operation, ErrorCode* code);

 private:
  struct Countdown {
    std::string operation;  // empty: any
    int64_t left;
    ErrorCode code;
  };
  std::vector<Countdown> list_;
};

// Thread-safe.
class Faults {
 public:
  explicit Faults(std::string device) : device_(std::move(device)) {}
  Status inject(const Fault& fault);
  void clear();
  // Counts the call, and fails it if a fault was asked for.
  Status begin(const char* operation);
  int64_t count(const std::string& operation) const;

 private:
  const std::string device_;
  mutable std::mutex mutex_;
  Countdowns faults_;
  std::map<std::string, int64_t> counts_;
};

}  // namespace headrace
