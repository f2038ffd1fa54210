// The thread's selection, and the search for another copy of it.

#include <atomic>

#include "headrace/caller_stream.h"
#include "stream/image.h"
#include "stream/selection.h"

namespace headrace::stream {
namespace {

constexpr headrace_selection kNothing = {nullptr, -1, 0};

// The default model and not initial-exec: this library is loaded by dlopen(), at any time, and the static
// block that initial-exec needs may be used up by then.
thread_local constinit headrace_selection selection = kNothing;

// Nothing that was loaded up to the loader's counter of this value is another copy. 0: not looked yet. Only
// the counter of loads matters, since unloading makes no copy.
std::atomic<unsigned long long> clean_adds{0};

struct Search {
  char* ours;
  size_t ours_nbytes;
  char* other;
  size_t other_nbytes;
  unsigned long long adds = 0;
  int32_t others = 0;
};

int visit(dl_phdr_info* info, size_t /*nbytes*/, void* data) {
  auto& search = *static_cast<Search*>(data);
  search.adds = info->dlpi_adds;
  if (search.adds == clean_adds.load(std::memory_order_relaxed)) return 1;
  const Image image(*info);
  // By the address of what no other copy can stand in for: an exported name may resolve to the other copy's.
  if (image.contains(reinterpret_cast<uintptr_t>(&visit), 1)) {
    image.file(search.ours, search.ours_nbytes);
  } else if (image.exported("headrace_stream_abi") != 0) {
    if (search.others++ == 0) image.file(search.other, search.other_nbytes);
  }
  return 0;
}

int32_t find_duplicate(Search search) {
  dl_iterate_phdr(visit, &search);
  if (search.others == 0) clean_adds.store(search.adds, std::memory_order_relaxed);
  return search.others;
}

// A look at load, so that the first question is answered from memory.
[[gnu::constructor]] void look_at_load() { find_duplicate({nullptr, 0, nullptr, 0}); }

}  // namespace

headrace_selection normal(headrace_selection given) {
  if (given.selected == 0) return kNothing;
  if (given.stream == nullptr) given.stream = reinterpret_cast<CUstream_st*>(1);
  if (given.device < 0) given.device = -1;
  given.selected = 1;
  return given;
}

}  // namespace headrace::stream

using namespace headrace::stream;

int32_t headrace_stream_abi(void) noexcept { return HEADRACE_STREAM_ABI; }

headrace_selection headrace_get_selection(void) noexcept { return selection; }

headrace_selection headrace_exchange_selection(headrace_selection next) noexcept {
  const headrace_selection former = selection;
  selection = normal(next);
  return former;
}

int32_t headrace_find_duplicate(char* ours, size_t ours_nbytes, char* other, size_t other_nbytes) noexcept {
  return find_duplicate({ours, ours_nbytes, other, other_nbytes});
}
