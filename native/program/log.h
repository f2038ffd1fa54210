// The engine's log, per thread: kept for the failure that it belongs to, never printed.
#pragma once

#include <string>
#include <vector>

namespace headrace {

// Takes over the engine's log for the whole process. Its lines at level Error go to the LogScope of the
// thread that logs; outside a scope they are dropped. Behind a fatal line the engine ends the process: inside
// a scope that catches them an EngineAbort is thrown instead, on the thread that called the engine; elsewhere
// the line is written to stderr and the process ends.
void collect_engine_log();

// The engine gave up (a check of its own failed). It is built with exceptions, so its frames are unwound; the
// method that was running may not be run again. Caught where the engine was called, never passed on.
struct EngineAbort {};

// Collects this thread's lines while it lives. Scopes nest; a line goes to the innermost.
class LogScope {
 public:
  enum Aborts { kEnd, kThrow };  // what an abort of the engine does: end the process, or throw EngineAbort
  explicit LogScope(Aborts aborts = kEnd);
  ~LogScope();
  LogScope(const LogScope&) = delete;
  LogScope& operator=(const LogScope&) = delete;
  std::vector<std::string> take();

 private:
  friend struct LogSink;
  std::vector<std::string> lines_;
  Aborts aborts_;
  LogScope* outer_;
};

}  // namespace headrace
