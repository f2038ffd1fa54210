// Captures and graphs. The rules are those measured on an H200 (driver 580.159, CUDA 13.0).
#include <algorithm>
#include <set>
#include <thread>

#include "check.h"

using namespace headrace;

namespace {

constexpr CaptureMode kModes[] = {CaptureMode::kGlobal, CaptureMode::kThreadLocal, CaptureMode::kRelaxed};

// A capture that a test may break.
struct Captured {
  explicit Captured(SimDevice& device, CaptureMode mode = CaptureMode::kThreadLocal, bool blocking = false)
      : device(device) {
    StreamOptions options;
    options.blocking = blocking;
    stream = *device.create_stream(options);
    CHECK_OK(device.begin_capture(stream, mode));
    CHECK_OK(work(stream));
  }
  Status work(StreamHandle on) {
    return device.call(on, [] { return Status(); }, {});
  }
  CaptureStatus status() { return *device.capture_status(stream); }
  void expect_intact() {
    CHECK(status() == CaptureStatus::kActive);
    CHECK_OK(device.end_capture(stream));
    CHECK(status() == CaptureStatus::kNone);
    CHECK_OK(work(stream));
    CHECK_OK(device.synchronize(stream));
  }
  // `word` is in the first reason.
  void expect_broken(const char* word) {
    CHECK(status() == CaptureStatus::kInvalidated);
    CHECK_REFUSED(work(stream), kCapture, "INVALIDATED", word);
    CHECK_REFUSED(device.end_capture(stream), kCapture, "end_capture", "INVALIDATED", word);
    CHECK(status() == CaptureStatus::kNone);
    CHECK_OK(work(stream));
    CHECK_OK(device.synchronize(stream));
  }
  SimDevice& device;
  StreamHandle stream = 0;
};

template <class Body>
void on_another_thread(Body body) {
  std::thread(body).join();
}

TEST(a_capture_runs_nothing_and_each_launch_runs_it_again) {
  check::on_every_schedule([](SimDevice& device) {
    StreamHandle a = *device.create_stream({}), b = *device.create_stream({});
    auto* data = static_cast<int32_t*>(*device.allocate(4, a));
    int32_t in = 1, out = 0;
    int ran = 0;
    CHECK_OK(device.synchronize(a));
    CHECK_OK(device.begin_capture(a, CaptureMode::kThreadLocal));
    CHECK(*device.capture_status(a) == CaptureStatus::kActive);
    CHECK(*device.capture_status(b) == CaptureStatus::kNone);
    CHECK_OK(device.copy(data, &in, 4, a));
    CHECK_OK(device.call(a,
                         [&] {
                           *data += 10;
                           ++ran;
                           return Status();
                         },
                         {{data, 4, true}}));
    CHECK_OK(device.copy(&out, data, 4, a));
    GraphRef graph = *device.end_capture(a);
    CHECK_OK(device.synchronize());
    CHECK_EQ(ran, 0);
    GraphExecRef exec = *device.instantiate(*graph);
    graph.reset();
    CHECK_OK(device.upload(*exec, b));
    for (int i = 1; i <= 3; ++i) {
      in = i;
      CHECK_OK(device.launch(*exec, b));
      CHECK_OK(device.synchronize(b));
      CHECK_EQ(out, i + 10);
      CHECK_EQ(ran, i);
    }
    CHECK_OK(device.launch(*exec, b));
    exec.reset();  // in flight
    CHECK_OK(device.synchronize(b));
    CHECK_EQ(ran, 4);
  });
}

TEST(an_empty_capture_is_a_graph) {
  auto device = make_sim_device({});
  StreamHandle a = *device->create_stream({});
  CHECK_OK(device->begin_capture(a, CaptureMode::kGlobal));
  GraphRef graph = *device->end_capture(a);
  GraphExecRef exec = *device->instantiate(*graph);
  CHECK_OK(device->launch(*exec, a));
  CHECK_OK(device->synchronize(a));
  CHECK_EQ(device->pending(), 0);
}

TEST(a_launch_is_behind_its_stream_and_before_what_follows) {
  check::on_every_schedule([](SimDevice& device) {
    StreamHandle a = *device.create_stream({}), b = *device.create_stream({});
    std::vector<int> ran;
    auto entry = [&](int number) {
      return [&ran, number] {
        ran.push_back(number);
        return Status();
      };
    };
    CHECK_OK(device.begin_capture(a, CaptureMode::kThreadLocal));
    CHECK_OK(device.call(a, entry(2), {}));
    GraphRef graph = *device.end_capture(a);
    GraphExecRef exec = *device.instantiate(*graph);
    CHECK_OK(device.call(b, entry(1), {}));
    CHECK_OK(device.launch(*exec, b));
    CHECK_OK(device.call(b, entry(3), {}));
    CHECK_OK(device.synchronize(b));
    CHECK(ran == (std::vector<int>{1, 2, 3}));
  });
}

TEST(launches_of_one_graph_run_one_after_the_other_and_of_two_need_not) {
  for (bool same : {true, false}) {
    bool interleaved = false;
    for (const auto& options : check::schedules(60)) {
      auto device = make_sim_device(options);
      StreamHandle a = *device->create_stream({}), b = *device->create_stream({});
      int running = 0;
      CHECK_OK(device->begin_capture(a, CaptureMode::kThreadLocal));
      CHECK_OK(device->call(a,
                            [&] {
                              interleaved = interleaved || running != 0;
                              ++running;
                              return Status();
                            },
                            {}));
      CHECK_OK(device->call(a,
                            [&] {
                              --running;
                              return Status();
                            },
                            {}));
      GraphRef graph = *device->end_capture(a);
      GraphExecRef first = *device->instantiate(*graph), second = *device->instantiate(*graph);
      CHECK_OK(device->launch(*first, a));
      CHECK_OK(device->launch(same ? *first : *second, b));
      CHECK_OK(device->synchronize());
    }
    CHECK_EQ(interleaved, !same);
  }
}

// A fork and a join: 1, then 2 and 3 side by side, then 4.
GraphRef diamond(SimDevice& device, std::vector<int>& ran) {
  StreamHandle a = *device.create_stream({}), b = *device.create_stream({});
  EventRef fork = *device.create_event(), join = *device.create_event();
  auto entry = [&ran](int number) {
    return [&ran, number] {
      ran.push_back(number);
      return Status();
    };
  };
  CHECK_OK(device.begin_capture(a, CaptureMode::kThreadLocal));
  CHECK_OK(device.call(a, entry(1), {}));
  CHECK_OK(device.record(*fork, a));
  CHECK_OK(device.wait(b, *fork));
  CHECK(*device.capture_status(b) == CaptureStatus::kActive);
  CHECK_OK(device.call(a, entry(2), {}));
  CHECK_OK(device.call(b, entry(3), {}));
  CHECK_OK(device.record(*join, b));
  CHECK_OK(device.wait(a, *join));
  CHECK_OK(device.call(a, entry(4), {}));
  GraphRef graph = *device.end_capture(a);
  CHECK(*device.capture_status(b) == CaptureStatus::kNone);
  CHECK_OK(device.call(b, [] { return Status(); }, {}));
  CHECK_OK(device.synchronize(b));
  return graph;
}

TEST(branches_of_a_graph_run_in_any_order_that_its_edges_allow) {
  std::set<std::vector<int>> orders;
  for (const auto& options : check::schedules(60)) {
    auto device = make_sim_device(options);
    std::vector<int> ran;
    GraphRef graph = diamond(*device, ran);
    CHECK(ran.empty());
    GraphExecRef exec = *device->instantiate(*graph);
    CHECK_OK(device->launch(*exec, 0));
    CHECK_EQ(device->calls("launch"), 1);
    CHECK_OK(device->synchronize());
    orders.insert(ran);
  }
  CHECK(orders == (std::set<std::vector<int>>{{1, 2, 3, 4}, {1, 3, 2, 4}}));
}

TEST(work_of_a_forked_stream_must_be_joined) {
  for (int shape = 0; shape < 5; ++shape) {
    auto device = make_sim_device({});
    Captured capture(*device);
    StreamHandle fork = *device->create_stream({});
    EventRef event = *device->create_event();
    CHECK_OK(device->record(*event, capture.stream));
    CHECK_OK(device->wait(fork, *event));
    if (shape != 0) CHECK_OK(capture.work(fork));
    if (shape == 2 || shape == 3) {
      CHECK_OK(device->record(*event, fork));
      CHECK_OK(device->wait(capture.stream, *event));
    }
    if (shape == 3) CHECK_OK(capture.work(fork));            // after the join
    if (shape == 4) CHECK_OK(device->destroy_stream(fork));  // its work stays to be joined
    CHECK(capture.status() == CaptureStatus::kActive);
    auto end = device->end_capture(capture.stream);
    if (shape == 0 || shape == 2) {
      CHECK_OK(end);
    } else {
      CHECK_REFUSED(end, kCapture, "end_capture", "UNJOINED");
    }
    CHECK(capture.status() == CaptureStatus::kNone);
    if (shape != 4) CHECK(*device->capture_status(fork) == CaptureStatus::kNone);
  }
}

TEST(a_destroyed_fork_that_was_joined_is_no_fault) {
  auto device = make_sim_device({});
  Captured capture(*device);
  StreamHandle fork = *device->create_stream({});
  EventRef event = *device->create_event();
  CHECK_OK(device->record(*event, capture.stream));
  CHECK_OK(device->wait(fork, *event));
  CHECK_OK(capture.work(fork));
  CHECK_OK(device->record(*event, fork));
  CHECK_OK(device->wait(capture.stream, *event));
  CHECK_OK(device->destroy_stream(fork));
  capture.expect_intact();
}

TEST(a_capture_ends_where_it_began) {
  auto device = make_sim_device({});
  {
    Captured capture(*device);
    StreamHandle fork = *device->create_stream({});
    EventRef event = *device->create_event();
    CHECK_OK(device->record(*event, capture.stream));
    CHECK_OK(device->wait(fork, *event));
    CHECK_REFUSED(device->end_capture(fork), kCapture, "UNMATCHED");
    CHECK(*device->capture_status(fork) == CaptureStatus::kInvalidated);
    capture.expect_broken("UNMATCHED");
    CHECK(*device->capture_status(fork) == CaptureStatus::kNone);
  }
  for (CaptureMode mode : kModes) {
    Captured capture(*device, mode);
    on_another_thread([&] {
      if (mode == CaptureMode::kRelaxed) {
        CHECK_OK(device->end_capture(capture.stream));
      } else {
        CHECK_REFUSED(device->end_capture(capture.stream), kCapture, "WRONG_THREAD");
      }
    });
    CHECK(capture.status() == CaptureStatus::kNone);
    CHECK_REFUSED(device->end_capture(capture.stream), kCapture, "does not", "ILLEGAL_STATE");
  }
}

TEST(what_cannot_begin) {
  auto device = make_sim_device({});
  CHECK_REFUSED(device->begin_capture(0, CaptureMode::kRelaxed), kCapture, "legacy stream", "UNSUPPORTED");
  CHECK_REFUSED(device->begin_capture(1, CaptureMode::kRelaxed), kCapture, "legacy stream", "UNSUPPORTED");
  CHECK_OK(device->begin_capture(kPerThreadStream, CaptureMode::kRelaxed));
  CHECK_OK(device->end_capture(kPerThreadStream));
  Captured capture(*device);
  CHECK_REFUSED(device->begin_capture(capture.stream, CaptureMode::kRelaxed), kCapture, "begin_capture",
                "which does");
  capture.expect_intact();
}

TEST(legacy_work_breaks_the_capture_of_a_blocking_stream_and_fails_itself) {
  for (CaptureMode mode : kModes) {
    for (int use = 0; use < 9; ++use) {
      for (int kind = 0; kind < 4;
           ++kind) {  // blocking, per-thread, non-blocking, forked into a blocking one
        auto device = make_sim_device({});
        EventRef event = *device->create_event();
        void* data = *device->allocate(16, 0);
        CHECK_OK(device->begin_capture(*device->create_stream({}), CaptureMode::kRelaxed));
        StreamOptions options;
        options.blocking = kind == 0;
        StreamHandle stream = kind == 1 ? kPerThreadStream : *device->create_stream(options);
        CHECK_OK(device->begin_capture(stream, mode));
        CHECK_OK(device->call(stream, [] { return Status(); }, {}));
        if (kind == 3) {
          options.blocking = true;
          EventRef fork = *device->create_event();
          CHECK_OK(device->record(*fork, stream));
          CHECK_OK(device->wait(*device->create_stream(options), *fork));
        }
        bool exempt = kind == 2;
        auto act = [&]() -> Status {
          switch (use) {
            case 0:
              return device->call(0, [] { return Status(); }, {});
            case 1:
              return device->copy(data, data, 1, 0);
            case 2:
              return device->fill(data, 0, 1, 1);
            case 3:
              return device->record(*event, 0);
            case 4:
              return device->wait(0, *event);
            case 5:
              return device->synchronize(StreamHandle{0});
            case 6:
              return device->query(StreamHandle{0}).status();
            case 7:
              return device->allocate(1, 0).status();
            default:
              return device->free(data, 0);
          }
        };
        // In global mode another thread's unsafe calls break it for that reason.
        bool unsafe = use >= 5 && mode == CaptureMode::kGlobal;
        on_another_thread([&] {
          if (!exempt) {
            CHECK_REFUSED(act(), kCapture, "IMPLICIT");
            CHECK_REFUSED(act(), kCapture, "IMPLICIT");  // until it is ended
          } else if (unsafe) {
            CHECK_REFUSED(act(), kCapture, "UNSUPPORTED");
          } else {
            CHECK_OK(act());
          }
        });
        auto end = device->end_capture(stream);
        if (!exempt) {
          CHECK_REFUSED(end, kCapture, "INVALIDATED", "IMPLICIT");
          on_another_thread([&] { CHECK_OK(act()); });
        } else if (unsafe) {
          CHECK_REFUSED(end, kCapture, "INVALIDATED");
        } else {
          CHECK_OK(end);
        }
      }
    }
  }
}

TEST(asking_the_legacy_stream_or_using_another_blocking_one_breaks_nothing) {
  auto device = make_sim_device({});
  StreamOptions blocking;
  blocking.blocking = true;
  StreamHandle other = *device->create_stream(blocking);
  Captured capture(*device, CaptureMode::kThreadLocal, true);
  CHECK_REFUSED(device->capture_status(0), kCapture, "IMPLICIT");
  CHECK_OK(capture.work(other));
  capture.expect_intact();
  CHECK(*device->capture_status(0) == CaptureStatus::kNone);
}

TEST(calls_that_captures_forbid_even_on_unrelated_objects) {
  enum Expect { kFine, kForbidden };
  for (CaptureMode mode : kModes) {
    for (CaptureMode thread : kModes) {
      for (bool own : {true, false}) {
        for (int call = 0; call < 16; ++call) {
          auto device = make_sim_device({});
          StreamHandle other = *device->create_stream({});
          EventRef event = *device->create_event(true);
          CHECK_OK(device->record(*event, other));
          void* data = *device->allocate(16, other);
          CHECK_OK(device->begin_capture(other, CaptureMode::kRelaxed));
          GraphRef graph = *device->end_capture(other);
          GraphExecRef exec = *device->instantiate(*graph);
          CHECK_OK(device->synchronize());
          Captured capture(*device, mode);
          auto act = [&]() -> Status {
            switch (call) {
              case 0:
                return device->synchronize(other);
              case 1:
                return device->query(other).status();
              case 2:
                return device->synchronize(*event);
              case 3:
                return device->query(*event).status();
              case 4:
                return device->allocate(1, other).status();
              case 5:
                return device->free(data, other);
              case 6:
                return device->instantiate(*graph).status();
              case 7:
                return device->elapsed_ms(*event, *event).status();
              case 8:
                return device->create_stream({}).status();
              case 9:
                return device->create_event().status();
              case 10:
                return device->destroy_stream(other);
              case 11:
                return device->record(*event, other);
              case 12:
                return device->wait(other, *event);
              case 13:
                return device->copy(data, data, 1, other);
              case 14:
                return device->launch(*exec, other);
              default:
                return device->upload(*exec, other);
            }
          };
          Expect expect = kFine;
          if (call < 7 && thread != CaptureMode::kRelaxed) {
            if (own && mode != CaptureMode::kRelaxed) expect = kForbidden;
            if (!own && mode == CaptureMode::kGlobal && thread == CaptureMode::kGlobal) expect = kForbidden;
          }
          auto body = [&] {
            CHECK(device->exchange_capture_mode(thread) == CaptureMode::kGlobal);
            Status status = act();
            CHECK(device->exchange_capture_mode(CaptureMode::kGlobal) == thread);
            if (expect == kForbidden) {
              CHECK_REFUSED(status, kCapture, "UNSUPPORTED", "invalidated");
            } else {
              CHECK_OK(status);
            }
          };
          if (own) {
            body();
          } else {
            on_another_thread(body);
          }
          if (expect == kForbidden) {
            capture.expect_broken("UNSUPPORTED");
          } else {
            capture.expect_intact();
          }
        }
      }
    }
  }
}

TEST(waiting_for_the_whole_device_breaks_every_capture_in_every_mode) {
  for (CaptureMode mode : kModes) {
    auto device = make_sim_device({});
    Captured capture(*device, mode);
    on_another_thread([&] {
      device->exchange_capture_mode(CaptureMode::kRelaxed);
      CHECK_REFUSED(device->synchronize(), kCapture, "synchronize_device", "UNSUPPORTED");
    });
    capture.expect_broken("synchronize_device");
    CHECK_OK(device->synchronize());
  }
}

TEST(a_stream_or_event_in_a_capture_cannot_be_waited_for) {
  for (CaptureMode thread : kModes) {
    for (int call = 0; call < 6; ++call) {
      auto device = make_sim_device({});
      CHECK_OK(device->begin_capture(*device->create_stream({}), CaptureMode::kRelaxed));
      StreamHandle other = *device->create_stream({});
      CHECK_OK(device->begin_capture(other, CaptureMode::kRelaxed));
      GraphRef graph = *device->end_capture(other);
      GraphExecRef exec = *device->instantiate(*graph);
      EventRef event = *device->create_event();
      Captured capture(*device, CaptureMode::kRelaxed);
      CHECK_OK(device->record(*event, capture.stream));
      device->exchange_capture_mode(thread);
      switch (call) {
        case 0:
          CHECK_REFUSED(device->synchronize(capture.stream), kCapture, "UNSUPPORTED");
          break;
        case 1:
          CHECK_REFUSED(device->query(capture.stream), kCapture, "UNSUPPORTED");
          break;
        case 2:
          CHECK_REFUSED(device->synchronize(*event), kCapture, "CAPTURED_EVENT");
          break;
        case 3:
          CHECK_REFUSED(device->query(*event), kCapture, "CAPTURED_EVENT");
          break;
        case 4:
          CHECK_REFUSED(device->launch(*exec, capture.stream), kCapture, "launch", "UNSUPPORTED");
          break;
        default:
          CHECK_REFUSED(device->upload(*exec, capture.stream), kCapture, "upload", "UNSUPPORTED");
          break;
      }
      device->exchange_capture_mode(CaptureMode::kGlobal);
      capture.expect_broken(call == 2 || call == 3 ? "CAPTURED_EVENT" : "UNSUPPORTED");
    }
  }
}

TEST(memory_is_neither_made_nor_freed_on_a_capturing_stream_and_the_capture_goes_on) {
  auto device = make_sim_device({});
  void* data = *device->allocate(16, 0);
  Captured capture(*device);
  CHECK_REFUSED(device->free(data, capture.stream), kCapture, "free", "INVALID_VALUE");
  CHECK(device->where(data).kind == PointerInfo::Kind::kDevice);
  CHECK_REFUSED(device->allocate(16, capture.stream), kCapture, "allocate", "cache");
  CHECK_EQ(device->memory().allocations, 1);
  capture.expect_intact();
  CHECK_OK(device->free(data, capture.stream));
}

TEST(an_event_from_outside_isolates_and_one_never_recorded_does_not) {
  auto device = make_sim_device({});
  EventRef outside = *device->create_event(), never = *device->create_event();
  CHECK_OK(device->record(*outside, 0));
  {
    Captured capture(*device);
    CHECK_OK(device->wait(capture.stream, *never));
    capture.expect_intact();
  }
  Captured capture(*device);
  CHECK_REFUSED(device->wait(capture.stream, *outside), kCapture, "ISOLATION");
  CHECK_REFUSED(device->record(*never, capture.stream), kCapture, "INVALIDATED", "ISOLATION");
  CHECK_REFUSED(device->wait(capture.stream, *never), kCapture, "INVALIDATED");
  capture.expect_broken("ISOLATION");
}

TEST(two_captures_do_not_merge_and_the_legacy_stream_is_not_forked_into) {
  auto device = make_sim_device({});
  EventRef event = *device->create_event();
  {
    Captured one(*device), two(*device);
    CHECK_OK(device->record(*event, two.stream));
    CHECK_REFUSED(device->wait(one.stream, *event), kCapture, "MERGE");
    CHECK(one.status() == CaptureStatus::kInvalidated);
    CHECK_REFUSED(device->end_capture(one.stream), kCapture, "INVALIDATED", "MERGE");
    two.expect_broken("MERGE");
  }
  Captured capture(*device);
  CHECK_OK(device->record(*event, capture.stream));
  CHECK_REFUSED(device->wait(0, *event), kCapture, "legacy stream", "IMPLICIT");
  capture.expect_broken("IMPLICIT");
}

TEST(an_event_of_a_broken_capture_forks_nothing) {
  auto device = make_sim_device({});
  EventRef event = *device->create_event();
  StreamHandle other = *device->create_stream({});
  Captured capture(*device);
  CHECK_OK(device->record(*event, capture.stream));
  CHECK_REFUSED(device->query(capture.stream), kCapture);
  CHECK_REFUSED(device->wait(other, *event), kCapture, "INVALIDATED");
  CHECK(*device->capture_status(other) == CaptureStatus::kNone);
  capture.expect_broken("query_stream");
}

TEST(an_event_of_a_capture_that_ended_is_of_no_use_until_it_is_recorded_again) {
  auto device = make_sim_device({});
  EventRef event = *device->create_event(true);
  StreamHandle other = *device->create_stream({});
  {
    Captured capture(*device);
    CHECK_OK(device->record(*event, capture.stream));
    capture.expect_intact();
  }
  CHECK_REFUSED(device->wait(other, *event), kCapture, "ended", "INVALID_VALUE");
  CHECK_REFUSED(device->synchronize(*event), kCapture, "ended", "INVALID_VALUE");
  CHECK_REFUSED(device->query(*event), kCapture, "ended", "INVALID_VALUE");
  CHECK_REFUSED(device->elapsed_ms(*event, *event), kInput, "in a capture");
  {
    Captured capture(*device);
    CHECK_REFUSED(device->wait(capture.stream, *event), kCapture, "ended");
    capture.expect_broken("ended");
  }
  CHECK_OK(device->record(*event, other));
  CHECK_OK(device->wait(other, *event));
  CHECK_OK(device->synchronize(*event));
}

TEST(an_event_recorded_outside_again_is_no_part_of_the_capture) {
  auto device = make_sim_device({});
  EventRef event = *device->create_event();
  StreamHandle other = *device->create_stream({});
  Captured capture(*device);
  CHECK_OK(device->record(*event, capture.stream));
  CHECK_OK(device->record(*event, other));
  CHECK_OK(device->wait(other, *event));
  CHECK(*device->capture_status(other) == CaptureStatus::kNone);
  capture.expect_intact();
  CHECK_OK(device->synchronize(*event));
}

TEST(another_threads_work_on_the_stream_is_taken_into_the_capture) {
  auto device = make_sim_device({});
  StreamHandle a = *device->create_stream({});
  int ran = 0;
  CHECK_OK(device->begin_capture(a, CaptureMode::kThreadLocal));
  on_another_thread([&] {
    CHECK_OK(device->call(a,
                          [&] {
                            ++ran;
                            return Status();
                          },
                          {}));
  });
  GraphRef graph = *device->end_capture(a);
  CHECK_EQ(ran, 0);
  GraphExecRef exec = *device->instantiate(*graph);
  CHECK_OK(device->launch(*exec, a));
  CHECK_OK(device->synchronize());
  CHECK_EQ(ran, 1);
}

TEST(destroying_the_stream_where_it_began_ends_the_capture) {
  auto device = make_sim_device({});
  Captured capture(*device);
  StreamHandle fork = *device->create_stream({});
  EventRef event = *device->create_event();
  CHECK_OK(device->record(*event, capture.stream));
  CHECK_OK(device->wait(fork, *event));
  CHECK_OK(device->destroy_stream(capture.stream));
  CHECK(*device->capture_status(fork) == CaptureStatus::kNone);
  CHECK_OK(capture.work(fork));
  CHECK_OK(device->synchronize());
}

TEST(a_graph_whose_memory_was_freed_is_not_launched) {
  check::on_every_schedule(
      [](SimDevice& device) {
        StreamHandle a = *device.create_stream({});
        void* data = *device.allocate(16, a);
        for (int kind = 0; kind < 2; ++kind) {
          if (kind == 1) data = *device.allocate(16, a);
          CHECK_OK(device.synchronize(a));
          CHECK_OK(device.begin_capture(a, CaptureMode::kThreadLocal));
          if (kind == 0) CHECK_OK(device.fill(data, 0, 16, a));
          if (kind == 1) CHECK_OK(device.call(a, [] { return Status(); }, {{data, 16, true}}));
          GraphRef graph = *device.end_capture(a);
          GraphExecRef exec = *device.instantiate(*graph);
          CHECK_OK(device.launch(*exec, a));
          CHECK_OK(device.free(data, a));
          CHECK_REFUSED(device.launch(*exec, a), kInput, "launch", "touched after its end");
          // Kept by the graph, so that its address is not given out again.
          for (int i = 0; i < 600; ++i) CHECK_OK(device.free(*device.allocate(16, a), a));
          CHECK_OK(device.synchronize(a));
          CHECK_REFUSED(device.launch(*exec, a), kInput, "touched after its end");
        }
      },
      2);
}

TEST(a_node_that_fails_skips_what_is_behind_it_in_the_graph_and_the_next_launch_runs) {
  check::on_every_schedule([](SimDevice& device) {
    StreamHandle a = *device.create_stream({});
    int ran = 0, fail = 1;
    CHECK_OK(device.begin_capture(a, CaptureMode::kThreadLocal));
    CHECK_OK(device.call(a, [&] { return fail ? Status(ErrorCode::kDelegate, "boom") : Status(); }, {}));
    CHECK_OK(device.call(a,
                         [&] {
                           ++ran;
                           return Status();
                         },
                         {}));
    GraphRef graph = *device.end_capture(a);
    GraphExecRef exec = *device.instantiate(*graph);
    CHECK_OK(device.launch(*exec, a));
    CHECK_REFUSED(device.synchronize(a), kDelegate, "boom");
    CHECK_EQ(ran, 0);
    fail = 0;
    CHECK_OK(device.launch(*exec, a));
    CHECK_OK(device.synchronize(a));
    CHECK_EQ(ran, 1);
  });
}

TEST(a_launch_can_be_held_back) {
  auto device = make_sim_device({});
  StreamHandle a = *device->create_stream({});
  std::vector<int> ran;
  GraphRef graph = diamond(*device, ran);
  GraphExecRef exec = *device->instantiate(*graph);
  CHECK_OK(device->delay("launch", 0));
  CHECK_OK(device->launch(*exec, a));
  CHECK(ran.empty());
  CHECK_EQ(device->pending(), 6);
  CHECK_OK(device->synchronize(a));
  CHECK_EQ(ran.size(), 4u);
}

TEST(work_before_a_capture_is_no_part_of_it_and_goes_on) {
  check::on_every_schedule([](SimDevice& device) {
    StreamHandle a = *device.create_stream({}), b = *device.create_stream({});
    std::vector<int> ran;
    auto entry = [&](int number) {
      return [&ran, number] {
        ran.push_back(number);
        return Status();
      };
    };
    CHECK_OK(device.call(a, entry(1), {}));
    CHECK_OK(device.begin_capture(a, CaptureMode::kThreadLocal));
    CHECK_OK(device.call(a, entry(2), {}));
    GraphRef graph = *device.end_capture(a);
    CHECK_OK(device.call(a, entry(3), {}));
    CHECK_OK(device.synchronize(a));
    CHECK(ran == (std::vector<int>{1, 3}));
    GraphExecRef exec = *device.instantiate(*graph);
    CHECK_OK(device.launch(*exec, b));
    CHECK_OK(device.synchronize(b));
    CHECK(ran == (std::vector<int>{1, 3, 2}));
  });
}

}  // namespace
