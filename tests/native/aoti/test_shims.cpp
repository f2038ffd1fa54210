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

int main() {
  memory();
  tensors();
  constants();
  checks();
  ends_of_threads();
  std::printf("%d failures\n", failures);
  return failures != 0;
}
