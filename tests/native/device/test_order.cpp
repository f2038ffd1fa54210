// What runs behind what: streams, the legacy stream's rule, events; and what each schedule leaves open.
#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <thread>

#include "check.h"

using namespace headrace;

namespace {

// Numbers in the order in which work ran.
struct Log {
  std::vector<int> ran;
  HostFunction entry(int number) {
    return [this, number] {
      ran.push_back(number);
      return Status();
    };
  }
  bool before(int a, int b) const {
    auto at = [&](int number) { return std::find(ran.begin(), ran.end(), number); };
    return at(a) < at(b) && at(b) != ran.end();
  }
};

// Whether `second`, enqueued later on its stream, ever runs before `first` under some seed.
template <class Enqueue>
bool overtakes(Enqueue enqueue) {
  bool overtaken = false;
  for (const auto& options : check::schedules(60)) {
    auto device = make_sim_device(options);
    Log log;
    enqueue(*device, log);
    CHECK_OK(device->synchronize());
    CHECK_EQ(log.ran.size(), 2u);
    overtaken = overtaken || !log.before(1, 2);
  }
  return overtaken;
}

TEST(one_stream_is_in_order_and_two_are_not) {
  CHECK(!overtakes([](SimDevice& device, Log& log) {
    StreamHandle a = *device.create_stream({});
    CHECK_OK(device.call(a, log.entry(1), {}));
    CHECK_OK(device.call(a, log.entry(2), {}));
  }));
  CHECK(overtakes([](SimDevice& device, Log& log) {
    StreamHandle a = *device.create_stream({}), b = *device.create_stream({});
    CHECK_OK(device.call(a, log.entry(1), {}));
    CHECK_OK(device.call(b, log.entry(2), {}));
  }));
}

TEST(legacy_and_blocking_streams_order_each_other_and_non_blocking_ones_are_exempt) {
  for (bool blocking : {true, false}) {
    for (bool legacy_first : {true, false}) {
      for (StreamHandle legacy : {StreamHandle{0}, kLegacyStream}) {
        bool free = overtakes([&](SimDevice& device, Log& log) {
          StreamOptions options;
          options.blocking = blocking;
          StreamHandle other = *device.create_stream(options);
          CHECK_OK(device.call(legacy_first ? legacy : other, log.entry(1), {}));
          CHECK_OK(device.call(legacy_first ? other : legacy, log.entry(2), {}));
        });
        CHECK_EQ(free, !blocking);
      }
    }
  }
}

TEST(legacy_and_per_thread_streams_order_each_other) {
  for (bool legacy_first : {true, false}) {
    CHECK(!overtakes([&](SimDevice& device, Log& log) {
      CHECK_OK(device.call(legacy_first ? kLegacyStream : kPerThreadStream, log.entry(1), {}));
      CHECK_OK(device.call(legacy_first ? kPerThreadStream : kLegacyStream, log.entry(2), {}));
    }));
  }
}

TEST(two_blocking_streams_do_not_order_each_other_without_the_legacy_one) {
  CHECK(overtakes([](SimDevice& device, Log& log) {
    StreamOptions options;
    options.blocking = true;
    StreamHandle a = *device.create_stream(options), b = *device.create_stream(options);
    CHECK_OK(device.call(a, log.entry(1), {}));
    CHECK_OK(device.call(b, log.entry(2), {}));
  }));
  // A mere record on the legacy stream between them does.
  CHECK(!overtakes([](SimDevice& device, Log& log) {
    StreamOptions options;
    options.blocking = true;
    StreamHandle a = *device.create_stream(options), b = *device.create_stream(options);
    EventRef event = *device.create_event();
    CHECK_OK(device.call(a, log.entry(1), {}));
    CHECK_OK(device.record(*event, kLegacyStream));
    CHECK_OK(device.call(b, log.entry(2), {}));
  }));
}

TEST(a_destroyed_blocking_stream_still_holds_up_the_legacy_one) {
  CHECK(!overtakes([](SimDevice& device, Log& log) {
    StreamOptions options;
    options.blocking = true;
    StreamHandle a = *device.create_stream(options);
    CHECK_OK(device.call(a, log.entry(1), {}));
    CHECK_OK(device.destroy_stream(a));
    CHECK_OK(device.call(kLegacyStream, log.entry(2), {}));
  }));
}

TEST(each_thread_has_a_per_thread_stream_of_its_own) {
  CHECK(overtakes([](SimDevice& device, Log& log) {
    std::thread([&] { CHECK_OK(device.call(kPerThreadStream, log.entry(1), {})); }).join();
    CHECK_OK(device.call(kPerThreadStream, log.entry(2), {}));
  }));
  CHECK(!overtakes([](SimDevice& device, Log& log) {
    std::thread([&] { CHECK_OK(device.call(kPerThreadStream, log.entry(1), {})); }).join();
    CHECK_OK(device.call(kLegacyStream, log.entry(2), {}));
  }));
}

TEST(synchronizing_the_legacy_stream_waits_for_blocking_streams_and_not_the_other_way_round) {
  // Measured on an H200.
  SimOptions late;
  late.schedule = SimOptions::Schedule::kLate;
  auto device = make_sim_device(late);
  StreamOptions blocking;
  blocking.blocking = true;
  StreamHandle a = *device->create_stream(blocking), b = *device->create_stream({});
  Log log;
  CHECK_OK(device->call(a, log.entry(1), {}));
  CHECK_OK(device->call(b, log.entry(2), {}));
  CHECK_OK(device->call(kPerThreadStream, log.entry(3), {}));
  CHECK(!*device->query(kLegacyStream));
  CHECK_OK(device->synchronize(kLegacyStream));
  CHECK(log.ran == (std::vector<int>{1, 3}));
  CHECK(*device->query(kLegacyStream));
  CHECK_OK(device->call(kLegacyStream, log.entry(4), {}));
  CHECK_OK(device->synchronize(a));
  CHECK(*device->query(a));
  CHECK(log.ran == (std::vector<int>{1, 3}));
}

TEST(an_event_orders_streams) {
  CHECK(!overtakes([](SimDevice& device, Log& log) {
    StreamHandle a = *device.create_stream({}), b = *device.create_stream({});
    EventRef event = *device.create_event();
    CHECK_OK(device.call(a, log.entry(1), {}));
    CHECK_OK(device.record(*event, a));
    CHECK_OK(device.wait(b, *event));
    CHECK_OK(device.call(b, log.entry(2), {}));
  }));
}

TEST(a_wait_takes_the_event_as_it_is_when_it_is_enqueued) {
  // Before any record: no wait.
  CHECK(overtakes([](SimDevice& device, Log& log) {
    StreamHandle a = *device.create_stream({}), b = *device.create_stream({});
    EventRef event = *device.create_event();
    CHECK_OK(device.wait(b, *event));
    CHECK_OK(device.call(a, log.entry(1), {}));
    CHECK_OK(device.record(*event, a));
    CHECK_OK(device.call(b, log.entry(2), {}));
  }));
  // Recorded again afterwards, elsewhere: still behind the first record.
  CHECK(!overtakes([](SimDevice& device, Log& log) {
    StreamHandle a = *device.create_stream({}), b = *device.create_stream({}), c = *device.create_stream({});
    EventRef event = *device.create_event();
    CHECK_OK(device.call(a, log.entry(1), {}));
    CHECK_OK(device.record(*event, a));
    CHECK_OK(device.wait(b, *event));
    CHECK_OK(device.record(*event, c));
    CHECK_OK(device.call(b, log.entry(2), {}));
  }));
  // Not behind what was recorded only later.
  CHECK(overtakes([](SimDevice& device, Log& log) {
    StreamHandle a = *device.create_stream({}), b = *device.create_stream({}), c = *device.create_stream({});
    EventRef event = *device.create_event();
    CHECK_OK(device.record(*event, c));
    CHECK_OK(device.wait(b, *event));
    CHECK_OK(device.call(a, log.entry(1), {}));
    CHECK_OK(device.record(*event, a));
    CHECK_OK(device.call(b, log.entry(2), {}));
  }));
}

TEST(an_event_may_go_while_its_wait_is_pending) {
  CHECK(!overtakes([](SimDevice& device, Log& log) {
    StreamHandle a = *device.create_stream({}), b = *device.create_stream({});
    EventRef event = *device.create_event();
    CHECK_OK(device.call(a, log.entry(1), {}));
    CHECK_OK(device.record(*event, a));
    CHECK_OK(device.wait(b, *event));
    event.reset();
    CHECK_OK(device.destroy_stream(a));
    CHECK_OK(device.call(b, log.entry(2), {}));
  }));
}

TEST(events_are_queried_and_waited_for) {
  check::on_every_schedule([](SimDevice& device) {
    StreamHandle a = *device.create_stream({});
    EventRef event = *device.create_event();
    CHECK(*device.query(*event));
    CHECK_OK(device.synchronize(*event));  // never recorded: complete
    CHECK_OK(device.delay("call", 0));
    int value = 0;
    CHECK_OK(device.call(a,
                         [&] {
                           value = 1;
                           return Status();
                         },
                         {}));
    CHECK_OK(device.record(*event, a));
    CHECK(!*device.query(*event));
    CHECK(!*device.query(a));
    CHECK_OK(device.call(a,
                         [&] {
                           value = 2;
                           return Status();
                         },
                         {}));
    CHECK_OK(device.synchronize(*event));
    CHECK(value >= 1);
    CHECK(*device.query(*event));
    CHECK_OK(device.synchronize(a));
    CHECK_EQ(value, 2);
    CHECK(*device.query(a));
  });
}

TEST(times_are_the_same_in_every_run) {
  for (int run = 0; run < 3; ++run) {
    auto device = make_sim_device({});
    StreamHandle a = *device->create_stream({});
    EventRef from = *device->create_event(true), to = *device->create_event(true);
    void* data = *device->allocate(1000000, a);
    CHECK_OK(device->record(*from, a));
    CHECK_OK(device->fill(data, 0, 1000000, a));
    CHECK_OK(device->call(a, [] { return Status(); }, {}));
    CHECK_OK(device->record(*to, a));
    double ms = *device->elapsed_ms(*from, *to);
    CHECK(ms > 0.0119999 && ms < 0.0120001);  // 1 us + 10 us for a megabyte, and 1 us
  }
}

TEST(elapsed_times_need_two_timing_events_that_are_complete) {
  SimOptions late;
  late.schedule = SimOptions::Schedule::kLate;
  auto device = make_sim_device(late);
  StreamHandle a = *device->create_stream({});
  EventRef plain = *device->create_event(), from = *device->create_event(true),
           to = *device->create_event(true);
  CHECK_OK(device->record(*plain, a));
  CHECK_OK(device->record(*from, a));
  CHECK_OK(device->synchronize(a));
  CHECK_REFUSED(device->elapsed_ms(*plain, *from), kInput, "made for timing", "INVALID_HANDLE");
  CHECK_REFUSED(device->elapsed_ms(*from, *to), kInput, "never recorded");
  CHECK_OK(device->record(*to, a));
  CHECK_REFUSED(device->elapsed_ms(*from, *to), kDevice, "complete", "NOT_READY");
  CHECK_OK(device->synchronize(*to));
  CHECK_OK(device->elapsed_ms(*from, *to));
}

TEST(handles_are_checked_by_name) {
  SimOptions second;
  second.ordinal = 1;
  auto a = make_sim_device({}), b = make_sim_device(second);
  StreamHandle mine = *a->create_stream({}), theirs = *b->create_stream({});
  EventRef event = *a->create_event();
  CHECK_OK(a->check_stream(mine));
  for (StreamHandle special : {0, 1, 2}) CHECK_OK(a->check_stream(special));
  CHECK_REFUSED(a->check_stream(theirs), kDevice, "sim:0", "sim:1");
  CHECK_EQ(a->check_stream(theirs)->device == "sim:0", true);
  CHECK_REFUSED(a->check_stream(0x7f0012345678), kInput, "0x7f0012345678", "no stream of sim:0 ever was");
  CHECK_REFUSED(a->check_stream(mine + 1), kInput, "ever was");
  CHECK_REFUSED(a->check_stream(3), kInput, "ever was");
  CHECK_OK(a->destroy_stream(mine));
  CHECK_REFUSED(a->check_stream(mine), kInput, "destroyed");
  CHECK_REFUSED(a->call(mine, [] { return Status(); }, {}), kInput, "call", "destroyed");
  CHECK_REFUSED(a->copy(nullptr, nullptr, 0, mine), kInput, "copy", "destroyed");
  CHECK_REFUSED(a->fill(nullptr, 0, 0, mine), kInput, "fill", "destroyed");
  CHECK_REFUSED(a->allocate(1, mine), kInput, "allocate", "destroyed");
  CHECK_REFUSED(a->record(*event, mine), kInput, "record", "destroyed");
  CHECK_REFUSED(a->wait(mine, *event), kInput, "wait", "destroyed");
  CHECK_REFUSED(a->synchronize(mine), kInput, "synchronize_stream", "destroyed");
  CHECK_REFUSED(a->query(mine), kInput, "query_stream", "destroyed");
  CHECK_REFUSED(a->begin_capture(mine, CaptureMode::kGlobal), kInput, "begin_capture", "destroyed");
  CHECK_REFUSED(a->end_capture(mine), kInput, "end_capture", "destroyed");
  CHECK_REFUSED(a->capture_status(mine), kInput, "capture_status", "destroyed");
  CHECK_REFUSED(a->destroy_stream(mine), kInput, "destroy_stream", "destroyed");
  for (StreamHandle special : {0, 1, 2})
    CHECK_REFUSED(a->destroy_stream(special), kInput, "create_stream() made");
  std::set<StreamHandle> seen;
  for (int i = 0; i < 100; ++i) {
    StreamHandle stream = *a->create_stream({});
    CHECK(seen.insert(stream).second);
    CHECK_OK(a->destroy_stream(stream));
  }
  std::string name = b->name();
  b.reset();
  CHECK_REFUSED(a->check_stream(theirs), kDevice, "sim:1");  // known after its device has gone
}

TEST(objects_of_another_device_are_refused_by_both_names) {
  SimOptions second;
  second.ordinal = 1;
  auto a = make_sim_device({}), b = make_sim_device(second);
  StreamHandle stream = *a->create_stream({}), other = *b->create_stream({});
  EventRef theirs = *b->create_event(true), mine = *a->create_event(true),
           cpu = *cpu_device()->create_event(true);
  CHECK_REFUSED(a->record(*theirs, stream), kDevice, "record", "sim:0", "sim:1");
  CHECK_REFUSED(a->record(*cpu, stream), kDevice, "record", "sim:0", "cpu");
  CHECK_REFUSED(cpu_device()->record(*mine, 0), kDevice, "record", "sim:0", "cpu");
  CHECK_REFUSED(a->wait(stream, *theirs), kDevice, "wait", "sim:0", "sim:1");
  CHECK_REFUSED(a->synchronize(*theirs), kDevice, "synchronize_event", "sim:0", "sim:1");
  CHECK_REFUSED(a->query(*theirs), kDevice, "query_event", "sim:0", "sim:1");
  CHECK_REFUSED(a->elapsed_ms(*mine, *theirs), kDevice, "elapsed_ms", "sim:0", "sim:1");
  CHECK_OK(b->begin_capture(other, CaptureMode::kThreadLocal));
  GraphRef graph = *b->end_capture(other);
  GraphExecRef exec = *b->instantiate(*graph);
  CHECK_REFUSED(a->instantiate(*graph), kDevice, "instantiate", "sim:0", "sim:1");
  CHECK_REFUSED(a->upload(*exec, stream), kDevice, "upload", "sim:0", "sim:1");
  CHECK_REFUSED(a->launch(*exec, stream), kDevice, "launch", "sim:0", "sim:1");
  int sizes[] = {8};
  StreamOptions options;
  options.partition = (*b->split(sizes))[0];
  CHECK_REFUSED(a->create_stream(options), kDevice, "create_stream", "sim:0", "sim:1");
}

TEST(late_runs_what_a_wait_demands_and_no_more) {
  SimOptions late;
  late.schedule = SimOptions::Schedule::kLate;
  auto device = make_sim_device(late);
  StreamHandle a = *device->create_stream({}), b = *device->create_stream({}), c = *device->create_stream({});
  EventRef event = *device->create_event();
  Log log;
  CHECK_OK(device->call(c, log.entry(1), {}));
  CHECK_OK(device->call(b, log.entry(2), {}));
  CHECK_OK(device->call(a, log.entry(3), {}));
  CHECK_OK(device->record(*event, a));
  CHECK_OK(device->call(a, log.entry(4), {}));
  CHECK_OK(device->wait(b, *event));
  CHECK_OK(device->call(b, log.entry(5), {}));
  CHECK_EQ(device->pending(), 7);
  CHECK(log.ran.empty());
  CHECK_OK(device->synchronize(*event));
  CHECK(log.ran == (std::vector<int>{3}));
  CHECK_OK(device->synchronize(b));
  CHECK(log.ran == (std::vector<int>{3, 2, 5}));
  CHECK_EQ(device->pending(), 2);
  CHECK_OK(device->synchronize());
  CHECK(log.ran == (std::vector<int>{3, 2, 5, 1, 4}));
  CHECK_EQ(device->pending(), 0);
}

TEST(eager_runs_at_once) {
  auto device = make_sim_device({});
  Log log;
  CHECK_OK(device->call(0, log.entry(1), {}));
  CHECK(log.ran == (std::vector<int>{1}));
  CHECK_EQ(device->pending(), 0);
}

TEST(a_delay_holds_work_back_until_a_wait_demands_it) {
  for (const auto& options : check::schedules(20)) {
    check::Note note(check::name_of(options));
    auto device = make_sim_device(options);
    StreamHandle a = *device->create_stream({}), b = *device->create_stream({});
    Log log;
    CHECK_OK(device->delay("call", 1));
    CHECK_OK(device->call(a, log.entry(1), {}));
    CHECK_OK(device->call(a, log.entry(2), {}));
    CHECK_OK(device->call(a, log.entry(3), {}));
    CHECK_OK(device->call(b, log.entry(4), {}));
    CHECK_OK(device->synchronize(b));
    CHECK(std::find(log.ran.begin(), log.ran.end(), 2) == log.ran.end());
    CHECK(std::find(log.ran.begin(), log.ran.end(), 3) == log.ran.end());
    CHECK_OK(device->synchronize(a));
    CHECK(log.before(1, 2) && log.before(2, 3));
  }
  auto device = make_sim_device({});
  CHECK_REFUSED(device->delay("record", 0), kInput, "record");
  CHECK_REFUSED(device->delay("copy", -1), kInput, "-1");
}

TEST(one_wait_lets_go_of_all_that_is_held_back_before_it) {
  for (const auto& options : check::schedules(10)) {
    check::Note note(check::name_of(options));
    auto device = make_sim_device(options);
    Log log;
    CHECK_OK(device->delay("call", 0));
    CHECK_OK(device->delay("call", 1));
    CHECK_OK(device->call(0, log.entry(1), {}));
    CHECK_OK(device->call(0, log.entry(2), {}));
    CHECK(log.ran.empty());
    CHECK_OK(device->synchronize(StreamHandle{0}));
    CHECK(log.ran == (std::vector<int>{1, 2}));
  }
}

TEST(a_seed_means_one_order) {
  auto run = [](uint64_t seed) {
    SimOptions options;
    options.schedule = SimOptions::Schedule::kRandom;
    options.seed = seed;
    auto device = make_sim_device(options);
    std::vector<StreamHandle> streams;
    for (int i = 0; i < 4; ++i) streams.push_back(*device->create_stream({}));
    Log log;
    for (int i = 0; i < 40; ++i) CHECK_OK(device->call(streams[i % 4], log.entry(i), {}));
    CHECK_OK(device->synchronize());
    return log.ran;
  };
  std::set<std::vector<int>> orders;
  for (uint64_t seed = 0; seed < 50; ++seed) {
    auto order = run(seed);
    CHECK(run(seed) == order);
    orders.insert(order);
  }
  CHECK(orders.size() >= 49);
  // Fixed for ever: a seed in a report must mean the same in every build.
  CHECK_EQ(run(7).size(), 40u);
  auto seven = run(7);
  CHECK(std::vector<int>(seven.begin(), seven.begin() + 8) == (std::vector<int>{1, 0, 4, 2, 5, 9, 3, 6}));
}

TEST(calls_are_counted_and_kept_in_order) {
  auto device = make_sim_device({});
  CHECK_EQ(device->calls("copy"), 0);
  CHECK_OK(device->copy(nullptr, nullptr, 0, 0));
  CHECK_OK(device->copy(nullptr, nullptr, 0, 0));
  std::thread([&] { CHECK_OK(device->synchronize()); }).join();
  CHECK_EQ(device->calls("copy"), 2);
  CHECK_EQ(device->calls("synchronize_device"), 1);
  CHECK_EQ(device->calls(""), 3);
  CHECK_EQ(device->calls("sync"), -1);
  std::vector<std::pair<int, std::string>> want = {{0, "copy"}, {0, "copy"}, {1, "synchronize_device"}};
  CHECK(device->submissions() == want);
}

}  // namespace
