// Many threads on one device. Run under ThreadSanitizer these say that nothing but the device's own order is
// needed.
#include <atomic>
#include <future>
#include <latch>
#include <thread>

#include "check.h"

using namespace headrace;

namespace {

TEST(threads_with_streams_of_their_own_get_their_own_results) {
  check::on_every_schedule(
      [](SimDevice& device) {
        std::vector<std::thread> threads;
        for (int number = 0; number < 4; ++number) {
          threads.emplace_back([&device, number] {
            StreamHandle stream = number == 0 ? kPerThreadStream : *device.create_stream({});
            EventRef event = *device.create_event();
            for (int i = 0; i < 30; ++i) {
              auto* data = static_cast<int64_t*>(*device.allocate(8, stream));
              int64_t in = number * 1000 + i, out = -1;
              CHECK_OK(device.copy(data, &in, 8, stream));
              CHECK_OK(device.call(stream,
                                   [data] {
                                     *data *= 2;
                                     return Status();
                                   },
                                   {{data, 8, true}}));
              CHECK_OK(device.copy(&out, data, 8, stream));
              CHECK_OK(device.record(*event, stream));
              CHECK_OK(device.free(data, stream));
              CHECK_OK(device.synchronize(*event));
              CHECK_EQ(out, 2 * in);
            }
            CHECK_OK(device.synchronize(stream));
          });
        }
        for (auto& thread : threads) thread.join();
        CHECK_OK(device.synchronize());
        CHECK_EQ(device.pending(), 0);
        CHECK_EQ(device.memory().current_nbytes, 0u);
      },
      10);
}

TEST(threads_that_hand_on_by_events_are_ordered) {
  // A token goes round: each thread waits on the device for its predecessor's event, adds, and records its
  // own.
  check::on_every_schedule(
      [](SimDevice& device) {
        constexpr int kThreads = 4, kRounds = 25;
        uint64_t value = 0;
        EventRef last;
        std::mutex mutex;
        std::condition_variable turn;
        int next = 0;
        std::vector<std::thread> threads;
        for (int number = 0; number < kThreads; ++number) {
          threads.emplace_back([&, number] {
            StreamHandle stream = *device.create_stream({});
            for (int round = 0; round < kRounds; ++round) {
              std::unique_lock lock(mutex);
              turn.wait(lock, [&] { return next % kThreads == number; });
              if (last) CHECK_OK(device.wait(stream, *last));
              auto add = static_cast<uint64_t>(next);
              CHECK_OK(device.call(stream,
                                   [&value, add] {
                                     value = value * 3 + add;
                                     return Status();
                                   },
                                   {}));
              last = *device.create_event();
              CHECK_OK(device.record(*last, stream));
              ++next;
              turn.notify_all();
            }
            CHECK_OK(device.synchronize(stream));
          });
        }
        for (auto& thread : threads) thread.join();
        CHECK_OK(device.synchronize(*last));
        uint64_t want = 0;
        for (uint64_t i = 0; i < kThreads * kRounds; ++i) want = want * 3 + i;
        CHECK_EQ(value, want);
      },
      10);
}

TEST(a_running_host_function_holds_up_no_other_stream) {
  check::on_every_schedule([](SimDevice& device) {
    StreamHandle a = *device.create_stream({}), b = *device.create_stream({});
    std::promise<void> started, may_end;
    int64_t after = 0;
    std::thread runner([&] {
      CHECK_OK(device.call(a,
                           [&] {
                             started.set_value();
                             may_end.get_future().wait();  // until the other thread has had its work done
                             return Status();
                           },
                           {}));
      CHECK_OK(device.synchronize(a));
    });
    started.get_future().wait();
    int value = 0;
    CHECK_OK(device.call(b,
                         [&] {
                           value = 1;
                           return Status();
                         },
                         {}));
    CHECK_OK(device.call(a,
                         [&] {
                           after = 1;
                           return Status();
                         },
                         {}));  // behind the running one: returns at once
    CHECK(!*device.query(a));
    CHECK_OK(device.synchronize(b));
    CHECK_EQ(value, 1);
    EventRef event = *device.create_event();
    CHECK_OK(device.record(*event, b));
    CHECK_OK(device.synchronize(*event));
    CHECK(!*device.query(a));
    may_end.set_value();
    CHECK_OK(device.synchronize(a));  // waits for what the other thread runs
    CHECK_EQ(after, 1);
    runner.join();
    CHECK_OK(device.synchronize());
  });
}

TEST(a_failure_is_told_to_one_of_two_waiting_threads) {
  check::on_every_schedule([](SimDevice& device) {
    StreamHandle a = *device.create_stream({});
    CHECK_OK(device.delay("call", 0));
    CHECK_OK(device.call(a, [] { return Status(ErrorCode::kDelegate, "boom"); }, {}));
    std::atomic<int> told{0};
    std::latch both(2);
    auto wait = [&] {
      both.arrive_and_wait();
      if (!device.synchronize(a).ok()) ++told;
    };
    std::thread one(wait), two(wait);
    one.join();
    two.join();
    CHECK_EQ(told, 1);
  });
}

TEST(one_graph_launched_from_many_threads_runs_one_launch_at_a_time) {
  check::on_every_schedule(
      [](SimDevice& device) {
        StreamHandle a = *device.create_stream({});
        int64_t value = 0;  // not atomic: the launches must not overlap
        CHECK_OK(device.begin_capture(a, CaptureMode::kThreadLocal));
        for (int i = 0; i < 3; ++i)
          CHECK_OK(device.call(a,
                               [&] {
                                 ++value;
                                 return Status();
                               },
                               {}));
        GraphRef graph = *device.end_capture(a);
        GraphExecRef exec = *device.instantiate(*graph);
        std::vector<std::thread> threads;
        for (int number = 0; number < 4; ++number) {
          threads.emplace_back([&] {
            StreamHandle stream = *device.create_stream({});
            for (int i = 0; i < 10; ++i) {
              CHECK_OK(device.launch(*exec, stream));
              if (i % 3 == 0) CHECK_OK(device.synchronize(stream));
            }
            CHECK_OK(device.synchronize(stream));
            CHECK_OK(device.destroy_stream(stream));
          });
        }
        for (auto& thread : threads) thread.join();
        CHECK_EQ(value, 4 * 10 * 3);
      },
      10);
}

TEST(captures_beside_legacy_work_of_another_thread_survive_on_non_blocking_streams) {
  auto device = make_sim_device({});
  std::atomic<bool> stop{false};
  std::atomic<int64_t> hammered{0};
  std::thread hammer([&] {
    void* data = *device->allocate(16, 0);
    while (!stop) {
      CHECK_OK(device->fill(data, 1, 16, 0));
      CHECK_OK(device->synchronize(StreamHandle{0}));
      ++hammered;
    }
  });
  while (hammered == 0) std::this_thread::yield();
  for (int i = 0; i < 200; ++i) {
    StreamHandle a = *device->create_stream({});
    CHECK_OK(device->begin_capture(a, CaptureMode::kThreadLocal));
    CHECK_OK(device->call(a, [] { return Status(); }, {}));
    CHECK_OK(device->end_capture(a));
    CHECK_OK(device->destroy_stream(a));
  }
  stop = true;
  hammer.join();
  CHECK(hammered > 0);
}

TEST(many_short_threads_leave_no_streams_behind_that_slow_the_legacy_one) {
  SimOptions late;
  late.schedule = SimOptions::Schedule::kLate;
  auto device = make_sim_device(late);
  int ran = 0;
  for (int i = 0; i < 200; ++i) {
    std::thread([&] {
      CHECK_OK(device->call(kPerThreadStream,
                            [&] {
                              ++ran;
                              return Status();
                            },
                            {}));
    }).join();
    if (i % 2) CHECK_OK(device->synchronize(kLegacyStream));
  }
  CHECK_OK(device->synchronize(kLegacyStream));
  CHECK_EQ(ran, 200);
}

TEST(devices_come_and_go_on_many_threads) {
  std::vector<std::thread> threads;
  for (int number = 0; number < 4; ++number) {
    threads.emplace_back([number] {
      for (int i = 0; i < 20; ++i) {
        SimOptions options;
        options.ordinal = number;
        options.schedule = SimOptions::Schedule::kLate;
        auto device = make_sim_device(options);
        void* data = *device->allocate(64, 0);
        CHECK(device_of(data) == device);
        CHECK_OK(device->fill(data, 1, 64, 0));
        if (i % 2) CHECK_OK(device->free(data, 0));
        void* on_cpu = *cpu_device()->allocate(64, 0);
        CHECK(device_of(on_cpu) == cpu_device());
        CHECK_OK(cpu_device()->free(on_cpu, 0));
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace
