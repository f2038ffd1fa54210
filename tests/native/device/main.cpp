// Runs all tests, or those whose names contain an argument.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "check.h"

namespace check {

namespace {
std::atomic<int64_t> checks{0};
std::atomic<int64_t> failures{0};
std::mutex mutex;
std::vector<std::string>& notes() {
  static thread_local std::vector<std::string> texts;
  return texts;
}
}  // namespace

std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

namespace {
void count(bool ok, const char* text, const std::string& got, const char* file, int line) {
  ++checks;
  if (ok || ++failures > 50) return;
  std::lock_guard lock(mutex);
  std::printf("%s:%d: %s%s\n", file, line, text, got.c_str());
  for (const std::string& note : notes()) std::printf("    with %s\n", note.c_str());
}
}  // namespace

void that(bool ok, const char* text, const char* file, int line) { count(ok, text, "", file, line); }

void equal(int64_t got, int64_t want, const char* text, const char* file, int line) {
  if (got == want) return that(true, text, file, line);
  count(false, text, " is " + std::to_string(got) + ", expected " + std::to_string(want), file, line);
}

void ok(const headrace::Status& status, const char* text, const char* file, int line) {
  if (status.ok()) return that(true, text, file, line);
  count(false, text, ": " + status.message(), file, line);
}

void refused(const headrace::Status& status, headrace::ErrorCode code,
             std::initializer_list<const char*> words, const char* text, const char* file, int line) {
  if (status.code() != code)
    return count(false, text,
                 ": code " + std::to_string(static_cast<int>(status.code())) + ", expected " +
                     std::to_string(static_cast<int>(code)) + ": " + status.message(),
                 file, line);
  for (const char* word : words) {
    if (status.message().find(word) == std::string::npos)
      return count(false, text, std::string(": no '") + word + "' in: " + status.message(), file, line);
  }
  that(true, text, file, line);
}

Note::Note(std::string text) { notes().push_back(std::move(text)); }
Note::~Note() { notes().pop_back(); }

uint64_t Random::operator()(uint64_t below) {
  state_ = state_ * 6364136223846793005u + 1442695040888963407u;
  return (state_ >> 33) % below;
}

std::vector<headrace::SimOptions> schedules(int seeds) {
  using Schedule = headrace::SimOptions::Schedule;
  std::vector<headrace::SimOptions> all(2);
  all[0].schedule = Schedule::kEager;
  all[1].schedule = Schedule::kLate;
  for (int seed = 0; seed < seeds; ++seed) {
    all.emplace_back();
    all.back().schedule = Schedule::kRandom;
    all.back().seed = static_cast<uint64_t>(seed);
  }
  return all;
}

std::string name_of(const headrace::SimOptions& options) {
  using Schedule = headrace::SimOptions::Schedule;
  if (options.schedule == Schedule::kEager) return "schedule eager";
  if (options.schedule == Schedule::kLate) return "schedule late";
  return "seed " + std::to_string(options.seed);
}

void on_every_schedule(const std::function<void(headrace::SimDevice&)>& body, int seeds) {
  for (const auto& options : schedules(seeds)) {
    Note note(name_of(options));
    body(*headrace::make_sim_device(options));
  }
}

}  // namespace check

int main(int argc, char** argv) {
  using namespace check;
  int ran = 0;
  for (const Test& test : tests()) {
    if (argc > 1 && !std::strstr(test.name, argv[1])) continue;
    int64_t checks_before = checks, failures_before = failures;
    test.run();
    ++ran;
    if (checks == checks_before) that(false, "the test checked nothing", test.name, 0);
    std::printf("%s %s (%lld checks)\n", failures == failures_before ? "ok    " : "FAILED", test.name,
                static_cast<long long>(checks - checks_before));
    std::fflush(stdout);
  }
  if (ran == 0) std::printf("no test ran\n");
  std::printf("%d tests, %lld checks, %lld failures\n", ran, static_cast<long long>(checks),
              static_cast<long long>(failures));
  return ran > 0 && failures == 0 ? 0 : 1;
}
