// The tensors that libraries work on, without a library: memory, views, copies, ends of threads.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cuda/constants.h"
#include "cuda/shims.h"
#include "device/driver.h"

using namespace headrace::shims;

#define A(name) aoti_hrace_##name
extern "C" {
int32_t A(empty_strided)(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Tensor**);
int32_t A(delete_tensor_object)(Tensor*);
int32_t A(create_tensor_from_blob)(void*, int64_t, const int64_t*, const int64_t*, int64_t, int32_t, int32_t,
                                   int32_t, Tensor**);
int32_t A(_reinterpret_tensor)(Tensor*, int64_t, const int64_t*, const int64_t*, int64_t, Tensor**);
int32_t A(new_tensor_handle)(Tensor*, Tensor**);
int32_t A(clone)(Tensor*, Tensor**);
int32_t A(clone_preserve_strides)(Tensor*, Tensor**);
int32_t A(copy_)(Tensor*, Tensor*, int32_t);
int32_t A(get_data_ptr)(Tensor*, void**);
int32_t A(get_storage_size)(Tensor*, int64_t*);
int32_t A(item_float32)(Tensor*, float*);
int32_t A(item_int64)(Tensor*, int64_t*);
void A(check)(bool, const char*, const char*, uint32_t, const char*);
int __hra_thread_atexit(void (*)(void*), void*, void*);
}

static int failures = 0;
#define CHECK(condition)                                           \
  do {                                                             \
    if (!(condition)) {                                            \
      std::printf("line %d: expected %s\n", __LINE__, #condition); \
      ++failures;                                                  \
    }                                                              \
  } while (0)

constexpr int32_t kFloat = 6, kLong = 4;

static Tensor* empty(std::vector<int64_t> sizes, std::vector<int64_t> strides, int32_t dtype = kFloat) {
  Tensor* t = nullptr;
  CHECK(A(empty_strided)(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype, kCpu, 0,
                         &t) == 0);
  return t;
}
static float* data(Tensor* t) { return static_cast<float*>(view(t).data); }

// Temporaries of a steady state cost nothing; of changing sizes, no more than the largest.
static void memory() {
  Arena* arena = make_arena();
  Arena* former = exchange_arena(arena);
  auto call = [](int64_t n) {
    Tensor* a = empty({n}, {1});
    Tensor* b = empty({2 * n}, {1});
    A(delete_tensor_object)(a);
    Tensor* c = empty({n}, {1});
    std::memset(data(b), 1, static_cast<size_t>(2 * n) * 4);
    A(delete_tensor_object)(c);
    A(delete_tensor_object)(b);
  };
  call(1000);
  int64_t first = counts(arena).allocations;
  CHECK(first == 2);
  for (int k = 0; k < 100; ++k) call(1000);
  CHECK(counts(arena).allocations == first);
  for (int64_t n = 1; n <= 1000; ++n) call(n);
  CHECK(counts(arena).allocations == first);  // smaller ones fit
  for (int64_t n = 1000; n <= 4000; n += 100) call(n);
  // Two blocks are in use at once, so two there are.
  CHECK(counts(arena).nbytes <= (4000 + 8000) * 4 + 4 * 64);
  CHECK(counts(arena).tensors == 0);
  Tensor* t = empty({0}, {1});
  A(delete_tensor_object)(t);
  int64_t sizes[] = {INT64_MAX / 2, 4}, strides[] = {4, 1};
  CHECK(A(empty_strided)(2, sizes, strides, kFloat, kCpu, 0, &t) != 0);
  CHECK(std::string(take_error()).find("empty_strided") == 0);
  CHECK(std::string(take_error()).empty());
  int64_t large[] = {int64_t{1} << 50}, one[] = {1}, minus[] = {-1};
  CHECK(A(empty_strided)(1, large, one, kFloat, kCpu, 0, &t) != 0);
  CHECK(A(empty_strided)(1, one, minus, kFloat, kCpu, 0, &t) != 0);
  CHECK(A(empty_strided)(1, one, one, 12, kCpu, 0, &t) != 0);
  CHECK(A(empty_strided)(1, one, one, kFloat, kCuda, 0, &t) != 0);
  exchange_arena(nullptr);
  CHECK(A(empty_strided)(1, one, one, kFloat, kCpu, 0, &t) != 0);
  exchange_arena(arena);
  // What is still there ends with the arena (the sanitizer looks for leaks).
  (void)empty({10}, {1});
  Tensor* held = empty({10}, {1});
  Tensor* other = nullptr;
  CHECK(A(new_tensor_handle)(held, &other) == 0);
  CHECK(counts(arena).tensors == 3);
  exchange_arena(former);
  destroy_arena(arena);
}

static void tensors() {
  Arena* arena = make_arena();
  exchange_arena(arena);
  float numbers[24];
  for (int i = 0; i < 24; ++i) numbers[i] = static_cast<float>(i);
  int64_t sizes[] = {2, 3}, strides[] = {12, 4};
  Tensor* in = borrow(arena, numbers, sizeof numbers, kFloat, 2, sizes, strides, 1, kCpu, 0);
  CHECK(data(in) == numbers + 1);
  A(delete_tensor_object)(in);  // leaves it alone
  CHECK(data(in)[4] == 5);
  // The step is added to the tensor's own offset, and the storage is shared.
  int64_t row[] = {3}, step[] = {4};
  Tensor* second = nullptr;
  CHECK(A(_reinterpret_tensor)(in, 1, row, step, 12, &second) == 0);
  CHECK(data(second) == numbers + 13);
  int64_t nbytes = 0;
  CHECK(A(get_storage_size)(second, &nbytes) == 0 && nbytes == static_cast<int64_t>(sizeof numbers));
  // A strided one becomes contiguous, or keeps its strides; one without gaps keeps them.
  Tensor *dense = nullptr, *kept = nullptr;
  CHECK(A(clone)(in, &dense) == 0 && view(dense).strides[0] == 3 && view(dense).strides[1] == 1);
  CHECK(data(dense)[5] == numbers[1 + 12 + 8] && data(dense)[2] == numbers[9]);
  CHECK(A(clone_preserve_strides)(in, &kept) == 0 && view(kept).strides[0] == 12);
  CHECK(data(kept)[20] == numbers[21]);
  int64_t turned[] = {1, 2};
  Tensor* columns = borrow(arena, numbers, sizeof numbers, kFloat, 2, sizes, turned, 0, kCpu, 0);
  Tensor* same = nullptr;
  CHECK(A(clone)(columns, &same) == 0 && view(same).strides[1] == 2 && data(same)[3] == 3);
  // Copies: what broadcasts; one dtype.
  int64_t scalar_sizes[] = {1};
  int64_t zero[] = {0};
  Tensor* scalar = borrow(arena, numbers + 7, 4, kFloat, 1, scalar_sizes, zero, 0, kCpu, 0);
  CHECK(A(copy_)(dense, scalar, 0) == 0 && data(dense)[0] == 7 && data(dense)[5] == 7);
  CHECK(A(copy_)(dense, in, 0) == 0 && data(dense)[5] == 21);
  CHECK(A(copy_)(scalar, dense, 0) != 0);
  Tensor* other = empty({2, 3}, {3, 1}, kLong);
  CHECK(A(copy_)(dense, other, 0) != 0);
  float number = 0;
  int64_t wrong = 0;
  CHECK(A(item_float32)(scalar, &number) == 0 && number == 7);
  CHECK(A(item_int64)(scalar, &wrong) != 0 && A(item_float32)(dense, &number) != 0);
  Tensor* blob = nullptr;
  CHECK(A(create_tensor_from_blob)(numbers, 1, row, step, 2, kFloat, kCpu, 0, &blob) == 0 &&
        data(blob) == numbers + 2);
  CHECK(A(create_tensor_from_blob)(numbers, 1, row, step, -1, kFloat, kCpu, 0, &blob) != 0);
  for (Tensor* t : {in, columns, scalar}) end_borrow(t);
  // The view outlives the handle that it was made from.
  CHECK(data(second)[0] == 13);
  exchange_arena(nullptr);
  destroy_arena(arena);
}

// One constant for all who ask by its key; the file's own bytes where they can be used.
static void constants() {
  using headrace::HostConstants;
  alignas(64) static char bytes[256];
  for (int i = 0; i < 256; ++i) bytes[i] = static_cast<char>(i);
  HostConstants held;
  auto first = held.get("w", {bytes, 128}, false), again = held.get("w", {bytes, 128}, false);
  CHECK(first.ok() && again.ok() && *first == *again && (*first)->data() == bytes);
  auto odd = held.get("odd", {bytes + 4, 100}, false), same = held.get("odd", {bytes + 4, 100}, false);
  CHECK(odd.ok() && same.ok() && *odd == *same && (*odd)->data() != bytes + 4);
  CHECK(reinterpret_cast<uintptr_t>((*odd)->data()) % 64 == 0 &&
        std::memcmp((*odd)->data(), bytes + 4, 100) == 0);
  // State is written, so it is never the file.
  HostConstants one, other;
  auto mine = one.get("s", {bytes, 128}, true), yours = other.get("s", {bytes, 128}, true);
  CHECK(mine.ok() && yours.ok() && (*mine)->data() != bytes && (*mine)->data() != (*yours)->data());
  static_cast<char*>((*mine)->data())[0] = 99;
  CHECK(bytes[0] == 0 && *static_cast<char*>((*yours)->data()) == 0);
  CHECK(static_cast<char*>((*one.get("s", {bytes, 128}, true))->data())[0] == 99);
  CHECK(held.get("empty", {bytes, 0}, true).ok());
}

static void checks() {
  std::string said;
  A(check)(true, "f", "file", 1, "holds");
  A(check)(false, "f", "file", 1, "nobody listens");
  set_on_check_failed([](const char* message, bool) { throw std::runtime_error(message); });
  try {
    A(check)(false, "f", "file", 3, "index out of bounds");
  } catch (const std::exception& error) {
    said = error.what();
  }
  CHECK(said == "index out of bounds (f, line 3)");
  set_on_check_failed(nullptr);
}

static void ends_of_threads() {
  static std::vector<int> ended;
  auto end = [](void* which) { ended.push_back(*static_cast<int*>(which)); };
  static int one = 1, two = 2, three = 3;
  char library[2][16];
  // On its own, a thread ends what it has, the latest first.
  std::thread([&] {
    __hra_thread_atexit(end, &one, library[0]);
    __hra_thread_atexit(end, &two, library[0]);
  }).join();
  CHECK((ended == std::vector<int>{2, 1}));
  ended.clear();
  // A library that goes takes its objects of every thread along, and no other's; none ends twice.
  int stage = 0;
  std::thread waiting([&] {
    __hra_thread_atexit(end, &one, library[0]);
    __hra_thread_atexit(end, &two, library[1]);
    __atomic_store_n(&stage, 1, __ATOMIC_RELEASE);
    while (__atomic_load_n(&stage, __ATOMIC_ACQUIRE) != 2) std::this_thread::yield();
  });
  __hra_thread_atexit(end, &three, library[0]);
  while (__atomic_load_n(&stage, __ATOMIC_ACQUIRE) != 1) std::this_thread::yield();
  end_thread_objects(library[0], library[0] + 16);
  CHECK(ended.size() == 2);
  __atomic_store_n(&stage, 2, __ATOMIC_RELEASE);
  waiting.join();
  CHECK(ended.size() == 3 && ended.back() == 2);
}

// ---- a GPU, as far as libraries see one: a table of the driver's, and memory

namespace cu = headrace::cu;

static int64_t taken = 0, given = 0, launched = 0, copies = 0, waits = 0, events = 0;
static int driver_says = 0;
static void* stream_used = nullptr;

extern "C" {
int hrceEventRecord(void*, void*);
int hrceEventSynchronize(void*);
int hrceEventQuery(void*);
int hrceGetDevice(int*);
int hrceSetDevice(int);
int hrceGetLastError();
int hrceMalloc(void**, size_t);
int hrceFree(void*);
int hrceMemcpy(void*, const void*, size_t, int);
int hrceStreamSynchronize(void*);
int hrLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                   void**);
int32_t A(create_cuda_stream_guard)(void*, int32_t, void**);
int32_t A(delete_cuda_stream_guard)(void*);
int32_t A(get_current_cuda_stream)(int32_t, void**);
int32_t A(create_cuda_guard)(int32_t, void**);
}

static Tensor* on_gpu(std::vector<int64_t> sizes, std::vector<int64_t> strides) {
  Tensor* t = nullptr;
  CHECK(A(empty_strided)(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), kFloat, kCuda, 3,
                         &t) == 0);
  return t;
}

static void gpu() {
  cu::Driver driver;
  driver.LaunchKernel = [](cu::Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                           cu::Stream stream, void**, void**) -> cu::Code {
    ++launched;
    stream_used = stream;
    return driver_says;
  };
  driver.MemcpyAsync = [](cu::Address to, cu::Address from, size_t n, cu::Stream stream) -> cu::Code {
    ++copies;
    stream_used = stream;
    if (driver_says == 0) std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), n);
    return driver_says;
  };
  driver.StreamSynchronize = [](cu::Stream) -> cu::Code { return 0; };
  driver.EventRecord = [](cu::Event, cu::Stream) -> cu::Code { return ++events, 0; };
  driver.EventSynchronize = [](cu::Event) -> cu::Code { return ++events, 0; };
  driver.EventQuery = [](cu::Event) -> cu::Code { return ++events, cu::kNotReady; };
  driver.GetErrorString = [](cu::Code, const char** text) -> cu::Code { return *text = "no luck", 0; };
  Gpu on;
  on.driver = &driver;
  on.ordinal = 3;
  on.take = [](void*, size_t n) { return ++taken, std::malloc(n + 1); };
  on.give = [](void*, void* data) { ++given, std::free(data); };
  on.copied = [](void*, size_t, size_t) {};
  on.waited = [](void*) { ++waits; };
  Arena* arena = make_arena(&on);
  exchange_arena(arena);
  int first_stream = 0, second_stream = 0, device = -1;
  GpuRun run;
  run.stream = &first_stream;

  // Memory: the caller's where a request is to become an output; a clone is no request.
  std::vector<float> output(6);
  Placement placement{1, 24, output.data()};
  run.placements = &placement;
  run.num_placements = 1;
  begin_gpu_run(arena, run);
  Tensor* a = on_gpu({2, 3}, {3, 1});
  Tensor* copied = nullptr;
  CHECK(A(clone_preserve_strides)(a, &copied) == 0 && view(copied).ordinal == -1);
  Tensor* b = on_gpu({2, 3}, {3, 1});
  CHECK(view(a).ordinal == 0 && view(b).ordinal == 1 && view(b).data == output.data() && view(b).whole);
  CHECK(taken == 2 && copies == 1 && stream_used == &first_stream);
  for (Tensor* t : {a, b, copied}) CHECK(A(delete_tensor_object)(t) == 0);
  CHECK(given == 2 && counts(arena).tensors == 0);
  // Another size under that number is no output.
  begin_gpu_run(arena, run);
  a = on_gpu({2, 3}, {3, 1});
  b = on_gpu({2, 2}, {2, 1});
  CHECK(view(b).ordinal == 1 && view(b).data != output.data());

  // The device is that of the program, the stream that of the run or of a guard.
  void* guard = nullptr;
  void* now = nullptr;
  CHECK(hrceGetDevice(&device) == 0 && device == 3 && hrceSetDevice(3) == 0 && hrceSetDevice(0) == 101);
  CHECK(A(create_cuda_stream_guard)(&second_stream, 3, &guard) == 0);
  CHECK(A(get_current_cuda_stream)(3, &now) == 0 && now == &second_stream);
  CHECK(A(delete_cuda_stream_guard)(guard) == 0);
  CHECK(A(get_current_cuda_stream)(3, &now) == 0 && now == &first_stream);
  CHECK(A(create_cuda_stream_guard)(&second_stream, 0, &guard) == 1 && A(create_cuda_guard)(1, &guard) == 1);
  CHECK(std::string(take_error()).find("device index 3") != std::string::npos);
  // Guards within guards, as many as there is room for; each puts back what was there before it.
  void* guards[9] = {};
  int streams[9] = {};
  for (int i = 0; i < 8; ++i) CHECK(A(create_cuda_stream_guard)(&streams[i], 3, &guards[i]) == 0);
  CHECK(A(create_cuda_stream_guard)(&streams[8], 3, &guards[8]) == 1);
  CHECK(std::string(take_error()).find("at most 8 guards at once") != std::string::npos);
  for (int i = 8; i-- > 0;) {
    CHECK(A(get_current_cuda_stream)(3, &now) == 0 && now == &streams[i]);
    CHECK(A(delete_cuda_stream_guard)(guards[i]) == 0);
  }
  CHECK(A(get_current_cuda_stream)(3, &now) == 0 && now == &first_stream);

  // Strided copies: as few as there are stretches without a gap.
  float* x = data(a);
  for (int i = 0; i < 6; ++i) x[i] = static_cast<float>(i);
  copies = 0;
  const int64_t dense[] = {3, 1}, turned[] = {1, 2};
  std::vector<float> to(6);
  CHECK(copy_on_device(a, to.data(), dense) && copies == 1 && to == (std::vector<float>{0, 1, 2, 3, 4, 5}));
  CHECK(copy_on_device(a, to.data(), turned) && copies == 7);
  CHECK((to == std::vector<float>{0, 3, 1, 4, 2, 5}));

  // Events and waits of the library's own: for constants that it computes, and for nothing else.
  CHECK(hrceEventRecord(&device, &first_stream) == 0 && hrceEventSynchronize(&device) == 0);
  CHECK(hrceEventQuery(&device) == 0 && events == 0 && waits == 0);
  run.events = true;
  begin_gpu_run(arena, run);
  CHECK(hrceEventRecord(&device, &first_stream) == 0 && hrceEventSynchronize(&device) == 0);
  CHECK(hrceEventQuery(&device) == cu::kNotReady && events == 3 && waits == 1 && counts(arena).code == 0);

  // A value read back waits; where host memory may take no part it is refused, before anything is enqueued.
  float value = 0;
  Tensor* one = on_gpu({1}, {1});
  *data(one) = 7;
  copies = 0;
  CHECK(A(item_float32)(one, &value) == 0 && value == 7 && copies == 1 && waits == 2);
  run.replayed = true;
  begin_gpu_run(arena, run);
  CHECK(A(item_float32)(one, &value) == 1 && copies == 1);
  CHECK(std::string(take_error()).find("never at replay") != std::string::npos);

  // A rehearsal enqueues nothing.
  run.replayed = false;
  run.rehearsal = true;
  begin_gpu_run(arena, run);
  void* arguments[] = {nullptr};
  CHECK(hrLaunchKernel(nullptr, 1, 1, 1, 1, 1, 1, 0, &first_stream, arguments, nullptr) == 0 &&
        launched == 0);
  CHECK(hrceMemcpy(&value, data(one), 4, 2) == 0 && copies == 1 && hrceStreamSynchronize(nullptr) == 0);
  CHECK(A(item_float32)(one, &value) == 1 && waits == 2);
  (void)take_error();

  // What the driver says is kept, the first of it, for whoever called the library.
  begin_gpu_run(arena, GpuRun{&first_stream});
  driver_says = 700;
  CHECK(hrLaunchKernel(nullptr, 1, 1, 1, 1, 1, 1, 0, &first_stream, arguments, nullptr) == 700 &&
        launched == 1);
  driver_says = 719;
  CHECK(hrLaunchKernel(nullptr, 1, 1, 1, 1, 1, 1, 0, &first_stream, arguments, nullptr) == 719);
  CHECK(counts(arena).code == 700 && counts(arena).launches == 2 && hrceGetLastError() == 719);
  CHECK(A(clone)(one, &copied) == 1 && std::string(take_error()).find("no luck") != std::string::npos);
  driver_says = 0;
  void* memory = nullptr;
  CHECK(hrceMalloc(&memory, 8) == 0 && hrceFree(memory) == 0);
  exchange_arena(nullptr);
  // With no arena of a GPU they answer as on a machine without one.
  CHECK(hrLaunchKernel(nullptr, 1, 1, 1, 1, 1, 1, 0, nullptr, arguments, nullptr) == 100 && launched == 2);
  destroy_arena(arena);
  CHECK(taken == given);
}

int main() {
  memory();
  tensors();
  constants();
  checks();
  gpu();
  ends_of_threads();
  std::printf("%d failures\n", failures);
  return failures != 0;
}
