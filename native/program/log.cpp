#include "program/log.h"

#include <executorch/runtime/platform/platform.h>

#include <cstdio>
#include <cstdlib>
#include <utility>

namespace headrace {

namespace {
thread_local LogScope* innermost = nullptr;
constexpr size_t kMaxLines = 64;  // a failing kernel in a loop logs without end
}  // namespace

struct LogSink {
  static void emit(et_timestamp_t, et_pal_log_level_t level, const char* file, const char*, size_t line,
                   const char* message, size_t length) {
    bool fatal = level == et_pal_log_level_t::kFatal;
    if (fatal && (innermost == nullptr || innermost->aborts_ == LogScope::kEnd)) {
      std::fprintf(stderr, "headrace: the engine ends this process: %s:%zu: %.*s\n", file, line,
                   static_cast<int>(length), message);
      return;
    }
    if ((level != et_pal_log_level_t::kError && !fatal) || innermost == nullptr) return;
    auto& lines = innermost->lines_;
    if (lines.size() >= kMaxLines && !fatal) return;
    std::string text(message, length);
    // The engine quotes the file, whose bytes may be anything.
    for (char& c : text) c = c >= 0x20 && c < 0x7f ? c : '?';
    lines.push_back(std::string(file) + ":" + std::to_string(line) + ": " + text);
  }

  static void abort() {
    if (innermost != nullptr && innermost->aborts_ == LogScope::kThrow) throw EngineAbort{};
    std::abort();
  }
};

void collect_engine_log() {
  executorch::runtime::register_pal(executorch::runtime::PalImpl::create(
      nullptr, &LogSink::abort, nullptr, nullptr, &LogSink::emit, nullptr, nullptr, __FILE_NAME__));
}

LogScope::LogScope(Aborts aborts) : aborts_(aborts), outer_(std::exchange(innermost, this)) {}
LogScope::~LogScope() { innermost = outer_; }
std::vector<std::string> LogScope::take() { return std::exchange(lines_, {}); }

}  // namespace headrace
