// What of the engine is process-wide: its registries, its threads, and how its errors become ours.
#pragma once

#include <executorch/runtime/core/error.h>

#include <string>
#include <vector>

#include "headrace/program.h"
#include "program/plan.h"

namespace headrace {

// Brackets a program's life: the thread pool must not change under it. The first waits for a change that is
// under way.
void program_begins();
void program_ends();

// kEngine: a second libheadrace_stream.so is in the process, whoever brought it and whenever (CS3).
Status check_one_selection();

bool kernel_registered(const std::string& name);
// kDelegateUnavailable: not registered, or registered and unavailable on this machine.
Status check_delegate(const std::string& id, const std::string& where);
// Whether a delegate's payload is machine code that loading runs.
bool payload_is_code(const std::string& id);
HEADRACE_API void set_payload_is_code(const std::string& id, bool code);

// The Status of a failed engine call in `method`: the code by who must act, the log as it came, and the
// instruction and delegate that the log names.
Status engine_status(executorch::runtime::Error error, const std::string& doing, const MethodPlan& method,
                     std::vector<std::string> log);

}  // namespace headrace
