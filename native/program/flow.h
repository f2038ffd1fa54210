// What a method's instructions do to its values, followed before it runs: the kinds of the arguments that
// each kernel will see, what is written and whether it may be, what shares memory with what.
#pragma once

#include <optional>
#include <string>

#include "program/plan.h"

namespace headrace {

struct FlowError {
  size_t chain = 0, instruction = 0;  // SIZE_MAX: of the method as a whole
  std::string text;                   // expected, got
  std::string advice;                 // what to do; empty: the file is damaged
};

// Checks every instruction of `method`, whose indices are all in range (read_program() saw to it), and notes
// in it which outputs have no memory of their own.
std::optional<FlowError> check_flow(MethodPlan& method);

}  // namespace headrace
