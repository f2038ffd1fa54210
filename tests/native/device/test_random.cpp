// Random programs over streams of every kind against a model of CUDA's order that knows nothing of the
// simulator's: each piece of work folds the values of those it must run behind, so a single one that ran too
// early changes the result.
#include <map>
#include <set>

#include "check.h"

using namespace headrace;

namespace {

uint64_t fold(uint64_t number, const std::set<int>& behind, const std::vector<uint64_t>& values) {
  uint64_t value = number + 1;
  for (int other : behind) value = value * 1000003 + values[static_cast<size_t>(other)];
  return value | 1;  // never 0, which means: has not run
}

struct Model {
  struct Queue {
    StreamHandle handle;
    bool legacy, blocking, live = true;
    std::set<int> last;
  };
  std::vector<Queue> queues;
  std::vector<std::set<int>> behind;  // of each piece of work
  std::map<int, std::set<int>> events;

  std::set<int> next(const Queue& queue) const {
    std::set<int> before = queue.last;
    for (const Queue& other : queues) {
      bool joined = queue.legacy ? other.blocking : queue.blocking && other.legacy;
      if (joined) before.insert(other.last.begin(), other.last.end());
    }
    return before;
  }
  void demanded(const std::set<int>& from, std::set<int>& all) const {
    for (int work : from) {
      if (all.insert(work).second) demanded(behind[static_cast<size_t>(work)], all);
    }
  }
};

void run(const SimOptions& options, uint64_t program) {
  check::Note note(check::name_of(options) + ", program " + std::to_string(program));
  check::Random random(program);
  auto device = make_sim_device(options);
  Model model;
  model.queues.push_back({kLegacyStream, true, false, true, {}});
  model.queues.push_back({kPerThreadStream, false, true, true, {}});
  std::vector<uint64_t> values(200), want(200);
  std::set<int> demanded;
  std::vector<EventRef> events;
  for (int i = 0; i < 5; ++i) events.push_back(*device->create_event());
  bool late = options.schedule == SimOptions::Schedule::kLate;
  auto check_ran = [&](const std::set<int>& from) {
    model.demanded(from, demanded);
    for (size_t work = 0; work < model.behind.size(); ++work) {
      bool must = demanded.contains(static_cast<int>(work));
      if (must) CHECK_EQ(values[work], want[work]);
      if (late && !must) CHECK_EQ(values[work], 0u);
    }
  };
  for (int step = 0; step < 120; ++step) {
    size_t at = random(model.queues.size());
    while (!model.queues[at].live) at = random(model.queues.size());
    Model::Queue& queue = model.queues[at];
    size_t event = random(events.size());
    switch (random(12)) {
      case 0:
        if (model.queues.size() < 9) {
          StreamOptions made;
          made.blocking = random(2) == 0;
          model.queues.push_back({*device->create_stream(made), false, made.blocking, true, {}});
        }
        break;
      case 1:
      case 2:
        queue.last = model.next(queue);
        model.events[static_cast<int>(event)] = queue.last;
        CHECK_OK(device->record(*events[event], queue.handle));
        break;
      case 3:
      case 4:
        if (model.events.contains(static_cast<int>(event))) {
          std::set<int> before = model.next(queue);
          before.insert(model.events[static_cast<int>(event)].begin(),
                        model.events[static_cast<int>(event)].end());
          queue.last = before;
        }
        CHECK_OK(device->wait(queue.handle, *events[event]));
        break;
      case 5:
        if (random(3) == 0) {
          CHECK_OK(device->synchronize(queue.handle));
          // A wait for a blocking stream is none for the legacy one; for the legacy stream it is one for all.
          check_ran(queue.legacy ? model.next(queue) : queue.last);
        } else {
          CHECK_OK(device->synchronize(*events[event]));
          auto recorded = model.events.find(static_cast<int>(event));
          if (recorded != model.events.end()) check_ran(recorded->second);
        }
        break;
      case 6:
        if (queue.handle > kPerThreadStream && random(4) == 0) {
          CHECK_OK(device->destroy_stream(queue.handle));
          queue.live = false;
        }
        break;
      default: {
        auto number = model.behind.size();
        std::set<int> behind = model.next(queue);
        want[number] = fold(number, behind, want);
        model.behind.push_back(behind);
        queue.last = {static_cast<int>(number)};
        CHECK_OK(device->call(queue.handle,
                              [&values, number, behind] {
                                values[number] = fold(number, behind, values);
                                return Status();
                              },
                              {}));
      }
    }
  }
  CHECK_OK(device->synchronize());
  CHECK_EQ(device->pending(), 0);
  for (size_t work = 0; work < model.behind.size(); ++work) CHECK_EQ(values[work], want[work]);
}

TEST(random_programs_equal_the_model_under_every_schedule) {
  for (const auto& options : check::schedules(200)) {
    for (uint64_t program = 0; program < 3; ++program) run(options, options.seed * 3 + program);
  }
}

TEST(random_programs_equal_the_model_eager_and_late_for_many_programs) {
  for (const auto& options : check::schedules(0)) {
    for (uint64_t program = 0; program < 200; ++program) run(options, 1000 + program);
  }
}

}  // namespace
