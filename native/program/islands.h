// Delegate calls as the plan shows them: which arguments go in, which come out, and where they lie.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "headrace/capture.h"
#include "program/plan.h"

namespace headrace {

struct IslandPlan {
  int32_t instruction = 0;  // counted over all chains
  int32_t delegate = 0;     // index into MethodPlan::delegates
  std::vector<int32_t> args;
  // How many of `args`, from the front, are inputs; -1 where neither the delegate's compile spec
  // "headrace.inputs" (decimal) nor the plan says it. The engine does not mark where inputs end.
  int32_t num_inputs = -1;
};

std::vector<IslandPlan> islands_of(const MethodPlan& method);

// Whether any planned buffer or tensor of the method is on a device.
bool uses_device(const MethodPlan& method);

// What a delegate keeps for all its islands together, by its name; ended with its owner. Threads: any.
class DelegateState {
 public:
  // Made at the first question.
  template <class T>
  std::shared_ptr<T> get(const std::string& delegate) {
    std::lock_guard lock(mutex_);
    std::shared_ptr<void>& kept = kept_[delegate];
    if (kept == nullptr) kept = std::make_shared<T>();
    return std::static_pointer_cast<T>(kept);
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<void>> kept_;
};

// What the method that is being loaded belongs to.
struct LoadOwners {
  DelegateState* program = nullptr;  // shared by its methods and their instances: what never changes
  DelegateState* instance =
      nullptr;  // of one copy of one method: what calls change. Outlives a mended method.
};

// Names the islands of the method that the calling thread loads, for as long as it lives: a delegate is told
// its payload and nothing else. `parts`, one for each of the method's delegates, takes what these give to
// take_part() (headrace/capture.h).
class LoadScope {
 public:
  LoadScope(const MethodPlan& method, const std::vector<IslandPlan>& islands, LoadOwners owners,
            std::vector<std::shared_ptr<IslandCapture>>& parts);
  ~LoadScope();
  LoadScope(const LoadScope&) = delete;
  LoadScope& operator=(const LoadScope&) = delete;

 private:
  friend const IslandPlan* claim_island(const std::string&, const void*);
  friend LoadOwners load_owners();
  friend const MethodPlan* loading_method();
  friend bool take_part(const std::string&, const void*, std::shared_ptr<IslandCapture>);
  const MethodPlan& method_;
  const std::vector<IslandPlan>& islands_;
  std::vector<char> claimed_;
  LoadOwners owners_;
  std::vector<std::shared_ptr<IslandCapture>>& parts_;
  LoadScope* outer_;
};

// The island of the method being loaded whose delegate has this name and payload, each once. Null outside a
// LoadScope. What it points to lives as long as the scope.
HEADRACE_API const IslandPlan* claim_island(const std::string& delegate, const void* payload);

// Nulls outside a LoadScope: a program that the engine's own `Module` loads.
HEADRACE_API LoadOwners load_owners();
// Null outside a LoadScope.
HEADRACE_API const MethodPlan* loading_method();

// kProgram: a CPU kernel is called with device memory, an input is planned in device memory, or the initial
// state of a mutable buffer would have to be written there by the engine; none of which the engine can do.
Status check_placement(const MethodPlan& method, const std::string& where);

}  // namespace headrace
