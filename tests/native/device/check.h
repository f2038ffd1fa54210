// A test program in a page: TEST registers a function, CHECK counts. A test that checked nothing fails.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include "headrace/device.h"

namespace check {

struct Test {
  const char* name;
  void (*run)();
};
std::vector<Test>& tests();
struct Register {
  Register(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

// Each counts one check; from any thread. `text` is the source of what was checked. Not inline, or the tests
// take minutes to compile.
void that(bool ok, const char* text, const char* file, int line);
void equal(int64_t got, int64_t want, const char* text, const char* file, int line);
void ok(const headrace::Status& status, const char* text, const char* file, int line);
// The words are found in the message one by one.
void refused(const headrace::Status& status, headrace::ErrorCode code,
             std::initializer_list<const char*> words, const char* text, const char* file, int line);
template <class T>
headrace::Status status_of(const headrace::Result<T>& result) {
  return result.status();
}
inline const headrace::Status& status_of(const headrace::Status& status) { return status; }

// Says what the checks of its lifetime belong to, when they fail.
class Note {
 public:
  explicit Note(std::string text);
  ~Note();
};

// A generator of its own for each test: the same numbers everywhere.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2 + 1) {}
  uint64_t operator()(uint64_t below);

 private:
  uint64_t state_;
};

// The schedules that every rule must hold under: eager, late and `seeds` random ones.
std::vector<headrace::SimOptions> schedules(int seeds = 20);
std::string name_of(const headrace::SimOptions& options);
void on_every_schedule(const std::function<void(headrace::SimDevice&)>& body, int seeds = 20);

}  // namespace check

#define TEST(name)                                           \
  static void name();                                        \
  static const check::Register register_##name(#name, name); \
  static void name()

#define CHECK(condition) check::that(static_cast<bool>(condition), #condition, __FILE__, __LINE__)
#define CHECK_EQ(got, want) \
  check::equal(static_cast<int64_t>(got), static_cast<int64_t>(want), #got, __FILE__, __LINE__)
#define CHECK_OK(expression) check::ok(check::status_of(expression), #expression, __FILE__, __LINE__)
#define CHECK_REFUSED(expression, code, ...)                                                          \
  check::refused(check::status_of(expression), headrace::ErrorCode::code, {__VA_ARGS__}, #expression, \
                 __FILE__, __LINE__)
