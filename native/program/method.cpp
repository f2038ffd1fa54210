#include "program/method.h"

#include <algorithm>

#include "headrace/caller_stream.h"
#include "program/exit.h"
#include "program/text.h"
#include "program/values.h"

namespace headrace {

MethodPool::MethodPool(std::shared_ptr<ProgramCore> core, const MethodPlan& plan)
    : name_(plan.name),
      device_(core->device),
      uses_device_(uses_device(plan)),
      lane_(core->lane),
      shared_(core->device),
      core_(std::move(core)) {
  for (int32_t value : plan.inputs) inputs_.push_back(describe_value(plan, value));
  for (int32_t value : plan.outputs) outputs_.push_back(describe_value(plan, value));
  int index = 0;
  for (const auto& chain : plan.chains) {
    for (const Instruction& in : chain) {
      if (in.kind == InstructionKind::kDelegate) {
        const DelegatePlan& d = plan.delegates[static_cast<size_t>(in.target)];
        islands_.push_back({index, d.id, d.payload.size(), static_cast<int>(in.args.size())});
      }
      ++index;
    }
  }
}

Result<std::shared_ptr<MethodPool>> MethodPool::load(std::shared_ptr<ProgramCore> core,
                                                     const MethodPlan& plan, int instances) {
  std::shared_ptr<MethodPool> pool(new MethodPool(std::move(core), plan),
                                   [](MethodPool* p) { put_off([p] { delete p; }); });
  for (int i = 0; i < instances; ++i) {
    auto instance = Instance::load(*pool->core_, plan, pool->shared_);
    if (!instance.ok()) return instance.status();
    pool->instances_.push_back(std::move(*instance));
    pool->idle_.push_back(static_cast<size_t>(i));
    pool->busy_.emplace_back();
  }
  return pool;
}

int64_t MethodPool::stats(CallStats* last, CallStats* total) const {
  std::lock_guard lock(mutex_);
  *last = last_;
  *total = total_;
  return calls_;
}

void MethodPool::memory(std::vector<MemoryUse>& out) const {
  std::vector<std::shared_ptr<GraphSet>> graphs;  // let go of with no lock held
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < instances_.size(); ++i) {
    const auto& buffers = instances_[i]->buffers();
    for (size_t b = 1; b < buffers.size(); ++b) {
      bool host = buffers[b].device.kind == DeviceKind::kCpu;
      out.push_back(
          {"planned", name_, static_cast<int>(i), host ? "cpu" : device_->name(), buffers[b].nbytes});
    }
  }
  out.push_back({"outputs", name_, -1, "cpu", shared_.host->nbytes()});
  if (shared_.on_device) {
    out.push_back({"outputs", name_, -1, device_->name(), shared_.on_device->nbytes()});
  }
  size_t nbytes = 0;
  for (const auto& weak : graphs_) {
    graphs.push_back(weak.lock());
    if (graphs.back()) nbytes += graphs.back()->stats().memory_nbytes;
  }
  if (!graphs_.empty()) out.push_back({"graphs", name_, -1, device_->name(), nbytes});
}

Result<MethodPool::Turn> MethodPool::acquire(std::optional<size_t> which) {
  if (Status status = check_not_torn(name_); !status.ok()) return status;
  std::unique_lock lock(mutex_);
  auto free = [&] {
    return which           ? std::find(idle_.begin(), idle_.end(), *which)
           : idle_.empty() ? idle_.end()
                           : idle_.end() - 1;
  };
  while (!closed_ && free() == idle_.end()) {
    // A delegate that calls its own method would wait for itself.
    if (std::find(busy_.begin(), busy_.end(), std::this_thread::get_id()) != busy_.end()) {
      return Status(ErrorCode::kInput,
                    name_ +
                        ": expected a call from outside, got one from inside a running call "
                        "of the same method; open the program with more instances");
    }
    changed_.wait(lock);
  }
  if (closed_)
    return Status(ErrorCode::kProgram,
                  name_ + ": expected an open program, got one that was closed; load it again");
  auto taken = free();
  size_t instance = *taken;
  idle_.erase(taken);
  busy_[instance] = std::this_thread::get_id();
  return Turn(*this, instance);
}

void MethodPool::release(size_t instance, const CallStats* stats) {
  {
    std::lock_guard lock(mutex_);
    busy_[instance] = {};
    idle_.push_back(instance);
    if (stats != nullptr) {
      calls_ += 1;
      last_ = *stats;
      add(total_, *stats);
    }
  }
  changed_.notify_all();  // who waits may wait for one instance alone
}

void add(CallStats& total, const CallStats& stats) {
  total.bytes_to_device += stats.bytes_to_device;
  total.bytes_to_host += stats.bytes_to_host;
  total.synchronizations += stats.synchronizations;
  total.driver_allocations += stats.driver_allocations;
  total.driver_frees += stats.driver_frees;
  total.repacked_bytes += stats.repacked_bytes;
}

void CountScope::end() {
  if (std::exchange(ended_, true)) return;
  const ThreadCounts& after = thread_counts();
  stats_.bytes_to_device = after.bytes_to_device - before_.bytes_to_device;
  stats_.bytes_to_host = after.bytes_to_host - before_.bytes_to_host;
  stats_.synchronizations = after.synchronizations - before_.synchronizations;
  stats_.driver_allocations = after.driver_allocations - before_.driver_allocations;
  stats_.driver_frees = after.driver_frees - before_.driver_frees;
}

Status MethodPool::check_inputs(std::span<const Value> inputs) const {
  if (inputs.size() != inputs_.size()) {
    return Status(ErrorCode::kInput, name_ + ": expected " + std::to_string(inputs_.size()) +
                                         " inputs, got " + std::to_string(inputs.size()) +
                                         "; pass one value for each input");
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    const ValueInfo& want = inputs_[i];
    const Value& got = inputs[i];
    auto wrong = [&](const std::string& what) {
      std::string name = want.name.empty() ? "" : " '" + want.name + "'";
      return Status(ErrorCode::kInput, name_ + ", input " + std::to_string(i) + name + ": expected " +
                                           describe(want) + ", got " + describe(got) + what);
    };
    if (got.kind == Value::Kind::kTensor) {
      if (std::string problem = problem_of(got.tensor); !problem.empty())
        return Status(ErrorCode::kInput, name_ + ", input " + std::to_string(i) + ": expected " +
                                             describe(want) + ", got a tensor with " + problem +
                                             "; correct it before calling");
    }
    if (want.kind != got.kind) return wrong("; pass a value of that kind");
    if (std::string only = number(want), given = number(got); only != given) {
      return wrong(" " + given + "; the program was exported for " + only +
                   " and accepts no other: pass that, or export it again");
    }
    if (want.kind != Value::Kind::kTensor) continue;
    const TensorView& view = got.tensor;
    if (view.dtype != want.dtype) return wrong("; convert the dtype before calling");
    if (static_cast<size_t>(view.ndim) != want.shape.size())
      return wrong("; the rank differs: reshape it before calling");
    for (size_t d = 0; d < want.shape.size(); ++d) {
      if (want.dynamic ? view.sizes[d] > want.shape[d] : view.sizes[d] != want.shape[d]) {
        return wrong("; dimension " + std::to_string(d) + " must be " + (want.dynamic ? "at most " : "") +
                     std::to_string(want.shape[d]) + " and is " + std::to_string(view.sizes[d]) +
                     (want.dynamic ? ": pass less, or export it with larger bounds"
                                   : ": pass that size, or export it with dynamic shapes"));
      }
    }
  }
  return {};
}

Status MethodPool::check_out(std::span<const Value> out) const {
  if (out.empty()) return {};
  if (out.size() != outputs_.size()) {
    return Status(ErrorCode::kInput, name_ + ", out: expected " + std::to_string(outputs_.size()) +
                                         " arrays, got " + std::to_string(out.size()) +
                                         "; pass an array or None for each output");
  }
  for (size_t i = 0; i < out.size(); ++i) {
    if (out[i].kind == Value::Kind::kNone) continue;
    const ValueInfo& want = outputs_[i];
    const TensorView& view = out[i].tensor;
    if (out[i].kind == Value::Kind::kTensor) {
      if (std::string problem = problem_of(view); !problem.empty())
        return Status(ErrorCode::kInput, name_ + ", out " + std::to_string(i) + ": expected " +
                                             describe(want) + ", got a tensor with " + problem +
                                             "; correct it before calling");
    }
    bool fits = want.kind == Value::Kind::kTensor && out[i].kind == Value::Kind::kTensor &&
                view.dtype == want.dtype && static_cast<size_t>(view.ndim) == want.shape.size();
    for (size_t d = 0; fits && d < want.shape.size(); ++d) {
      fits = want.dynamic ? view.sizes[d] <= want.shape[d] : view.sizes[d] == want.shape[d];
    }
    if (!fits) {
      return Status(ErrorCode::kInput, name_ + ", out " + std::to_string(i) + ": expected " + describe(want) +
                                           ", got " + describe(out[i]) +
                                           "; pass memory of that dtype and shape, or None");
    }
  }
  return {};
}

Result<Settled> MethodPool::settle(const CallStream& options) const {
  if (options.settled) return *options.settled;
  Settled settled;
  if (lane_ != nullptr && uses_device_) settled.stream = lane_->stream();
  int32_t device = -1;
  if (options.stream) {
    settled = {*options.stream, true};
    device = options.stream_device;
  } else if (device_->backend() != Backend::kCpu) {
    headrace_selection selected = headrace_get_selection();
    // A program without device memory has no use for another device's stream, and is no reason to refuse one.
    // On its own device's it reads what is in order there.
    if (selected.selected && (uses_device_ || selected.device == device_->id())) {
      settled = {reinterpret_cast<StreamHandle>(selected.stream), true};
      device = selected.device;
    }
  }
  if (device != -1 && device != device_->id()) {
    Status status(ErrorCode::kDevice, name_ + ", stream: expected a stream of " + device_->name() +
                                          ", got one of " + device_name_of(device, device_->name()) +
                                          "; select a stream of the program's device");
    status->device = device_->name();
    return status;
  }
  if (settled.chosen) {
    if (Status status = device_->check_stream(settled.stream); !status.ok()) return status;
  }
  if (!uses_device_ || device_->backend() == Backend::kCpu) return settled;
  // The caller's own capture: nothing would order its graph with other calls, which share this method's
  // planned memory. Told before anything is enqueued, so that the capture stays what it was (GR8).
  auto captures = device_->capture_status(settled.stream);
  if (!captures.ok()) return captures.status();
  if (*captures == CaptureStatus::kNone) return settled;
  Status status(ErrorCode::kCapture,
                name_ +
                    ", stream: expected a stream that does not capture, got one that does: nothing was "
                    "enqueued and the capture goes on; call the method before or after it, or capture the "
                    "method itself and replay that graph");
  status->step = "stream";
  return status;
}

bool MethodPool::outside_lanes(const Settled& settled) const {
  if (!uses_device_ || device_->partitions() == 0 || told_outside_) return false;
  auto partition = device_->partition_of(settled.stream);
  return partition.ok() && *partition == nullptr && !told_outside_.exchange(true);
}

Status MethodPool::graphs_off() const {
  std::lock_guard lock(mutex_);
  return graphs_off_;
}

Status MethodPool::turn_graphs_off(Status why) {
  Status told(ErrorCode::kCapture,
              why.message() +
                  "; graphs are off for this method from now on, its calls and replays run "
                  "without them; load the program again to try again");
  told->step = why->step;
  told->log = std::move(why->log);
  told->cause = std::move(why->cause);
  std::lock_guard lock(mutex_);
  if (graphs_off_.ok()) {
    graphs_off_ =
        Status(ErrorCode::kCapture, name_ +
                                        ", capture: expected a method whose captures succeed, got one "
                                        "of which a capture failed before: " +
                                        told.message());
    graphs_off_->step = told->step;
  }
  return told;
}

Result<std::shared_ptr<GraphSet>> MethodPool::capture(std::span<const Value> inputs,
                                                      const CaptureOptions& options,
                                                      std::vector<Value>& outputs) {
  if (options.keep < 1 || options.keep > 1024)
    return Status(ErrorCode::kOption, name_ + ", capture, keep: expected a count between 1 and 1024, got " +
                                          std::to_string(options.keep) +
                                          "; pass as many as there are shapes in use");
  size_t instance = 0;
  {
    std::lock_guard lock(mutex_);
    if (!instances_.empty()) instance = next_graph_++ % instances_.size();
  }
  auto set = std::make_shared<GraphSet>(shared_from_this(), instance, options.keep);
  ReplayOptions replay;
  static_cast<CallStream&>(replay) = options;
  {
    // Before its first graph, so that close() finds it.
    std::lock_guard lock(mutex_);
    std::erase_if(graphs_, [](const auto& known) { return known.expired(); });
    graphs_.push_back(set);
  }
  if (Status status = set->run(inputs, {}, replay, true, outputs); !status.ok()) return status;
  return set;
}

Status MethodPool::run(std::span<const Value> inputs, std::span<const Value> out, const CallOptions& options,
                       std::vector<Value>& outputs) {
  if (Status status = check_not_torn(name_); !status.ok()) return status;
  run_put_off();
  if (Status status = check_inputs(inputs); !status.ok()) return status;
  if (Status status = check_out(out); !status.ok()) return status;
  auto settled = settle(options);
  if (!settled.ok()) return settled.status();
  CallStats stats;
  auto turn = acquire();
  if (!turn.ok()) return turn.status();
  CountScope counts(stats);
  std::optional<ContextScope> current;
  std::optional<RelaxedScope> relaxed;
  if (uses_device_) {
    current.emplace(*device_);
    relaxed.emplace(*device_);
  }
  Status status = instances_[turn->instance()]->run(inputs, out, *settled, options.strict, outputs, stats);
  counts.end();
  turn->stats = &stats;
  return status;
}

Status MethodPool::check_close() const {
  if (Status status = check_not_torn(name_); !status.ok()) return status;
  if (in_host_function()) {
    return Status(ErrorCode::kDevice,
                  name_ +
                      ": expected close() from outside a host function, where devices can be "
                      "waited for, got it from inside one; close it on another thread");
  }
  std::lock_guard lock(mutex_);
  if (std::find(busy_.begin(), busy_.end(), std::this_thread::get_id()) == busy_.end()) return {};
  return Status(ErrorCode::kInput, name_ +
                                       ": expected close() from outside, got it from inside a running call; "
                                       "close it when the call has returned");
}

Status MethodPool::close() {
  if (Status status = check_close(); !status.ok()) return status;
  std::shared_ptr<ProgramCore> core;
  std::vector<std::unique_ptr<Instance>> doomed;
  std::vector<std::weak_ptr<GraphSet>> graphs;
  {
    std::unique_lock lock(mutex_);
    closed_ = true;
    changed_.notify_all();
    changed_.wait(lock, [&] { return idle_.size() == instances_.size(); });
    doomed.swap(instances_);
    graphs.swap(graphs_);
    core.swap(core_);
    idle_.clear();
    busy_.clear();
  }
  changed_.notify_all();  // other threads in close()
  Status failed;
  for (const auto& instance : doomed) {
    Status status = instance->close();
    failed = failed.ok() ? status : also(failed, status);
  }
  for (const auto& weak : graphs) {
    if (auto set = weak.lock()) set->drop();
  }
  shared_.retired.clear();
  doomed.clear();
  // Outputs that are still held go back to the device when they are dropped.
  for (const auto& ring : {shared_.planned, shared_.on_device, shared_.host}) {
    if (ring) ring->close();
  }
  return failed;
}

Method::Method(std::shared_ptr<MethodPool> pool) : pool_(std::move(pool)) {}
Method::~Method() = default;
const std::string& Method::name() const { return pool_->name(); }
const std::vector<ValueInfo>& Method::inputs() const { return pool_->inputs(); }
const std::vector<ValueInfo>& Method::outputs() const { return pool_->outputs(); }
const std::vector<IslandInfo>& Method::islands() const { return pool_->islands(); }
const DeviceRef& Method::device() const { return pool_->device(); }
Result<Settled> Method::settle(const CallStream& options) const { return pool_->settle(options); }
bool Method::outside_lanes(const Settled& settled) const { return pool_->outside_lanes(settled); }
int64_t Method::stats(CallStats* last, CallStats* total) const { return pool_->stats(last, total); }
Status Method::run(std::span<const Value> inputs, std::span<const Value> out, const CallOptions& options,
                   std::vector<Value>& outputs) {
  return pool_->run(inputs, out, options, outputs);
}
Result<std::shared_ptr<MethodGraph>> Method::capture(std::span<const Value> inputs,
                                                     const CaptureOptions& options,
                                                     std::vector<Value>& outputs) {
  auto set = pool_->capture(inputs, options, outputs);
  if (!set.ok()) return set.status();
  return std::make_shared<MethodGraph>(std::move(*set));
}

}  // namespace headrace
