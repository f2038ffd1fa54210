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
}

Result<size_t> MethodPool::acquire() {
  std::unique_lock lock(mutex_);
  while (!closed_ && idle_.empty()) {
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
    return Status(ErrorCode::kProgram, name_ + ": expected an open program, got one that was closed");
  size_t instance = idle_.back();
  idle_.pop_back();
  busy_[instance] = std::this_thread::get_id();
  return instance;
}

void MethodPool::release(size_t instance, const CallStats& stats) {
  {
    std::lock_guard lock(mutex_);
    busy_[instance] = {};
    idle_.push_back(instance);
    calls_ += 1;
    last_ = stats;
    total_.bytes_to_device += stats.bytes_to_device;
    total_.bytes_to_host += stats.bytes_to_host;
    total_.synchronizations += stats.synchronizations;
    total_.driver_allocations += stats.driver_allocations;
    total_.driver_frees += stats.driver_frees;
    total_.repacked_bytes += stats.repacked_bytes;
  }
  changed_.notify_one();
}

Status MethodPool::check_inputs(std::span<const Value> inputs) const {
  if (inputs.size() != inputs_.size()) {
    return Status(ErrorCode::kInput, name_ + ": expected " + std::to_string(inputs_.size()) +
                                         " inputs, got " + std::to_string(inputs.size()));
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    const ValueInfo& want = inputs_[i];
    const Value& got = inputs[i];
    auto wrong = [&](const std::string& what) {
      std::string name = want.name.empty() ? "" : " '" + want.name + "'";
      return Status(ErrorCode::kInput, name_ + ", input " + std::to_string(i) + name + ": expected " +
                                           describe(want) + ", got " + describe(got) + what);
    };
    if (want.kind != got.kind) return wrong("");
    if (std::string only = number(want), given = number(got); only != given) {
      return wrong(" " + given + "; the program was exported for " + only + " and accepts no other");
    }
    if (want.kind != Value::Kind::kTensor) continue;
    const TensorView& view = got.tensor;
    if (view.dtype != want.dtype) return wrong("; convert the dtype before calling");
    if (static_cast<size_t>(view.ndim) != want.shape.size()) return wrong("; the rank differs");
    for (size_t d = 0; d < want.shape.size(); ++d) {
      if (want.dynamic ? view.sizes[d] > want.shape[d] : view.sizes[d] != want.shape[d]) {
        return wrong("; dimension " + std::to_string(d) + " must be " + (want.dynamic ? "at most " : "") +
                     std::to_string(want.shape[d]) + " and is " + std::to_string(view.sizes[d]));
      }
    }
  }
  return {};
}

Status MethodPool::check_out(std::span<const Value> out) const {
  if (out.empty()) return {};
  if (out.size() != outputs_.size()) {
    return Status(ErrorCode::kInput, name_ + ", out: expected " + std::to_string(outputs_.size()) +
                                         " arrays, got " + std::to_string(out.size()));
  }
  for (size_t i = 0; i < out.size(); ++i) {
    if (out[i].kind == Value::Kind::kNone) continue;
    const ValueInfo& want = outputs_[i];
    const TensorView& view = out[i].tensor;
    bool fits = want.kind == Value::Kind::kTensor && out[i].kind == Value::Kind::kTensor &&
                view.dtype == want.dtype && static_cast<size_t>(view.ndim) == want.shape.size();
    for (size_t d = 0; fits && d < want.shape.size(); ++d) {
      fits = want.dynamic ? view.sizes[d] <= want.shape[d] : view.sizes[d] == want.shape[d];
    }
    if (!fits) {
      return Status(ErrorCode::kInput, name_ + ", out " + std::to_string(i) + ": expected " + describe(want) +
                                           ", got " + describe(out[i]));
    }
  }
  return {};
}

Result<Settled> MethodPool::settle(const CallOptions& options) const {
  Settled settled;
  int32_t device = -1;
  if (options.stream) {
    settled = {*options.stream, true};
    device = options.stream_device;
  } else if (device_->backend() != Backend::kCpu) {
    headrace_selection selected = headrace_get_selection();
    // A program without device memory has no use for another device's stream, and is no reason to refuse one. On
    // its own device's it reads what is in order there.
    if (selected.selected && (uses_device_ || selected.device == device_->id())) {
      settled = {reinterpret_cast<StreamHandle>(selected.stream), true};
      device = selected.device;
    }
  }
  if (device != -1 && device != device_->id()) {
    Status status(ErrorCode::kDevice, name_ + ", stream: expected a stream of " + device_->name() +
                                          ", got one of " + device_name_of(device, device_->name()) +
                                          "; select a stream of the program's device");
    status.device = device_->name();
    return status;
  }
  if (settled.chosen) {
    if (Status status = device_->check_stream(settled.stream); !status.ok()) return status;
  }
  return settled;
}

Status MethodPool::run(std::span<const Value> inputs, std::span<const Value> out, const CallOptions& options,
                       std::vector<Value>& outputs) {
  if (Status status = check_not_torn(name_); !status.ok()) return status;
  run_put_off();
  if (Status status = check_inputs(inputs); !status.ok()) return status;
  if (Status status = check_out(out); !status.ok()) return status;
  auto settled = settle(options);
  if (!settled.ok()) return settled.status();
  auto instance = acquire();
  if (!instance.ok()) return instance.status();
  CallStats stats;
  ThreadCounts before = thread_counts();
  Status status = instances_[*instance]->run(inputs, out, *settled, options.strict, outputs, stats);
  const ThreadCounts& after = thread_counts();
  stats.bytes_to_device = after.bytes_to_device - before.bytes_to_device;
  stats.bytes_to_host = after.bytes_to_host - before.bytes_to_host;
  stats.synchronizations = after.synchronizations - before.synchronizations;
  stats.driver_allocations = after.driver_allocations - before.driver_allocations;
  stats.driver_frees = after.driver_frees - before.driver_frees;
  release(*instance, stats);
  return status;
}

Status MethodPool::check_close() const {
  if (Status status = check_not_torn(name_); !status.ok()) return status;
  if (in_host_function()) {
    return Status(ErrorCode::kDevice,
                  name_ +
                      ": expected close() from outside a host function, where devices can be "
                      "waited for, got it from inside one");
  }
  std::lock_guard lock(mutex_);
  if (std::find(busy_.begin(), busy_.end(), std::this_thread::get_id()) == busy_.end()) return {};
  return Status(ErrorCode::kInput, name_ + ": expected close() from outside, got it from inside a running call");
}

Status MethodPool::close() {
  if (Status status = check_close(); !status.ok()) return status;
  std::shared_ptr<ProgramCore> core;
  std::vector<std::unique_ptr<Instance>> doomed;
  {
    std::unique_lock lock(mutex_);
    closed_ = true;
    changed_.notify_all();
    changed_.wait(lock, [&] { return idle_.size() == instances_.size(); });
    doomed.swap(instances_);
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
int64_t Method::stats(CallStats* last, CallStats* total) const { return pool_->stats(last, total); }
Status Method::run(std::span<const Value> inputs, std::span<const Value> out, const CallOptions& options,
                   std::vector<Value>& outputs) {
  return pool_->run(inputs, out, options, outputs);
}

}  // namespace headrace
