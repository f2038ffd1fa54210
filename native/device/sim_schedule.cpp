#include "device/sim_schedule.h"

#include <algorithm>

#include "device/host_function.h"
#include "device/refusal.h"

namespace headrace::sim {

namespace {

// Plain pointers: a thread may still run a host function while its thread-local objects are destroyed.
thread_local const Schedule* current_schedule = nullptr;
thread_local const PartitionRef* current_partition_of_thread = nullptr;

class PartitionScope {
 public:
  PartitionScope(const Schedule* schedule, const PartitionRef* partition)
      : schedule_(std::exchange(current_schedule, schedule)),
        partition_(std::exchange(current_partition_of_thread, partition)) {}
  ~PartitionScope() {
    current_schedule = schedule_;
    current_partition_of_thread = partition_;
  }
  PartitionScope(const PartitionScope&) = delete;
  PartitionScope& operator=(const PartitionScope&) = delete;

 private:
  const Schedule* schedule_;
  const PartitionRef* partition_;
};

// The clock is logical, so that times are the same in every run: the device does one operation at a time,
// work takes 1 us, and bytes 1 ns for each 100 (100 GB/s). What only orders takes no time.
int64_t cost_ns(const Op& op) {
  if (!is_work(op.kind)) return 0;
  return 1000 + static_cast<int64_t>(op.action->nbytes / 100);
}

}  // namespace

Schedule::Schedule(const SimOptions& options, std::string device, Memory& memory)
    : schedule_(options.schedule), random_state_(options.seed), device_(std::move(device)), memory_(memory) {
  // Seeds differ in temper: some run nearly everything at once, some let nearly everything pile up.
  if (schedule_ == SimOptions::Schedule::kRandom) haste_ = 1 + random(7);
}

Schedule::~Schedule() {
  // One by one, so that a long chain of causes is not destroyed by recursion.
  for (const FailureRef& failure : untold_) failure->causes.clear();
}

// splitmix64 (Steele, Lea, Flood 2014). The library's distributions differ between implementations, and a
// seed must mean one order everywhere. The bias of the remainder does not matter here.
uint64_t Schedule::random(uint64_t below) {
  uint64_t z = random_state_ += 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return (z ^ (z >> 31)) % below;
}

void Schedule::order(Op& op, const OpRef& former) {
  if (!former) return;
  if (former->done()) {
    for (const FailureRef& failure : former->failures) {
      if (!failure->told()) op.inherited.push_back(failure);
    }
    return;
  }
  former->before.push_back(&op);
  op.after.push_back(former);
  ++op.unmet;
}

void Schedule::add(const OpRef& op) {
  op->id = ++last_id_;
  pending_[op->id] = op;
  if (op->unmet == 0 && !op->held) ready_[op->id] = op;
}

void Schedule::advance(Guard& guard) {
  if (schedule_ == SimOptions::Schedule::kLate) return;
  bool eager = schedule_ == SimOptions::Schedule::kEager;
  while (true) {
    guard.flush();
    if (ready_.empty() || !(eager || random(8) < haste_)) return;
    run(guard, pick());
  }
}

OpRef Schedule::pick() {
  auto op = ready_.begin();
  if (schedule_ == SimOptions::Schedule::kRandom) std::advance(op, random(ready_.size()));
  return op->second;
}

std::vector<OpRef> Schedule::closure(const std::vector<OpRef>& targets) {
  ++last_mark_;
  std::vector<OpRef> found;
  auto take = [&](const OpRef& op) {
    if (!op || op->done() || op->mark == last_mark_) return;
    op->mark = last_mark_;
    found.push_back(op);
  };
  for (const OpRef& op : targets) take(op);
  for (size_t i = 0; i < found.size(); ++i) {
    // Index, not reference: take() grows the vector.
    for (size_t j = 0; j < found[i]->after.size(); ++j) take(found[i]->after[j]);
  }
  std::sort(found.begin(), found.end(), [](const OpRef& a, const OpRef& b) { return a->id < b->id; });
  return found;
}

void Schedule::demand(Guard& guard, const std::vector<OpRef>& targets) {
  std::vector<OpRef> needed = closure(targets);
  for (const OpRef& op : needed) {
    if (op->held && op->unmet == 0 && op->state == Op::State::kPending) ready_[op->id] = op;
    op->held = false;
  }
  bool any = schedule_ == SimOptions::Schedule::kRandom;
  size_t first = 0;
  while (true) {
    guard.flush();
    while (first < needed.size() && needed[first]->done()) ++first;
    if (first == needed.size()) break;
    OpRef next;
    if (any) {
      if (!ready_.empty()) next = pick();
    } else {
      auto can_run = [](const OpRef& op) { return op->state == Op::State::kPending && op->unmet == 0; };
      auto found = std::find_if(needed.begin() + static_cast<ptrdiff_t>(first), needed.end(), can_run);
      if (found != needed.end()) next = *found;
    }
    if (next) {
      run(guard, next);
    } else {
      // Another thread runs a host function that these need.
      guard.wait(changed_);
    }
  }
  advance(guard);
}

std::vector<OpRef> Schedule::everything() const {
  std::vector<OpRef> all;
  all.reserve(pending_.size());
  for (const auto& [id, op] : pending_) all.push_back(op);
  return all;
}

void Schedule::run(Guard& guard, const OpRef& op) {
  ready_.erase(op->id);
  op->state = Op::State::kRunning;
  bool skipped = is_work(op->kind) && !op->inherited.empty();
  if (skipped || op->kind != OpKind::kCall) {
    if (!skipped && op->action) {
      Memory::run(*op->action);
      if (op->kind == OpKind::kFree) memory_.release(op->action->blocks[0]);
    }
    complete(guard, *op, {});
    return;
  }
  // Completes the operation also when the thread is ended inside the function, so that nobody waits for ever.
  struct Finish {
    Schedule& schedule;
    Guard& guard;
    Op& op;
    Status status;
    ~Finish() {
      guard.lock();
      schedule.complete(guard, op, std::move(status));
    }
  } finish{*this, guard, *op,
           refusal(ErrorCode::kDevice, device_, "host function", "a return", "the end of its thread",
                   "do not end a thread inside a host function")};
  ActionRef action = op->action;
  guard.unlock();
  PartitionScope scope(this, &action->partition);
  finish.status = run_host_function(action->function, device_);
}

void Schedule::complete(Guard& guard, Op& op, Status status) {
  OpRef self = pending_.at(op.id);
  if (op.inherited.empty()) clock_ns_ += cost_ns(op);
  op.at_ns = clock_ns_;
  op.state = Op::State::kDone;
  std::sort(op.inherited.begin(), op.inherited.end());
  op.inherited.erase(std::unique(op.inherited.begin(), op.inherited.end()), op.inherited.end());
  if (is_work(op.kind) && (!status.ok() || !op.inherited.empty())) {
    auto failure = std::make_shared<Failure>();
    if (op.inherited.empty()) {
      failure->status = std::make_shared<const Status>(std::move(status));
      failure->root = op.id;
    } else {
      auto first = *std::min_element(op.inherited.begin(), op.inherited.end(),
                                     [](const auto& a, const auto& b) { return a->root < b->root; });
      failure->status = first->status;
      failure->root = first->root;
      failure->causes = std::move(op.inherited);
    }
    untold_.push_back(failure);
    op.failures.push_back(std::move(failure));
  } else {
    op.failures = std::move(op.inherited);
  }
  op.inherited.clear();
  for (Op* next : op.before) {
    for (const FailureRef& failure : op.failures) {
      if (next->id <= failure->told_at) next->inherited.push_back(failure);
    }
    if (--next->unmet == 0 && !next->held) ready_[next->id] = pending_.at(next->id);
  }
  op.before.clear();
  op.after.clear();
  if (op.action) guard.discard(std::move(op.action));
  pending_.erase(op.id);
  changed_.notify_all();
}

Status Schedule::tell(const std::vector<OpRef>& targets) {
  std::vector<FailureRef> failures;
  for (const OpRef& op : targets) {
    if (op) failures.insert(failures.end(), op->failures.begin(), op->failures.end());
  }
  return tell(std::move(failures));
}

Status Schedule::tell_all() { return tell(untold_); }

Status Schedule::tell(std::vector<FailureRef> failures) {
  FailureRef first;
  while (!failures.empty()) {
    FailureRef failure = std::move(failures.back());
    failures.pop_back();
    if (failure->told()) continue;
    failure->told_at = last_id_;
    if (!first || failure->root < first->root) first = failure;
    for (FailureRef& cause : failure->causes) failures.push_back(std::move(cause));
    failure->causes.clear();
  }
  if (!first) return {};
  std::erase_if(untold_, [](const FailureRef& failure) { return failure->told(); });
  return *first->status;
}

void Schedule::drop(Guard& guard) {
  if (pending_.empty()) return;
  auto failure = std::make_shared<Failure>();
  failure->status = std::make_shared<const Status>(
      refusal(ErrorCode::kDevice, device_, "wait", "work that ran", "work that was dropped before it ran",
              "wait for work before dropping it"));
  failure->root = last_id_ + 1;  // behind every failure there is
  untold_.push_back(failure);
  for (auto& [id, op] : pending_) {
    if (op->state == Op::State::kPending) op->inherited.push_back(failure);
  }
  demand(guard, everything());
}

PartitionRef Schedule::current_partition() const {
  return current_schedule == this && current_partition_of_thread ? *current_partition_of_thread : nullptr;
}

}  // namespace headrace::sim
