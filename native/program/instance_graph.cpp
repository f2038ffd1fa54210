// The memory of an instance's graph: filled from the caller's, walked over, replayed and handed out.
#include <algorithm>
#include <array>
#include <optional>

#include "program/exit.h"
#include "program/instance.h"
#include "program/instance_scope.h"
#include "program/layout.h"
#include "program/values.h"

namespace headrace {

namespace et = executorch::runtime;

// ---- memory of a graph

namespace {

Result<std::unique_ptr<Pages>> host_memory(const std::string& method, size_t nbytes) {
  auto pages = std::make_unique<Pages>(std::max<size_t>(nbytes, 1));
  if (pages->data() != nullptr) return pages;
  Status status(ErrorCode::kOutOfDeviceMemory, method + ", capture: expected " + std::to_string(nbytes) +
                                                   " bytes on cpu, got none; free memory");
  status->device = "cpu";
  return status;
}

}  // namespace

Status Instance::prepare(std::span<const Value> inputs, StreamHandle stream, CapturedGraph& graph) {
  GraphMemory& memory = graph.memory;
  memory.device = device_;
  memory.method = plan_.name;
  memory.inputs.resize(inputs.size());
  memory.outputs.resize(plan_.outputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    GraphMemory::Input& in = memory.inputs[i];
    const Value& value = inputs[i];
    in.shown.kind = value.kind;
    in.shown.int_value = value.int_value;
    in.shown.double_value = value.double_value;
    in.shown.bool_value = value.bool_value;
    in.shown.string_value = value.string_value;
    if (value.kind != Value::Kind::kTensor) continue;
    const TensorPlan& plan = *plan_.tensor_of(plan_.inputs[i]);
    TensorView& view = in.shown.tensor = value.tensor;
    set_dense_strides(view, plan.dim_order.data());
    auto block = graph.ring->take(view.nbytes(), stream);
    if (!block.ok()) return block.status();
    in.block = std::move(*block);
    if (apart(plan)) {
      in.shown.device = device_;
      view.data = in.block->data();
      continue;
    }
    auto host = host_memory(plan_.name, view.nbytes());
    if (!host.ok()) return host.status();
    in.host = std::move(*host);
    view.data = in.host->data();
    in.host_address = plan.storage == Storage::kPlanned ? planned_address(plan) : view.data;
  }
  for (size_t i = 0; i < memory.outputs.size(); ++i) {
    GraphMemory::Output& out = memory.outputs[i];
    const TensorPlan* plan = plan_.tensor_of(plan_.outputs[i]);
    if (plan == nullptr) continue;
    auto block = graph.ring->take(plan->nbytes, stream);
    if (!block.ok()) return block.status();
    out.block = std::move(*block);
    if (apart(*plan)) continue;
    out.host_address = planned_address(*plan);
    if (!output_is_caller_memory_[i]) continue;
    auto host = host_memory(plan_.name, plan->nbytes);
    if (!host.ok()) return host.status();
    out.host = std::move(*host);
    out.host_address = out.host->data();
  }
  return {};
}

Status Instance::walk(GraphMemory& memory, const Settled& settled, CaptureStage stage, WalkNotes& notes) {
  std::vector<Value> inputs;
  for (const GraphMemory::Input& in : memory.inputs) inputs.push_back(in.shown);
  CallStats stats;
  Call call{inputs, {}, settled, false, stats};
  call.context.staging = &memory;
  Scope bound(*this, settled.stream, call.context, true, true);
  if (Status status = bound.begin(); !status.ok()) return status;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (Status status = bind_input(i, inputs[i], call); !status.ok()) return status;
  }
  for (size_t i = 0; i < memory.outputs.size(); ++i) {
    GraphMemory::Output& out = memory.outputs[i];
    out.copied = 0;
    if (!output_is_caller_memory_[i]) continue;
    void* data = out.host ? out.host->data() : out.block->data();
    if (Status status = bind_output_memory(i, data); !status.ok()) return status;
  }
  StageScope told(stage, notes);
  int64_t before = thread_counts().driver_allocations;
  Status status = execute(settled);
  notes.allocations = thread_counts().driver_allocations - before;
  if (!status.ok() && !call.context.failure.ok()) {
    call.context.failure->log.insert(call.context.failure->log.end(), status->log.begin(), status->log.end());
    status = call.context.failure;
  }
  return status.ok() ? note_outputs(memory, settled) : status;
}

// What the outputs are, and those that the engine planned elsewhere brought to the graph's own memory.
Status Instance::note_outputs(GraphMemory& memory, const Settled& settled) {
  for (size_t i = 0; i < memory.outputs.size(); ++i) {
    GraphMemory::Output& out = memory.outputs[i];
    out.told = Value();
    const void* source = describe_output(i, out.told);
    if (out.told.kind != Value::Kind::kTensor) continue;
    size_t nbytes = out.told.tensor.nbytes();
    out.told.tensor.data = out.block->data();
    if (nbytes > out.block->capacity() || (source == nullptr && nbytes != 0))
      return Status(ErrorCode::kDelegate, plan_.name + ", output " + std::to_string(i) +
                                              ": expected memory within the plan's bounds, got " +
                                              headrace::describe(out.told.tensor) +
                                              "; export it with larger bounds");
    if (!apart(*plan_.tensor_of(plan_.outputs[i]))) {
      if (out.copied != nbytes)
        return Status(ErrorCode::kDelegate, plan_.name + ", output " + std::to_string(i) + ": expected " +
                                                std::to_string(nbytes) + " bytes from the device, got " +
                                                std::to_string(out.copied) + "; call the method");
      continue;
    }
    if (source == out.block->data() || nbytes == 0) continue;
    if (Status status = device_->copy(out.block->data(), source, nbytes, settled.stream); !status.ok())
      return status;
  }
  return {};
}

// ---- what comes in and goes out

// The caller's inputs to the graph's memory, in order on the stream of the call.
Status Instance::fill(GraphMemory& memory, std::span<const Value> inputs, Call& call) {
  StreamHandle stream = call.settled.stream;
  for (size_t i = 0; i < inputs.size(); ++i) {
    GraphMemory::Input& in = memory.inputs[i];
    if (!in.block) continue;
    const Value& value = inputs[i];
    const TensorPlan& plan = *plan_.tensor_of(plan_.inputs[i]);
    const TensorView& view = value.tensor;
    if (Status status = check_source(i, value); !status.ok()) return status;
    bool there = value.device != nullptr && value.device->backend() != Backend::kCpu;
    if (value.block) {
      Status status = there ? value.block->order(stream, false, call.behind) : value.block->wait(false);
      if (!status.ok()) return status;
      if (there) call.reads.push_back(value.block);
    }
    if (there && value.keep) call.keeps.push_back(value.keep);
    const void* from = view.data;
    if (!there) {
      call.context.staged_in = true;
      if (!is_dense(view, plan.dim_order.data())) {
        auto block = shared_.host->take(view.nbytes(), stream);
        if (!block.ok()) return block.status();
        repack(view, plan.dim_order.data(), (*block)->data());
        from = (*block)->data();
        call.stats.repacked_bytes += static_cast<int64_t>(view.nbytes());
        call.keeps.push_back(std::move(*block));
      }
    }
    if (view.nbytes() == 0) continue;
    if (Status status = device_->copy(in.block->data(), from, view.nbytes(), stream); !status.ok())
      return status;
  }
  return {};
}

// Whether the outputs of the graph can go to `out`. Nothing was enqueued yet.
Status Instance::check_targets(const GraphMemory& memory, std::span<const Value> out) const {
  for (size_t i = 0; i < out.size(); ++i) {
    if (out[i].kind == Value::Kind::kNone) continue;
    if (Status status = check_out_device(i, out[i]); !status.ok()) return status;
    const TensorPlan& plan = *plan_.tensor_of(plan_.outputs[i]);
    bool there = apart(plan);
    const TensorView& from = memory.outputs[i].told.tensor;
    const TensorView& to = out[i].tensor;
    bool fits = to.ndim == from.ndim && to.dtype == from.dtype &&
                std::equal(from.sizes.begin(), from.sizes.begin() + from.ndim, to.sizes.begin()) &&
                (!there || is_dense(to, plan.dim_order.data()));
    if (!fits)
      return Status(ErrorCode::kInput, plan_.name + ", out " + std::to_string(i) + ": expected " +
                                           (there ? std::string("dense ") : "") + headrace::describe(from) +
                                           ", got " + headrace::describe(to) +
                                           "; give memory of the output's shape");
  }
  return {};
}

// The graph's outputs to the caller, in order on the stream of the call; then the end of the call. Host
// outputs are complete when this returns.
Status Instance::deliver(CapturedGraph& graph, std::span<const Value> out, bool borrow, Call& call,
                         std::vector<Value>& outputs) {
  GraphMemory& memory = graph.memory;
  StreamHandle stream = call.settled.stream;
  outputs.clear();
  outputs.resize(memory.outputs.size());
  std::vector<std::pair<size_t, BlockRef>> staged;  // host outputs that go elsewhere at the end
  for (size_t i = 0; i < outputs.size(); ++i) {
    const GraphMemory::Output& from = memory.outputs[i];
    Value& value = outputs[i] = from.told;
    if (value.kind != Value::Kind::kTensor) continue;
    const Value* given = out.empty() || out[i].kind == Value::Kind::kNone ? nullptr : &out[i];
    const TensorPlan& plan = *plan_.tensor_of(plan_.outputs[i]);
    bool there = apart(plan);
    size_t nbytes = value.tensor.nbytes();
    void* to = nullptr;
    if (there) value.device = device_;
    if (given != nullptr) {
      if (given->block) {
        Status status = there ? given->block->order(stream, true, call.behind) : given->block->wait(true);
        if (!status.ok()) return status;
        if (there) call.writes.push_back(given->block);
      }
      if (there && given->keep) call.keeps.push_back(given->keep);
      if (is_dense(given->tensor, plan.dim_order.data())) to = given->tensor.data;
      value.tensor = given->tensor;
      value.block = given->block;
    } else if (there && borrow) {
      value.block = from.block;
      value.lease = {graph.replays, *graph.replays};
      continue;
    }
    if (to == nullptr) {
      auto block = (there ? shared_.on_device : shared_.host)->take(nbytes, stream, call.behind);
      if (!block.ok()) return block.status();
      to = (*block)->data();
      if (there) call.writes.push_back(*block);
      if (given != nullptr) {
        staged.emplace_back(i, std::move(*block));
      } else {
        value.tensor.data = to;
        value.block = std::move(*block);
      }
    }
    if (!there) call.context.staged_out = true;
    if (nbytes == 0) continue;
    if (Status status = device_->copy(to, from.block->data(), nbytes, stream); !status.ok()) return status;
  }
  if (Status status = finish(call); !status.ok()) return status;
  for (auto& [i, block] : staged) unpack(block->data(), memory.outputs[i].told.tensor, outputs[i].tensor);
  return {};
}

// Orders the call behind whoever used what the graph uses, and marks it as used when the call ends.
Status Instance::take_memory(CapturedGraph& graph, Call& call) {
  auto take = [&](const BlockRef& block, bool write) -> Status {
    if (!block) return {};
    (write ? call.writes : call.reads).push_back(block);
    return block->order(call.settled.stream, write, call.behind);
  };
  for (const auto& in : graph.memory.inputs) {
    if (Status status = take(in.block, true); !status.ok()) return status;
  }
  for (const auto& out : graph.memory.outputs) {
    if (Status status = take(out.block, true); !status.ok()) return status;
  }
  for (const auto& [block, write] : graph.uses) {
    if (Status status = take(block, write); !status.ok()) return status;
  }
  return {};
}

Status Instance::replay(std::span<const Value> inputs, std::span<const Value> out, const Replay& how,
                        CapturedGraph& graph, std::vector<Value>& outputs, CallStats& stats) {
  RunScope scope;
  if (Status status = check_targets(graph.memory, out); !status.ok()) return status;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!graph.memory.inputs[i].block) continue;
    if (Status status = check_source(i, inputs[i]); !status.ok()) return status;
  }
  Call call{inputs, out, how.settled, false, stats};
  std::optional<record::CallScope> recorded;
  if (record::recording()) {
    recorded.emplace(*device_, how.settled.stream, plan_.name, number_);
    if (!recorded->named()) recorded->name_values(value_labels());
  }
  auto enqueue = [&]() -> Status {
    shared_.retired.reap(*device_);
    reap();
    if (last_) {
      call.behind = last_;
      if (Status status = device_->wait(how.settled.stream, *last_); !status.ok()) return status;
    }
    if (Status status = take_memory(graph, call); !status.ok()) return status;
    if (Status status = fill(graph.memory, inputs, call); !status.ok()) return status;
    // What was lent of the last replay ends here, also where this one fails.
    ++*graph.replays;
    if (Status status = device_->launch(*graph.exec, how.settled.stream); !status.ok()) return status;
    return deliver(graph, out, how.borrow, call, outputs);
  };
  Status status = enqueue();
  if (status.ok()) {
    graph.last = last_;
    return {};
  }
  outputs.clear();
  // What was enqueued before the failure still uses the caller's memory.
  return also(std::move(status), drain(*device_, how.settled.stream));
}

}  // namespace headrace
