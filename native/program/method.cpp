#include "program/method.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>

#include "program/engine.h"
#include "program/layout.h"
#include "program/log.h"
#include "program/xnnpack.h"

namespace headrace {

namespace et = executorch::runtime;
using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::aten::TensorImpl;

namespace {

ValueInfo describe_value(const MethodPlan& plan, int32_t value) {
  const ValuePlan& v = plan.values[static_cast<size_t>(value)];
  ValueInfo info;
  switch (v.kind) {
    case ValueKind::kInt:
      info.kind = Value::Kind::kInt;
      info.int_value = v.int_value;
      break;
    case ValueKind::kBool:
      info.kind = Value::Kind::kBool;
      info.int_value = v.int_value;
      break;
    case ValueKind::kDouble:
      info.kind = Value::Kind::kDouble;
      info.double_value = v.double_value;
      break;
    case ValueKind::kString:
      info.kind = Value::Kind::kString;
      break;
    case ValueKind::kTensor: {
      const TensorPlan& t = *plan.tensor_of(value);
      info.kind = Value::Kind::kTensor;
      info.name = t.name;
      info.dtype = t.dtype;
      info.shape.assign(t.sizes.begin(), t.sizes.end());
      info.dynamic = t.dynamism != Dynamism::kStatic;
      info.device = t.device;
      info.planned = t.storage != Storage::kNone;
      break;
    }
    default:
      break;
  }
  return info;
}

const char* name_of(Value::Kind kind) {
  switch (kind) {
    case Value::Kind::kNone:
      return "None";
    case Value::Kind::kTensor:
      return "a tensor";
    case Value::Kind::kInt:
      return "an int";
    case Value::Kind::kDouble:
      return "a float";
    case Value::Kind::kBool:
      return "a bool";
    case Value::Kind::kString:
      return "a string";
  }
  return "?";
}

// "float32[1, ≤80] on cpu".
std::string describe(const ValueInfo& info) {
  if (info.kind != Value::Kind::kTensor) return name_of(info.kind);
  std::string out = dtype_name(info.dtype) + "[";
  for (size_t d = 0; d < info.shape.size(); ++d) {
    out += (d ? ", " : "") + std::string(info.dynamic ? "≤" : "") + std::to_string(info.shape[d]);
  }
  return out + "] on " + device_name(info.device);
}

std::string describe(const Value& value) {
  return value.kind == Value::Kind::kTensor
             ? describe(value.tensor) + " on " + device_name(value.tensor.device)
             : name_of(value.kind);
}

}  // namespace

// ------------------------------------------------------------------ Instance

struct Instance::TensorSlot {
  std::array<int32_t, kMaxDims> sizes, strides;
  std::array<uint8_t, kMaxDims> dim_order;
  std::optional<TensorImpl> impl;
  std::unique_ptr<uint8_t, Free> scratch;
  size_t scratch_capacity = 0;
};

Instance::Instance(const ProgramCore& core, const MethodPlan& plan) : core_(core), plan_(plan) {
  for (size_t i = 0; i < plan.inputs.size(); ++i) slots_.push_back(std::make_unique<TensorSlot>());
  for (int32_t value : plan.outputs) {
    const TensorPlan* t = plan.tensor_of(value);
    bool also_input = std::find(plan.inputs.begin(), plan.inputs.end(), value) != plan.inputs.end();
    bool twice = std::count(plan.outputs.begin(), plan.outputs.end(), value) > 1;
    bool moved = std::find(plan.moved.begin(), plan.moved.end(), value) != plan.moved.end();
    output_is_caller_memory_.push_back(t != nullptr && t->storage == Storage::kNone && !also_input &&
                                       !twice && !moved);
  }
}

Instance::~Instance() = default;

Status Instance::allocate() {
  for (size_t b = 1; b < plan_.buffers.size(); ++b) {
    size_t nbytes = plan_.buffers[b].nbytes;
    // Zero, so that what a program reads before it writes is the same in every run.
    Pages& arena = arenas_.emplace_back(nbytes);
    if (arena.data() == nullptr) {
      Status status(ErrorCode::kOutOfDeviceMemory,
                    plan_.name + ", planned buffer " + std::to_string(b) + ": expected " +
                        std::to_string(nbytes) +
                        " bytes on cpu, got none; free memory or export with smaller bounds");
      status.device = "cpu";
      return status;
    }
    spans_.emplace_back(arena.data(), nbytes);
  }
  return {};
}

Result<std::unique_ptr<Instance>> Instance::load(const ProgramCore& core, const MethodPlan& plan) {
  std::unique_ptr<Instance> self(new Instance(core, plan));
  if (Status status = self->allocate(); !status.ok()) return status;
  self->planned_.emplace(et::Span<et::Span<uint8_t>>(self->spans_.data(), self->spans_.size()));
  self->memory_.emplace(&self->method_allocator_, &*self->planned_, &self->temp_allocator_);
  if (Status status = self->open(); !status.ok()) return status;
  return self;
}

Status Instance::open() {
  const ProgramCore& core = core_;
  std::vector<std::vector<et::BackendOption>> storage;
  et::LoadBackendOptionsMap map;
  for (const auto& [delegate, entries] : core.options) {
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
                        "' beyond that");
    }
  }

  LogScope log;
  (void)core.data_map.take_missing();
  auto load = [&]() -> et::Result<et::Method> {
    try {
      return core.program->load_method(plan_.name.c_str(), &*memory_, nullptr,
                                       core.data_map.empty() ? nullptr : &core.data_map,
                                       core.options.empty() ? nullptr : &map);
    } catch (const EngineAbort&) {
      return et::Error::Internal;
    }
  };
  auto method = load();
  if (!method.ok()) {
    Status status = engine_status(method.error(), "loading", plan_, log.take());
    auto missing = core.data_map.take_missing();
    if (missing.empty()) return status;
    std::string keys;
    for (const std::string& key : missing) keys += (keys.empty() ? "'" : ", '") + key + "'";
    Status named(ErrorCode::kProgram, status.message() + "; the data files lack the keys " + keys);
    named.log = status.log;
    return named;
  }
  method_.emplace(std::move(*method));
  return {};
}

// After a call that ended in its middle: the engine cannot leave a method there, and XNNPACK takes shapes for
// settled whose memory it did not get, so another call would write beyond it.
Status Instance::reopen() {
  for (const TensorPlan& t : plan_.tensors) {
    if (!t.mutable_state) continue;
    return Status(
        ErrorCode::kDelegate,
        plan_.name +
            ": an earlier call failed in its middle, and what the method keeps between calls with it; "
            "load the program again");
  }
  method_.reset();
  method_allocator_.reset();
  if (Status status = open(); !status.ok()) return status;
  broken_ = false;
  return {};
}

Status Instance::bind_input(size_t i, const Value& value, CallStats& stats) {
  et::EValue bound;
  switch (value.kind) {
    case Value::Kind::kTensor: {
      const TensorPlan& plan = *plan_.tensor_of(plan_.inputs[i]);
      const TensorView& view = value.tensor;
      TensorSlot& slot = *slots_[i];
      for (int d = 0; d < view.ndim; ++d)
        slot.sizes[static_cast<size_t>(d)] = static_cast<int32_t>(view.sizes[static_cast<size_t>(d)]);
      std::copy(plan.dim_order.begin(), plan.dim_order.end(), slot.dim_order.begin());
      dense_strides(view.ndim, slot.sizes.data(), slot.dim_order.data(), slot.strides.data());
      void* data = view.data;
      size_t nbytes = view.nbytes();
      if (!is_dense(view, slot.strides.data()) ||
          reinterpret_cast<uintptr_t>(data) % itemsize(view.dtype) != 0) {
        if (slot.scratch_capacity < nbytes) {
          slot.scratch.reset(static_cast<uint8_t*>(std::aligned_alloc(64, (nbytes + 63) / 64 * 64)));
          slot.scratch_capacity = slot.scratch ? nbytes : 0;
          if (!slot.scratch)
            return Status(ErrorCode::kOutOfDeviceMemory, plan_.name + ": no memory to repack an input");
        }
        repack(view, slot.dim_order.data(), slot.scratch.get());
        data = slot.scratch.get();
        stats.repacked_bytes += static_cast<int64_t>(nbytes);
      }
      slot.impl.emplace(static_cast<ScalarType>(view.dtype), view.ndim, slot.sizes.data(), data,
                        slot.dim_order.data(), slot.strides.data(), et::TensorShapeDynamism::STATIC);
      bound = et::EValue(Tensor(&*slot.impl));
      break;
    }
    case Value::Kind::kInt:
      bound = et::EValue(value.int_value);
      break;
    case Value::Kind::kDouble:
      bound = et::EValue(value.double_value);
      break;
    case Value::Kind::kBool:
      bound = et::EValue(value.bool_value);
      break;
    default:
      break;
  }
  if (plan_.values[static_cast<size_t>(plan_.inputs[i])].kind == ValueKind::kString) return {};
  et::Error error = method_->set_input(bound, i);
  if (error == et::Error::Ok) return {};
  return Status(ErrorCode::kInput, plan_.name + ", input " + std::to_string(i) + ": expected " +
                                       describe(describe_value(plan_, plan_.inputs[i])) + ", got " +
                                       describe(value) + "; the engine refuses it: " + et::to_string(error));
}

Status Instance::bind_output(size_t i, const Value* given, Ring& ring, Value& out) {
  if (!output_is_caller_memory_[i]) return {};
  const TensorPlan& plan = *plan_.tensor_of(plan_.outputs[i]);
  void* data = nullptr;
  if (given != nullptr && plan.dynamism == Dynamism::kStatic) {
    std::array<int32_t, kMaxDims> strides;
    dense_strides(given->tensor.ndim, plan.sizes.data(), plan.dim_order.data(), strides.data());
    if (is_dense(given->tensor, strides.data()) &&
        reinterpret_cast<uintptr_t>(given->tensor.data) % itemsize(plan.dtype) == 0) {
      data = given->tensor.data;
    }
  }
  if (data == nullptr) {
    out.block = ring.take(plan.nbytes);
    if (!out.block)
      return Status(ErrorCode::kOutOfDeviceMemory,
                    plan_.name + ": no memory for output " + std::to_string(i));
    data = out.block->data();
  }
  out.tensor.data = data;
  et::Error error = method_->set_output_data_ptr(data, plan.nbytes, i);
  if (error == et::Error::Ok) return {};
  return Status(ErrorCode::kProgram, plan_.name + ", output " + std::to_string(i) +
                                         ": the engine refuses memory for it: " + et::to_string(error));
}

Status Instance::collect_output(size_t i, const Value* given, Ring& ring, Value& out) {
  const et::EValue& value = method_->get_output(i);
  if (!value.isTensor()) {
    out.kind = Value::Kind::kNone;
    if (value.isInt()) out.kind = Value::Kind::kInt, out.int_value = value.toInt();
    if (value.isDouble()) out.kind = Value::Kind::kDouble, out.double_value = value.toDouble();
    if (value.isBool()) out.kind = Value::Kind::kBool, out.bool_value = value.toBool();
    if (value.isString()) out.kind = Value::Kind::kString, out.string_value = value.toString();
    return {};
  }
  const Tensor& tensor = value.toTensor();
  const void* source = tensor.const_data_ptr();
  TensorView& view = out.tensor;
  out.kind = Value::Kind::kTensor;
  view.dtype = static_cast<DType>(tensor.scalar_type());
  view.ndim = static_cast<int>(tensor.dim());
  std::array<int32_t, kMaxDims> sizes, strides;
  std::array<uint8_t, kMaxDims> dim_order;
  std::copy(tensor.sizes().begin(), tensor.sizes().end(), sizes.begin());
  std::copy(tensor.dim_order().begin(), tensor.dim_order().end(), dim_order.begin());
  dense_strides(view.ndim, sizes.data(), dim_order.data(), strides.data());
  auto width = static_cast<int64_t>(itemsize(view.dtype));
  for (size_t d = 0; d < static_cast<size_t>(view.ndim); ++d) {
    view.sizes[d] = sizes[d];
    view.strides_bytes[d] = strides[d] * width;
  }
  size_t nbytes = view.nbytes();
  if (source == nullptr && nbytes != 0) {
    return Status(ErrorCode::kDelegate,
                  plan_.name + ", output " + std::to_string(i) + ": the engine left it without memory");
  }
  if (given != nullptr) {
    const TensorView& to = given->tensor;
    if (!std::equal(view.sizes.begin(), view.sizes.begin() + view.ndim, to.sizes.begin()) ||
        to.ndim != view.ndim) {
      return Status(ErrorCode::kInput, plan_.name + ", out " + std::to_string(i) + ": expected " +
                                           headrace::describe(view) + ", got " + headrace::describe(to) +
                                           "; give an array of the output's shape");
    }
    if (source != to.data) unpack(source, view, to);
    view = to;
    return {};
  }
  if (out.block && source == out.block->data()) return {};
  if (!out.block || out.block->capacity() < nbytes) out.block = ring.take(nbytes);
  if (!out.block)
    return Status(ErrorCode::kOutOfDeviceMemory, plan_.name + ": no memory for output " + std::to_string(i));
  if (nbytes != 0) std::memcpy(out.block->data(), source, nbytes);
  view.data = out.block->data();
  return {};
}

// The engine marks its instruction-wise interface as experimental; the version is pinned.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
Status Instance::execute() {
  auto unless_it_aborts = [&](auto&& call) {
    try {
      return call();
    } catch (const EngineAbort&) {
      broken_ = true;
      return et::Error::Internal;
    }
  };
  LogScope log;
  et::Error error = et::Error::Ok;
  if (!plan_.loops) {
    error = unless_it_aborts([&] { return method_->execute(); });
  } else {
    int64_t steps = 0;
    while ((error = unless_it_aborts([&] { return method_->step(); })) == et::Error::Ok) {
      if (++steps < core_.max_steps) continue;
      broken_ = true;
      return Status(ErrorCode::kDelegate,
                    plan_.name + ": expected a loop to end within " + std::to_string(core_.max_steps) +
                        " instructions, got more; load the program with a larger max_steps "
                        "if it is meant to take that long");
    }
    if (error == et::Error::EndOfMethod) {
      error = method_->reset_execution();
    } else {
      broken_ = true;
    }
  }
  if (error == et::Error::Ok) return {};
  Status status = engine_status(error, "running", plan_, log.take());
  broken_ |= std::any_of(plan_.delegates.begin(), plan_.delegates.end(),
                         [](const DelegatePlan& d) { return d.id == kXnnpack; });
  return status;
}
#pragma GCC diagnostic pop

Status Instance::run(std::span<const Value> inputs, std::span<const Value> out, Ring& ring,
                     std::vector<Value>& outputs, CallStats& stats) {
  if (broken_) {
    if (Status status = reopen(); !status.ok()) return status;
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (Status status = bind_input(i, inputs[i], stats); !status.ok()) return status;
  }
  outputs.clear();
  outputs.resize(plan_.outputs.size());
  auto given = [&](size_t i) -> const Value* {
    return out.empty() || out[i].kind == Value::Kind::kNone ? nullptr : &out[i];
  };
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (Status status = bind_output(i, given(i), ring, outputs[i]); !status.ok()) return status;
  }
  if (Status status = execute(); !status.ok()) return status;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (Status status = collect_output(i, given(i), ring, outputs[i]); !status.ok()) return status;
  }
  return {};
}

// ---------------------------------------------------------------- MethodPool

MethodPool::MethodPool(std::shared_ptr<ProgramCore> core, const MethodPlan& plan)
    : name_(plan.name), core_(std::move(core)) {
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
  std::shared_ptr<MethodPool> pool(new MethodPool(std::move(core), plan));
  for (int i = 0; i < instances; ++i) {
    auto instance = Instance::load(*pool->core_, plan);
    if (!instance.ok()) return instance.status();
    pool->instances_.push_back(std::move(*instance));
    pool->idle_.push_back(static_cast<size_t>(i));
    pool->busy_.emplace_back();
  }
  return pool;
}

CallStats MethodPool::stats() const {
  std::lock_guard lock(mutex_);
  return stats_;
}

void MethodPool::memory(std::vector<MemoryUse>& out) const {
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < instances_.size(); ++i) {
    const auto& buffers = instances_[i]->buffers();
    for (size_t b = 1; b < buffers.size(); ++b) {
      out.push_back({"planned", name_, static_cast<int>(i), buffers[b].device, buffers[b].nbytes});
    }
  }
  out.push_back({"outputs", name_, -1, {}, ring_->nbytes()});
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
    stats_.calls += 1;
    stats_.repacked_bytes += stats.repacked_bytes;
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
    if ((want.kind == Value::Kind::kInt && want.int_value != got.int_value) ||
        (want.kind == Value::Kind::kBool && (want.int_value != 0) != got.bool_value) ||
        (want.kind == Value::Kind::kDouble && want.double_value != got.double_value)) {
      return wrong("; the program was exported for one value and accepts no other");
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
    if (view.device.kind != DeviceKind::kCpu) return wrong("; the program runs on cpu");
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

Status MethodPool::run(std::span<const Value> inputs, std::span<const Value> out, const CallOptions& options,
                       std::vector<Value>& outputs) {
  (void)options;
  if (Status status = check_inputs(inputs); !status.ok()) return status;
  if (Status status = check_out(out); !status.ok()) return status;
  auto instance = acquire();
  if (!instance.ok()) return instance.status();
  CallStats stats;
  Status status = instances_[*instance]->run(inputs, out, *ring_, outputs, stats);
  release(*instance, stats);
  return status;
}

Status MethodPool::close() {
  std::shared_ptr<ProgramCore> core;
  std::vector<std::unique_ptr<Instance>> doomed;
  {
    std::unique_lock lock(mutex_);
    if (std::find(busy_.begin(), busy_.end(), std::this_thread::get_id()) != busy_.end()) {
      return Status(ErrorCode::kInput,
                    name_ + ": expected close() from outside, got it from inside a running call");
    }
    closed_ = true;
    changed_.notify_all();
    changed_.wait(lock, [&] { return idle_.size() == instances_.size(); });
    doomed.swap(instances_);
    core.swap(core_);
    idle_.clear();
    busy_.clear();
  }
  return {};
}

// -------------------------------------------------------------------- Method

Method::Method(std::shared_ptr<MethodPool> pool) : pool_(std::move(pool)) {}
Method::~Method() = default;
const std::string& Method::name() const { return pool_->name(); }
const std::vector<ValueInfo>& Method::inputs() const { return pool_->inputs(); }
const std::vector<ValueInfo>& Method::outputs() const { return pool_->outputs(); }
const std::vector<IslandInfo>& Method::islands() const { return pool_->islands(); }
CallStats Method::stats() const { return pool_->stats(); }
Status Method::run(std::span<const Value> inputs, std::span<const Value> out, const CallOptions& options,
                   std::vector<Value>& outputs) {
  return pool_->run(inputs, out, options, outputs);
}

}  // namespace headrace
