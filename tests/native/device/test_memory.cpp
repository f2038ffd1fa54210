// Memory of the simulated device: fresh, in use, and after its end.
#include <cstring>

#include "check.h"

using namespace headrace;

namespace {

struct Fixture {
  explicit Fixture(SimDevice& device) : device(device), stream(*device.create_stream({})) {}
  SimDevice& device;
  StreamHandle stream;
  uint8_t* make(size_t nbytes) { return static_cast<uint8_t*>(*device.allocate(nbytes, stream)); }
};

TEST(memory_is_aligned_and_fresh_memory_is_poisoned) {
  check::on_every_schedule(
      [](SimDevice& device) {
        Fixture f(device);
        uint8_t* data = f.make(1000);
        CHECK_EQ(reinterpret_cast<uintptr_t>(data) % 256, 0u);
        uint8_t host[1000] = {};
        CHECK_OK(device.copy(host, data, 1000, f.stream));
        CHECK_OK(device.synchronize(f.stream));
        for (uint8_t byte : host) CHECK_EQ(byte, 0xFF);
      },
      3);
}

TEST(memory_of_no_bytes_has_an_address) {
  check::on_every_schedule(
      [](SimDevice& device) {
        Fixture f(device);
        auto a = device.allocate(0, f.stream), b = device.allocate(0, f.stream);
        CHECK(a.ok() && b.ok() && *a != nullptr && *a != *b);
        CHECK_OK(device.free(*a, f.stream));
        CHECK_OK(device.free(*b, f.stream));
        CHECK_OK(device.copy(nullptr, nullptr, 0, f.stream));
      },
      1);
}

TEST(what_another_stream_wrote_before_the_allocation_was_reached_is_lost) {
  SimOptions options;
  options.schedule = SimOptions::Schedule::kLate;
  auto device = make_sim_device(options);
  Fixture f(*device);
  StreamHandle other = *device->create_stream({});
  uint8_t* data = f.make(4);
  CHECK_OK(device->fill(data, 7, 4, other));  // not ordered behind the allocation
  CHECK_OK(device->synchronize(other));
  uint8_t host[4] = {};
  CHECK_OK(device->copy(host, data, 4, f.stream));
  CHECK_OK(device->synchronize(f.stream));
  CHECK_EQ(host[0], 0xFF);
}

TEST(copies_and_fills_move_bytes_in_stream_order) {
  check::on_every_schedule([](SimDevice& device) {
    Fixture f(device);
    uint8_t in[64], out[64] = {};
    for (int i = 0; i < 64; ++i) in[i] = static_cast<uint8_t>(i);
    uint8_t *a = f.make(64), *b = f.make(64);
    ThreadCounts before = thread_counts();
    CHECK_OK(device.copy(a, in, 64, f.stream));
    CHECK_OK(device.copy(b, a, 64, f.stream));
    CHECK_OK(device.fill(b + 8, 9, 8, f.stream));
    CHECK_OK(device.copy(out, b, 64, f.stream));
    CHECK_EQ(thread_counts().bytes_to_device - before.bytes_to_device, 64);
    CHECK_EQ(thread_counts().bytes_to_host - before.bytes_to_host, 64);
    CHECK_OK(device.synchronize(f.stream));
    for (int i = 0; i < 64; ++i) CHECK_EQ(int{out[i]}, i >= 8 && i < 16 ? 9 : i);
  });
}

TEST(host_memory_is_read_when_the_copy_runs) {
  SimOptions options;
  options.schedule = SimOptions::Schedule::kLate;
  auto device = make_sim_device(options);
  Fixture f(*device);
  uint8_t in = 1, out = 0;
  uint8_t* a = f.make(1);
  CHECK_OK(device->copy(a, &in, 1, f.stream));
  CHECK_OK(device->copy(&out, a, 1, f.stream));
  in = 2;
  CHECK_EQ(out, 0);
  CHECK_OK(device->synchronize(f.stream));
  CHECK_EQ(out, 2);
}

TEST(freed_memory_is_poisoned_in_stream_order_and_touching_it_is_refused) {
  check::on_every_schedule([](SimDevice& device) {
    Fixture f(device);
    uint8_t* data = f.make(16);
    uint8_t out = 0;
    CHECK_OK(device.fill(data, 5, 16, f.stream));
    CHECK_OK(device.copy(&out, data, 1, f.stream));
    CHECK(device.where(data + 15).kind == PointerInfo::Kind::kDevice);
    CHECK_OK(device.free(data, f.stream));
    CHECK(device.where(data + 15).kind == PointerInfo::Kind::kFreed);
    CHECK(device.where(data + 15).base == data);
    CHECK_EQ(device.where(data).nbytes, 16u);
    CHECK_REFUSED(device.copy(&out, data, 1, f.stream), kInput, "copy", "touched after its end",
                  "cuMemFreeAsync");
    CHECK_REFUSED(device.fill(data, 1, 1, f.stream), kInput, "fill", "touched after its end");
    CHECK_REFUSED(device.call(f.stream, [] { return Status(); }, {{data, 1, false}}), kInput, "call",
                  "touched after its end");
    CHECK_REFUSED(device.free(data, f.stream), kInput, "free", "freed before");
    CHECK_OK(device.synchronize(f.stream));
    CHECK_EQ(out, 5);         // the copy came before the free
    CHECK_EQ(data[0], 0xFF);  // still mapped, and poisoned
    CHECK(device.where(data).kind == PointerInfo::Kind::kFreed);
  });
}

TEST(a_free_on_another_stream_is_seen_as_poison_by_work_it_overtakes) {
  SimOptions options;
  options.schedule = SimOptions::Schedule::kLate;
  auto device = make_sim_device(options);
  Fixture f(*device);
  StreamHandle other = *device->create_stream({});
  uint8_t* data = f.make(16);
  uint8_t out = 0;
  CHECK_OK(device->fill(data, 5, 16, f.stream));
  CHECK_OK(device->synchronize(f.stream));
  CHECK_OK(device->copy(&out, data, 1, f.stream));
  CHECK_OK(device->free(data, other));  // nothing orders it behind the copy
  CHECK_OK(device->synchronize(other));
  CHECK_OK(device->synchronize(f.stream));
  CHECK_EQ(out, 0xFF);
}

TEST(memory_outlives_work_that_still_names_it) {
  // More frees than are kept, while a pending operation holds the first block: no use after free under ASan.
  SimOptions options;
  options.schedule = SimOptions::Schedule::kLate;
  auto device = make_sim_device(options);
  Fixture f(*device);
  StreamHandle other = *device->create_stream({});
  uint8_t* data = f.make(16);
  uint8_t out = 0;
  CHECK_OK(device->copy(&out, data, 1, f.stream));
  CHECK_OK(device->free(data, other));
  for (int i = 0; i < 600; ++i) CHECK_OK(device->free(*device->allocate(16, other), other));
  CHECK_OK(device->synchronize(other));
  CHECK_OK(device->synchronize(f.stream));
  CHECK_EQ(out, 0xFF);
}

TEST(an_ended_address_is_not_given_out_again_soon_and_not_kept_for_ever) {
  auto device = make_sim_device({});
  Fixture f(*device);
  uint8_t* first = f.make(13);
  CHECK_OK(device->free(first, f.stream));
  bool again = false;
  for (int i = 0; i < 200; ++i) {
    uint8_t* data = f.make(16);
    again = again || data == first;
    CHECK_OK(device->free(data, f.stream));
  }
  CHECK(!again);
  CHECK_EQ(device->where(first).nbytes, 13u);
  for (int i = 0; i < 200; ++i) CHECK_OK(device->free(f.make(16), f.stream));
  CHECK(device->where(first).nbytes != 13);
  uint8_t* large = f.make((size_t{1} << 20) + 13);
  CHECK_OK(device->free(large, f.stream));
  CHECK_EQ(device->where(large).nbytes, (size_t{1} << 20) + 13);
  for (int i = 0; i < 20; ++i) CHECK_OK(device->free(f.make(size_t{4} << 20), f.stream));
  CHECK(device->where(large).nbytes != (size_t{1} << 20) + 13);
}

TEST(ranges_lie_inside_one_allocation) {
  auto device = make_sim_device({});
  Fixture f(*device);
  uint8_t* data = f.make(100);
  uint8_t host[200] = {};
  CHECK_OK(device->copy(data + 90, host, 10, f.stream));
  CHECK_REFUSED(device->copy(data + 90, host, 11, f.stream), kInput, "10 are inside", "allocation of 100");
  CHECK_REFUSED(device->copy(host, data + 1, 100, f.stream), kInput, "99 are inside");
  CHECK_REFUSED(device->fill(data, 0, 101, f.stream), kInput, "100 are inside");
  CHECK_REFUSED(device->call(f.stream, [] { return Status(); }, {{data + 50, 51, true}}), kInput,
                "50 are inside");
  CHECK_REFUSED(device->copy(data - 8, host, 16, f.stream), kInput, "run into the allocation");
  CHECK_REFUSED(device->copy(nullptr, host, 1, f.stream), kInput, "null");
  CHECK_REFUSED(device->free(data + 1, f.stream), kInput, "inside the allocation");
  CHECK_REFUSED(device->free(host, f.stream), kInput, "start of a live allocation");
}

TEST(memory_of_another_device_is_refused_by_both_names) {
  SimOptions second;
  second.ordinal = 1;
  auto a = make_sim_device({}), b = make_sim_device(second);
  Fixture fa(*a), fb(*b);
  uint8_t *mine = fa.make(16), *theirs = fb.make(16);
  CHECK_REFUSED(a->copy(mine, theirs, 16, fa.stream), kDevice, "sim:0", "sim:1");
  CHECK_REFUSED(a->copy(theirs, mine, 16, fa.stream), kDevice, "sim:0", "sim:1");
  CHECK_REFUSED(a->fill(theirs, 0, 16, fa.stream), kDevice, "sim:0", "sim:1");
  CHECK_REFUSED(a->free(theirs, fa.stream), kInput, "sim:0", "sim:1");
  CHECK(device_of(theirs) == b);
  CHECK(device_of(mine + 15) == a);
  CHECK(device_of(mine + 16) == nullptr);
  void* on_cpu = *cpu_device()->allocate(16, 0);
  CHECK_OK(a->copy(on_cpu, mine, 16, fa.stream));  // host memory, after all
  CHECK_OK(a->copy(mine, on_cpu, 16, fa.stream));
  CHECK_REFUSED(cpu_device()->copy(on_cpu, mine, 16, 0), kDevice, "cpu", "sim:0");
  CHECK_OK(cpu_device()->free(on_cpu, 0));
  CHECK_OK(b->free(theirs, fb.stream));
  CHECK(device_of(theirs) == nullptr);
  CHECK_REFUSED(a->copy(mine, theirs, 16, fa.stream), kInput, "sim:1", "touched after its end");
}

TEST(limits_and_counts) {
  check::on_every_schedule(
      [](SimDevice& device) {
        StreamHandle stream = *device.create_stream({});
        size_t half = size_t{1} << 29;
        ThreadCounts before = thread_counts();
        void* a = *device.allocate(half, stream);
        CHECK_REFUSED(device.allocate(half + 1, stream), kOutOfDeviceMemory, "at most 536870912",
                      "1073741824", "536870913");
        CHECK_EQ(device.memory().current_nbytes, half);
        CHECK_OK(device.free(a, stream));
        CHECK_EQ(device.memory().current_nbytes, 0u);  // whether or not the free has been reached
        CHECK_EQ(device.memory().peak_nbytes, half);
        CHECK_EQ(device.memory().allocations, 1);
        CHECK_EQ(device.memory().frees, 1);
        CHECK_EQ(thread_counts().driver_allocations - before.driver_allocations, 1);
        CHECK_EQ(thread_counts().driver_frees - before.driver_frees, 1);
        CHECK_REFUSED(device.allocate(SIZE_MAX, stream), kOutOfDeviceMemory, "18446744073709551615");
      },
      1);
  SimOptions endless;
  endless.memory_nbytes = SIZE_MAX;
  auto device = make_sim_device(endless);
  CHECK_REFUSED(device->allocate(SIZE_MAX, 0), kOutOfDeviceMemory);
  CHECK_REFUSED(device->allocate(SIZE_MAX - 256, 0), kOutOfDeviceMemory);
}

TEST(a_device_that_goes_takes_its_memory_along) {
  void* data = nullptr;
  {
    auto device = make_sim_device({});
    data = *device->allocate(100, 0);
    CHECK(device_of(data) == device);
    void* freed = *device->allocate(100, 0);
    CHECK_OK(device->free(freed, 0));
  }
  CHECK(device_of(data) == nullptr);
  auto other = make_sim_device({});
  CHECK(other->where(data).kind == PointerInfo::Kind::kHost);
}

}  // namespace
