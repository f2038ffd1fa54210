// What is said about the values of a method, for its users and in messages.
#pragma once

#include <string>

#include "headrace/program.h"
#include "program/plan.h"

namespace headrace {

ValueInfo describe_value(const MethodPlan& plan, int32_t value);

// "float32[1, ≤80] on cpu".
std::string describe(const ValueInfo& info);
std::string describe(const Value& value);

// The number that is not a tensor, as text; empty for everything else.
std::string number(const ValueInfo& info);
std::string number(const Value& value);

}  // namespace headrace
