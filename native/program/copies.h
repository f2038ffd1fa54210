// What the copies between host and device that a method makes while it runs have to wait for, as its plan
// says. The planner gives memory to one value after another, and copies are enqueued: what the host does in
// between is at once.
#pragma once

#include <cstdint>
#include <vector>

#include "program/plan.h"

namespace headrace {

// Whether something else is copied from the device to where this output will lie, earlier in the call.
bool place_is_shared(const MethodPlan& plan, int32_t value);

// The planned host memory that a copy to the device reads and that the host writes later in the same call,
// before anything waits: state, or a place that the planner gives to another value.
std::vector<const TensorPlan*> overwritten_sources(const MethodPlan& plan);

}  // namespace headrace
