#include "cuda/library_scope.h"

#include <dlfcn.h>

#include <atomic>
#include <mutex>
#include <stdexcept>

#include "cuda/shims.h"

namespace headrace {

namespace {

// A check of the library's own that failed while the calling thread ran it.
thread_local std::string failed_here;
// The same, on a thread of OpenMP: how many, and what the last one said.
std::atomic<int64_t> count_elsewhere{0};
std::mutex elsewhere_mutex;
std::string failed_elsewhere;

thread_local bool inside = false;

// An exception would end the process on its way out of a parallel region.
bool in_parallel_region() {
  static auto* function = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "omp_in_parallel"));
  static auto* ours = [] {
    void* gomp = dlopen("libgomp.so.1", RTLD_LAZY | RTLD_NOLOAD);
    return gomp == nullptr ? nullptr : reinterpret_cast<int (*)()>(dlsym(gomp, "omp_in_parallel"));
  }();
  auto* ask = ours != nullptr ? ours : function;
  return ask != nullptr && ask() != 0;
}

}  // namespace

LibraryScope::LibraryScope(shims::Arena* arena)
    : former_(shims::exchange_arena(arena)), former_inside_(inside) {
  inside = true;
  failed_here.clear();
  shims::begin_run();
}

LibraryScope::~LibraryScope() {
  shims::exchange_arena(former_);
  inside = former_inside_;
}

void LibraryScope::on_check_failed(const char* message, bool may_throw) {
  if (!inside) {
    std::lock_guard lock(elsewhere_mutex);
    failed_elsewhere = message;
    count_elsewhere.fetch_add(1, std::memory_order_release);
    return;
  }
  if (failed_here.empty()) failed_here = message;
  // The library turns it into an error code, in its own frame.
  if (may_throw && !in_parallel_region()) throw std::runtime_error(message);
}

int64_t LibraryScope::failures_elsewhere() { return count_elsewhere.load(std::memory_order_acquire); }

std::string LibraryScope::failed_check(int64_t before) {
  if (!failed_here.empty()) return failed_here;
  if (failures_elsewhere() == before) return {};
  std::lock_guard lock(elsewhere_mutex);
  return failed_elsewhere;
}

}  // namespace headrace
