#include "program/exit.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "program/engine.h"

namespace headrace {

namespace {

std::atomic<int> running{0};
std::atomic<bool> ending{false};
std::atomic<std::thread::id> ending_thread{};
thread_local int depth = 0;

bool overtaken() { return ending.load() && ending_thread.load() != std::this_thread::get_id(); }

void wait_for_runs() {
  ending_thread = std::this_thread::get_id();
  ending = true;
  // A run that this thread is in itself called exit(); one that hangs must not keep the process for ever.
  for (int ms = 0; running.load() > depth && ms < 30'000; ++ms) usleep(1000);
}

}  // namespace

void arm_exit_gate() {
  static std::once_flag once;
  std::call_once(once, [] {
    // Its destructor is registered now, so it runs after the gate: exit handlers run in reverse.
    (void)num_threads();
    std::atexit(&wait_for_runs);
    // Runs of other threads do not exist in a forked process.
    pthread_atfork(nullptr, nullptr, [] { running = depth; });
  });
}

RunScope::RunScope() {
  ++depth;
  ++running;
  if (overtaken()) park();
}

RunScope::~RunScope() {
  --running;
  --depth;
  if (overtaken()) park();
}

void park() {
  running -= depth;
  for (;;) pause();
}

}  // namespace headrace
