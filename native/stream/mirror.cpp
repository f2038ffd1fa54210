// The mirror into ExecuTorch's own caller-stream library: libextension_cuda.so of ExecuTorch 1.4,
// libexecutorch_extension_cuda.so of the CUDA wheels since, or whatever else exports the same class
// (extension/cuda/caller_stream.h and .cpp in github.com/pytorch/executorch). Its state is a thread_local
// inside an unnamed namespace, so the guard that it exports is the only way in: it is constructed in memory
// of ours and destroyed at the end, by the symbols that any C++ user of it would have been linked to.

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include <atomic>

#include "headrace/caller_stream.h"
#include "stream/image.h"
#include "stream/selection.h"

namespace headrace::stream {
namespace {

// std::optional<cudaStream_t> executorch::extension::cuda::getCallerStream()
constexpr char kGetName[] = "_ZN10executorch9extension4cuda15getCallerStreamEv";
// executorch::extension::cuda::CallerStreamGuard::CallerStreamGuard(cudaStream_t) and the destructor
constexpr char kBeginName[] = "_ZN10executorch9extension4cuda17CallerStreamGuardC1EP11CUstream_st";
constexpr char kEndName[] = "_ZN10executorch9extension4cuda17CallerStreamGuardD1Ev";

// std::optional of a pointer, as libstdc++ and libc++ lay it out and as it is returned: in two registers.
struct Answer {
  CUstream_st* stream;
  bool selected;
};

using Get = Answer();
using Begin = void(void* guard, CUstream_st* stream);
using End = void(void* guard);

struct Library {
  uintptr_t base;
  Begin* begin;
  End* end;
};

// Grows under the lock and never shrinks: what is in it stays loaded. Entries below the count do not change.
Library libraries[HEADRACE_MIRROR_LIBRARIES];
std::atomic<int32_t> library_count{0};
pthread_mutex_t growing = PTHREAD_MUTEX_INITIALIZER;

// Every such library that was loaded up to the loader's counter of this value is in the list. 0: not looked
// yet.
std::atomic<unsigned long long> settled_adds{0};

bool is_known(uintptr_t base) {
  const int32_t count = library_count.load(std::memory_order_acquire);
  for (int32_t i = 0; i < count; ++i) {
    if (libraries[i].base == base) return true;
  }
  return false;
}

// The first library that is not in the list yet.
struct Search {
  unsigned long long adds = 0;
  bool settled = false;
  bool found = false;
  uintptr_t base = 0;
  uintptr_t get = 0, begin = 0, end = 0;
  char loader_name[4096];  // PATH_MAX; the object may be gone when the name is used, so it is copied
  char* file;
  size_t file_nbytes;
};

int visit(dl_phdr_info* info, size_t /*nbytes*/, void* data) {
  auto& search = *static_cast<Search*>(data);
  search.adds = info->dlpi_adds;
  if (search.adds == settled_adds.load(std::memory_order_acquire)) {
    search.settled = true;
    return 1;
  }
  const Image image(*info);
  const uintptr_t get = image.exported(kGetName);
  if (get == 0 || is_known(image.base())) return 0;
  search.found = true;
  search.base = image.base();
  search.get = get;
  search.begin = image.exported(kBeginName);
  search.end = image.exported(kEndName);
  strncpy(search.loader_name, image.loader_name(), sizeof search.loader_name - 1);
  search.loader_name[sizeof search.loader_name - 1] = '\0';
  image.file(search.file, search.file_nbytes);
  return 1;
}

// Keeps what was found loaded, and waits until it is: dlopen() returns when no other thread is loading it, so
// that it is relocated and initialized. Null: it is gone, or cannot be named to the loader.
void* hold(const Search& search) {
  const char* name = search.loader_name[0] != '\0' ? search.loader_name : nullptr;  // null: the program
  void* handle = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) return nullptr;
  link_map* map = nullptr;
  if (dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr && map->l_addr == search.base)
    return handle;
  dlclose(handle);  // another object of the same name
  return nullptr;
}

bool same(Answer a, Answer b) { return a.selected == b.selected && (!a.selected || a.stream == b.stream); }

// Whether the guard does what the known one does, on this thread: selects, puts back, and fits into a mirror.
bool behaves(const Search& search) {
  if (search.begin == 0 || search.end == 0) return false;
  auto* const get = reinterpret_cast<Get*>(search.get);
  constexpr size_t kRoom = sizeof(headrace_mirror::guards[0]);
  constexpr unsigned char kUntouched = 0xA5;
  alignas(16) unsigned char guard[4 * kRoom];
  memset(guard, kUntouched, sizeof guard);

  auto* const probe = reinterpret_cast<CUstream_st*>(guard);  // any handle will do: nobody looks behind it
  const Answer before = get();
  reinterpret_cast<Begin*>(search.begin)(guard, probe);
  const Answer during = get();
  reinterpret_cast<End*>(search.end)(guard);
  const Answer after = get();

  for (size_t i = kRoom; i < sizeof guard; ++i) {
    if (guard[i] != kUntouched) return false;
  }
  return during.selected && during.stream == probe && same(before, after);
}

// False: the list is full.
bool add(const Search& search, void* handle) {
  bool added = true;
  bool surplus = false;  // another thread was first, or there is no room: one reference too many
  pthread_mutex_lock(&growing);
  const int32_t count = library_count.load(std::memory_order_relaxed);
  if (is_known(search.base)) {
    surplus = true;
  } else if (count == HEADRACE_MIRROR_LIBRARIES) {
    surplus = true;
    added = false;
  } else {
    libraries[count] = {search.base, reinterpret_cast<Begin*>(search.begin),
                        reinterpret_cast<End*>(search.end)};
    library_count.store(count + 1, std::memory_order_release);
  }
  pthread_mutex_unlock(&growing);
  if (surplus) dlclose(handle);
  return added;
}

// Completes the list. False: a library, named in `file`, cannot be served.
bool settle(char* file, size_t file_nbytes) {
  // A round ends with nothing new, one library more, or one that was unloaded just then; the loop is bounded
  // all the same, since others may load and unload for ever.
  for (int round = 0; round < 4 * HEADRACE_MIRROR_LIBRARIES; ++round) {
    Search search;
    search.file = file;
    search.file_nbytes = file_nbytes;
    dl_iterate_phdr(visit, &search);
    if (search.settled) return true;
    if (!search.found) {
      settled_adds.store(search.adds, std::memory_order_release);
      return true;
    }
    // The loader's lock is not held here: dlopen() takes it in the other order.
    void* handle = hold(search);
    if (handle == nullptr) continue;
    if (!behaves(search)) {
      dlclose(handle);
      return false;
    }
    if (!add(search, handle)) return false;
  }
  return false;
}

}  // namespace
}  // namespace headrace::stream

using namespace headrace::stream;

int32_t headrace_mirror_begin(headrace_mirror* mirror, headrace_selection selection) noexcept {
  mirror->count = 0;
  if (selection.selected == 0) return 0;
  if (!settle(nullptr, 0)) return -1;
  const int32_t count = library_count.load(std::memory_order_acquire);
  for (int32_t i = 0; i < count; ++i) libraries[i].begin(mirror->guards[i], normal(selection).stream);
  mirror->count = count;
  return count;
}

void headrace_mirror_end(headrace_mirror* mirror) noexcept {
  while (mirror->count > 0) {
    --mirror->count;
    libraries[mirror->count].end(mirror->guards[mirror->count]);
  }
}

int32_t headrace_find_unmirrored(char* library, size_t library_nbytes) noexcept {
  return settle(library, library_nbytes) ? 0 : 1;
}
