// Host functions, what becomes of their failures, and faults that a test asks for.
#include <pthread.h>

#include <memory>
#include <stdexcept>
#include <thread>

#include "check.h"

using namespace headrace;

namespace {

HostFunction fails(const char* message) {
  return [message] { return Status(ErrorCode::kDelegate, message); };
}
HostFunction adds(int& value) {
  return [&value] {
    ++value;
    return Status();
  };
}

TEST(a_failure_is_returned_once_and_work_behind_it_is_skipped) {
  check::on_every_schedule([](SimDevice& device) {
    StreamHandle a = *device.create_stream({});
    int value = 0;
    CHECK_OK(device.call(a, adds(value), {}));
    CHECK_OK(device.call(a, fails("boom"), {}));
    CHECK_OK(device.call(a, adds(value), {}));
    Status status = device.synchronize(a);
    CHECK_REFUSED(status, kDelegate, "boom");
    CHECK(status->device == "sim:0");
    CHECK_EQ(value, 1);
    CHECK_OK(device.synchronize(a));
    CHECK_OK(device.synchronize());
    CHECK_OK(device.call(a, adds(value), {}));
    CHECK_OK(device.synchronize(a));
    CHECK_EQ(value, 2);
  });
}

TEST(every_kind_of_work_behind_a_failure_is_skipped_and_frees_are_not) {
  check::on_every_schedule([](SimDevice& device) {
    StreamHandle a = *device.create_stream({});
    auto* data = static_cast<uint8_t*>(*device.allocate(1, a));
    uint8_t in = 1, out = 0;
    CHECK_OK(device.copy(data, &in, 1, a));
    CHECK_OK(device.call(a, fails("boom"), {}));
    CHECK_OK(device.fill(data, 7, 1, a));
    CHECK_OK(device.copy(&out, data, 1, a));
    CHECK_OK(device.call(a,
                         [&] {
                           out = 9;
                           return Status();
                         },
                         {}));
    CHECK_REFUSED(device.synchronize(a), kDelegate, "boom");
    CHECK_EQ(out, 0);
    CHECK_EQ(data[0], 1);
    CHECK_OK(device.call(a, fails("again"), {}));
    CHECK_OK(device.free(data, a));
    CHECK_REFUSED(device.synchronize(), kDelegate, "again");
    CHECK_EQ(data[0], 0xFF);
  });
}

TEST(a_failure_reaches_other_streams_by_events_and_no_others) {
  check::on_every_schedule([](SimDevice& device) {
    StreamHandle a = *device.create_stream({}), b = *device.create_stream({}), c = *device.create_stream({});
    EventRef event = *device.create_event();
    int behind = 0, beside = 0;
    CHECK_OK(device.call(a, fails("boom"), {}));
    CHECK_OK(device.record(*event, a));
    CHECK_OK(device.wait(b, *event));
    CHECK_OK(device.call(b, adds(behind), {}));
    CHECK_OK(device.call(c, adds(beside), {}));
    CHECK_OK(device.synchronize(c));
    CHECK_EQ(beside, 1);
    CHECK_REFUSED(device.synchronize(b), kDelegate, "boom");
    CHECK_EQ(behind, 0);
    CHECK_OK(device.synchronize(a));  // told already
    CHECK_OK(device.synchronize(*event));
    CHECK_OK(device.call(b, adds(behind), {}));
    CHECK_OK(device.synchronize(b));
    CHECK_EQ(behind, 1);
  });
}

TEST(work_skipped_elsewhere_is_told_there_too) {
  check::on_every_schedule([](SimDevice& device) {
    StreamHandle a = *device.create_stream({}), b = *device.create_stream({});
    EventRef event = *device.create_event();
    int behind = 0;
    CHECK_OK(device.call(a, fails("boom"), {}));
    CHECK_OK(device.record(*event, a));
    CHECK_OK(device.wait(b, *event));
    CHECK_OK(device.call(b, adds(behind), {}));
    CHECK_REFUSED(device.synchronize(a), kDelegate, "boom");
    // Whoever waits for b must not take its skipped work for done.
    CHECK_REFUSED(device.synchronize(b), kDelegate, "boom");
    CHECK_EQ(behind, 0);
    CHECK_OK(device.synchronize(b));
    CHECK_OK(device.synchronize());
  });
}

TEST(work_enqueued_after_the_telling_runs_though_a_pending_record_lies_between) {
  SimOptions late;
  late.schedule = SimOptions::Schedule::kLate;
  auto device = make_sim_device(late);
  StreamHandle a = *device->create_stream({}), b = *device->create_stream({});
  EventRef event = *device->create_event();
  int value = 0;
  CHECK_OK(device->call(a, fails("boom"), {}));
  CHECK_OK(device->record(*event, a));
  CHECK_OK(device->wait(b, *event));  // pending on b, enqueued before the telling
  CHECK_REFUSED(device->synchronize(a), kDelegate, "boom");
  CHECK_OK(device->call(b, adds(value), {}));
  CHECK_OK(device->synchronize(b));
  CHECK_EQ(value, 1);
}

TEST(of_two_failures_the_first_is_returned_and_both_are_told) {
  check::on_every_schedule([](SimDevice& device) {
    StreamHandle a = *device.create_stream({}), b = *device.create_stream({});
    EventRef event = *device.create_event();
    CHECK_OK(device.call(a, fails("first"), {}));
    CHECK_OK(device.call(b, fails("second"), {}));
    CHECK_OK(device.record(*event, b));
    CHECK_OK(device.wait(a, *event));
    int value = 0;
    CHECK_OK(device.call(a, adds(value), {}));
    CHECK_REFUSED(device.synchronize(a), kDelegate, "first");
    CHECK_OK(device.synchronize());
    CHECK_EQ(value, 0);
  });
}

TEST(an_exception_is_a_failure) {
  check::on_every_schedule(
      [](SimDevice& device) {
        CHECK_OK(device.call(0, []() -> Status { throw std::runtime_error("thrown"); }, {}));
        CHECK_REFUSED(device.synchronize(), kDevice, "thrown", "host function");
        CHECK_OK(device.call(0, []() -> Status { throw 3; }, {}));
        CHECK_REFUSED(device.synchronize(), kDevice, "not a std::exception");
      },
      3);
  CHECK_REFUSED(cpu_device()->call(0, []() -> Status { throw std::runtime_error("thrown"); }, {}), kDevice,
                "cpu", "thrown");
}

TEST(a_thread_that_ends_inside_a_host_function_fails_it_and_the_device_goes_on) {
  auto device = make_sim_device({});
  std::thread([&] { (void)device->call(0, []() -> Status { pthread_exit(nullptr); }, {}); }).join();
  CHECK_REFUSED(device->synchronize(), kDevice, "end of its thread");
  CHECK(!in_host_function());
  int value = 0;
  CHECK_OK(device->call(0, adds(value), {}));
  CHECK_OK(device->synchronize());
  CHECK_EQ(value, 1);
}

#define FORBIDDEN(expression) CHECK_REFUSED(expression, kDevice, "cuLaunchHostFunc", "host function")

TEST(a_host_function_may_not_call_the_device) {
  check::on_every_schedule(
      [](SimDevice& device) {
        StreamHandle a = *device.create_stream({});
        EventRef event = *device.create_event(true);
        void* data = *device.allocate(16, a);
        CHECK_OK(device.begin_capture(a, CaptureMode::kRelaxed));
        GraphRef graph = *device.end_capture(a);
        GraphExecRef exec = *device.instantiate(*graph);
        int64_t calls = 0;
        int ran = 0;
        CHECK(!in_host_function());
        CHECK_OK(device.call(a,
                             [&] {
                               CHECK(in_host_function());
                               calls = device.calls("");
                               int sizes[] = {8};
                               FORBIDDEN(device.allocate(1, a));
                               FORBIDDEN(device.free(data, a));
                               FORBIDDEN(device.copy(data, data, 0, a));
                               FORBIDDEN(device.fill(data, 0, 0, a));
                               FORBIDDEN(device.create_stream({}));
                               FORBIDDEN(device.destroy_stream(a));
                               FORBIDDEN(device.check_stream(a));
                               FORBIDDEN(device.synchronize(a));
                               FORBIDDEN(device.synchronize());
                               FORBIDDEN(device.query(a));
                               FORBIDDEN(device.call(a, [] { return Status(); }, {}));
                               FORBIDDEN(device.create_event());
                               FORBIDDEN(device.record(*event, a));
                               FORBIDDEN(device.wait(a, *event));
                               FORBIDDEN(device.synchronize(*event));
                               FORBIDDEN(device.query(*event));
                               FORBIDDEN(device.elapsed_ms(*event, *event));
                               FORBIDDEN(device.begin_capture(a, CaptureMode::kGlobal));
                               FORBIDDEN(device.end_capture(a));
                               FORBIDDEN(device.capture_status(a));
                               FORBIDDEN(device.instantiate(*graph));
                               FORBIDDEN(device.upload(*exec, a));
                               FORBIDDEN(device.launch(*exec, a));
                               FORBIDDEN(device.split(sizes));
                               FORBIDDEN(cpu_device()->synchronize());
                               CHECK_EQ(device.calls(""), calls);
                               CHECK(device.where(data).kind ==
                                     PointerInfo::Kind::kDevice);  // asking is allowed, and no lock is held
                               ++ran;
                               return Status();
                             },
                             {}));
        CHECK_OK(device.synchronize(a));
        CHECK_EQ(ran, 1);
        CHECK(!in_host_function());
        CHECK(device_of(data) != nullptr);  // the refused free has ended nothing
        CHECK_OK(device.free(data, a));
      },
      2);
  CHECK_OK(cpu_device()->call(0,
                              [] {
                                CHECK_REFUSED(cpu_device()->synchronize(), kDevice, "cpu", "host function");
                                return Status();
                              },
                              {}));
}

TEST(an_empty_function_is_refused) {
  CHECK_REFUSED(make_sim_device({})->call(0, nullptr, {}), kInput, "function");
  CHECK_REFUSED(cpu_device()->call(0, nullptr, {}), kInput, "function");
}

// An object whose destruction calls the device, as that of a Python object may.
struct Calls {
  explicit Calls(SimDevice& device, int& destroyed) : device(device), destroyed(destroyed) {}
  ~Calls() {
    CHECK(!in_host_function());
    CHECK_OK(device.synchronize());
    ++destroyed;
  }
  SimDevice& device;
  int& destroyed;
};

TEST(functions_are_destroyed_with_no_lock_held_whatever_became_of_them) {
  check::on_every_schedule(
      [](SimDevice& device) {
        StreamHandle a = *device.create_stream({});
        int destroyed = 0, made = 0;
        auto holding = [&](bool ok) {
          ++made;
          return HostFunction([calls = std::make_shared<Calls>(device, destroyed), ok] {
            return ok ? Status() : Status(ErrorCode::kDelegate, "boom");
          });
        };
        CHECK_OK(device.call(a, holding(true), {}));
        CHECK_OK(device.synchronize(a));
        CHECK_EQ(destroyed, made);
        CHECK_REFUSED(device.call(12345, holding(true), {}), kInput);
        CHECK_EQ(destroyed, made);
        CHECK_REFUSED(device.call(a, holding(true), {{nullptr, 1, true}}), kInput, "null");
        CHECK_EQ(destroyed, made);
        CHECK_OK(device.inject({"call", 0, ErrorCode::kDevice}));
        CHECK_REFUSED(device.call(a, holding(true), {}), kDevice, "injected");
        CHECK_EQ(destroyed, made);
        // Captured, and dropped with the graph; refused by a broken capture.
        StreamHandle b = *device.create_stream({});
        CHECK_OK(device.begin_capture(b, CaptureMode::kRelaxed));
        CHECK_OK(device.call(b, holding(true), {}));
        GraphRef graph = *device.end_capture(b);
        CHECK_EQ(destroyed, made - 1);
        graph.reset();
        CHECK_EQ(destroyed, made);
        CHECK_OK(device.begin_capture(b, CaptureMode::kRelaxed));
        CHECK_OK(device.call(b, holding(true), {}));
        CHECK_REFUSED(device.query(b), kCapture);
        CHECK_REFUSED(device.call(b, [] { return Status(); }, {}), kCapture, "INVALIDATED");
        CHECK_REFUSED(device.end_capture(b), kCapture);
        CHECK_EQ(destroyed, made);
        CHECK_OK(device.begin_capture(b, CaptureMode::kRelaxed));
        CHECK_OK(device.call(b, holding(true), {}));
        CHECK_OK(device.destroy_stream(b));
        CHECK_EQ(destroyed, made);
      },
      5);
}

TEST(pending_work_is_skipped_when_the_device_goes) {
  int ran = 0;
  auto alive = std::make_shared<int>(0);
  {
    SimOptions late;
    late.schedule = SimOptions::Schedule::kLate;
    auto device = make_sim_device(late);
    void* data = *device->allocate(16, 0);
    EventRef event = *device->create_event();
    for (int i = 0; i < 10; ++i)
      CHECK_OK(device->call(0,
                            [&ran, alive] {
                              ++ran;
                              return Status();
                            },
                            {}));
    CHECK_OK(device->record(*event, 0));
    CHECK_OK(device->free(data, 0));
    CHECK_EQ(alive.use_count(), 11);
    device.reset();  // before the event, which may be dropped afterwards
    CHECK_EQ(alive.use_count(), 1);
  }
  CHECK_EQ(ran, 0);
}

TEST(dropping_pending_work_breaks_the_circle_of_a_function_that_owns_its_device) {
  std::weak_ptr<SimDevice> watched;
  int ran = 0;
  {
    SimOptions late;
    late.schedule = SimOptions::Schedule::kLate;
    auto device = make_sim_device(late);
    watched = device;
    CHECK_OK(device->call(0,
                          [device, &ran] {
                            ++ran;
                            return Status();
                          },
                          {}));
    device->drop_pending();
    CHECK_EQ(device->pending(), 0);
    CHECK_REFUSED(device->synchronize(), kDevice, "dropped");
    CHECK_OK(device->call(0,
                          [&ran] {
                            ++ran;
                            return Status();
                          },
                          {}));
    CHECK_OK(device->synchronize());
    device->drop_pending();
    CHECK_OK(device->synchronize());
  }
  CHECK(watched.expired());
  CHECK_EQ(ran, 1);
}

TEST(a_long_chain_of_skipped_work_is_no_deep_recursion) {
  for (bool wait : {true, false}) {
    SimOptions late;
    late.schedule = SimOptions::Schedule::kLate;
    auto device = make_sim_device(late);
    CHECK_OK(device->call(0, fails("boom"), {}));
    for (int i = 0; i < 300000; ++i) {
      if (!device->fill(nullptr, 0, 0, 0).ok()) CHECK(false);
    }
    if (wait) CHECK_REFUSED(device->synchronize(), kDelegate, "boom");
  }
}

TEST(a_fault_fails_the_call_that_was_named_once_and_does_nothing) {
  auto device = make_sim_device({});
  StreamHandle a = *device->create_stream({});
  CHECK_OK(device->inject({"allocate", 1, ErrorCode::kOutOfDeviceMemory}));
  void* data = *device->allocate(16, a);
  CHECK_REFUSED(device->allocate(16, a), kOutOfDeviceMemory, "sim:0", "allocate", "injected");
  CHECK_EQ(device->memory().allocations, 1);
  CHECK_OK(device->allocate(16, a));
  CHECK_OK(device->inject({"free", 0}));
  CHECK_REFUSED(device->free(data, a), kDevice, "injected");
  CHECK(device->where(data).kind == PointerInfo::Kind::kDevice);
  CHECK(device_of(data) == device);
  CHECK_OK(device->free(data, a));
  // Any call: three faults at places 0, 1 and 1 fail three calls in a row.
  CHECK_OK(device->inject({"", 0}));
  CHECK_OK(device->inject({"", 1, ErrorCode::kCapture}));
  CHECK_OK(device->inject({"record", 0}));
  EventRef event;
  CHECK_REFUSED(device->create_event(), kDevice);
  CHECK_REFUSED(device->query(a), kCapture);
  event = *device->create_event();
  CHECK_REFUSED(device->record(*event, a), kDevice);
  CHECK(*device->query(*event));
  CHECK_OK(device->inject({"", 0}));
  device->clear_faults();
  CHECK_OK(device->synchronize());
  CHECK_REFUSED(device->inject({"coppy", 0}), kInput, "coppy");
  CHECK_REFUSED(device->inject({"copy", -1}), kInput, "-1");
  CHECK_REFUSED(device->inject({"copy", 0, ErrorCode::kOk}), kInput, "no error");
}

TEST(a_fault_can_be_put_at_every_operation) {
  auto device = make_sim_device({});
  StreamHandle a = *device->create_stream({}), b = *device->create_stream({});
  EventRef event = *device->create_event(true);
  void* data = *device->allocate(16, a);
  CHECK_OK(device->begin_capture(b, CaptureMode::kRelaxed));
  GraphRef graph = *device->end_capture(b);
  GraphExecRef exec = *device->instantiate(*graph);
  int sizes[] = {8};
  std::vector<std::pair<const char*, std::function<Status()>>> all = {
      {"allocate", [&] { return device->allocate(1, a).status(); }},
      {"free", [&] { return device->free(data, a); }},
      {"copy", [&] { return device->copy(data, data, 1, a); }},
      {"fill", [&] { return device->fill(data, 0, 1, a); }},
      {"create_stream", [&] { return device->create_stream({}).status(); }},
      {"destroy_stream", [&] { return device->destroy_stream(b); }},
      {"synchronize_stream", [&] { return device->synchronize(a); }},
      {"synchronize_device", [&] { return device->synchronize(); }},
      {"query_stream", [&] { return device->query(a).status(); }},
      {"call", [&] { return device->call(a, [] { return Status(); }, {}); }},
      {"create_event", [&] { return device->create_event().status(); }},
      {"record", [&] { return device->record(*event, a); }},
      {"wait", [&] { return device->wait(a, *event); }},
      {"synchronize_event", [&] { return device->synchronize(*event); }},
      {"query_event", [&] { return device->query(*event).status(); }},
      {"elapsed_ms", [&] { return device->elapsed_ms(*event, *event).status(); }},
      {"begin_capture", [&] { return device->begin_capture(b, CaptureMode::kRelaxed); }},
      {"capture_status", [&] { return device->capture_status(b).status(); }},
      {"instantiate", [&] { return device->instantiate(*graph).status(); }},
      {"upload", [&] { return device->upload(*exec, a); }},
      {"launch", [&] { return device->launch(*exec, a); }},
      {"split", [&] { return device->split(sizes).status(); }},
  };
  for (auto& [name, call] : all) {
    int64_t calls = device->calls(name);
    CHECK_OK(device->inject({name, 0}));
    CHECK_REFUSED(call(), kDevice, name, "injected");
    CHECK_EQ(device->calls(name), calls + 1);
  }
  // Ended all the same.
  CHECK_OK(device->begin_capture(b, CaptureMode::kRelaxed));
  CHECK_OK(device->inject({"end_capture", 0}));
  CHECK_REFUSED(device->end_capture(b), kDevice, "end_capture", "injected");
  CHECK(*device->capture_status(b) == CaptureStatus::kNone);
  for (auto& [name, call] : all) {
    if (std::string(name) == "destroy_stream" || std::string(name) == "begin_capture") continue;
    CHECK_OK(device->record(*event, a));
    if (std::string(name) == "free") CHECK_OK(device->allocate(1, a));
    if (std::string(name) != "free") CHECK_OK(call());
  }
}

}  // namespace
