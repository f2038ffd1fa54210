// The cpu device: the same seam, and everything is done when a call returns.
#include <cstring>
#include <thread>

#include "check.h"

using namespace headrace;

namespace {

TEST(cpu_is_one_and_synchronous) {
  DeviceRef cpu = cpu_device();
  CHECK(cpu == cpu_device());
  CHECK(cpu->name() == "cpu");
  CHECK(cpu->backend() == Backend::kCpu);
  StreamHandle stream = *cpu->create_stream({});
  int value = 0;
  CHECK_OK(cpu->call(stream,
                     [&] {
                       value = 1;
                       return Status();
                     },
                     {}));
  CHECK_EQ(value, 1);
  CHECK(*cpu->query(stream));
  CHECK_OK(cpu->synchronize(stream));
  CHECK_OK(cpu->synchronize());
  CHECK_OK(cpu->destroy_stream(stream));
}

TEST(cpu_returns_a_failure_at_once_and_only_there) {
  DeviceRef cpu = cpu_device();
  Status status = cpu->call(0, [] { return Status(ErrorCode::kDelegate, "boom"); }, {});
  CHECK_REFUSED(status, kDelegate, "boom");
  CHECK(status->device == "cpu");
  CHECK_OK(cpu->synchronize(0));
}

TEST(cpu_memory) {
  DeviceRef cpu = cpu_device();
  MemoryCounts before = cpu->memory();
  auto* data = static_cast<uint8_t*>(*cpu->allocate(100, 0));
  CHECK_EQ(reinterpret_cast<uintptr_t>(data) % 256, 0u);
  CHECK_EQ(cpu->memory().current_nbytes - before.current_nbytes, 100u);
  CHECK(cpu->memory().peak_nbytes >= before.current_nbytes + 100);
  CHECK(cpu->where(data + 99).kind == PointerInfo::Kind::kDevice);
  CHECK(cpu->where(data + 99).base == data);
  CHECK_EQ(cpu->where(data).nbytes, 100u);
  CHECK(cpu->where(data + 100).kind == PointerInfo::Kind::kHost);
  CHECK(cpu->where(&before).kind == PointerInfo::Kind::kHost);
  CHECK(device_of(data + 50) == cpu);
  uint8_t host[100];
  std::memset(host, 3, sizeof host);
  CHECK_OK(cpu->copy(data, host, 100, 0));
  CHECK_OK(cpu->fill(data + 1, 4, 1, 0));
  CHECK(data[0] == 3 && data[1] == 4 && data[99] == 3);
  CHECK_OK(cpu->copy(data, data + 1, 99, 0));  // overlapping ranges do not tear
  CHECK(data[0] == 4 && data[1] == 3);
  CHECK_REFUSED(cpu->copy(data + 1, host, 100, 0), kInput, "99 are inside");
  CHECK_REFUSED(cpu->fill(data, 0, 101, 0), kInput, "100 are inside");
  CHECK_REFUSED(cpu->call(0, [] { return Status(); }, {{data, 101, true}}), kInput, "100 are inside");
  CHECK_REFUSED(cpu->free(data + 1, 0), kInput, "start of a live allocation");
  CHECK_OK(cpu->free(data, 0));
  CHECK_REFUSED(cpu->free(data, 0), kInput, "start of a live allocation");
  CHECK_REFUSED(cpu->free(host, 0), kInput, "start of a live allocation");
  CHECK(device_of(data) == nullptr);
  CHECK_EQ(cpu->memory().current_nbytes, before.current_nbytes);
  CHECK_EQ(cpu->memory().allocations, before.allocations + 1);
  CHECK_EQ(cpu->memory().frees, before.frees + 1);
  CHECK_REFUSED(cpu->allocate(SIZE_MAX, 0), kOutOfDeviceMemory, "18446744073709551615");
  void *a = *cpu->allocate(0, 0), *b = *cpu->allocate(0, 0);
  CHECK(a != nullptr && a != b);
  CHECK_OK(cpu->free(a, 0));
  CHECK_OK(cpu->free(b, 0));
}

TEST(cpu_events_are_complete_and_timed) {
  DeviceRef cpu = cpu_device();
  EventRef from = *cpu->create_event(true), to = *cpu->create_event(true), plain = *cpu->create_event();
  CHECK(*cpu->query(*from));
  CHECK_OK(cpu->synchronize(*from));
  CHECK_OK(cpu->wait(0, *from));
  CHECK_REFUSED(cpu->elapsed_ms(*from, *to), kInput, "never recorded");
  CHECK_OK(cpu->record(*from, 0));
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  CHECK_OK(cpu->record(*to, 0));
  CHECK(*cpu->elapsed_ms(*from, *to) >= 2);
  CHECK(*cpu->elapsed_ms(*to, *from) <= -2);
  CHECK_OK(cpu->record(*plain, 0));
  CHECK_REFUSED(cpu->elapsed_ms(*from, *plain), kInput, "made for timing");
}

TEST(cpu_checks_handles) {
  DeviceRef cpu = cpu_device();
  StreamHandle stream = *cpu->create_stream({}), other = *make_sim_device({})->create_stream({});
  for (StreamHandle special : {0, 1, 2}) CHECK_OK(cpu->check_stream(special));
  CHECK_OK(cpu->check_stream(stream));
  CHECK_REFUSED(cpu->check_stream(other), kDevice, "cpu", "sim:0");
  CHECK_REFUSED(cpu->check_stream(77), kInput, "ever was");
  CHECK_OK(cpu->destroy_stream(stream));
  CHECK_REFUSED(cpu->destroy_stream(stream), kInput, "destroyed");
  EventRef event = *cpu->create_event();
  CHECK_REFUSED(cpu->call(stream, [] { return Status(); }, {}), kInput, "call", "destroyed");
  CHECK_REFUSED(cpu->copy(nullptr, nullptr, 0, stream), kInput, "copy", "destroyed");
  CHECK_REFUSED(cpu->fill(nullptr, 0, 0, stream), kInput, "fill", "destroyed");
  CHECK_REFUSED(cpu->allocate(1, stream), kInput, "allocate", "destroyed");
  CHECK_REFUSED(cpu->free(&stream, stream), kInput, "free", "destroyed");
  CHECK_REFUSED(cpu->synchronize(stream), kInput, "synchronize_stream", "destroyed");
  CHECK_REFUSED(cpu->query(stream), kInput, "query_stream", "destroyed");
  CHECK_REFUSED(cpu->record(*event, stream), kInput, "record", "destroyed");
  CHECK_REFUSED(cpu->wait(stream, *event), kInput, "wait", "destroyed");
  CHECK_REFUSED(cpu->capture_status(stream), kInput, "capture_status", "destroyed");
}

TEST(cpu_says_what_it_has_not) {
  DeviceRef cpu = cpu_device();
  int sizes[] = {8};
  CHECK_REFUSED(cpu->begin_capture(0, CaptureMode::kGlobal), kDevice, "cpu", "has no capture");
  CHECK_REFUSED(cpu->end_capture(0), kDevice, "has no capture");
  CHECK_REFUSED(cpu->split(sizes), kDevice, "has no partitions");
  CHECK(*cpu->capture_status(0) == CaptureStatus::kNone);
  CHECK(cpu->exchange_capture_mode(CaptureMode::kRelaxed) == CaptureMode::kGlobal);
  CHECK(cpu->exchange_capture_mode(CaptureMode::kGlobal) == CaptureMode::kRelaxed);
  CHECK_EQ(cpu->sm_limits().total, 0);
}

}  // namespace
