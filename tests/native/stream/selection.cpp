// What caller_stream.h promises to C++ (CS1, CS2, CS7). Prints how many checks were made; ends with 1 and a
// line for the first that fails.
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <thread>

#include "headrace/caller_stream.h"

namespace {

int checks = 0;

void check(bool holds, const char* what, int line) {
  ++checks;
  if (holds) return;
  std::fprintf(stderr, "line %d: %s\n", line, what);
  std::exit(1);
}
#define CHECK(...) check((__VA_ARGS__), #__VA_ARGS__, __LINE__)

using headrace::caller_stream;
using headrace::CallerStreamGuard;

cudaStream_t handle(uintptr_t value) { return reinterpret_cast<cudaStream_t>(value); }
bool is(uintptr_t value) { return caller_stream() == handle(value); }

void guards_nest() {
  CHECK(!caller_stream());
  {
    CallerStreamGuard outer(handle(0x1000));
    CHECK(is(0x1000));
    {
      CallerStreamGuard inner(handle(0x2000), 3);
      CHECK(is(0x2000));
      CHECK(headrace_get_selection().device == 3);
      CallerStreamGuard innermost(handle(0x1000));
      CHECK(is(0x1000));
      CHECK(headrace_get_selection().device == -1);
    }
    CHECK(is(0x1000));
    CHECK(headrace_get_selection().device == -1);
  }
  CHECK(!caller_stream());
  CHECK(headrace_get_selection().device == -1);
}

void special_handles_are_ordinary() {
  for (uintptr_t special : {1, 2}) {
    CallerStreamGuard guard(handle(special));
    CHECK(is(special));
  }
  {
    CallerStreamGuard guard(nullptr);
    CHECK(caller_stream().has_value());  // not "nothing selected"
    CHECK(is(1));
    CallerStreamGuard inner(handle(2));
    CHECK(is(2));
  }
  CHECK(!caller_stream());
}

int leave_early() {
  CallerStreamGuard guard(handle(0x1000));
  return is(0x1000) ? 1 : 0;
}

void every_exit_restores() {
  CallerStreamGuard outer(handle(0x3000), 1);
  try {
    CallerStreamGuard guard(handle(0x1000));
    CallerStreamGuard inner(nullptr);
    throw std::runtime_error("a delegate failed");
  } catch (const std::runtime_error&) {
    CHECK(is(0x3000));
    CHECK(headrace_get_selection().device == 1);
  }
  CHECK(leave_early() == 1);
  CHECK(is(0x3000));
  for (int i = 0; i < 3; ++i) {
    CallerStreamGuard guard(handle(0x1000));
    if (i == 1) continue;
    if (i == 2) break;
  }
  CHECK(is(0x3000));
}

void threads_are_independent() {
  CallerStreamGuard guard(handle(0x1000));
  std::thread other([] {
    CHECK(!caller_stream());
    CallerStreamGuard theirs(handle(0x2000));
    CHECK(is(0x2000));
  });
  other.join();
  CHECK(is(0x1000));
}

void exchange_keeps_the_normal_form() {
  const headrace_selection former = headrace_exchange_selection({nullptr, -7, 42});
  CHECK(former.selected == 0);
  headrace_selection now = headrace_get_selection();
  CHECK(now.stream == handle(1));
  CHECK(now.device == -1);
  CHECK(now.selected == 1);
  now = headrace_exchange_selection({handle(0x5000), 4, 0});  // selects nothing, whatever else it says
  CHECK(now.stream == handle(1));
  now = headrace_exchange_selection(former);
  CHECK(now.stream == nullptr && now.device == -1 && now.selected == 0);
}

}  // namespace

int main() {
  CHECK(headrace_stream_abi() == HEADRACE_STREAM_ABI);
  guards_nest();
  special_handles_are_ordinary();
  every_exit_restores();
  threads_are_independent();
  exchange_keeps_the_normal_form();
  CHECK(!caller_stream());
  std::printf("%d checks\n", checks);
}
