// Delegate calls as the plan shows them: which arguments go in, which come out, and where they lie.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

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

// Names the islands of the method that the calling thread loads, for as long as it lives: a delegate is told
// its payload and nothing else.
class LoadScope {
 public:
  LoadScope(const MethodPlan& method, const std::vector<IslandPlan>& islands);
  ~LoadScope();
  LoadScope(const LoadScope&) = delete;
  LoadScope& operator=(const LoadScope&) = delete;

 private:
  friend const IslandPlan* claim_island(const std::string&, const void*);
  const MethodPlan& method_;
  const std::vector<IslandPlan>& islands_;
  std::vector<char> claimed_;
  LoadScope* outer_;
};

// The island of the method being loaded whose delegate has this name and payload, each once. Null outside a
// LoadScope. What it points to lives as long as the scope.
HEADRACE_API const IslandPlan* claim_island(const std::string& delegate, const void* payload);

// kProgram: a CPU kernel is called with device memory, an input is planned in device memory, or the initial
// state of a mutable buffer would have to be written there by the engine; none of which the engine can do.
Status check_placement(const MethodPlan& method, const std::string& where);

}  // namespace headrace
