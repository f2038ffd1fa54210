// While the calling thread is inside a library's code: the arena that it allocates from, and the checks of
// its own ("index out of bounds") that fail in it.
#pragma once

#include <cstdint>
#include <string>

namespace headrace {

namespace shims {
struct Arena;
}

// The thread's arena is the one given while this lives.
class LibraryScope {
 public:
  explicit LibraryScope(shims::Arena* arena);
  ~LibraryScope();
  LibraryScope(const LibraryScope&) = delete;
  LibraryScope& operator=(const LibraryScope&) = delete;

  // For shims::set_on_check_failed().
  static void on_check_failed(const char* message, bool may_throw);
  // Checks that failed so far on threads of OpenMP, whoever's. They cannot be told from those of a call that
  // runs beside, and a call that may have failed has.
  static int64_t failures_elsewhere();
  // What a check said that failed on the calling thread since the innermost LibraryScope began, or elsewhere
  // since failures_elsewhere() was `before`; empty where none did.
  static std::string failed_check(int64_t before);

 private:
  shims::Arena* former_;
  bool former_inside_;
};

}  // namespace headrace
