// How the caller's values and the engine's meet: bound, staged, copied, collected.
#include <algorithm>
#include <cstring>

#include "device/record.h"
#include "program/instance.h"
#include "program/layout.h"
#include "program/values.h"

namespace headrace {

namespace et = executorch::runtime;
using executorch::aten::ScalarType;
using executorch::aten::Tensor;

Status Instance::reserve_scratch(size_t i, size_t nbytes, const char* purpose) {
  TensorSlot& slot = *slots_[i];
  if (slot.scratch_capacity >= nbytes) return {};
  slot.scratch.reset(static_cast<uint8_t*>(std::aligned_alloc(64, (nbytes + 63) / 64 * 64)));
  slot.scratch_capacity = slot.scratch ? nbytes : 0;
  if (slot.scratch) return {};
  return Status(ErrorCode::kOutOfDeviceMemory, plan_.name + ", input " + std::to_string(i) + ": expected " +
                                                   std::to_string(nbytes) + " bytes of host memory to " +
                                                   purpose + ", got none; free memory");
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
  if (!exposed && is_dense(view, slot.dim_order.data()) &&
      reinterpret_cast<uintptr_t>(data) % itemsize(view.dtype) == 0) {
    return {};
  }
  size_t nbytes = view.nbytes();
  if (Status status = reserve_scratch(i, nbytes, "rewrite its layout in"); !status.ok()) return status;
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
  auto block = shared_.on_device->take(nbytes, call.settled.stream, call.behind);
  if (!block.ok()) return block.status();
  data = (*block)->data();
  call.writes.push_back(std::move(*block));
  call.context.staged_in = true;
  return nbytes == 0 ? Status() : device_->copy(data, from, nbytes, call.settled.stream);
}

// From the device to host memory that the engine reads next.
Status Instance::stage_out(size_t i, const Value& value, Call& call, void*& data) {
  size_t nbytes = value.tensor.nbytes();
  if (Status status = reserve_scratch(i, nbytes, "copy it to"); !status.ok()) return status;
  data = slots_[i]->scratch.get();
  if (nbytes == 0) return {};
  if (Status status = value.device->copy(data, value.tensor.data, nbytes, call.settled.stream); !status.ok())
    return status;
  return value.device->synchronize(call.settled.stream);
}

Status Instance::check_source(size_t i, const Value& value) const {
  const TensorPlan& plan = *plan_.tensor_of(plan_.inputs[i]);
  std::string where = plan_.name + ", input " + std::to_string(i) + ": expected ";
  if (value.lease.ended()) {
    return Status(ErrorCode::kInput,
                  where +
                      "memory that still holds what it held, got an output lent by a replay, "
                      "which a later replay has written over; replay without borrow=True");
  }
  if (value.device == nullptr || value.device->backend() == Backend::kCpu) return {};
  if (value.device != device_) {
    Status status(ErrorCode::kDevice,
                  where + "memory of " + device_->name() + " or of the host, got memory of " +
                      device_name_of(value.device->id(), device_->name()) + "; copy it first");
    status->device = value.device->name();
    return status;
  }
  if (is_dense(value.tensor, plan.dim_order.data())) return {};
  return Status(ErrorCode::kInput, where + describe(describe_value(plan_, plan_.inputs[i])) + ", got " +
                                       describe(value) +
                                       "; device memory must be dense, in the program's layout: copy it to "
                                       "such memory first");
}

Status Instance::bind_tensor(size_t i, const Value& value, Call& call) {
  const TensorPlan& plan = *plan_.tensor_of(plan_.inputs[i]);
  const TensorView& view = value.tensor;
  TensorSlot& slot = *slots_[i];
  for (size_t d = 0; d < static_cast<size_t>(view.ndim); ++d)
    slot.sizes[d] = static_cast<int32_t>(view.sizes[d]);
  std::copy(plan.dim_order.begin(), plan.dim_order.end(), slot.dim_order.begin());
  dense_strides(view.ndim, slot.sizes.data(), slot.dim_order.data(), slot.strides.data());

  if (Status status = check_source(i, value); !status.ok()) return status;
  bool there = value.device != nullptr && value.device->backend() != Backend::kCpu;
  if (call.strict && there != apart(plan))
    return Status(ErrorCode::kInput,
                  plan_.name + ", input " + std::to_string(i) + ": expected " +
                      describe(describe_value(plan_, plan_.inputs[i])) + ", got " + describe(value) +
                      "; strict=True refuses to stage it: pass memory of the program's device");
  if (value.block) {
    if (Status status = value.block->order(call.settled.stream, false, call.behind); !status.ok())
      return status;
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
                                       describe(value) + ", which the engine refuses (" +
                                       et::to_string(error) + "); pass an input as it was exported with");
}

Status Instance::check_out_device(size_t i, const Value& given) const {
  bool there = apart(*plan_.tensor_of(plan_.outputs[i]));
  bool on_device = given.device != nullptr && given.device->backend() != Backend::kCpu;
  if (there == on_device && (!there || given.device == device_)) return {};
  std::string where = there ? device_->name() : "the host";
  std::string text = plan_.name + ", out " + std::to_string(i) + ": expected memory of " + where + ", got ";
  if (there != on_device)
    return Status(ErrorCode::kInput, text + describe(given) + "; pass memory of " + where);
  Status status(ErrorCode::kDevice, text + "memory of " + device_name_of(given.device->id(), where) +
                                        "; pass memory of " + where);
  status->device = where;
  return status;
}

Status Instance::bind_output_memory(size_t i, void* data) {
  size_t nbytes = plan_.tensor_of(plan_.outputs[i])->nbytes;
  et::Error error = method_->set_output_data_ptr(data, nbytes, i);
  if (error == et::Error::Ok) return {};
  return Status(ErrorCode::kProgram, plan_.name + ", output " + std::to_string(i) +
                                         ": expected the engine to take " + std::to_string(nbytes) +
                                         " bytes of memory for it, got " + et::to_string(error) +
                                         "; export it again");
}

Status Instance::bind_output(size_t i, const Value* given, Call& call, Value& out) {
  const TensorPlan* plan = plan_.tensor_of(plan_.outputs[i]);
  if (plan == nullptr) return {};
  bool there = apart(*plan);
  if (given != nullptr) {
    if (Status status = check_out_device(i, *given); !status.ok()) return status;
  }
  if (given != nullptr && given->block) {
    if (Status status =
            there ? given->block->order(call.settled.stream, true, call.behind) : given->block->wait(true);
        !status.ok()) {
      return status;
    }
    if (there) call.writes.push_back(given->block);
  }
  if (given != nullptr && there && given->keep) call.keeps.push_back(given->keep);
  if (!output_is_caller_memory_[i]) {
    // Copies are known by where they go: one that the host reads in between must not pass for the output's.
    if (!there && plan->storage == Storage::kPlanned && output_is_final_[i] && output_place_is_its_own_[i]) {
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
    if (is_dense(given->tensor, plan->dim_order.data()) &&
        reinterpret_cast<uintptr_t>(given->tensor.data) % itemsize(plan->dtype) == 0) {
      data = given->tensor.data;
    }
  }
  if (data == nullptr) {
    auto block =
        (there ? shared_.on_device : shared_.host)->take(plan->nbytes, call.settled.stream, call.behind);
    if (!block.ok()) return block.status();
    out.block = std::move(*block);
    data = out.block->data();
    if (there) call.writes.push_back(out.block);
  }
  if (!there && output_is_final_[i]) call.context.host_outputs.push_back(data);
  out.tensor.data = data;
  return bind_output_memory(i, data);
}

const void* Instance::describe_output(size_t i, Value& out) const {
  const et::EValue& value = method_->get_output(i);
  if (!value.isTensor()) {
    out.kind = Value::Kind::kNone;
    if (value.isInt()) out.kind = Value::Kind::kInt, out.int_value = value.toInt();
    if (value.isDouble()) out.kind = Value::Kind::kDouble, out.double_value = value.toDouble();
    if (value.isBool()) out.kind = Value::Kind::kBool, out.bool_value = value.toBool();
    if (value.isString()) out.kind = Value::Kind::kString, out.string_value = value.toString();
    return nullptr;
  }
  const Tensor& tensor = value.toTensor();
  TensorView& view = out.tensor;
  out.kind = Value::Kind::kTensor;
  view.dtype = static_cast<DType>(tensor.scalar_type());
  view.ndim = static_cast<int>(tensor.dim());
  std::copy(tensor.sizes().begin(), tensor.sizes().end(), view.sizes.begin());
  set_dense_strides(view, tensor.dim_order().data());
  return tensor.const_data_ptr();
}

// Runs after the work was enqueued and, for host outputs, after it was waited for.
Status Instance::collect_output(size_t i, const Value* given, Call& call, Value& out) {
  const void* source = describe_output(i, out);
  if (out.kind != Value::Kind::kTensor) return {};
  bool there = apart(*plan_.tensor_of(plan_.outputs[i]));
  if (there) out.device = device_;
  TensorView& view = out.tensor;
  size_t nbytes = view.nbytes();
  auto taken = [&, nbytes](const void* to, size_t written) {
    if (there) return;
    record::host("output", {record::touch(source, nbytes, false, plan_.outputs[i]),
                            record::touch(to == source ? nullptr : to, written, true)});
  };
  if (source == nullptr && nbytes != 0) {
    return Status(ErrorCode::kDelegate,
                  plan_.name + ", output " + std::to_string(i) +
                      ": expected memory for it, got none from the engine; export it again");
  }
  if (given != nullptr) {
    const TensorView& to = given->tensor;
    bool same = to.ndim == view.ndim &&
                std::equal(view.sizes.begin(), view.sizes.begin() + view.ndim, to.sizes.begin());
    if (!same || (there && !same_strides(to, view))) {
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
    auto block = (there ? shared_.on_device : shared_.host)->take(nbytes, call.settled.stream, call.behind);
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

}  // namespace headrace
