// Threads of libraries: objects that end with them, and parallel regions that may be left early.
#pragma once

namespace headrace::shims {

// What the calling thread's last failed function says (shims.cpp).
extern thread_local char error[512];
// set_on_check_failed() (shims.cpp).
extern void (*on_check_failed)(const char* message, bool may_throw);

// Whether the calling thread is in a parallel region of a library's.
bool in_region();
// From a check that failed there, with what it says in `error`: out of the region, over frames of generated
// code that own nothing.
[[noreturn]] void leave_region();

}  // namespace headrace::shims
