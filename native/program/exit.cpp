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
std::atomic<bool> torn_by_fork{false};
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
    pthread_atfork(nullptr, nullptr, [] {
      if (running.load() > depth) torn_by_fork = true;
      running = depth;
    });
  });
}

Status check_not_torn(const std::string& where) {
  if (!torn_by_fork) return {};
  return Status(ErrorCode::kEngine,
                where +
                    ": expected a process that was forked while no other thread was in a call, got one that "
                    "was; what that thread held is held for ever: fork before the calls, or start a new "
                    "program (multiprocessing's 'spawn')");
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
