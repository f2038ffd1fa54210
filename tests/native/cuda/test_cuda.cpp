// The device cuda on the fake driver (fake_driver.cpp): what can be shown without a GPU. Run with the name of
// a test and the fake in LD_LIBRARY_PATH; main.cpp is the other native tests' own.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "../device/check.h"
#include "cuda/temporaries.h"
#include "device/driver.h"
#include "headrace/block.h"

using namespace headrace;

namespace {

template <class F>
F* fake(const char* name) {
  static void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) library = dlopen("libcuda.so.1", RTLD_NOW);
  return reinterpret_cast<F*>(dlsym(library, name));
}
int64_t calls(const char* name) { return fake<int64_t(const char*)>("fake_calls")(name); }
void fail(const char* name, int at, int code) {
  fake<void(const char*, int64_t, int)>("fake_fail")(name, at, code);
}
void* memory(size_t nbytes, int device, bool managed = false, bool host = false) {
  return fake<void*(size_t, int, int, int)>("fake_memory")(nbytes, device, managed, host);
}
void run_all() { fake<void()>("fake_run_all")(); }
cu::Context now() {
  cu::Context context = nullptr;
  (void)fake<cu::Code(cu::Context*)>("cuCtxGetCurrent")(&context);
  return context;
}

StreamHandle handle(cu::Stream stream) { return reinterpret_cast<StreamHandle>(stream); }

DeviceRef gpu(int ordinal = 0) {
  auto device = cuda_device(ordinal);
  CHECK_OK(device);
  return *device;
}

// Nothing is left but the device's own context and pool, and nobody did what nobody should.
void nothing_left() {
  run_all();
  CHECK_OK(gpu()->synchronize());  // reaps
  CHECK_OK(gpu()->trim());         // streams kept for the next one
  std::string left = fake<const char*()>("fake_left")();
  check::Note note("left: " + left);
  CHECK(left.empty());
}

TEST(cuda_opens_one_device_for_the_process) {
  DeviceRef device = gpu();
  CHECK(device == gpu());
  CHECK(device->name() == "cuda:0");
  CHECK(device->backend() == Backend::kCuda);
  CHECK_EQ(device->id(), 0);
  CHECK_EQ(calls("cuDevicePrimaryCtxRetain"), 1);
  CHECK_EQ(calls("cuMemPoolCreate"), 1);
  CHECK_EQ(fake<int()>("fake_internal_dependencies")(), 0);
  CHECK(now() == nullptr);
  CHECK_REFUSED(cuda_device(1), kDevice, "cuda:1", "cuda:0 alone", "CUDA_VISIBLE_DEVICES");
  CHECK_REFUSED(cuda_device(-1), kDevice, "cuda:-1");
  nothing_left();
}

TEST(cuda_copies_and_fills_in_stream_order) {
  DeviceRef device = gpu();
  StreamHandle stream = *device->create_stream({});
  uint8_t in[64], out[64] = {};
  std::memset(in, 7, sizeof in);
  auto* data = static_cast<uint8_t*>(*device->allocate(64, stream));
  CHECK_OK(device->copy(data, in, 64, stream));
  CHECK_OK(device->fill(data + 1, 9, 2, stream));
  CHECK_OK(device->copy(out, data, 64, stream));
  CHECK(out[0] == 0 && data[0] == 0xFF);  // nothing has run
  CHECK(!*device->query(stream));
  CHECK_OK(device->synchronize(stream));
  CHECK(*device->query(stream));
  CHECK(out[0] == 7 && out[1] == 9 && out[2] == 9 && out[63] == 7);
  CHECK_OK(device->free(data, stream));
  CHECK_OK(device->destroy_stream(stream));
  nothing_left();
}

TEST(cuda_temporaries_serve_again_what_was_given_back) {
  DeviceRef device = gpu();
  StreamHandle first = *device->create_stream({}), second = *device->create_stream({});
  {
    Temporaries temporaries(device);
    temporaries.begin(first, false);
    void* small = temporaries.take(100);
    void* large = temporaries.take(1000);
    CHECK(small != nullptr && large != nullptr && small != large);
    CHECK_OK(device->fill(large, 7, 1000, first));
    temporaries.give(large);
    temporaries.give(small);
    // Another stream, a steady state: the smallest that is large enough, and nothing of the driver's.
    int64_t made = calls("cuMemAllocFromPoolAsync"), freed = calls("cuMemFreeAsync");
    for (int round = 0; round < 3; ++round) {
      temporaries.begin(second, false);
      CHECK(temporaries.take(100) == small && temporaries.take(101) == large);
      temporaries.give(small);
      temporaries.give(large);
    }
    CHECK_EQ(calls("cuMemAllocFromPoolAsync"), made);
    // One that fits nowhere takes the place of the largest that waits, whose memory goes behind its work.
    void* larger = temporaries.take(5000);
    CHECK(larger != nullptr && calls("cuMemAllocFromPoolAsync") == made + 1);
    CHECK_EQ(calls("cuMemFreeAsync"), freed + 1);
    CHECK_EQ(temporaries.nbytes(), 128 + 5056);
    temporaries.give(larger);
    // Not while a graph holds them, or a run is recorded for one.
    {
      auto pin = temporaries.pin();
      CHECK(temporaries.take(9000) != nullptr);
    }
    temporaries.begin(second, true);
    CHECK(temporaries.take(10000) != nullptr);
    CHECK_EQ(calls("cuMemFreeAsync"), freed + 1);
    // What cannot be had is told, and the next run finds it.
    fail("cuMemAllocFromPoolAsync", 0, cu::kOutOfMemory);
    temporaries.begin(first, false);
    CHECK(temporaries.take(100000) == nullptr);
    CHECK(temporaries.failure().code() == ErrorCode::kOutOfDeviceMemory);
    temporaries.begin(first, false);
    CHECK(temporaries.take(100000) != nullptr && temporaries.failure().ok());
    // While a stream captures there is nothing but what waits.
    CHECK_OK(device->begin_capture(second, CaptureMode::kThreadLocal));
    {
      PutOffScope capture;
      temporaries.begin(second, true);
      CHECK(temporaries.take(200000) == nullptr);
      CHECK(temporaries.failure().code() == ErrorCode::kCapture);
    }
    (void)device->end_capture(second);
    CHECK_OK(device->synchronize(first));
    CHECK_OK(device->synchronize(second));
  }
  CHECK_OK(device->destroy_stream(first));
  CHECK_OK(device->destroy_stream(second));
  CHECK_EQ(device->memory().current_nbytes, 0);
  nothing_left();
}

TEST(cuda_knows_what_an_address_is) {
  DeviceRef device = gpu();
  auto* data = static_cast<uint8_t*>(*device->allocate(100, 0));
  CHECK(device->where(data + 99).kind == PointerInfo::Kind::kDevice);
  CHECK(device->where(data + 99).base == data);
  CHECK_EQ(device->where(data).nbytes, 100);
  CHECK(device->where(data + 100).kind == PointerInfo::Kind::kHost);
  CHECK(device_of(data + 50) == device);
  int here = 0;
  CHECK(device->where(&here).kind == PointerInfo::Kind::kHost);
  CHECK(device->where(nullptr).kind == PointerInfo::Kind::kHost);
  CHECK(device->where(memory(64, 0)).kind == PointerInfo::Kind::kDevice);
  CHECK(device->where(memory(64, 0, false, true)).kind == PointerInfo::Kind::kHost);  // pinned
  CHECK(device->where(memory(64, 1, true)).kind == PointerInfo::Kind::kDevice);  // managed, from anywhere
  void* other = memory(64, 1);
  CHECK(device->where(other).kind == PointerInfo::Kind::kOther);
  CHECK_EQ(device->where(other).device_id, 1);
  CHECK_REFUSED(device->copy(data, other, 8, 0), kDevice, "cuda:0", "memory of cuda:1");
  CHECK_REFUSED(device->copy(data + 1, data, 100, 0), kInput, "99 are inside");
  CHECK_REFUSED(device->fill(data, 0, 101, 0), kInput, "100 are inside");
  CHECK_REFUSED(device->copy(nullptr, data, 1, 0), kInput, "null");
  CHECK_REFUSED(device->fill(&here, 0, 4, 0), kInput, "CUDA_ERROR_INVALID_VALUE");
  auto sim = make_sim_device({});
  void* pretend = *sim->allocate(16, 0);
  CHECK_REFUSED(device->copy(data, pretend, 8, 0), kDevice, "memory of sim:0");
  void* plain = *cpu_device()->allocate(16, 0);
  CHECK_OK(device->copy(data, plain, 16, 0));
  CHECK_OK(device->synchronize(0));
  CHECK_OK(cpu_device()->free(plain, 0));
  CHECK_OK(device->copy(data, &here, 0, 0));
  CHECK_OK(device->free(data, 0));
  nothing_left();
}

TEST(cuda_counts_memory) {
  DeviceRef device = gpu();
  MemoryCounts before = device->memory();
  void* a = *device->allocate(1000, 0);
  void* b = *device->allocate(0, 0);
  CHECK(a != nullptr && b != nullptr && a != b);
  CHECK_EQ(device->memory().current_nbytes - before.current_nbytes, 1000);
  CHECK_EQ(device->memory().allocations - before.allocations, 2);
  CHECK_REFUSED(device->free(static_cast<char*>(a) + 1, 0), kInput, "start of a live allocation");
  CHECK_OK(device->free(a, 0));
  CHECK_REFUSED(device->free(a, 0), kInput, "start of a live allocation");
  CHECK_OK(device->free(b, kPerThreadStream));
  CHECK_EQ(device->memory().current_nbytes, before.current_nbytes);
  CHECK_EQ(device->memory().frees - before.frees, 2);
  CHECK(device->memory().peak_nbytes >= before.current_nbytes + 1000);
  CHECK_REFUSED(device->allocate(size_t{1} << 40, 0), kOutOfDeviceMemory, "CUDA_ERROR_OUT_OF_MEMORY",
                "are free");
  int64_t trims = calls("cuMemPoolTrimTo");
  CHECK_OK(device->trim());
  CHECK_EQ(calls("cuMemPoolTrimTo"), trims + 1);
  CHECK_EQ(fake<size_t()>("fake_pool_nbytes")(), before.current_nbytes);
  nothing_left();
}

TEST(cuda_a_failed_free_keeps_the_memory_known) {
  DeviceRef device = gpu();
  void* data = *device->allocate(10, 0);
  fail("cuMemFreeAsync", 0, cu::kInvalidValue);
  CHECK_REFUSED(device->free(data, 0), kInput, "cuda:0, free", "CUDA_ERROR_INVALID_VALUE");
  CHECK(device->where(data).kind == PointerInfo::Kind::kDevice);
  CHECK(device_of(data) == device);
  CHECK_OK(device->free(data, 0));
  nothing_left();
}

// Every call of the seam, so that something can be said of all of them.
struct Everything {
  DeviceRef device = gpu();
  StreamHandle stream = *device->create_stream({});
  void* data = *device->allocate(64, stream);
  EventRef event = *device->create_event(true), other = *device->create_event(true);
  GraphRef graph;
  GraphExecRef exec;
  PartitionRef lane = (*device->split(std::vector<int>{8}))[0];
  Everything() {
    CHECK_OK(device->begin_capture(stream, CaptureMode::kThreadLocal));
    CHECK_OK(device->fill(data, 1, 64, stream));
    graph = *device->end_capture(stream);
    exec = *device->instantiate(*graph);
    CHECK_OK(device->record(*event, stream));
    CHECK_OK(device->record(*other, stream));
    CHECK_OK(device->synchronize(stream));
  }
  ~Everything() {
    CHECK_OK(device->synchronize());
    CHECK_OK(device->free(data, stream));
    CHECK_OK(device->destroy_stream(stream));
  }
  // Each with the driver's entry that does its work.
  std::vector<std::pair<const char*, std::function<Status()>>> all() {
    return {
        {"cuMemAllocFromPoolAsync",
         [this] {
           auto made = device->allocate(8, stream);
           return made.ok() ? device->free(*made, stream) : made.status();
         }},
        {"cuMemFreeAsync",
         [this] {
           auto made = device->allocate(8, stream);
           if (!made.ok()) return made.status();
           Status status = device->free(*made, stream);
           if (!status.ok()) CHECK_OK(device->free(*made, stream));
           return status;
         }},
        {"cuMemcpyAsync", [this] { return device->copy(data, this, 8, stream); }},
        {"cuMemsetD8Async", [this] { return device->fill(data, 0, 8, stream); }},
        {"cuMemPoolTrimTo", [this] { return device->trim(); }},
        {"cuStreamCreateWithPriority",
         [this] {
           // Else it would be one that rests.
           if (Status trimmed = device->trim(); !trimmed.ok()) return trimmed;
           auto made = device->create_stream({});
           return made.ok() ? device->destroy_stream(*made) : made.status();
         }},
        {"cuStreamSynchronize", [this] { return device->synchronize(stream); }},
        {"cuCtxSynchronize", [this] { return device->synchronize(); }},
        {"cuStreamQuery", [this] { return device->query(stream).status(); }},
        {"cuLaunchHostFunc", [this] { return device->call(stream, [] { return Status(); }, {}); }},
        {"cuEventCreate", [this] { return device->create_event().status(); }},
        {"cuEventRecord", [this] { return device->record(*event, stream); }},
        {"cuStreamWaitEvent", [this] { return device->wait(stream, *event); }},
        {"cuEventSynchronize", [this] { return device->synchronize(*event); }},
        {"cuEventQuery", [this] { return device->query(*event).status(); }},
        {"cuEventElapsedTime",
         [this] {
           auto status = device->synchronize(*event);
           return status.ok() ? device->elapsed_ms(*event, *other).status() : status;
         }},
        {"cuStreamIsCapturing", [this] { return device->capture_status(stream).status(); }},
        {"cuStreamBeginCapture",
         [this] {
           Status status = device->begin_capture(stream, CaptureMode::kThreadLocal);
           return status.ok() ? device->end_capture(stream).status() : status;
         }},
        {"cuGraphInstantiate", [this] { return device->instantiate(*graph).status(); }},
        {"cuGraphUpload", [this] { return device->upload(*exec, stream); }},
        {"cuGraphLaunch", [this] { return device->launch(*exec, stream); }},
        {"cuGreenCtxCreate", [this] { return device->split(std::vector<int>{8}).status(); }},
        {"cuGreenCtxGetDevResource", [this] { return device->split(std::vector<int>{8}).status(); }},
        {"cuDevResourceGenerateDesc", [this] { return device->split(std::vector<int>{8}).status(); }},
        {"cuModuleLoadData", [this] { return device->sms_seen(stream).status(); }},
        {"cuLaunchKernel", [this] { return device->sms_seen(stream, true).status(); }},
        {"cuGraphGetNodes", [this] { return device->work_of(*graph, lane).status(); }},
    };
  }
};

// LT4, GR10, f10: with nothing current, with the primary one, with another context and with a green one.
TEST(cuda_puts_back_the_current_context_on_every_way_out) {
  Everything everything;
  auto push = fake<cu::Code(cu::Context)>("cuCtxPushCurrent_v2");
  auto pop = fake<cu::Code(cu::Context*)>("cuCtxPopCurrent_v2");
  cu::Context former = nullptr;
  for (int which = 0; which < 3; ++which) {
    if (which == 1) CHECK_EQ(push(fake<cu::Context(int)>("fake_context")(0)), 0);
    if (which == 2) CHECK_EQ(fake<int()>("fake_push_green")(), 0);
    cu::Context there = now();
    CHECK(which == 0 ? there == nullptr : there != nullptr);
    for (auto& [entry, call] : everything.all()) {
      check::Note note(std::string(entry) + ", context " + std::to_string(which));
      CHECK_OK(call());
      CHECK(now() == there);
      fail(entry, 0, cu::kIllegalAddress);
      CHECK_REFUSED(call(), kDevice, "cuda:0, ", "CUDA_ERROR_ILLEGAL_ADDRESS", "context is lost");
      CHECK(now() == there);
      CHECK_OK(call());
      // The context cannot even be put in place.
      fail("cuCtxPushCurrent", 0, cu::kInvalidContext);
      CHECK(!call().ok());
      CHECK(now() == there);
    }
    (void)everything.device->where(everything.data);
    (void)everything.device->where(&everything);
    (void)everything.device->sm_limits();
    CHECK_OK(everything.device->check_stream(everything.stream));
    CHECK(now() == there);
    if (which != 0) CHECK_EQ(pop(&former), 0);
  }
}

TEST(cuda_leaves_nothing_after_all_of_that) { nothing_left(); }

TEST(cuda_the_per_thread_stream_works_while_a_green_context_is_current) {
  DeviceRef device = gpu();
  void* data = *device->allocate(8, kPerThreadStream);
  CHECK_EQ(fake<int()>("fake_push_green")(), 0);
  CHECK_OK(device->fill(data, 5, 8, kPerThreadStream));
  CHECK_OK(device->synchronize(kPerThreadStream));
  cu::Context green = nullptr;
  CHECK_EQ(fake<cu::Code(cu::Context*)>("cuCtxPopCurrent_v2")(&green), 0);
  CHECK(*static_cast<uint8_t*>(data) == 5);
  CHECK_OK(device->free(data, kPerThreadStream));
  nothing_left();
}

TEST(cuda_events_order_streams) {
  DeviceRef device = gpu();
  StreamHandle a = *device->create_stream({}), b = *device->create_stream({});
  auto* data = static_cast<uint8_t*>(*device->allocate(8, a));
  EventRef event = *device->create_event();
  CHECK(*device->query(*event));  // never recorded: complete, and no wait
  CHECK_OK(device->synchronize(*event));
  CHECK_OK(device->wait(b, *event));
  CHECK_OK(device->fill(data, 1, 8, a));
  CHECK_OK(device->record(*event, a));
  CHECK_OK(device->wait(b, *event));
  CHECK_OK(device->fill(data, 2, 4, b));
  CHECK(!*device->query(*event));
  CHECK_OK(device->synchronize(b));
  CHECK(data[0] == 2 && data[7] == 1);
  CHECK(*device->query(*event));
  EventRef begin = *device->create_event(true), end = *device->create_event(true);
  CHECK_REFUSED(device->elapsed_ms(*begin, *end), kInput, "never recorded");
  CHECK_OK(device->record(*begin, a));
  CHECK_OK(device->fill(data, 3, 8, a));
  CHECK_OK(device->record(*end, a));
  CHECK_REFUSED(device->elapsed_ms(*begin, *end), kDevice, "complete");
  CHECK_OK(device->synchronize(*end));
  CHECK(*device->elapsed_ms(*begin, *end) > 0);
  CHECK_REFUSED(device->elapsed_ms(*event, *end), kInput, "timing");
  CHECK_OK(device->free(data, a));
  // An event outlives its stream.
  CHECK_OK(device->destroy_stream(a));
  CHECK_OK(device->destroy_stream(b));
  CHECK_OK(device->synchronize(*event));
  event = begin = end = nullptr;
  nothing_left();
}

TEST(cuda_streams_of_others_are_told_apart) {
  DeviceRef device = gpu();
  auto push = fake<cu::Code(cu::Context)>("cuCtxPushCurrent_v2");
  auto pop = fake<cu::Code(cu::Context*)>("cuCtxPopCurrent_v2");
  auto make = fake<cu::Code(cu::Stream*, unsigned, int)>("cuStreamCreateWithPriority");
  auto destroy = fake<cu::Code(cu::Stream)>("cuStreamDestroy_v2");
  cu::Context former = nullptr;
  cu::Stream foreign = nullptr, own_context = nullptr, elsewhere = nullptr;
  StreamHandle ours = *device->create_stream({});
  cu::Context primary = nullptr;
  CHECK_EQ(fake<cu::Code(cu::Stream, cu::Context*)>("cuStreamGetCtx")(reinterpret_cast<cu::Stream>(ours),
                                                                      &primary),
           0);
  CHECK_EQ(push(primary), 0);
  CHECK_EQ(make(&foreign, 1, 0), 0);
  CHECK_EQ(pop(&former), 0);
  CHECK_EQ(push(fake<cu::Context(int)>("fake_context")(0)), 0);
  CHECK_EQ(make(&own_context, 1, 0), 0);
  CHECK_EQ(pop(&former), 0);
  CHECK_EQ(push(fake<cu::Context(int)>("fake_context")(1)), 0);
  CHECK_EQ(make(&elsewhere, 1, 0), 0);
  CHECK_EQ(pop(&former), 0);
  for (StreamHandle good : {StreamHandle{0}, kLegacyStream, kPerThreadStream, ours, handle(foreign)})
    CHECK_OK(device->check_stream(good));
  CHECK_REFUSED(device->check_stream(handle(elsewhere)), kDevice, "stream of cuda:0", "of cuda:1");
  Status other = device->check_stream(handle(own_context));
  // An older driver cannot tell this from a green context of the primary one.
  if (fake<void>("cuStreamGetCtx_v2") != nullptr) {
    CHECK_REFUSED(other, kDevice, "primary context", "another context");
  } else {
    CHECK_OK(other);
  }
  CHECK_REFUSED(device->check_stream(3), kInput, "is no stream");
  CHECK_REFUSED(device->check_stream(0xdead0000beef0000), kInput, "is no stream");
  CHECK_REFUSED(device->check_stream(handle(foreign) + 1), kInput, "is no stream");
  CHECK_REFUSED(device->destroy_stream(handle(foreign)), kInput, "create_stream");
  CHECK_REFUSED(device->destroy_stream(2), kInput, "the per-thread stream");
  CHECK(now() == nullptr);
  for (cu::Stream stream : {foreign, own_context, elsewhere}) CHECK_EQ(destroy(stream), 0);
  CHECK_OK(device->destroy_stream(ours));
  nothing_left();
}

TEST(cuda_a_destroyed_stream_is_refused_and_nobody_else_gets_its_address) {
  DeviceRef device = gpu();
  fake<void(int)>("fake_reuse_streams")(1);
  StreamHandle stream = *device->create_stream({});
  void* data = *device->allocate(8, stream);
  EventRef event = *device->create_event();
  CHECK_OK(device->destroy_stream(stream));
  CHECK_REFUSED(device->destroy_stream(stream), kInput, "destroyed");
  CHECK_REFUSED(device->check_stream(stream), kInput, "destroyed");
  CHECK_REFUSED(device->free(data, stream), kInput, "destroyed");
  CHECK_REFUSED(device->copy(data, data, 8, stream), kInput, "destroyed");
  CHECK_REFUSED(device->record(*event, stream), kInput, "destroyed");
  CHECK_REFUSED(device->wait(stream, *event), kInput, "destroyed");
  CHECK_REFUSED(device->synchronize(stream), kInput, "destroyed");
  CHECK_REFUSED(device->allocate(8, stream), kInput, "destroyed");
  // Another library's stream has another address, whatever the driver does with those of destroyed ones.
  auto theirs = [&] {
    cu::Context former = nullptr, primary = nullptr;
    CHECK_EQ(fake<cu::Code(cu::Context*, cu::Device)>("cuDevicePrimaryCtxRetain")(&primary, 0), 0);
    CHECK_EQ(fake<cu::Code(cu::Context)>("cuCtxPushCurrent_v2")(primary), 0);
    cu::Stream made = nullptr;
    CHECK_EQ(fake<cu::Code(cu::Stream*, unsigned, int)>("cuStreamCreateWithPriority")(&made, 1, 0), 0);
    CHECK_EQ(fake<cu::Code(cu::Context*)>("cuCtxPopCurrent_v2")(&former), 0);
    CHECK_EQ(fake<cu::Code(cu::Device)>("cuDevicePrimaryCtxRelease_v2")(0), 0);
    return made;
  };
  cu::Stream other = theirs();
  CHECK(handle(other) != stream);
  CHECK_OK(device->check_stream(handle(other)));
  CHECK_EQ(fake<cu::Code(cu::Stream)>("cuStreamDestroy_v2")(other), 0);
  // Ours is given out again, to those who ask for one of its kind and only when it has nothing to do.
  StreamHandle blocking = *device->create_stream({0, true, nullptr});
  CHECK(blocking != stream);
  StreamHandle again = *device->create_stream({});
  CHECK_EQ(again, stream);
  CHECK_OK(device->check_stream(stream));
  CHECK_OK(device->fill(data, 0, 8, stream));
  CHECK_OK(device->record(*event, stream));
  CHECK_OK(device->destroy_stream(stream));
  StreamHandle fresh = *device->create_stream({});
  CHECK(fresh != stream);
  CHECK_OK(device->wait(fresh, *event));
  CHECK_OK(device->free(data, fresh));
  CHECK_OK(device->synchronize(fresh));
  CHECK_OK(device->destroy_stream(fresh));
  CHECK_OK(device->destroy_stream(blocking));
  // Given back to the driver, the address may be anybody's.
  CHECK_OK(device->trim());
  cu::Stream somebody = theirs();
  CHECK_OK(device->check_stream(handle(somebody)));
  CHECK_EQ(fake<cu::Code(cu::Stream)>("cuStreamDestroy_v2")(somebody), 0);
  fake<void(int)>("fake_reuse_streams")(0);
  event = nullptr;
  nothing_left();
}

TEST(cuda_priorities_are_clamped) {
  DeviceRef device = gpu();
  for (int priority : {-100, -1, 0, 100}) {
    auto stream = device->create_stream({priority, false, nullptr});
    CHECK_OK(stream);
    CHECK_OK(device->destroy_stream(*stream));
  }
  nothing_left();
}

TEST(cuda_a_dropped_block_is_freed_behind_its_last_use) {
  DeviceRef device = gpu();
  auto ring = std::make_shared<Ring>(device);
  StreamHandle stream = *device->create_stream({});
  uint8_t in[64], out[64] = {};
  std::memset(in, 3, sizeof in);
  {
    BlockRef block = *ring->take(64, stream);
    CHECK_OK(device->copy(block->data(), in, 64, stream));
    CHECK_OK(device->copy(out, block->data(), 64, stream));
    EventRef event = *device->create_event();
    CHECK_OK(device->record(*event, stream));
    block->used(event, true);
  }
  CHECK_OK(device->destroy_stream(stream));  // nothing has run yet
  ring->trim();
  CHECK_EQ(device->memory().current_nbytes, 0);
  CHECK_OK(device->synchronize(kPerThreadStream));
  CHECK(out[0] == 3 && out[63] == 3);
  nothing_left();
}

// ---- host functions

TEST(cuda_host_functions_run_in_stream_order) {
  DeviceRef device = gpu();
  StreamHandle stream = *device->create_stream({});
  auto* data = static_cast<uint8_t*>(*device->allocate(1, stream));
  uint8_t seen = 0;
  CHECK_OK(device->fill(data, 4, 1, stream));
  CHECK_OK(device->call(stream,
                        [&] {
                          seen = *data;
                          CHECK(in_host_function());
                          CHECK_REFUSED(device->synchronize(), kDevice, "inside a host function");
                          return Status();
                        },
                        {{data, 1, false}}));
  CHECK_OK(device->fill(data, 5, 1, stream));
  CHECK_EQ(seen, 0);
  CHECK_OK(device->synchronize(stream));
  CHECK_EQ(seen, 4);
  CHECK_EQ(*data, 5);
  CHECK_REFUSED(device->call(stream, [] { return Status(); }, {{data, 2, true}}), kInput, "1 are inside");
  CHECK_OK(device->free(data, stream));
  CHECK_OK(device->destroy_stream(stream));
  nothing_left();
}

TEST(cuda_a_host_function_s_failure_is_told_once_by_the_wait_behind_it) {
  DeviceRef device = gpu();
  StreamHandle a = *device->create_stream({}), b = *device->create_stream({}), c = *device->create_stream({});
  auto boom = [] { return Status(ErrorCode::kDelegate, "boom"); };
  CHECK_OK(device->call(a, boom, {}));
  CHECK_OK(device->synchronize(c));  // it is not behind it
  CHECK_REFUSED(device->synchronize(a), kDelegate, "boom");
  CHECK_OK(device->synchronize(a));
  // By an event, and across streams.
  EventRef event = *device->create_event();
  CHECK_OK(device->call(a, boom, {}));
  CHECK_OK(device->record(*event, a));
  CHECK_OK(device->wait(b, *event));
  CHECK_REFUSED(device->synchronize(b), kDelegate, "boom");
  CHECK_OK(device->synchronize(*event));
  CHECK_OK(device->call(a, boom, {}));
  CHECK_OK(device->record(*event, a));
  CHECK_REFUSED(device->synchronize(*event), kDelegate, "boom");
  CHECK_OK(device->synchronize(a));
  // By the device, from another thread's per-thread stream.
  std::thread([&] { CHECK_OK(device->call(kPerThreadStream, []() -> Status { throw 1; }, {})); }).join();
  CHECK_OK(device->synchronize(kPerThreadStream));
  CHECK_REFUSED(device->synchronize(), kDevice, "exception");
  CHECK_OK(device->synchronize());
  event = nullptr;
  for (StreamHandle stream : {a, b, c}) CHECK_OK(device->destroy_stream(stream));
  nothing_left();
}

TEST(cuda_functions_are_destroyed_by_a_later_call_and_never_inside_the_driver) {
  DeviceRef device = gpu();
  struct Owner {
    std::atomic<int>* ended;
    std::thread::id thread = std::this_thread::get_id();
    ~Owner() {
      CHECK(std::this_thread::get_id() == thread);
      ++*ended;
    }
  };
  std::atomic<int> ended{0};
  auto owner = std::make_shared<Owner>(Owner{&ended});
  ended = 0;
  CHECK_OK(device->call(kLegacyStream, [owner] { return Status(); }, {}));
  owner = nullptr;
  CHECK_EQ(ended, 0);
  CHECK_OK(device->synchronize(kLegacyStream));
  CHECK_EQ(ended, 1);
  nothing_left();
}

TEST(cuda_what_a_failure_left_that_nobody_is_told_of_goes_outside_the_driver_s_callback) {
  DeviceRef device = gpu();
  StreamHandle stream = *device->create_stream({});
  auto ring = std::make_shared<Ring>(device);
  BlockRef block = *ring->take(64, stream);
  ring->close();  // memory is given back at once
  CHECK_OK(device->synchronize(stream));
  int count = 0;
  CHECK_OK(device->begin_capture(stream, CaptureMode::kThreadLocal));
  CHECK_OK(device->call(stream,
                        [&] {
                          Status status(ErrorCode::kDelegate, "boom");
                          if (++count == 2) status->cause = std::move(block);
                          return status;
                        },
                        {}));
  auto graph = device->end_capture(stream);
  CHECK_OK(graph);
  auto exec = device->instantiate(**graph);
  CHECK_OK(exec);
  for (int i = 0; i < 2; ++i) CHECK_OK(device->launch(**exec, stream));
  CHECK_REFUSED(device->synchronize(stream), kDelegate, "boom");
  CHECK_EQ(count, 2);
  *exec = nullptr;
  *graph = nullptr;
  run_put_off();
  ring = nullptr;
  CHECK_OK(device->destroy_stream(stream));
  nothing_left();
}

// ---- capture

TEST(cuda_captures_and_replays) {
  DeviceRef device = gpu();
  StreamHandle stream = *device->create_stream({});
  auto* data = static_cast<uint8_t*>(*device->allocate(8, stream));
  CHECK_OK(device->synchronize(stream));
  int count = 0;
  CHECK_OK(device->begin_capture(stream, CaptureMode::kThreadLocal));
  CHECK(*device->capture_status(stream) == CaptureStatus::kActive);
  CHECK_OK(device->fill(data, 6, 8, stream));
  CHECK_OK(device->call(
      stream, [&] { return ++count == 2 ? Status(ErrorCode::kDelegate, "second") : Status(); }, {}));
  auto graph = device->end_capture(stream);
  CHECK_OK(graph);
  CHECK(*device->capture_status(stream) == CaptureStatus::kNone);
  CHECK_EQ(data[0], 0xFF);
  auto exec = device->instantiate(**graph);
  *graph = nullptr;
  CHECK_OK(device->upload(**exec, stream));
  CHECK_OK(device->launch(**exec, stream));
  CHECK_OK(device->synchronize(stream));
  CHECK_EQ(data[0], 6);
  CHECK_OK(device->launch(**exec, stream));
  CHECK_REFUSED(device->synchronize(stream), kDelegate, "second");
  CHECK_OK(device->launch(**exec, stream));
  *exec = nullptr;  // in flight: its function stays
  CHECK_OK(device->synchronize(stream));
  CHECK_EQ(count, 3);
  CHECK_OK(device->free(data, stream));
  CHECK_OK(device->destroy_stream(stream));
  nothing_left();
}

TEST(cuda_refuses_in_a_capture_before_the_driver_is_asked) {
  DeviceRef device = gpu();
  StreamHandle stream = *device->create_stream({});
  void* data = *device->allocate(8, stream);
  EventRef inside = *device->create_event(), outside = *device->create_event();
  CHECK_OK(device->record(*outside, stream));
  CHECK_OK(device->synchronize(stream));
  CHECK_OK(device->begin_capture(stream, CaptureMode::kThreadLocal));
  CHECK_REFUSED(device->allocate(8, stream), kCapture, "does not capture", "cache");
  CHECK_REFUSED(device->free(data, stream), kCapture, "does not capture");
  CHECK_REFUSED(device->begin_capture(stream, CaptureMode::kRelaxed), kCapture, "which does");
  CHECK_OK(device->record(*inside, stream));
  CHECK_REFUSED(device->synchronize(*inside), kCapture, "CUDA_ERROR_CAPTURED_EVENT");
  CHECK_REFUSED(device->query(*inside), kCapture, "CUDA_ERROR_CAPTURED_EVENT");
  CHECK(*device->capture_status(stream) == CaptureStatus::kActive);  // intact
  CHECK_OK(device->fill(data, 1, 8, stream));
  CHECK_OK(device->end_capture(stream));
  CHECK_REFUSED(device->synchronize(*inside), kCapture, "CUDA_ERROR_CAPTURED_EVENT");
  CHECK_REFUSED(device->wait(stream, *inside), kCapture, "a capture that has ended");
  CHECK_OK(device->record(*inside, stream));  // recorded outside it is an event like any other
  CHECK_OK(device->synchronize(*inside));
  // What the driver refuses is told by name.
  CHECK_REFUSED(device->begin_capture(0, CaptureMode::kGlobal), kCapture, "the legacy stream");
  CHECK_REFUSED(device->end_capture(stream), kCapture, "which does not");
  CHECK_OK(device->begin_capture(stream, CaptureMode::kThreadLocal));
  CHECK_REFUSED(device->wait(stream, *outside), kCapture, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION");
  CHECK(*device->capture_status(stream) == CaptureStatus::kInvalidated);
  CHECK_REFUSED(device->end_capture(stream), kCapture, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED");
  CHECK(*device->capture_status(stream) == CaptureStatus::kNone);
  // A thread's relaxed mode.
  CHECK_OK(device->begin_capture(stream, CaptureMode::kThreadLocal));
  CaptureMode former = device->exchange_capture_mode(CaptureMode::kRelaxed);
  CHECK(*device->query(*outside));
  CHECK_OK(device->synchronize(*outside));
  CHECK(device->exchange_capture_mode(former) == CaptureMode::kRelaxed);
  CHECK(*device->capture_status(stream) == CaptureStatus::kActive);
  CHECK_REFUSED(device->query(*outside), kCapture, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED");
  CHECK_REFUSED(device->end_capture(stream), kCapture, "INVALIDATED");
  CHECK_OK(device->free(data, stream));
  CHECK_OK(device->destroy_stream(stream));
  inside = outside = nullptr;
  nothing_left();
}

TEST(cuda_our_own_bookkeeping_leaves_a_capture_alone) {
  DeviceRef device = gpu();
  StreamHandle stream = *device->create_stream({});
  PartitionRef lane = (*device->split(std::vector<int>{8}))[0];
  StreamHandle in_lane = *device->create_stream({0, false, lane});
  void* data = *device->allocate(8, in_lane);
  CHECK_OK(device->fill(data, 1, 8, in_lane));
  EventRef filled = *device->create_event();
  CHECK_OK(device->record(*filled, in_lane));
  CHECK_OK(device->begin_capture(stream, CaptureMode::kThreadLocal));
  // Its end is put off: asking for its work is forbidden, and is done under the thread's relaxed mode.
  CHECK_OK(device->destroy_stream(in_lane));
  lane = nullptr;
  EventRef event = *device->create_event();
  event = nullptr;
  CHECK_OK(device->destroy_stream(*device->create_stream({})));
  CHECK(*device->capture_status(stream) == CaptureStatus::kActive);
  CHECK_OK(device->end_capture(stream));
  CHECK_OK(device->wait(stream, *filled));
  CHECK_OK(device->free(data, stream));
  filled = nullptr;
  CHECK_OK(device->destroy_stream(stream));
  nothing_left();
}

TEST(cuda_a_call_in_somebody_else_s_capture_is_refused_before_it_is_enqueued) {
  DeviceRef device = gpu();
  StreamHandle stream = *device->create_stream({});
  auto* raw = reinterpret_cast<cu::Stream>(stream);
  CHECK_EQ(fake<cu::Code(cu::Stream, int)>("cuStreamBeginCapture_v2")(raw, cu::kCaptureRelaxed),
           cu::kInvalidContext);
  cu::Context primary = nullptr;
  CHECK_EQ(fake<cu::Code(cu::Stream, cu::Context*)>("cuStreamGetCtx")(raw, &primary), 0);
  CHECK_EQ(fake<cu::Code(cu::Context)>("cuCtxPushCurrent_v2")(primary), 0);
  CHECK_EQ(fake<cu::Code(cu::Stream, int)>("cuStreamBeginCapture_v2")(raw, cu::kCaptureRelaxed), 0);
  CHECK_REFUSED(device->call(stream, [] { return Status(); }, {}), kCapture, "somebody else");
  CHECK(*device->capture_status(stream) == CaptureStatus::kActive);
  cu::Graph graph = nullptr;
  CHECK_EQ(fake<cu::Code(cu::Stream, cu::Graph*)>("cuStreamEndCapture")(raw, &graph), 0);
  CHECK_EQ(fake<cu::Code(cu::Graph)>("cuGraphDestroy")(graph), 0);
  CHECK_EQ(fake<cu::Code(cu::Context*)>("cuCtxPopCurrent_v2")(&primary), 0);
  CHECK_OK(device->destroy_stream(stream));
  nothing_left();
}

// ---- partitions

TEST(cuda_splits_into_disjoint_partitions) {
  DeviceRef device = gpu();
  SmLimits limits = device->sm_limits();
  CHECK(limits.total == 132 && limits.least == 8 && limits.alignment == 8);
  auto lanes = device->split(std::vector<int>{8, 64});
  CHECK_OK(lanes);
  CHECK_EQ((*lanes)[0]->sm_count(), 8);
  CHECK_EQ((*lanes)[1]->sm_count(), 64);
  auto more = device->split(std::vector<int>{1, 9});
  CHECK_EQ((*more)[0]->sm_count(), 8);
  CHECK_EQ((*more)[1]->sm_count(), 16);
  CHECK_REFUSED(device->split(std::vector<int>{64}), kDevice, "at most 36 SMs", "of 132", "got 64");
  CHECK_REFUSED(device->split(std::vector<int>{8, 40}), kDevice, "8 + 40");
  // What the split left over comes to whoever cannot be served otherwise.
  auto rest = device->split(std::vector<int>{25});
  CHECK_EQ((*rest)[0]->sm_count(), 36);
  CHECK_REFUSED(device->split(std::vector<int>{1}), kDevice, "at most 0 SMs");
  more->clear();
  CHECK_EQ((*device->split(std::vector<int>{24}))[0]->sm_count(), 24);
  CHECK_EQ(calls("cuDevSmResourceSplitByCount"), 2);  // one that counts, one that splits, for the process
  lanes->clear();
  rest->clear();
  CHECK_EQ((*device->split(std::vector<int>{132}))[0]->sm_count(), 132);
  CHECK_REFUSED(device->split(std::vector<int>{133}), kDevice, "at most 132");
  nothing_left();
}

TEST(cuda_streams_keep_their_partition_and_closing_it_refuses_more) {
  DeviceRef device = gpu();
  PartitionRef lane = (*device->split(std::vector<int>{120}))[0];
  StreamHandle stream = *device->create_stream({0, false, lane});
  CHECK_REFUSED(device->create_stream({0, true, lane}), kInput, "CU_STREAM_NON_BLOCKING");
  CHECK_OK(lane->close());
  CHECK(lane->closed());
  CHECK_REFUSED(device->create_stream({0, false, lane}), kInput, "closed");
  lane = nullptr;
  CHECK_REFUSED(device->split(std::vector<int>{64}), kDevice, "at most 12");
  void* data = *device->allocate(8, stream);
  CHECK_OK(device->fill(data, 1, 8, stream));
  CHECK_OK(device->check_stream(stream));
  CHECK_OK(device->destroy_stream(stream));  // with work in flight
  // Its SMs are needed: split() waits for that work.
  auto again = device->split(std::vector<int>{64});
  CHECK_OK(again);
  CHECK_EQ(*static_cast<uint8_t*>(data), 1);
  CHECK_OK(device->free(data, kLegacyStream));
  again->clear();
  nothing_left();
}

TEST(cuda_a_graph_keeps_the_partition_it_was_captured_in) {
  DeviceRef device = gpu();
  PartitionRef lane = (*device->split(std::vector<int>{120}))[0];
  StreamHandle stream = *device->create_stream({0, false, lane}), plain = *device->create_stream({});
  void* data = *device->allocate(8, plain);
  CHECK_OK(device->synchronize(plain));
  CHECK_OK(device->begin_capture(stream, CaptureMode::kThreadLocal));
  CHECK_OK(device->fill(data, 1, 8, stream));
  auto graph = device->end_capture(stream);
  auto exec = device->instantiate(**graph);
  *graph = nullptr;
  CHECK_OK(device->destroy_stream(stream));
  lane = nullptr;
  CHECK_REFUSED(device->split(std::vector<int>{64}), kDevice, "at most 12");
  CHECK_OK(device->launch(**exec, plain));
  *exec = nullptr;
  CHECK_OK(device->split(std::vector<int>{64}));  // waits for the launch
  CHECK_EQ(*static_cast<uint8_t*>(data), 1);
  CHECK_OK(device->free(data, plain));
  CHECK_OK(device->destroy_stream(plain));
  nothing_left();
}

TEST(cuda_a_stream_of_a_partition_that_joins_a_capture_lends_it_its_partition) {
  DeviceRef device = gpu();
  PartitionRef lane = (*device->split(std::vector<int>{120}))[0];
  StreamHandle in_lane = *device->create_stream({0, false, lane}), plain = *device->create_stream({});
  EventRef fork = *device->create_event(), join = *device->create_event();
  void* data = *device->allocate(8, plain);
  CHECK_OK(device->synchronize(plain));
  CHECK_OK(device->begin_capture(plain, CaptureMode::kThreadLocal));
  CHECK_OK(device->record(*fork, plain));
  CHECK_OK(device->wait(in_lane, *fork));
  CHECK_OK(device->fill(data, 1, 8, in_lane));
  CHECK_OK(device->record(*join, in_lane));
  CHECK_OK(device->wait(plain, *join));
  auto graph = device->end_capture(plain);
  CHECK_OK(graph);
  CHECK_OK(device->destroy_stream(in_lane));
  lane = nullptr;
  CHECK_REFUSED(device->split(std::vector<int>{64}), kDevice, "at most 12");
  *graph = nullptr;
  CHECK_OK(device->split(std::vector<int>{64}));
  fork = join = nullptr;
  CHECK_OK(device->free(data, plain));
  CHECK_OK(device->destroy_stream(plain));
  nothing_left();
}

// The trap: a context from a failed description has every SM.
TEST(cuda_a_partition_that_fails_leaves_nothing_and_takes_nothing) {
  DeviceRef device = gpu();
  for (const char* entry : {"cuDevResourceGenerateDesc", "cuGreenCtxCreate", "cuGreenCtxGetDevResource"}) {
    for (int at : {0, 1}) {
      check::Note note(std::string(entry) + " " + std::to_string(at));
      fail(entry, at, cu::kInvalidResourceConfiguration);
      CHECK_REFUSED(device->split(std::vector<int>{8, 112}), kDevice,
                    "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION");
    }
  }
  CHECK_EQ((*device->split(std::vector<int>{132}))[0]->sm_count(), 132);
  nothing_left();
}

// GC1: what is asked for is read back, or refused by a driver that is too old; nothing falls back.
TEST(cuda_partitions_have_workqueues_of_their_own_where_the_driver_has_them) {
  DeviceRef device = gpu();
  PartitionOptions three{.workqueue_concurrency_limit = 3}, many{.workqueue_concurrency_limit = 100};
  std::vector<int> sizes{8, 64};
  for (int bad : {0, -1}) {
    PartitionOptions options{.workqueue_concurrency_limit = bad};
    CHECK_REFUSED(device->split(sizes, options), kInput, "at least 1", std::to_string(bad).c_str());
  }
  auto info = cuda_info();
  CHECK_OK(info);
  if (info->driver_version < 13010) {
    int64_t before = calls("cuGreenCtxCreate");
    CHECK_REFUSED(device->split(sizes, three), kDevice, "workqueues (CUDA 13.1, driver 590)",
                  "one for CUDA 13.0", "update the driver");
    CHECK_EQ(calls("cuGreenCtxCreate"), before);
    CHECK(info->no_workqueues.find("CUDA 13.1") != std::string::npos);
  } else {
    CHECK(info->no_workqueues.empty());
    auto lanes = device->split(sizes, three);
    CHECK_OK(lanes);
    for (size_t i = 0; i < 2; ++i) {
      CHECK_EQ((*lanes)[i]->sm_count(), sizes[i]);
      CHECK((*lanes)[i]->workqueue_concurrency_limit() == 3);
    }
    // As the driver grants it: not what was asked for.
    auto more = device->split(std::vector<int>{8}, many);
    CHECK_OK(more);
    CHECK((*more)[0]->workqueue_concurrency_limit() == 8);
    StreamHandle stream = *device->create_stream({0, false, (*more)[0]});
    void* data = *device->allocate(8, stream);
    CHECK_OK(device->fill(data, 1, 8, stream));
    CHECK_OK(device->synchronize(stream));
    CHECK_EQ(*static_cast<uint8_t*>(data), 1);
    CHECK_OK(device->free(data, stream));
    CHECK_OK(device->destroy_stream(stream));
    lanes->clear();
    more->clear();
    // Asked of the device and read back from the context, of the first partition or of the second.
    for (auto [entry, at] : {std::pair{"cuDeviceGetDevResource", 0},
                             {"cuDeviceGetDevResource", 1},
                             {"cuDevResourceGenerateDesc", 0},
                             {"cuGreenCtxCreate", 1},
                             {"cuGreenCtxGetDevResource", 1},
                             {"cuGreenCtxGetDevResource", 3}}) {
      check::Note note(std::string(entry) + " " + std::to_string(at));
      for (cu::Code code : {cu::kInvalidResourceType, cu::kInvalidValue}) {
        fail(entry, at, code);
        CHECK_REFUSED(device->split(sizes, three), kDevice, "CUDA 13.1", "CUDA_ERROR_INVALID_", entry,
                      "ask for no workqueue concurrency limit");
      }
      // What is broken is not called old.
      fail(entry, at, cu::kIllegalAddress);
      CHECK_REFUSED(device->split(sizes, three), kDevice, "CUDA_ERROR_ILLEGAL_ADDRESS");
    }
  }
  auto whole = device->split(std::vector<int>{132});
  CHECK_EQ((*whole)[0]->sm_count(), 132);
  CHECK(!(*whole)[0]->workqueue_concurrency_limit());
  whole->clear();
  nothing_left();
}

// ---- where work runs

// A kernel of somebody's, loaded in the primary context as CuPy and compiled libraries load theirs.
struct Theirs {
  cu::Module module = nullptr;
  cu::Function function = nullptr;
  cu::Context primary = nullptr;
  Theirs() {
    CHECK_EQ(fake<cu::Code(cu::Context*, int)>("cuDevicePrimaryCtxRetain")(&primary, 0), 0);
    enter();
    static const unsigned char image[] = {0x7F, 'E', 'L', 'F'};
    CHECK_EQ(fake<cu::Code(cu::Module*, const void*)>("cuModuleLoadData")(&module, image), 0);
    CHECK_EQ(fake<cu::Code(cu::Function*, cu::Module, const char*)>("cuModuleGetFunction")(&function, module,
                                                                                           "theirs"),
             0);
    leave();
  }
  ~Theirs() {
    enter();
    CHECK_EQ(fake<cu::Code(cu::Module)>("cuModuleUnload")(module), 0);
    leave();
    CHECK_EQ(fake<cu::Code(int)>("cuDevicePrimaryCtxRelease_v2")(0), 0);
  }
  void enter() const { CHECK_EQ(fake<cu::Code(cu::Context)>("cuCtxPushCurrent_v2")(primary), 0); }
  static void leave() {
    cu::Context former = nullptr;
    CHECK_EQ(fake<cu::Code(cu::Context*)>("cuCtxPopCurrent_v2")(&former), 0);
  }
  void launch(StreamHandle stream) const {
    enter();
    CHECK_EQ(fake<cu::Code(cu::Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                           cu::Stream, void**, void**)>("cuLaunchKernel")(
                 function, 1, 1, 1, 1, 1, 1, 0, reinterpret_cast<cu::Stream>(stream), nullptr, nullptr),
             0);
    leave();
  }
};

bool disjoint(const std::vector<int>& a, const std::vector<int>& b) {
  return std::none_of(a.begin(), a.end(), [&](int n) { return std::find(b.begin(), b.end(), n) != b.end(); });
}

TEST(cuda_says_on_which_multiprocessors_work_runs) {
  DeviceRef device = gpu();
  auto lanes = device->split(std::vector<int>{8, 64});
  StreamHandle small = *device->create_stream({0, false, (*lanes)[0]});
  StreamHandle large = *device->create_stream({0, false, (*lanes)[1]});
  StreamHandle plain = *device->create_stream({});
  for (bool replayed : {false, true}) {
    auto first = device->sms_seen(small, replayed), second = device->sms_seen(large, replayed);
    CHECK_OK(first);
    CHECK_OK(second);
    CHECK(std::ssize(*first) == 8 && std::ssize(*second) == 64 && disjoint(*first, *second));
    CHECK(std::is_sorted(first->begin(), first->end()));
    for (StreamHandle whole : {plain, kLegacyStream, kPerThreadStream}) {
      auto all = device->sms_seen(whole, replayed);
      CHECK_OK(all);
      CHECK(std::ssize(*all) == 132 && all->front() == 0 && all->back() == 131);
    }
  }
  // A stream that captures is left alone, and so is a capture of this thread elsewhere.
  CHECK_OK(device->begin_capture(plain, CaptureMode::kThreadLocal));
  CHECK_REFUSED(device->sms_seen(plain), kCapture, "sms_seen", "one that does");
  for (bool replayed : {false, true}) CHECK_EQ(std::ssize(*device->sms_seen(small, replayed)), 8);
  CHECK_OK(device->end_capture(plain));
  CHECK_REFUSED(device->sms_seen(0xDEAD), kInput, "no stream");
  for (StreamHandle stream : {small, large, plain}) CHECK_OK(device->destroy_stream(stream));
  *lanes = std::vector<PartitionRef>();
  nothing_left();
}

TEST(cuda_what_goes_wrong_where_work_says_where_it_runs_is_typed_and_leaves_nothing) {
  DeviceRef device = gpu();
  PartitionRef lane = (*device->split(std::vector<int>{8}))[0];
  StreamHandle stream = *device->create_stream({0, false, lane});
  for (const char* entry :
       {"cuModuleLoadData", "cuModuleGetFunction", "cuMemAllocFromPoolAsync", "cuMemsetD8Async",
        "cuLaunchKernel", "cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphInstantiate", "cuGraphLaunch",
        "cuStreamSynchronize", "cuMemcpyAsync", "cuDeviceGetAttribute"}) {
    check::Note note(entry);
    fail(entry, 0, cu::kIllegalAddress);
    CHECK_REFUSED(device->sms_seen(stream, true), kDevice, "cuda:0", "CUDA_ERROR_ILLEGAL_ADDRESS");
    CHECK(now() == nullptr);
    fake<void()>("fake_forget_faults")();
    CHECK_EQ(std::ssize(*device->sms_seen(stream, true)), 8);
  }
  fail("cuMemAllocFromPoolAsync", 0, cu::kOutOfMemory);
  CHECK_REFUSED(device->sms_seen(stream), kOutOfDeviceMemory, "cuda:0");
  setenv("FAKE_NO_COMPILER", "1", 1);
  CHECK_REFUSED(device->sms_seen(stream), kDevice, "compiles PTX", "221", "libnvidia-ptxjitcompiler.so.1");
  unsetenv("FAKE_NO_COMPILER");
  setenv("FAKE_FEWER_BLOCKS", "1", 1);
  CHECK_REFUSED(device->sms_seen(stream), kDevice, "a note of every block");
  unsetenv("FAKE_FEWER_BLOCKS");
  CHECK_OK(device->destroy_stream(stream));
  lane = nullptr;
  nothing_left();
}

TEST(cuda_tells_which_kernels_of_a_graph_run_outside_its_partition) {
  DeviceRef device = gpu();
  {
    Theirs theirs;
    auto lanes = device->split(std::vector<int>{8, 16});
    PartitionRef lane = (*lanes)[0];
    StreamHandle inside = *device->create_stream({0, false, lane}), plain = *device->create_stream({});
    StreamHandle second = *device->create_stream({0, false, lane});
    StreamHandle beside = *device->create_stream({0, false, (*lanes)[1]});
    void* data = *device->allocate(8, plain);
    CHECK_OK(device->synchronize(plain));
    // Two kernels and a fill in the lane, and one on each of the streams that were forked into the capture.
    auto capture = [&](std::vector<StreamHandle> forked) {
      EventRef fork = *device->create_event();
      CHECK_OK(device->begin_capture(inside, CaptureMode::kThreadLocal));
      theirs.launch(inside);
      CHECK_OK(device->fill(data, 1, 8, inside));
      CHECK_OK(device->call(inside, [] { return Status(); }, {}));
      CHECK_OK(device->record(*fork, inside));
      for (StreamHandle stream : forked) {
        EventRef join = *device->create_event();
        CHECK_OK(device->wait(stream, *fork));
        theirs.launch(stream);
        CHECK_OK(device->record(*join, stream));
        CHECK_OK(device->wait(inside, *join));
      }
      theirs.launch(inside);
      auto graph = device->end_capture(inside);
      CHECK_OK(graph);
      return *graph;
    };
    auto outside = [](const GraphWork& work) {
      return std::count_if(work.pieces.begin(), work.pieces.end(), [](auto& piece) { return !piece.inside; });
    };
    for (bool child : {false, true}) {
      fake<void(int)>("fake_wrap_captures")(child);
      GraphRef kept = capture({second});
      GraphRef escaped = capture({plain, second, beside});
      fake<void(int)>("fake_wrap_captures")(0);
      auto work = device->work_of(*kept, lane);
      CHECK_OK(work);
      CHECK(work->pieces.size() == 3 && outside(*work) == 0 && work->untold == 1);
      work = device->work_of(*escaped, lane);
      CHECK(work->pieces.size() == 5 && outside(*work) == 2 && work->untold == 1);
      for (const GraphWork::Piece& piece : work->pieces) CHECK(piece.name == "theirs");
      // Of the other lane just one is inside.
      CHECK_EQ(outside(*device->work_of(*escaped, (*lanes)[1])), 4);
      // While the thread captures elsewhere, which goes on.
      StreamHandle elsewhere = *device->create_stream({});
      CHECK_OK(device->begin_capture(elsewhere, CaptureMode::kThreadLocal));
      CHECK_EQ(outside(*device->work_of(*escaped, lane)), 2);
      CHECK_OK(device->end_capture(elsewhere));
      CHECK_OK(device->destroy_stream(elsewhere));
      CHECK_REFUSED(device->work_of(*kept, nullptr), kInput, "a partition to compare with");
      for (const char* entry : {"cuGraphGetNodes", "cuGraphNodeGetType", "cuGraphKernelNodeGetParams",
                                "cuStreamBeginCapture", "cuLaunchKernel"}) {
        check::Note note(entry);
        fail(entry, 0, cu::kIllegalAddress);
        CHECK_REFUSED(device->work_of(*kept, lane), kDevice, "work_of", "CUDA_ERROR_ILLEGAL_ADDRESS");
      }
      // Names are for messages alone.
      fail("cuFuncGetName", 0, cu::kInvalidHandle);
      CHECK(device->work_of(*kept, lane)->pieces[0].name.empty());
      // A driver that tells nothing of functions: they are counted, where kernels of libraries show that
      // others are told; and one that tells nothing at all.
      setenv("FAKE_CONTEXTS", "1", 1);
      if (fake<cu::Code(cu::Library)>("cuLibraryUnload") != nullptr) {
        work = device->work_of(*escaped, lane);
        CHECK_OK(work);
        CHECK(work->pieces.empty() && work->untold_kernels == 5 && work->untold == 1);
      }
      setenv("FAKE_CONTEXTS", "2", 1);
      CHECK_REFUSED(device->work_of(*escaped, lane), kNotSupported, "by their contexts", "sms_seen()");
      unsetenv("FAKE_CONTEXTS");
      CHECK(now() == nullptr);
    }
    CHECK_OK(device->free(data, plain));
    for (StreamHandle stream : {inside, second, plain, beside}) CHECK_OK(device->destroy_stream(stream));
  }
  nothing_left();
}

TEST(cuda_many_threads) {
  DeviceRef device = gpu();
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  auto ring = std::make_shared<Ring>(device);
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      StreamHandle stream = t % 2 ? kPerThreadStream : *device->create_stream({});
      for (int i = 0; i < 200; ++i) {
        BlockRef block = *ring->take(64, stream);
        uint8_t out[64] = {};
        CHECK_OK(device->fill(block->data(), static_cast<uint8_t>(t + 1), 64, stream));
        CHECK_OK(device->copy(out, block->data(), 64, stream));
        EventRef event = *device->create_event();
        CHECK_OK(device->record(*event, stream));
        block->used(event, true);
        CHECK_OK(device->synchronize(*event));
        right += out[0] == t + 1 && out[63] == t + 1;
      }
      if (t % 2 == 0) CHECK_OK(device->destroy_stream(stream));
      CHECK(now() == nullptr);
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(right, 1600);
  ring->trim();
  nothing_left();
}

}  // namespace
