// The kinds of argument that each kernel of the engine takes. A kernel unpacks its arguments without
// looking at their number, and ends the process at a wrong kind, so they are compared beforehand.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "program/plan.h"

namespace headrace {

// Compares the arguments of one kernel call with the kernel's signature. Empty when they fit, else the
// rest of a message: which argument, what was expected, what came. A kernel that is not in the table (one
// from another library, loaded by the user) is let through.
std::string check_arguments(const std::string& kernel, const std::vector<int32_t>& args,
                            const MethodPlan& method);

}  // namespace headrace
