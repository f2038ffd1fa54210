#include "program/method.h"

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cstring>
#include <new>

#include "device/record.h"
#include "headrace/caller_stream.h"
#include "program/engine.h"
#include "program/exit.h"
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

bool bool_of(const ValueInfo& info) { return info.int_value != 0; }
bool bool_of(const Value& value) { return value.bool_value; }

// The number that is not a tensor, as text; empty for everything else.
template <class T>
std::string number(const T& value) {
  char digits[32];
  switch (value.kind) {
    case Value::Kind::kInt:
      return std::to_string(value.int_value);
    case Value::Kind::kBool:
      return bool_of(value) ? "True" : "False";
    case Value::Kind::kDouble:
      std::snprintf(digits, sizeof digits, "%.17g", value.double_value);
      return digits;
    default:
      return "";
  }
}

std::string describe(const Value& value) {
  if (value.kind != Value::Kind::kTensor) return name_of(value.kind);
  return describe(value.tensor) + " on " + (value.device ? value.device->name() : "cpu");
}

// What came up while a failure was cleaned up after is told with it.
Status also(Status status, const Status& other) {
  if (!other.ok() && other.message() != status.message()) status.log.push_back("also: " + other.message());
  return status;
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

struct Instance::Call {
  std::span<const Value> inputs, out;
  const Settled& settled;
  bool strict;
  CallStats& stats;
  CallContext context;
  std::vector<BlockRef> reads, writes;
  std::vector<std::shared_ptr<void>> keeps;
};

std::atomic<uint64_t> next_instance{1};

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
  DeviceGuard guard(device_, kPerThreadStream);
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
        status.device = device_->name();
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
      status.device = "cpu";
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
                        "' beyond that");
    }
  }
  LogScope log(LogScope::kThrow);
  std::vector<IslandPlan> islands = islands_of(plan_);
  LoadScope loading(plan_, islands);
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
    context.failure.log.insert(context.failure.log.end(), status.log.begin(), status.log.end());
    return context.failure;
  }
  auto missing = core_.data_map.take_missing();
  if (missing.empty()) return status;
  std::string keys;
  for (const std::string& key : missing) keys += (keys.empty() ? "'" : ", '") + key + "'";
  Status named(ErrorCode::kProgram, status.message() + "; the data files lack the keys " + keys);
  named.log = status.log;
  return named;
}

// Loads the engine's method again over the same memory, so that what the program keeps between calls stays as
// the torn call left it.
Status Instance::mend() try {
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

// Host memory in the program's layout: the caller's own where it fits, else a copy.
Status Instance::dense_on_host(size_t i, const TensorView& view, Call& call, void*& data) {
  TensorSlot& slot = *slots_[i];
  data = view.data;
  // The engine reads an unplanned input in place: not where the program writes it, or an output lies over it.
  bool aliased = plan_.tensor_of(plan_.inputs[i])->storage == Storage::kNone;
  bool exposed = aliased && (input_is_written_[i] ||
                             std::any_of(call.out.begin(), call.out.end(), [&](const Value& given) {
                               return given.kind == Value::Kind::kTensor && overlaps(given.tensor, view);
                             }));
  if (!exposed && is_dense(view, slot.strides.data()) &&
      reinterpret_cast<uintptr_t>(data) % itemsize(view.dtype) == 0) {
    return {};
  }
  size_t nbytes = view.nbytes();
  if (slot.scratch_capacity < nbytes) {
    slot.scratch.reset(static_cast<uint8_t*>(std::aligned_alloc(64, (nbytes + 63) / 64 * 64)));
    slot.scratch_capacity = slot.scratch ? nbytes : 0;
    if (!slot.scratch)
      return Status(ErrorCode::kOutOfDeviceMemory, plan_.name + ": no memory to repack an input");
  }
  repack(view, slot.dim_order.data(), slot.scratch.get());
  data = slot.scratch.get();
  call.stats.repacked_bytes += static_cast<int64_t>(nbytes);
  return {};
}

// From the host to a block on the device, on the stream of the call.
Status Instance::stage_in(size_t i, const TensorView& view, Call& call, void*& data) {
  size_t nbytes = view.nbytes();
  void* from = nullptr;
  if (Status status = dense_on_host(i, view, call, from); !status.ok()) return status;
  auto block = shared_.on_device->take(nbytes, call.settled.stream);
  if (!block.ok()) return block.status();
  data = (*block)->data();
  call.writes.push_back(std::move(*block));
  call.context.staged_in = true;
  return nbytes == 0 ? Status() : device_->copy(data, from, nbytes, call.settled.stream);
}

// From the device to host memory that the engine reads next.
Status Instance::stage_out(size_t i, const Value& value, Call& call, void*& data) {
  TensorSlot& slot = *slots_[i];
  size_t nbytes = value.tensor.nbytes();
  if (slot.scratch_capacity < nbytes) {
    slot.scratch.reset(static_cast<uint8_t*>(std::aligned_alloc(64, (nbytes + 63) / 64 * 64)));
    slot.scratch_capacity = slot.scratch ? nbytes : 0;
    if (!slot.scratch)
      return Status(ErrorCode::kOutOfDeviceMemory, plan_.name + ": no memory to stage an input");
  }
  data = slot.scratch.get();
  if (nbytes == 0) return {};
  if (Status status = value.device->copy(data, value.tensor.data, nbytes, call.settled.stream); !status.ok())
    return status;
  return value.device->synchronize(call.settled.stream);
}

Status Instance::bind_tensor(size_t i, const Value& value, Call& call) {
  const TensorPlan& plan = *plan_.tensor_of(plan_.inputs[i]);
  const TensorView& view = value.tensor;
  TensorSlot& slot = *slots_[i];
  for (size_t d = 0; d < static_cast<size_t>(view.ndim); ++d)
    slot.sizes[d] = static_cast<int32_t>(view.sizes[d]);
  std::copy(plan.dim_order.begin(), plan.dim_order.end(), slot.dim_order.begin());
  dense_strides(view.ndim, slot.sizes.data(), slot.dim_order.data(), slot.strides.data());

  auto refuse = [&](const std::string& what) {
    return Status(ErrorCode::kInput, plan_.name + ", input " + std::to_string(i) + ": expected " +
                                         describe(describe_value(plan_, plan_.inputs[i])) + ", got " +
                                         describe(value) + what);
  };
  bool there = value.device != nullptr && value.device->backend() != Backend::kCpu;
  if (there && value.device != device_) {
    Status status(ErrorCode::kDevice, plan_.name + ", input " + std::to_string(i) + ": expected memory of " +
                                          device_->name() + " or of the host, got memory of " +
                                          value.device->name() + "; copy it first");
    status.device = value.device->name();
    return status;
  }
  if (call.strict && there != apart(plan))
    return refuse("; strict=True refuses to stage it: pass memory of the program's device");
  if (there && !is_dense(view, slot.strides.data()))
    return refuse("; device memory must be dense, in the program's layout");
  if (value.block) {
    if (Status status = value.block->order(call.settled.stream, false); !status.ok()) return status;
    if (there) call.reads.push_back(value.block);
    if (!there) {
      if (Status status = value.block->wait(false); !status.ok()) return status;
    }
  }
  if (there && value.keep) call.keeps.push_back(value.keep);

  void* data = view.data;
  Status status;
  if (apart(plan)) {
    if (!there) status = stage_in(i, view, call, data);
  } else {
    status = there ? stage_out(i, value, call, data) : dense_on_host(i, view, call, data);
    call.context.host_inputs.push_back(plan.storage == Storage::kPlanned ? planned_address(plan) : data);
  }
  if (!status.ok()) return status;
  slot.impl.emplace(static_cast<ScalarType>(view.dtype), view.ndim, slot.sizes.data(), data,
                    slot.dim_order.data(), slot.strides.data(), et::TensorShapeDynamism::STATIC,
                    static_cast<et::etensor::DeviceType>(plan.device.kind), plan.device.index);
  return {};
}

Status Instance::bind_input(size_t i, const Value& value, Call& call) {
  et::EValue bound;
  switch (value.kind) {
    case Value::Kind::kTensor:
      if (Status status = bind_tensor(i, value, call); !status.ok()) return status;
      bound = et::EValue(Tensor(&*slots_[i]->impl));
      break;
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
  if (error == et::Error::Ok) {
    const TensorPlan* plan = plan_.tensor_of(plan_.inputs[i]);
    if (plan != nullptr && !apart(*plan)) {
      size_t nbytes = value.tensor.nbytes();
      record::host("input", {record::touch(slots_[i]->impl->data(), nbytes, false, plan_.inputs[i]),
                             record::touch(planned_address(*plan), nbytes, true, plan_.inputs[i])});
    }
    return {};
  }
  return Status(ErrorCode::kInput, plan_.name + ", input " + std::to_string(i) + ": expected " +
                                       describe(describe_value(plan_, plan_.inputs[i])) + ", got " +
                                       describe(value) + "; the engine refuses it: " + et::to_string(error));
}

Status Instance::bind_output(size_t i, const Value* given, Call& call, Value& out) {
  const TensorPlan* plan = plan_.tensor_of(plan_.outputs[i]);
  if (plan == nullptr) return {};
  bool there = apart(*plan);
  if (given != nullptr && there != (given->device != nullptr && given->device->backend() != Backend::kCpu)) {
    return Status(ErrorCode::kInput, plan_.name + ", out " + std::to_string(i) + ": expected memory of " +
                                         (there ? device_->name() : std::string("the host")) + ", got " +
                                         describe(*given));
  }
  if (given != nullptr && there && given->device != device_) {
    return Status(ErrorCode::kDevice, plan_.name + ", out " + std::to_string(i) + ": expected memory of " +
                                          device_->name() + ", got memory of " + given->device->name());
  }
  if (given != nullptr && given->block) {
    if (Status status = there ? given->block->order(call.settled.stream, true) : given->block->wait(true);
        !status.ok()) {
      return status;
    }
    if (there) call.writes.push_back(given->block);
  }
  if (given != nullptr && there && given->keep) call.keeps.push_back(given->keep);
  if (!output_is_caller_memory_[i]) {
    if (!there && plan->storage == Storage::kPlanned && output_is_final_[i]) {
      call.context.host_outputs.push_back(planned_address(*plan));
    }
    return {};
  }
  void* data = nullptr;
  // Islands may still read an input after the first of them writes this.
  bool over_input =
      there && given != nullptr && std::any_of(call.inputs.begin(), call.inputs.end(), [&](const Value& in) {
        return in.device == device_ && in.kind == Value::Kind::kTensor && overlaps(in.tensor, given->tensor);
      });
  if (given != nullptr && plan->dynamism == Dynamism::kStatic && !over_input) {
    std::array<int32_t, kMaxDims> strides;
    dense_strides(given->tensor.ndim, plan->sizes.data(), plan->dim_order.data(), strides.data());
    if (is_dense(given->tensor, strides.data()) &&
        reinterpret_cast<uintptr_t>(given->tensor.data) % itemsize(plan->dtype) == 0) {
      data = given->tensor.data;
    }
  }
  if (data == nullptr) {
    auto block = (there ? shared_.on_device : shared_.host)->take(plan->nbytes, call.settled.stream);
    if (!block.ok()) return block.status();
    out.block = std::move(*block);
    data = out.block->data();
    if (there) call.writes.push_back(out.block);
  }
  if (!there && output_is_final_[i]) call.context.host_outputs.push_back(data);
  out.tensor.data = data;
  et::Error error = method_->set_output_data_ptr(data, plan->nbytes, i);
  if (error == et::Error::Ok) return {};
  return Status(ErrorCode::kProgram, plan_.name + ", output " + std::to_string(i) +
                                         ": the engine refuses memory for it: " + et::to_string(error));
}

// Runs after the work was enqueued and, for host outputs, after it was waited for.
Status Instance::collect_output(size_t i, const Value* given, Call& call, Value& out) {
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
  bool there = apart(*plan_.tensor_of(plan_.outputs[i]));
  auto taken = [&](const void* to, size_t written) {
    if (there) return;
    size_t read = tensor.nbytes();
    record::host("output", {record::touch(source, read, false, plan_.outputs[i]),
                            record::touch(to == source ? nullptr : to, written, true)});
  };
  TensorView& view = out.tensor;
  out.kind = Value::Kind::kTensor;
  if (there) out.device = device_;
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
    bool same = to.ndim == view.ndim &&
                std::equal(view.sizes.begin(), view.sizes.begin() + view.ndim, to.sizes.begin());
    if (!same || (there && !is_dense(to, strides.data()))) {
      return Status(ErrorCode::kInput, plan_.name + ", out " + std::to_string(i) + ": expected " +
                                           (there ? std::string("dense ") : "") + headrace::describe(view) +
                                           ", got " + headrace::describe(to) +
                                           "; give memory of the output's shape");
    }
    if (source != to.data && there && nbytes != 0) {
      if (Status status = device_->copy(to.data, source, nbytes, call.settled.stream); !status.ok())
        return status;
    } else if (source != to.data && !there) {
      unpack(source, view, to);
    }
    taken(to.data, nbytes);
    view = to;
    out.block = given->block;
    return {};
  }
  if (out.block && source == out.block->data()) {
    view.data = out.block->data();
    taken(source, nbytes);
    return {};
  }
  if (!out.block || out.block->capacity() < nbytes) {
    auto block = (there ? shared_.on_device : shared_.host)->take(nbytes, call.settled.stream);
    if (!block.ok()) return block.status();
    out.block = std::move(*block);
    if (there) call.writes.push_back(out.block);
  }
  view.data = out.block->data();
  if (nbytes == 0) return {};
  if (there) return device_->copy(view.data, source, nbytes, call.settled.stream);
  std::memcpy(view.data, source, nbytes);
  taken(view.data, nbytes);
  return {};
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
    }
  };
  LogScope log(LogScope::kThrow);
  et::Error error = et::Error::Ok;
  if (!plan_.loops) {
    error = unless_it_aborts(
        [&] { return record::recording() ? execute_recorded(settled) : method_->execute(); });
  } else {
    int64_t steps = 0;
    while ((error = unless_it_aborts([&] { return method_->step(); })) == et::Error::Ok) {
      if (++steps < core_.max_steps) continue;
      torn_ = true;
      return Status(ErrorCode::kDelegate,
                    plan_.name + ": expected a loop to end within " + std::to_string(core_.max_steps) +
                        " instructions, got more; load the program with a larger max_steps "
                        "if it is meant to take that long");
    }
    if (error == et::Error::EndOfMethod) error = method_->reset_execution();
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

// Calls of one instance run in order, whatever streams and threads they come from.
Status Instance::begin(Call& call) {
  std::erase_if(kept_, [&](const auto& item) {
    auto done = device_->query(*item.first);
    return done.ok() && *done;
  });
  if (!last_) return {};
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
  for (const BlockRef& block : call.reads) block->used(last_, false);
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
  Call call{inputs, out, settled, strict, stats, {}, {}, {}, {}};
  // On the cpu device everything is done when a function returns.
  bool ordered = uses_device_ && device_->backend() != Backend::kCpu;
  std::optional<DeviceGuard> guard;
  guard.emplace(device_, settled.stream, &call.context);
  std::optional<CallerStreamGuard> selection;
  // Delegates of others read the thread's selection: for the length of the call it is the stream of the call.
  if (ordered) selection.emplace(reinterpret_cast<cudaStream_t>(settled.stream), device_->id());
  std::optional<record::CallScope> recorded;
  if (record::recording()) {
    recorded.emplace(ordered ? *device_ : *cpu_device(), settled.stream, plan_.name, number_);
    if (!recorded->named()) recorded->name_values(value_labels());
  }
  auto given = [&](size_t i) -> const Value* {
    return out.empty() || out[i].kind == Value::Kind::kNone ? nullptr : &out[i];
  };
  auto enqueue = [&]() -> Status {
    if (ordered) {
      if (Status status = begin(call); !status.ok()) return status;
    }
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (Status status = bind_input(i, inputs[i], call); !status.ok()) return status;
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (Status status = bind_output(i, given(i), call, outputs[i]); !status.ok()) return status;
    }
    Status status = execute(settled);
    if (!status.ok() && !call.context.failure.ok()) {
      // The engine knows a code; whoever failed said why.
      call.context.failure.log.insert(call.context.failure.log.end(), status.log.begin(), status.log.end());
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

// ---------------------------------------------------------------- MethodPool

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
      out.push_back({"planned", name_, static_cast<int>(i), buffers[b].device, buffers[b].nbytes});
    }
  }
  out.push_back({"outputs", name_, -1, {}, shared_.host->nbytes()});
  if (shared_.on_device)
    out.push_back({"outputs", name_, -1, {DeviceKind::kCuda, 0}, shared_.on_device->nbytes()});
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
  } else if (uses_device_ && device_->backend() != Backend::kCpu) {
    // A program without device work has no use for a selection, and is no reason to refuse one.
    headrace_selection selected = headrace_get_selection();
    if (selected.selected) {
      settled = {reinterpret_cast<StreamHandle>(selected.stream), true};
      device = selected.device;
    }
  }
  if (device != -1 && device != device_->id()) {
    Status status(ErrorCode::kDevice, name_ + ", stream: expected a stream of " + device_->name() +
                                          ", got one of " + device_name_of(device) +
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

Status MethodPool::close() {
  std::shared_ptr<ProgramCore> core;
  std::vector<std::unique_ptr<Instance>> doomed;
  if (in_host_function()) {
    return Status(ErrorCode::kDevice,
                  name_ +
                      ": expected close() from outside a host function, where devices can be "
                      "waited for, got it from inside one");
  }
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

// -------------------------------------------------------------------- Method

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
