// Partitions: counts as an H200 grants them, disjoint, given back.
#include <thread>

#include "check.h"

using namespace headrace;

namespace {

std::vector<int> counts(const Result<std::vector<PartitionRef>>& made) {
  std::vector<int> all;
  auto copy = made;
  if (!copy.ok()) return all;
  for (const PartitionRef& partition : *copy) all.push_back(partition->sm_count());
  return all;
}

TEST(requests_are_rounded_up_as_measured) {
  for (auto [asked, granted] : {std::pair{1, 8},
                                {2, 8},
                                {4, 8},
                                {8, 8},
                                {9, 16},
                                {12, 16},
                                {16, 16},
                                {64, 64},
                                {100, 104},
                                {128, 128},
                                {132, 132}}) {
    auto device = make_sim_device({});
    int sizes[] = {asked};
    CHECK(counts(device->split(sizes)) == std::vector<int>{granted});
  }
  auto device = make_sim_device({});
  CHECK_EQ(device->sm_limits().total, 132);
  CHECK_EQ(device->sm_limits().least, 8);
  CHECK_EQ(device->sm_limits().alignment, 8);
  SimOptions options;
  options.sm_count = 20;
  options.sm_least = 4;
  options.sm_alignment = 2;
  int sizes[] = {1, 5, 7};
  CHECK(counts(make_sim_device(options)->split(sizes)) == (std::vector<int>{4, 6, 8}));
}

TEST(one_split_makes_unequal_partitions_and_more_than_there_is_is_refused_with_what_is_left) {
  auto device = make_sim_device({});
  int sizes[] = {8, 60};
  auto first = device->split(sizes);
  CHECK(counts(first) == (std::vector<int>{8, 64}));
  int more[] = {61};
  CHECK_REFUSED(device->split(more), kDevice, "sim:0", "at most 60", "132", "64", "INVALID_RESOURCE");
  int both[] = {56, 8};  // neither alone is too much; nothing is made of a split that fails
  CHECK_REFUSED(device->split(both), kDevice, "at most 60", "56 + 8");
  int fits[] = {56};
  auto second = device->split(fits);
  CHECK(counts(second) == std::vector<int>{56});
  CHECK_REFUSED(device->split(fits), kDevice, "at most 4");
  second = Status(ErrorCode::kInput, "dropped");
  first = Status(ErrorCode::kInput, "dropped");
  int all[] = {132};
  CHECK(counts(device->split(all)) == std::vector<int>{132});
  int none[] = {8, 0}, huge[] = {INT32_MAX, INT32_MAX};
  CHECK_REFUSED(device->split(none), kInput, "at least 1", "0");
  CHECK_REFUSED(device->split({}), kInput, "none");
  CHECK_REFUSED(device->split(huge), kDevice, "4294967294");
}

TEST(streams_keep_their_partition_alive_and_a_closed_one_takes_no_more) {
  auto device = make_sim_device({});
  int all[] = {132}, some[] = {8};
  StreamOptions options;
  options.partition = (*device->split(all))[0];
  StreamHandle stream = *device->create_stream(options);
  int ran = 0;
  CHECK_OK(device->delay("call", 0));
  CHECK_OK(device->call(stream,
                        [&] {
                          ++ran;
                          return Status();
                        },
                        {}));
  CHECK(!options.partition->closed());
  CHECK_OK(options.partition->close());
  CHECK(options.partition->closed());
  CHECK_REFUSED(device->create_stream(options), kInput, "closed");
  options.partition.reset();
  CHECK_REFUSED(device->split(some), kDevice, "at most 0");
  CHECK_OK(device->synchronize(stream));
  CHECK_EQ(ran, 1);
  CHECK_OK(device->call(stream,
                        [&] {
                          ++ran;
                          return Status();
                        },
                        {}));
  CHECK_OK(device->synchronize(stream));
  CHECK_OK(device->destroy_stream(stream));
  CHECK_OK(device->split(some));
}

// GC1.
TEST(a_partition_tells_its_workqueue_concurrency_limit) {
  auto device = make_sim_device({});
  int sizes[] = {8, 64};
  auto lanes = device->split(sizes, {.workqueue_concurrency_limit = 3});
  CHECK(counts(lanes) == (std::vector<int>{8, 64}));
  for (const PartitionRef& lane : *lanes) CHECK(lane->workqueue_concurrency_limit() == 3);
  int some[] = {8};
  CHECK(!(*device->split(some))[0]->workqueue_concurrency_limit());
  for (int bad : {0, -1}) {
    CHECK_REFUSED(device->split(some, {.workqueue_concurrency_limit = bad}), kInput, "at least 1",
                  std::to_string(bad).c_str());
  }
  CHECK_REFUSED(cpu_device()->split(some, {.workqueue_concurrency_limit = 3}), kDevice, "partitions");
}

TEST(streams_of_a_partition_are_non_blocking) {
  auto device = make_sim_device({});
  int some[] = {8};
  StreamOptions options;
  options.partition = (*device->split(some))[0];
  options.blocking = true;
  CHECK_REFUSED(device->create_stream(options), kInput, "non-blocking", "cuGreenCtxStreamCreate");
}

TEST(a_host_function_and_a_graph_know_their_partition) {
  check::on_every_schedule([](SimDevice& device) {
    int sizes[] = {8, 16};
    auto made = *device.split(sizes);
    StreamOptions options;
    options.partition = made[0];
    StreamHandle in_8 = *device.create_stream(options);
    options.partition = made[1];
    StreamHandle in_16 = *device.create_stream(options);
    StreamHandle outside = *device.create_stream({});
    std::vector<int> seen;
    auto look = [&] {
      PartitionRef now = device.current_partition();
      seen.push_back(now ? now->sm_count() : 0);
      return Status();
    };
    CHECK(device.current_partition() == nullptr);
    for (StreamHandle stream : {in_8, in_16, outside}) {
      CHECK_OK(device.call(stream, look, {}));
      CHECK_OK(device.synchronize(stream));
    }
    CHECK(seen == (std::vector<int>{8, 16, 0}));
    // Measured: captured in a partition a graph stays there, captured outside it escapes.
    std::vector<GraphExecRef> execs;
    for (StreamHandle stream : {in_8, outside}) {
      CHECK_OK(device.begin_capture(stream, CaptureMode::kThreadLocal));
      CHECK_OK(device.call(stream, look, {}));
      auto graph = device.end_capture(stream);
      execs.push_back(*device.instantiate(**graph));
    }
    seen.clear();
    CHECK_OK(device.launch(*execs[0], outside));
    CHECK_OK(device.synchronize(outside));
    CHECK_OK(device.launch(*execs[1], in_16));
    CHECK_OK(device.synchronize(in_16));
    CHECK(seen == (std::vector<int>{8, 0}));
    CHECK(device.current_partition() == nullptr);
    // Another device's host function is in none of this one's partitions.
    auto other = make_sim_device({});
    CHECK_OK(device.call(in_8,
                         [&] {
                           CHECK(other->current_partition() == nullptr);
                           CHECK(device.current_partition() == made[0]);
                           return Status();
                         },
                         {}));
    CHECK_OK(device.synchronize(in_8));
  });
}

TEST(a_partition_may_outlive_its_device) {
  int some[] = {8};
  PartitionRef partition;
  {
    auto device = make_sim_device({});
    partition = (*device->split(some))[0];
  }
  CHECK_EQ(partition->sm_count(), 8);
  partition.reset();
}

// GC2: a probe sees the multiprocessors of its stream's partition, on every schedule, and those that a graph
// was captured in; nothing else of the stream is disturbed.
TEST(work_says_on_which_multiprocessors_it_runs) {
  check::on_every_schedule([](SimDevice& device) {
    auto lanes = device.split(std::vector<int>{8, 16});
    StreamHandle small = *device.create_stream({0, false, (*lanes)[0]});
    StreamHandle large = *device.create_stream({0, false, (*lanes)[1]});
    std::vector<int> first, second, all;
    for (int number = 0; number < 132; ++number) {
      all.push_back(number);
      if (number < 8) first.push_back(number);
      if (number >= 8 && number < 24) second.push_back(number);
    }
    for (bool replayed : {false, true}) {
      CHECK(*device.sms_seen(small, replayed) == first);
      CHECK(*device.sms_seen(large, replayed) == second);
      CHECK(*device.sms_seen(kPerThreadStream, replayed) == all);
    }
    CHECK_EQ(device.calls("sms_seen"), 6);
    // The lowest that are free come first.
    CHECK_OK(device.destroy_stream(small));
    (*lanes)[0] = nullptr;
    auto again = device.split(std::vector<int>{16});
    StreamHandle stream = *device.create_stream({0, false, (*again)[0]});
    auto seen = *device.sms_seen(stream);
    CHECK(std::ssize(seen) == 16 && seen[7] == 7 && seen[8] == 24);
    CHECK_OK(device.begin_capture(stream, CaptureMode::kThreadLocal));
    CHECK_REFUSED(device.sms_seen(stream), kCapture, "a stream that does not capture");
    CHECK_OK(device.end_capture(stream));
    CHECK_OK(device.inject({"sms_seen", 0, ErrorCode::kDevice}));
    CHECK_REFUSED(device.sms_seen(stream), kDevice);
  });
  CHECK_REFUSED(cpu_device()->sms_seen(kPerThreadStream), kDevice, "multiprocessors");
}

// GC2, GR3: each piece of work of a graph belongs to the partition of the stream it was captured on.
TEST(a_graph_tells_what_of_it_runs_outside_a_partition) {
  check::on_every_schedule([](SimDevice& device) {
    auto lanes = device.split(std::vector<int>{8, 16});
    StreamHandle inside = *device.create_stream({0, false, (*lanes)[0]}), plain = *device.create_stream({});
    void* data = *device.allocate(8, plain);
    CHECK_OK(device.synchronize(plain));
    EventRef fork = *device.create_event(), join = *device.create_event();
    CHECK_OK(device.begin_capture(inside, CaptureMode::kThreadLocal));
    CHECK_OK(device.fill(data, 1, 8, inside));
    CHECK_OK(device.record(*fork, inside));
    CHECK_OK(device.wait(plain, *fork));
    CHECK_OK(device.call(plain, [] { return Status(); }, {}));
    CHECK_OK(device.record(*join, plain));
    CHECK_OK(device.wait(inside, *join));
    auto graph = device.end_capture(inside);
    CHECK_OK(graph);
    auto work = device.work_of(**graph, (*lanes)[0]);
    CHECK(work->pieces.size() == 2 && work->untold == 0);
    CHECK(work->pieces[0].name == "fill" && work->pieces[0].inside);
    CHECK(work->pieces[1].name == "call" && !work->pieces[1].inside);
    work = device.work_of(**graph, (*lanes)[1]);
    CHECK(!work->pieces[0].inside && !work->pieces[1].inside);
    CHECK_REFUSED(device.work_of(**graph, nullptr), kInput, "partition");
    auto other = make_sim_device({});
    auto theirs = other->split(std::vector<int>{8});
    CHECK_REFUSED(device.work_of(**graph, (*theirs)[0]), kDevice, "partition");
    CHECK_REFUSED(other->work_of(**graph, (*theirs)[0]), kDevice, "graph");
  });
}

}  // namespace
