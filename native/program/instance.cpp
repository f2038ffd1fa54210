#include "program/instance.h"

#include <executorch/runtime/platform/log.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <new>

#include "headrace/caller_stream.h"
#include "program/copies.h"
#include "program/engine.h"
#include "program/exit.h"
#include "program/instance_record.h"
#include "program/instance_scope.h"
#include "program/log.h"
#include "program/text.h"
#include "program/xnnpack.h"

namespace headrace {

namespace et = executorch::runtime;

namespace {

std::atomic<uint64_t> next_instance{1};

}  // namespace

Instance::Scope::Scope(Instance& self, StreamHandle stream, CallContext& context, bool ordered, bool named)
    : self_(self), stream_(stream), ordered_(ordered), named_(named), guard_(self.device_, stream, &context) {
  if (named) selection_.emplace(reinterpret_cast<cudaStream_t>(stream), self.device_->id());
}

Status Instance::Scope::begin() {
  if (named_ && self_.device_->backend() == Backend::kCuda) {
    if (Status status = mirror_.begin(*self_.device_, stream_); !status.ok()) return status;
  }
  if (record::recording()) {
    recorded_.emplace(ordered_ ? *self_.device_ : *cpu_device(), stream_, self_.plan_.name, self_.number_);
    if (!recorded_->named()) recorded_->name_values(self_.value_labels());
  }
  return {};
}

Status also(Status status, const Status& other) {
  if (!other.ok() && other.message() != status.message()) status->log.push_back("also: " + other.message());
  return status;
}

Instance::Instance(const ProgramCore& core, const MethodPlan& plan, Shared& shared)
    : core_(core),
      plan_(plan),
      device_(core.device),
      shared_(shared),
      uses_device_(uses_device(plan)),
      number_(next_instance++) {
  for (size_t i = 0; i < plan.inputs.size(); ++i) slots_.push_back(std::make_unique<TensorSlot>());
  for (int32_t value : plan.outputs) {
    const TensorPlan* t = plan.tensor_of(value);
    bool also_input = std::find(plan.inputs.begin(), plan.inputs.end(), value) != plan.inputs.end();
    bool twice = std::count(plan.outputs.begin(), plan.outputs.end(), value) > 1;
    bool moved = std::find(plan.moved.begin(), plan.moved.end(), value) != plan.moved.end();
    output_is_caller_memory_.push_back(t != nullptr && t->storage == Storage::kNone && !also_input &&
                                       !twice && !moved);
    output_is_final_.push_back(!read_later(value));
    output_place_is_its_own_.push_back(!place_is_shared(plan, value));
  }
  for (int32_t value : plan.inputs) {
    // A kernel's result is its last argument.
    bool written = false;
    for (const auto& chain : plan.chains) {
      for (const Instruction& in : chain) {
        written |= in.kind == InstructionKind::kKernel && !in.args.empty() && in.args.back() == value;
      }
    }
    input_is_written_.push_back(written);
  }
}

Status Instance::close() {
  if (!last_) return {};
  // The event, not the stream: that one may be gone, or carry work of others.
  Status status = device_->synchronize(*last_);
  // Once more: a wait may itself fail, and then nothing was waited for.
  if (!status.ok() && !device_->synchronize(*last_).ok()) (void)device_->synchronize();
  last_.reset();
  if (status.ok()) return status;
  for (const auto& weak : written_) {
    if (BlockRef block = weak.lock()) block->lost(status);
  }
  return status;
}

Instance::~Instance() {
  (void)close();
  if (!uses_device_) return;
  CallContext context;
  DeviceGuard guard(device_, kPerThreadStream, &context);
  method_.reset();
}

bool Instance::apart(const TensorPlan& t) const {
  return t.device.kind != DeviceKind::kCpu && device_->backend() != Backend::kCpu;
}

void* Instance::planned_address(const TensorPlan& t) const {
  return t.storage == Storage::kPlanned ? spans_[t.memory_id - 1].data() + t.memory_offset : nullptr;
}

bool Instance::read_later(int32_t value) const {
  // A kernel names its result twice, as argument and as what it returns: instructions are counted, not
  // mentions.
  int instructions = 0;
  for (const auto& chain : plan_.chains) {
    for (const Instruction& in : chain) {
      bool argument = std::find(in.args.begin(), in.args.end(), value) != in.args.end();
      bool source =
          (in.kind == InstructionKind::kMove || in.kind == InstructionKind::kJumpFalse) && in.target == value;
      if (source) return true;
      instructions += argument;
    }
  }
  return instructions > 1 || plan_.loops;
}

Status Instance::allocate() {
  for (size_t b = 1; b < plan_.buffers.size(); ++b) {
    const BufferPlan& buffer = plan_.buffers[b];
    std::string what = plan_.name + ", planned buffer " + std::to_string(b) + ": ";
    span_devices_.emplace_back(static_cast<et::etensor::DeviceType>(buffer.device.kind), buffer.device.index);
    if (buffer.device.kind != DeviceKind::kCpu && device_->backend() != Backend::kCpu) {
      auto block = shared_.planned->take(buffer.nbytes, kPerThreadStream);
      if (!block.ok()) {
        Status status(block.status().code(), what + block.status().message());
        status->device = device_->name();
        return status;
      }
      // Complete before another thread may use it.
      if (Status status = device_->synchronize(kPerThreadStream); !status.ok()) return status;
      spans_.emplace_back(static_cast<uint8_t*>((*block)->data()), buffer.nbytes);
      device_arenas_.push_back(std::move(*block));
      continue;
    }
    size_t nbytes = buffer.nbytes;
    // Zero, so that what a program reads before it writes is the same in every run.
    Pages& arena = arenas_.emplace_back(nbytes);
    if (arena.data() == nullptr) {
      Status status(ErrorCode::kOutOfDeviceMemory,
                    what + "expected " + std::to_string(nbytes) +
                        " bytes on cpu, got none; free memory or export with smaller bounds");
      status->device = "cpu";
      return status;
    }
    spans_.emplace_back(arena.data(), nbytes);
  }
  return {};
}

Result<std::unique_ptr<Instance>> Instance::load(const ProgramCore& core, const MethodPlan& plan,
                                                 Shared& shared) {
  std::unique_ptr<Instance> self(new Instance(core, plan, shared));
  if (Status status = self->allocate(); !status.ok()) return status;
  if (self->uses_device_) {
    for (const TensorPlan* source : overwritten_sources(self->plan_))
      self->overwritten_.push_back(self->planned_address(*source));
  }
  et::Span<et::Span<uint8_t>> spans(self->spans_.data(), self->spans_.size());
  if (self->uses_device_) {
    self->planned_.emplace(
        spans, et::Span<const et::etensor::Device>(self->span_devices_.data(), self->span_devices_.size()));
  } else {
    self->planned_.emplace(spans);
  }
  self->memory_.emplace(&self->method_allocator_, &*self->planned_, &self->temp_allocator_);
  if (Status status = self->load_method(); !status.ok()) return status;
  return self;
}

Status Instance::load_method() {
  std::vector<std::vector<et::BackendOption>> storage;
  et::LoadBackendOptionsMap map;
  for (const auto& [delegate, entries] : core_.options) {
    auto& list = storage.emplace_back();
    for (const auto& [key, value] : entries) {
      et::BackendOption option;
      std::strncpy(option.key, key.c_str(), et::kMaxOptionKeyLength - 1);
      if (const auto* text = std::get_if<std::string>(&value)) {
        std::array<char, et::kMaxOptionValueLength> chars{};
        std::memcpy(chars.data(), text->data(), std::min(text->size(), chars.size() - 1));
        option.value = chars;
      } else if (const auto* flag = std::get_if<bool>(&value)) {
        option.value = *flag;
      } else {
        option.value = std::get<int>(value);
      }
      list.push_back(option);
    }
    if (map.set_options(delegate.c_str(), {list.data(), list.size()}) != et::Error::Ok) {
      return Status(ErrorCode::kOption,
                    "options: expected at most 8 delegates with names of at most 63 bytes, got '" + delegate +
                        "' beyond that; load it with options for fewer");
    }
  }
  LogScope log(LogScope::kThrow);
  std::vector<IslandPlan> islands = islands_of(plan_);
  ++loads_;
  LoadScope loading(plan_, islands, {&core_.delegate_state, &delegate_state_}, parts_);
  CallContext context;
  DeviceGuard guard(device_, kPerThreadStream, &context);
  (void)core_.data_map.take_missing();
  auto load = [&]() -> et::Result<et::Method> {
    try {
      return core_.program->load_method(plan_.name.c_str(), &*memory_, nullptr, &core_.data_map,
                                        core_.options.empty() ? nullptr : &map);
    } catch (const EngineAbort&) {
      return et::Error::Internal;
    }
  };
  auto method = load();
  if (method.ok()) {
    method_.emplace(std::move(*method));
    return {};
  }
  Status status = engine_status(method.error(), "loading", plan_, log.take());
  if (!context.failure.ok()) {
    context.failure->log.insert(context.failure->log.end(), status->log.begin(), status->log.end());
    return context.failure;
  }
  auto missing = core_.data_map.take_missing();
  if (missing.empty()) return status;
  std::string keys;
  for (const std::string& key : missing) keys += (keys.empty() ? "'" : ", '") + key + "'";
  Status named(ErrorCode::kProgram, status.message() + "; the data files lack the keys " + keys +
                                        ": pass the .ptd files that were exported with it as data=");
  named->log = status->log;
  return named;
}

// Loads the engine's method again over the same memory, so that what the program keeps between calls stays as
// the torn call left it.
Status Instance::mend() try {
  // A replay may still run what belongs to the delegates that go.
  if (last_) {
    if (Status status = device_->synchronize(*last_); !status.ok()) return status;
  }
  std::vector<std::vector<uint8_t>> kept;
  for (size_t b = 0; b < spans_.size(); ++b) {
    bool host = device_->backend() == Backend::kCpu || span_devices_[b].is_cpu();
    kept.emplace_back(spans_[b].begin(), host ? spans_[b].end() : spans_[b].begin());
  }
  method_.reset();
  method_allocator_.reset();
  Status status = load_method();
  for (size_t b = 0; b < kept.size(); ++b) std::copy(kept[b].begin(), kept[b].end(), spans_[b].begin());
  torn_ = !status.ok();
  return status;
} catch (const std::bad_alloc&) {
  return Status(ErrorCode::kOutOfDeviceMemory, plan_.name +
                                                   ": expected memory to load the method again after a call "
                                                   "that ended in its middle, got none; free memory");
}

// The engine marks its instruction-wise interface as experimental; the version is pinned.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
Status Instance::execute(const Settled& settled) {
  auto unless_it_aborts = [&](auto&& call) {
    try {
      return call();
    } catch (const EngineAbort&) {
      torn_ = true;
      return et::Error::Internal;
    } catch (const std::exception& thrown) {
      // A native delegate's, which has no business in the engine's frames.
      torn_ = true;
      ET_LOG(Error, "a delegate or kernel threw a C++ exception: %s", thrown.what());
      return et::Error::Internal;
    }
  };
  LogScope log(LogScope::kThrow);
  et::Error error = et::Error::Ok;
  std::optional<Walk> walk;
  if (record::recording()) walk.emplace(*this, settled);
  if (!walk && !plan_.loops) {
    error = unless_it_aborts([&] { return method_->execute(); });
  } else {
    int64_t steps = 0;
    auto step = [&] { return walk ? walk->step() : method_->step(); };
    while ((error = unless_it_aborts(step)) == et::Error::Ok) {
      if (!plan_.loops || ++steps < core_.max_steps) continue;
      torn_ = true;
      return Status(ErrorCode::kDelegate,
                    plan_.name + ": expected a loop to end within " + std::to_string(core_.max_steps) +
                        " instructions, got more; load the program with a larger max_steps "
                        "if it is meant to take that long");
    }
    if (error == et::Error::EndOfMethod) error = method_->reset_execution();
    // The engine stays where a step failed, takes no inputs there, and has no way back.
    torn_ = error != et::Error::Ok;
  }
  if (error == et::Error::Ok) return {};
  Status status = engine_status(error, "running", plan_, log.take());
  // XNNPACK takes shapes for settled whose memory it did not get: another call would write beyond it.
  torn_ |= std::any_of(plan_.delegates.begin(), plan_.delegates.end(),
                       [](const DelegatePlan& d) { return d.id == kXnnpack; });
  return status;
}
#pragma GCC diagnostic pop

// Calls run in order, so the first that has not ended stands for those behind it.
void Instance::reap() {
  auto item = kept_.begin();
  for (; item != kept_.end(); ++item) {
    auto done = device_->query(*item->first);
    if (!done.ok() || !*done) break;
  }
  kept_.erase(kept_.begin(), item);
}

// Calls of one instance run in order, whatever streams and threads they come from.
Status Instance::begin(Call& call) {
  shared_.retired.reap(*device_);
  reap();
  if (!last_) return {};
  call.behind = last_;
  if (!host_reads_) return device_->wait(call.settled.stream, *last_);
  Status status = device_->synchronize(*last_);
  if (status.ok()) host_reads_ = false;
  return status;
}

// Puts an event behind the call's work, tells every block of it, and waits if the call has to.
Status Instance::finish(Call& call) {
  const Settled& settled = call.settled;
  auto event = shared_.events.take(*device_);
  Status recorded = event.ok() ? device_->record(**event, settled.stream) : event.status();
  if (!recorded.ok()) {
    // Without an event nothing could be ordered behind this work: it has to end here.
    last_.reset();
    return also(std::move(recorded), drain(*device_, settled.stream));
  }
  last_ = *event;
  for (const BlockRef& block : call.reads) block->used(last_, false, call.behind);
  for (const BlockRef& block : call.writes) block->used(last_, true);
  for (const BlockRef& block : device_arenas_) block->used(last_, true);
  written_.assign(call.writes.begin(), call.writes.end());
  for (auto& keep : call.keeps) kept_.emplace_back(last_, std::move(keep));
  const CallContext& context = call.context;
  if (settled.chosen && !context.staged_in && !context.staged_out) {
    host_reads_ = context.host_reads;
    return {};
  }
  Status status = device_->synchronize(*last_);
  // Copies may still read and write the caller's memory.
  return status.ok() ? status : also(std::move(status), drain(*device_, settled.stream));
}

Status Instance::run(std::span<const Value> inputs, std::span<const Value> out, const Settled& settled,
                     bool strict, std::vector<Value>& outputs, CallStats& stats) {
  RunScope scope;
  if (torn_) {
    if (Status status = mend(); !status.ok()) return status;
  }
  Call call{inputs, out, settled, strict, stats};
  // On the cpu device everything is done when a function returns.
  bool ordered = uses_device_ && device_->backend() != Backend::kCpu;
  Scope bound(*this, settled.stream, call.context, ordered, ordered || settled.chosen);
  if (Status status = bound.begin(); !status.ok()) return status;
  auto given = [&](size_t i) -> const Value* {
    return out.empty() || out[i].kind == Value::Kind::kNone ? nullptr : &out[i];
  };
  auto enqueue = [&]() -> Status {
    if (ordered) {
      if (Status status = begin(call); !status.ok()) return status;
    }
    call.context.overwritten = &overwritten_;
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (Status status = bind_input(i, inputs[i], call); !status.ok()) return status;
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (Status status = bind_output(i, given(i), call, outputs[i]); !status.ok()) return status;
    }
    Status status = execute(settled);
    if (!status.ok() && !call.context.failure.ok()) {
      // The engine knows a code; whoever failed said why.
      call.context.failure->log.insert(call.context.failure->log.end(), status->log.begin(),
                                       status->log.end());
      return call.context.failure;
    }
    return status;
  };
  outputs.clear();
  outputs.resize(plan_.outputs.size());
  auto collect = [&](bool there) -> Status {
    for (size_t i = 0; i < outputs.size(); ++i) {
      const TensorPlan* t = plan_.tensor_of(plan_.outputs[i]);
      if ((t != nullptr && apart(*t)) != there) continue;
      if (Status status = collect_output(i, given(i), call, outputs[i]); !status.ok()) return status;
    }
    return {};
  };
  if (!ordered) {
    if (Status status = enqueue(); !status.ok()) return status;
    return collect(false);
  }
  Status status = enqueue();
  if (status.ok()) status = collect(true);
  if (!status.ok()) {
    // What was enqueued before the failure still uses the caller's memory. The call before stays what the
    // next one is ordered behind: this one may have failed before it was.
    return also(std::move(status), drain(*device_, settled.stream));
  }
  if (status = finish(call); !status.ok()) return status;
  return collect(false);
}

}  // namespace headrace
