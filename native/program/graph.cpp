#include "program/graph.h"

#include <algorithm>

#include "program/instance.h"
#include "program/method.h"

namespace headrace {

// ---- retired

void Retired::add(EventRef event, std::vector<std::shared_ptr<void>> keeps) {
  if (!event || keeps.empty()) return;
  std::lock_guard lock(mutex_);
  kept_.emplace_back(std::move(event), std::move(keeps));
}

void Retired::reap(Device& device) {
  std::vector<std::vector<std::shared_ptr<void>>> done;  // destroyed with no lock held
  std::lock_guard lock(mutex_);
  std::erase_if(kept_, [&](auto& item) {
    auto ended = device.query(*item.first);
    if (!ended.ok() || !*ended) return false;
    done.push_back(std::move(item.second));
    return true;
  });
}

void Retired::clear() {
  std::vector<std::pair<EventRef, std::vector<std::shared_ptr<void>>>> done;
  std::lock_guard lock(mutex_);
  done.swap(kept_);
}

// ---- key

const char* GraphKey::differs(const GraphKey& other) const {
  if (shapes != other.shapes) return "shapes";
  if (partition != other.partition) return "partition";
  return loads != other.loads ? "delegates" : "state";
}

// ---- memory

Status GraphMemory::to_device(void* to, const void* from, size_t nbytes, StreamHandle stream) {
  for (const Input& in : inputs) {
    if (in.host_address == nullptr || in.host_address != from || nbytes > in.block->capacity()) continue;
    return nbytes == 0 ? Status() : device->copy(to, in.block->data(), nbytes, stream);
  }
  return Status(ErrorCode::kCapture, method +
                                         ": expected copies of inputs to the device alone, got one of other "
                                         "host memory, which a replay would not read again; call the method");
}

Status GraphMemory::to_host(void* to, const void* from, size_t nbytes, StreamHandle stream) {
  bool found = false;
  for (Output& out : outputs) {
    if (out.host_address == nullptr || out.host_address != to || nbytes > out.block->capacity()) continue;
    found = true;
    out.copied = nbytes;
    if (nbytes == 0) continue;
    if (Status status = device->copy(out.block->data(), from, nbytes, stream); !status.ok()) return status;
  }
  if (found) return {};
  return Status(ErrorCode::kCapture, method +
                                         ": expected copies of outputs to the host alone, got one that the "
                                         "host would read once, at capture; call the method");
}

size_t GraphMemory::nbytes() const {
  size_t sum = 0;
  for (const Input& in : inputs) sum += in.block ? in.block->capacity() : 0;
  for (const Output& out : outputs) sum += out.block ? out.block->capacity() : 0;
  return sum;
}

// ---- what delegates are told and tell

namespace {
thread_local StageScope* stage_scope = nullptr;
}

StageScope::StageScope(CaptureStage stage, WalkNotes& notes)
    : stage_(stage), notes_(notes), outer_(stage_scope) {
  stage_scope = this;
}
StageScope::~StageScope() { stage_scope = outer_; }
StageScope* StageScope::current() { return stage_scope; }

CaptureStage capture_stage() { return stage_scope != nullptr ? stage_scope->stage() : CaptureStage::kNone; }

IslandCapture::~IslandCapture() = default;

AllocationWatch::AllocationWatch(int32_t instruction)
    : instruction_(instruction), before_(thread_counts().driver_allocations) {}
AllocationWatch::~AllocationWatch() {
  if (stage_scope == nullptr || thread_counts().driver_allocations == before_) return;
  stage_scope->notes().allocating.push_back(instruction_);
}

void captured_use(BlockRef block, bool write) {
  if (stage_scope == nullptr || !block) return;
  auto& uses = stage_scope->notes().uses;
  auto found = std::find_if(uses.begin(), uses.end(), [&](const auto& use) { return use.first == block; });
  if (found == uses.end()) {
    uses.emplace_back(std::move(block), write);
  } else {
    found->second |= write;
  }
}

// ---- the set

GraphSet::GraphSet(std::shared_ptr<MethodPool> pool, size_t instance, int keep)
    : pool_(std::move(pool)),
      instance_(instance),
      keep_(static_cast<size_t>(std::max(keep, 1))),
      ring_(std::make_shared<Ring>(pool_->device())) {}

// Nobody replays any more: there is no other reference.
GraphSet::~GraphSet() {
  // Often under a collector, which may run in a host function or in a thread that captures.
  auto graphs = std::make_shared<std::list<std::unique_ptr<CapturedGraph>>>(std::move(graphs_));
  put_off([graphs, ring = ring_, pool = pool_]() mutable {
    for (auto& graph : *graphs) pool->retired().add(graph->last, std::move(graph->pins));
    graphs->clear();
    ring->close();
  });
}

void GraphSet::retire(CapturedGraph& graph) { pool_->retired().add(graph.last, std::move(graph.pins)); }

void GraphSet::drop() {
  for (auto& graph : graphs_) retire(*graph);
  {
    std::lock_guard lock(mutex_);
    stats_.evicted += static_cast<int64_t>(graphs_.size());
  }
  graphs_.clear();
  ring_->close();
  count_memory();
}

void GraphSet::count_memory() {
  size_t nbytes = 0;
  for (const auto& graph : graphs_) nbytes += graph->memory.nbytes();
  std::lock_guard lock(mutex_);
  stats_.kept = static_cast<int64_t>(graphs_.size());
  stats_.memory_nbytes = nbytes;
}

GraphStats GraphSet::stats() const {
  std::lock_guard lock(mutex_);
  return stats_;
}

Result<GraphWork> GraphSet::work() {
  auto turn = pool_->acquire(instance_);
  if (!turn.ok()) return turn.status();
  auto look = [&]() -> Result<GraphWork> {
    if (graphs_.empty())
      return Status(
          ErrorCode::kCapture,
          pool_->name() + ", graph: expected one that was captured and is kept, got none; capture it anew");
    ContextScope current(*pool_->device());
    return pool_->device()->work_of(*graphs_.front()->graph, graphs_.front()->partition);
  };
  return look();
}

Status GraphSet::close() {
  run_put_off();
  auto turn = pool_->acquire(instance_);
  if (!turn.ok()) return turn.status().code() == ErrorCode::kProgram ? Status() : turn.status();
  closed_ = true;
  drop();
  return {};
}

Status GraphSet::run(std::span<const Value> inputs, std::span<const Value> out, const ReplayOptions& options,
                     bool must_capture, std::vector<Value>& outputs) {
  run_put_off();
  if (Status status = pool_->check_inputs(inputs); !status.ok()) return status;
  if (Status status = pool_->check_out(out); !status.ok()) return status;
  auto settled = pool_->settle(options);
  if (!settled.ok()) return settled.status();
  Replay how{*settled, nullptr, options.borrow};
  if (pool_->device()->backend() != Backend::kCpu) {
    auto partition = pool_->device()->partition_of(settled->stream);
    if (!partition.ok()) return partition.status();
    how.partition = std::move(*partition);
  }
  auto turn = pool_->acquire(instance_);
  if (!turn.ok()) return turn.status();
  ContextScope current(*pool_->device());
  RelaxedScope relaxed(*pool_->device());
  Status status = run_in_turn(pool_->instance(instance_), inputs, out, how, must_capture, outputs);
  count_memory();
  return status;
}

Status GraphSet::run_in_turn(Instance& instance, std::span<const Value> inputs, std::span<const Value> out,
                             const Replay& how, bool must_capture, std::vector<Value>& outputs) {
  const std::string& name = pool_->name();
  if (closed_) {
    Status status(
        ErrorCode::kCapture,
        name + ", replay: expected an open graph, got one that was closed; capture the method again");
    status->step = "closed";
    return status;
  }
  CallStats stats;
  CountScope counts(stats);
  auto count = [&](int64_t GraphStats::* what) {
    counts.end();
    std::lock_guard lock(mutex_);
    ++(stats_.*what);
    stats_.last = stats;
    add(stats_.total, stats);
  };
  if (Status off = pool_->graphs_off(); !off.ok()) {
    if (must_capture) return off;
    Status status = instance.run(inputs, out, how.settled, false, outputs, stats);
    count(&GraphStats::eager);
    return status;
  }
  auto key_now = [&] {
    GraphKey key;
    for (const Value& input : inputs) {
      auto& shape = key.shapes.emplace_back();
      if (input.kind == Value::Kind::kTensor)
        shape.assign(input.tensor.sizes.begin(), input.tensor.sizes.begin() + input.tensor.ndim);
    }
    key.partition = how.partition ? how.partition->number() : 0;
    instance.baked(key);
    return key;
  };
  GraphKey key = key_now();
  auto found =
      std::find_if(graphs_.begin(), graphs_.end(), [&](const auto& graph) { return graph->key == key; });
  if (found != graphs_.end()) {
    graphs_.splice(graphs_.begin(), graphs_, found);
    latest_ = key;
    Status status = instance.replay(inputs, out, how, *graphs_.front(), outputs, stats);
    count(&GraphStats::replays);
    return status;
  }
  if (Status status = instance.check_capturable(); !status.ok()) return status;
  if (Status status = instance.settle_before(how.settled); !status.ok()) return status;
  // Graphs of delegates that are gone, and of state that lies elsewhere now, are never launched again.
  auto stale = [&](const auto& graph) {
    return graph->key.loads != key.loads || graph->key.state != key.state;
  };
  for (auto& graph : graphs_) {
    if (stale(graph)) retire(*graph);
  }
  auto gone = static_cast<int64_t>(graphs_.remove_if(stale));
  auto graph = std::make_unique<CapturedGraph>();
  graph->ring = ring_;
  graph->partition = how.partition;
  Status status = instance.capture(inputs, out, how, *graph, outputs, stats);
  if (!status.ok()) {
    graph.reset();
    ring_->trim();
    // What was refused, or is the caller's to mend, says nothing about the next capture.
    if (status.code() == ErrorCode::kCapture && status->step != "check")
      status = pool_->turn_graphs_off(status);
    std::lock_guard lock(mutex_);
    stats_.evicted += gone;
    return status;
  }
  graph->key = key_now();
  const char* why = must_capture ? nullptr : graph->key.differs(latest_);
  latest_ = graph->key;
  graphs_.push_front(std::move(graph));
  while (graphs_.size() > keep_) {
    retire(*graphs_.back());
    graphs_.pop_back();
    ++gone;
  }
  ring_->trim();
  count(&GraphStats::captures);
  std::lock_guard lock(mutex_);
  stats_.evicted += gone;
  if (why != nullptr) ++stats_.recaptures[why];
  return {};
}

// ---- the public face

MethodGraph::MethodGraph(std::shared_ptr<GraphSet> set) : set_(std::move(set)) {}
MethodGraph::~MethodGraph() = default;
Status MethodGraph::replay(std::span<const Value> inputs, std::span<const Value> out,
                           const ReplayOptions& options, std::vector<Value>& outputs) {
  return set_->run(inputs, out, options, false, outputs);
}
GraphStats MethodGraph::stats() const { return set_->stats(); }
Result<GraphWork> MethodGraph::work() const { return set_->work(); }
Status MethodGraph::close() { return set_->close(); }

}  // namespace headrace
