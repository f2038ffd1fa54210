// The engine's log, per thread: kept for the failure that it belongs to, never printed.
#pragma once

#include <string>
#include <vector>

namespace headrace {

// Takes over the engine's log for the whole process. Its lines at level Error go to the LogScope of the
// thread that logs; outside a scope they are dropped. A fatal line, behind which the engine ends the
// process, is written to stderr.
void collect_engine_log();

// Collects this thread's lines while it lives. Scopes nest; a line goes to the innermost.
class LogScope {
 public:
  LogScope();
  ~LogScope();
  LogScope(const LogScope&) = delete;
  LogScope& operator=(const LogScope&) = delete;
  std::vector<std::string> take();

 private:
  friend struct LogSink;
  std::vector<std::string> lines_;
  LogScope* outer_;
};

}  // namespace headrace
