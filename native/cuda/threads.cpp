#include "cuda/threads.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "cuda/shims.h"

// As shims.cpp: the C++ run time is not linked.

namespace headrace::shims {

// ---- ends of threads

namespace {

struct ThreadObject {
  ThreadObject* next;  // an older one, whichever thread's
  void (*end)(void*);
  void* object;
  const void* library;  // an address inside it
  pthread_t thread;
};

// Every live object of every thread, latest first. `end` runs under the lock: it belongs to a library that
// must not go meanwhile, and it is the end of a string.
pthread_mutex_t objects_mutex = PTHREAD_MUTEX_INITIALIZER;
ThreadObject* objects = nullptr;
pthread_key_t objects_key;
pthread_once_t objects_once = PTHREAD_ONCE_INIT;

template <class Which>
void end_objects(Which which) {
  pthread_mutex_lock(&objects_mutex);
  for (ThreadObject** at = &objects; *at != nullptr;) {
    ThreadObject* object = *at;
    if (!which(*object)) {
      at = &object->next;
      continue;
    }
    *at = object->next;
    object->end(object->object);
    std::free(object);
  }
  pthread_mutex_unlock(&objects_mutex);
}

void end_thread(void*) {
  pthread_t self = pthread_self();
  end_objects([&](const ThreadObject& o) { return pthread_equal(o.thread, self) != 0; });
}

}  // namespace

// ---- parallel regions

namespace {

// A team of this thread failed: the run that it belongs to starts no others.
thread_local bool team_failed = false;

// The threads of one parallel region. Barriers are ours, because one that leaves early must not be waited
// for.
struct Team {
  void (*run)(void*);
  void* data;
  std::atomic<int> expected{0};  // who takes part in barriers; 0: nobody has begun
  std::atomic<uint32_t> barriers{0};
  int arrived = 0;
  bool failed = false;
  char message[sizeof error] = {};
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;  // of the two above, and of changes of `expected`
};

// A process that fork() made has of all threads the one that forked, and libgomp would wait for the team that
// this one had. So a thread that had a team in a process before works alone in those that came of it.
std::atomic<uint32_t> process{1};
// In which process the thread had its first team.
thread_local uint32_t first_team_in = 0;

unsigned team_size(unsigned threads) {
  uint32_t now = process.load(std::memory_order_relaxed);
  if (first_team_in == 0) first_team_in = now;
  return first_team_in == now ? threads : 1;
}

// A parallel region that the calling thread is in, and the one around it.
struct Region {
  Team* team;
  Region* outer;
  jmp_buf leave;
};
thread_local Region* region = nullptr;

struct OpenMp {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
  void (*barrier)() = nullptr;
  int (*num_threads)() = nullptr;
};
OpenMp openmp;
pthread_once_t openmp_once = PTHREAD_ONCE_INIT;

void find_openmp() {
  pthread_atfork(nullptr, nullptr, [] { process.fetch_add(1, std::memory_order_relaxed); });
  // The one that the library itself needs: it is loaded.
  void* handle = dlopen("libgomp.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) return;
  openmp.parallel = reinterpret_cast<decltype(openmp.parallel)>(dlsym(handle, "GOMP_parallel"));
  openmp.barrier = reinterpret_cast<decltype(openmp.barrier)>(dlsym(handle, "GOMP_barrier"));
  openmp.num_threads = reinterpret_cast<decltype(openmp.num_threads)>(dlsym(handle, "omp_get_num_threads"));
}

// With the mutex: lets the waiting go if all are there.
void open_if_complete(Team& team) {
  if (team.arrived == 0 || team.arrived < team.expected.load(std::memory_order_relaxed)) return;
  team.arrived = 0;
  team.barriers.fetch_add(1, std::memory_order_release);
}

void wait_for_team(Team& team) {
  pthread_mutex_lock(&team.mutex);
  uint32_t now = team.barriers.load(std::memory_order_relaxed);
  ++team.arrived;
  open_if_complete(team);
  pthread_mutex_unlock(&team.mutex);
  for (int k = 0; team.barriers.load(std::memory_order_acquire) == now; ++k) {
    if (k > 2000) sched_yield();
  }
}

void leave_team(Team& team) {
  pthread_mutex_lock(&team.mutex);
  team.expected.fetch_sub(1, std::memory_order_relaxed);
  open_if_complete(team);
  pthread_mutex_unlock(&team.mutex);
}

void run_in_team(void* argument) {
  auto* team = static_cast<Team*>(argument);
  int none = 0;
  team->expected.compare_exchange_strong(none, openmp.num_threads());
  Region here;
  here.team = team;
  here.outer = region;
  region = &here;
  if (_setjmp(here.leave) == 0) {
    team->run(team->data);
  } else {
    leave_team(*team);
  }
  region = here.outer;
}

}  // namespace

void end_thread_objects(const void* begin, const void* end) {
  end_objects([&](const ThreadObject& o) { return o.library >= begin && o.library < end; });
}

void begin_run() { team_failed = false; }

bool in_region() { return region != nullptr; }

void leave_region() {
  Team& team = *region->team;
  pthread_mutex_lock(&team.mutex);
  if (!team.failed) std::memcpy(team.message, error, sizeof error);
  team.failed = true;
  pthread_mutex_unlock(&team.mutex);
  _longjmp(region->leave, 1);
}

}  // namespace headrace::shims

// ---- what libraries call

namespace shims = headrace::shims;

#define SHIM extern "C" __attribute__((visibility("default")))

// __cxa_thread_atexit of the Itanium C++ ABI, for libraries that may be closed while the thread lives.
SHIM int __hra_thread_atexit(void (*end)(void*), void* object, void* library) {
  pthread_once(&shims::objects_once, [] { pthread_key_create(&shims::objects_key, shims::end_thread); });
  auto* entry = static_cast<shims::ThreadObject*>(std::malloc(sizeof(shims::ThreadObject)));
  if (entry == nullptr) return -1;
  // Any value but null makes pthread call end_thread.
  pthread_setspecific(shims::objects_key, &shims::objects);
  pthread_mutex_lock(&shims::objects_mutex);
  *entry = {shims::objects, end, object, library, pthread_self()};
  shims::objects = entry;
  pthread_mutex_unlock(&shims::objects_mutex);
  return 0;
}

// GOMP_parallel and GOMP_barrier of libgomp, for libraries with checks of their own.
SHIM void HRMP_parallel(void (*run)(void*), void* data, unsigned threads, unsigned flags) {
  if (shims::team_failed) return;
  pthread_once(&shims::openmp_once, shims::find_openmp);
  shims::Team team{run, data};
  shims::openmp.parallel(shims::run_in_team, &team, shims::team_size(threads), flags);
  if (!team.failed) return;
  std::memcpy(shims::error, team.message, sizeof shims::error);
  // The compiler takes GOMP_parallel for a function that does not throw, so nothing may be thrown from here:
  // the run goes on without its loops, and is told as failed when it ends.
  shims::team_failed = true;
  if (shims::on_check_failed != nullptr) shims::on_check_failed(team.message, false);
}
// The former, for all other libraries.
SHIM void HRMQ_parallel(void (*run)(void*), void* data, unsigned threads, unsigned flags) {
  pthread_once(&shims::openmp_once, shims::find_openmp);
  shims::openmp.parallel(run, data, shims::team_size(threads), flags);
}
SHIM void HRMP_barrier() {
  if (shims::region != nullptr) {
    shims::wait_for_team(*shims::region->team);
  } else {
    pthread_once(&shims::openmp_once, shims::find_openmp);
    shims::openmp.barrier();
  }
}
