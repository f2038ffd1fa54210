// The end of the process while other threads are in calls, as daemon threads of Python are: the engine's
// thread pool, a static object, must not be destroyed under them.
#pragma once

#include <string>

#include "headrace/status.h"

namespace headrace {

// Call before the first use of the engine's thread pool. From then on the end of the process (exit, a return
// from main) waits until no call is running, at most half a minute, and no other thread begins one.
void arm_exit_gate();

// kEngine in a process that was forked while another thread was in a call, whose locks and instances nobody
// gives back.
Status check_not_torn(const std::string& where);

// Brackets one run of the engine. Does not return to a thread that the end of the process overtook.
class RunScope {
 public:
  RunScope();
  ~RunScope();
  RunScope(const RunScope&) = delete;
  RunScope& operator=(const RunScope&) = delete;
};

// Ends the part of the calling thread, within a run or not, and waits for the end of the process.
[[noreturn]] HEADRACE_API void park();

}  // namespace headrace
