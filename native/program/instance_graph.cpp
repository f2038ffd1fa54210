// A method captured as one graph, and the graph replayed, over one instance's memory.
#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <optional>

#include "program/exit.h"
#include "program/instance.h"
#include "program/instance_scope.h"
#include "program/layout.h"
#include "program/values.h"

namespace headrace {

namespace et = executorch::runtime;

namespace {

// Runs that a warm-up takes at most until no island allocates any more.
constexpr int kWarmUps = 3;

Status failed_at(const std::string& method, const char* step, Status why) {
  Status status(ErrorCode::kCapture, method + ", capture, step '" + step + "': " + why.message());
  status.step = step;
  status.log = std::move(why.log);
  status.cause = std::move(why.cause);
  return status;
}

// A stream for one capture, gone with the scope; work on it goes on.
class PrivateStream {
 public:
  explicit PrivateStream(Device& device) : device_(device) {}
  ~PrivateStream() {
    if (handle_ != 0 && !device_.destroy_stream(handle_).ok()) (void)device_.destroy_stream(handle_);
  }
  PrivateStream(const PrivateStream&) = delete;
  PrivateStream& operator=(const PrivateStream&) = delete;
  // Non-blocking: anybody's legacy work would break the capture of another one (CAPTURE_IMPLICIT, measured).
  Status open(const PartitionRef& partition) {
    auto made = device_.create_stream({0, false, partition});
    if (made.ok()) handle_ = *made;
    return made.status();
  }
  StreamHandle handle() const { return handle_; }

 private:
  Device& device_;
  StreamHandle handle_ = 0;
};

// A capture on the stream: ended on every way out, before anything that came earlier is let go of (GR4).
// Until then the thread frees and waits for nothing.
class CaptureGuard {
 public:
  CaptureGuard(Device& device, StreamHandle stream) : device_(device), stream_(stream) {
    // Whatever the thread's mode was: what would not be replayed must not pass.
    mode_ = device_.exchange_capture_mode(CaptureMode::kThreadLocal);
  }
  ~CaptureGuard() {
    if (begun_) (void)device_.end_capture(stream_);
    (void)device_.exchange_capture_mode(mode_);
  }
  CaptureGuard(const CaptureGuard&) = delete;
  CaptureGuard& operator=(const CaptureGuard&) = delete;
  Status begin() {
    Status status = device_.begin_capture(stream_, CaptureMode::kThreadLocal);
    begun_ = status.ok();
    return status;
  }
  Result<GraphRef> end() {
    begun_ = false;
    return device_.end_capture(stream_);
  }

 private:
  PutOffScope later_;
  Device& device_;
  StreamHandle stream_;
  CaptureMode mode_;
  bool begun_ = false;
};

std::string at(int32_t instruction) { return "instruction " + std::to_string(instruction); }

}  // namespace

// ---- what can be captured

Status Instance::check_capturable() {
  auto refuse = [&](const std::string& what, const char* advice) {
    Status status(ErrorCode::kCapture, plan_.name + ", capture: " + what + "; " + advice);
    status.step = "check";
    return status;
  };
  if (device_->backend() == Backend::kCpu)
    return refuse("expected a program on a GPU or a simulated device, got one on cpu, which has no graphs",
                  "call the method");
  auto there = [&](int32_t value) {
    const TensorPlan* t = plan_.tensor_of(value);
    return t != nullptr && apart(*t);
  };
  auto index_in = [](const std::vector<int32_t>& values, int32_t value) {
    return static_cast<size_t>(std::find(values.begin(), values.end(), value) - values.begin());
  };
  std::vector<char> copied_out(plan_.outputs.size(), 0);
  int32_t instruction = 0;
  int islands = 0;
  for (const auto& chain : plan_.chains) {
    for (const Instruction& in : chain) {
      std::string where = at(instruction++);
      if (in.kind == InstructionKind::kMove || in.kind == InstructionKind::kJumpFalse)
        return refuse("expected instructions in a fixed order, got a branch at " + where +
                          ", which would be taken once, at capture",
                      "export the model without control flow");
      if (in.kind == InstructionKind::kDelegate) {
        ++islands;
        const std::string& name = plan_.delegates[static_cast<size_t>(in.target)].id;
        std::string who = where + ", delegate '" + name + "'";
        for (int32_t value : in.args) {
          if (plan_.tensor_of(value) == nullptr || there(value)) continue;
          return refuse("expected work on the device alone, got " + who +
                            ", which works on host memory: it "
                            "would run once, at capture, and never at replay",
                        "export it for the device, or call the method");
        }
        IslandCapture* part = parts_[static_cast<size_t>(in.target)].get();
        std::string why =
            part == nullptr ? "it says nothing about graphs (headrace/capture.h)" : part->refusal();
        if (!why.empty())
          return refuse("expected delegates that can be captured, got " + who + ", which cannot: " + why,
                        "call the method");
        continue;
      }
      if (in.kind != InstructionKind::kKernel) continue;
      const std::string& op = plan_.operators[static_cast<size_t>(in.target)];
      std::string who = where + ", kernel '" + op + "'";
      if (op.starts_with("et_copy::") && in.args.size() >= 2) {
        int32_t from = in.args.front(), to = in.args.back();
        if (!there(from) && there(to) && index_in(plan_.inputs, from) < plan_.inputs.size()) continue;
        size_t output = index_in(plan_.outputs, to);
        if (there(from) && !there(to) && output < plan_.outputs.size() && output_is_final_[output]) {
          for (size_t i = 0; i < plan_.outputs.size(); ++i) copied_out[i] |= plan_.outputs[i] == to;
          continue;
        }
        return refuse("expected copies between host and device at the method's ends alone, got " + who +
                          ", in its middle: the host would be read or written once, at capture",
                      "export it so that what is between stays on the device, or call the method");
      }
      bool tensors = std::any_of(in.args.begin(), in.args.end(), [&](int32_t value) {
        const ValuePlan& v = plan_.values[static_cast<size_t>(value)];
        return v.kind == ValueKind::kTensor || v.kind == ValueKind::kTensorList ||
               v.kind == ValueKind::kOptionalTensorList;
      });
      bool on_device = std::all_of(in.args.begin(), in.args.end(), [&](int32_t value) {
        return plan_.tensor_of(value) == nullptr || there(value);
      });
      // Shapes and what is computed of them are the same for every replay of one key.
      if (op == "executorch_prim::et_view.default" && on_device) continue;
      if (op.starts_with("aten::sym_") || (op.starts_with("executorch_prim::") && !tensors)) continue;
      return refuse("expected work on the device alone, got " + who +
                        ", on the cpu: it would run once, at capture, and never at replay",
                    "let a delegate take it, or call the method");
    }
  }
  if (islands == 0) return refuse("expected at least one island on the device, got none", "call the method");
  for (size_t i = 0; i < plan_.outputs.size(); ++i) {
    const TensorPlan* t = plan_.tensor_of(plan_.outputs[i]);
    if (t == nullptr || apart(*t) || copied_out[i] != 0) continue;
    return refuse("expected outputs that the device makes, got output " + std::to_string(i) +
                      ", which lies on the host and that no island writes",
                  "leave it out of the model, or call the method");
  }
  return {};
}

void Instance::baked(GraphKey& key) {
  key.loads = loads_;
  for (const auto& part : parts_) {
    if (!part) continue;
    for (const Access& access : part->state()) key.state.emplace_back(access.data, access.nbytes);
  }
}

// ---- memory of a graph

namespace {

// Dense in the program's layout.
void lay_out(const TensorPlan& plan, TensorView& view, std::array<int32_t, kMaxDims>& strides) {
  std::array<int32_t, kMaxDims> sizes{};
  for (size_t d = 0; d < static_cast<size_t>(view.ndim); ++d) sizes[d] = static_cast<int32_t>(view.sizes[d]);
  dense_strides(view.ndim, sizes.data(), plan.dim_order.data(), strides.data());
  auto width = static_cast<int64_t>(itemsize(view.dtype));
  for (size_t d = 0; d < static_cast<size_t>(view.ndim); ++d) view.strides_bytes[d] = strides[d] * width;
}

Result<std::unique_ptr<Pages>> host_memory(const std::string& method, size_t nbytes) {
  auto pages = std::make_unique<Pages>(std::max<size_t>(nbytes, 1));
  if (pages->data() != nullptr) return pages;
  Status status(ErrorCode::kOutOfDeviceMemory, method + ", capture: expected " + std::to_string(nbytes) +
                                                   " bytes on cpu, got none; free memory");
  status.device = "cpu";
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
    std::array<int32_t, kMaxDims> strides;
    lay_out(plan, view, strides);
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
    const TensorPlan& plan = *plan_.tensor_of(plan_.outputs[i]);
    void* data = out.host ? out.host->data() : out.block->data();
    et::Error error = method_->set_output_data_ptr(data, plan.nbytes, i);
    if (error == et::Error::Ok) continue;
    return Status(ErrorCode::kProgram, plan_.name + ", output " + std::to_string(i) +
                                           ": the engine refuses memory for it: " + et::to_string(error));
  }
  StageScope told(stage, notes);
  int64_t before = thread_counts().driver_allocations;
  Status status = execute(settled);
  notes.allocations = thread_counts().driver_allocations - before;
  if (!status.ok() && !call.context.failure.ok()) {
    call.context.failure.log.insert(call.context.failure.log.end(), status.log.begin(), status.log.end());
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
                                              headrace::describe(out.told.tensor));
    if (!apart(*plan_.tensor_of(plan_.outputs[i]))) {
      if (out.copied != nbytes)
        return Status(ErrorCode::kDelegate, plan_.name + ", output " + std::to_string(i) + ": expected " +
                                                std::to_string(nbytes) + " bytes from the device, got " +
                                                std::to_string(out.copied));
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
      TensorView dense = view;
      std::array<int32_t, kMaxDims> strides;
      lay_out(plan, dense, strides);
      if (!is_dense(view, strides.data())) {
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
    const TensorPlan& plan = *plan_.tensor_of(plan_.outputs[i]);
    bool there = apart(plan);
    bool given = out[i].device != nullptr && out[i].device->backend() != Backend::kCpu;
    if (there != given || (there && out[i].device != device_)) {
      ErrorCode code = there && given ? ErrorCode::kDevice : ErrorCode::kInput;
      Status status(code, plan_.name + ", out " + std::to_string(i) + ": expected memory of " +
                              (there ? device_->name() : std::string("the host")) + ", got " +
                              headrace::describe(out[i]));
      if (code == ErrorCode::kDevice) status.device = device_->name();
      return status;
    }
    const TensorView& from = memory.outputs[i].told.tensor;
    const TensorView& to = out[i].tensor;
    TensorView dense = to;
    std::array<int32_t, kMaxDims> strides;
    lay_out(plan, dense, strides);
    bool fits = to.ndim == from.ndim && to.dtype == from.dtype &&
                std::equal(from.sizes.begin(), from.sizes.begin() + from.ndim, to.sizes.begin()) &&
                (!there || is_dense(to, strides.data()));
    if (!fits)
      return Status(ErrorCode::kInput, plan_.name + ", out " + std::to_string(i) + ": expected " +
                                           (there ? std::string("dense ") : "") + headrace::describe(from) +
                                           ", got " + headrace::describe(to));
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
      TensorView dense = given->tensor;
      std::array<int32_t, kMaxDims> strides;
      lay_out(plan, dense, strides);
      if (is_dense(given->tensor, strides.data())) to = given->tensor.data;
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

// ---- capture

// One capture: its steps in order, and what undoes them.
class Instance::Capturing {
 public:
  Capturing(Instance& self, std::span<const Value> inputs, std::span<const Value> out, const Replay& how,
            CapturedGraph& graph, CallStats& stats)
      : self_(self),
        inputs_(inputs),
        out_(out),
        how_(how),
        graph_(graph),
        stats_(stats),
        stream_(*self.device_) {}

  Status run(std::vector<Value>& outputs) {
    Status status = steps(outputs);
    if (status.ok()) return status;
    outputs.clear();
    return also(std::move(status), undo());
  }

 private:
  Device& device() { return *self_.device_; }
  Status failed(const char* step, Status why) { return failed_at(self_.plan_.name, step, std::move(why)); }

  Status steps(std::vector<Value>& outputs) {
    if (Status status = stream_.open(how_.partition); !status.ok()) return failed("stream", status);
    const Settled own{stream_.handle(), true};
    if (Status status = self_.prepare(inputs_, own.stream, graph_); !status.ok())
      return failed("memory", status);
    if (Status status = save(); !status.ok()) return failed("state", status);
    {
      Call call{inputs_, out_, own, false, stats_};
      Status status = self_.fill(graph_.memory, inputs_, call);
      if (status.ok()) status = device().synchronize(own.stream);
      if (!status.ok()) {
        // The copies read the caller's memory.
        (void)drain(device(), own.stream);
        return status.code() == ErrorCode::kInput ? status : failed("inputs", status);
      }
    }
    if (Status status = warm_up(own); !status.ok()) return status;
    if (Status status = self_.check_targets(graph_.memory, out_); !status.ok()) return status;
    if (Status status = record(own); !status.ok()) return status;
    auto exec = device().instantiate(*graph_.graph);
    if (!exec.ok()) return failed("instantiate", exec.status());
    graph_.exec = std::move(*exec);
    Status status = device().upload(*graph_.exec, own.stream);
    if (status.ok()) status = device().synchronize(own.stream);
    if (!status.ok()) return failed("upload", status);
    return hand_out(outputs);
  }

  // Runs the method for real, until it allocates nothing any more; from the same state each time.
  Status warm_up(const Settled& own) {
    for (int runs = 1;; ++runs) {
      WalkNotes notes;
      ran_ = true;
      Status status = self_.walk(graph_.memory, own, CaptureStage::kWarmUp, notes);
      if (status.ok()) status = device().synchronize(own.stream);
      if (!status.ok()) return failed("warm-up", status);
      if (notes.allocations == 0) return {};
      if (runs == kWarmUps) return allocates(notes);
      if (status = restore(own.stream); !status.ok()) return failed("warm-up", status);
    }
  }

  Status allocates(const WalkNotes& notes) {
    std::string who;
    for (int32_t instruction : notes.allocating) {
      for (const IslandPlan& island : islands_of(self_.plan_)) {
        if (island.instruction != instruction) continue;
        who += (who.empty() ? "" : ", ") + at(instruction) + " (delegate '" +
               self_.plan_.delegates[static_cast<size_t>(island.delegate)].id + "')";
      }
    }
    Status status(
        ErrorCode::kCapture,
        self_.plan_.name + ", capture: expected runs that allocate no device memory after the first, got " +
            std::to_string(notes.allocations) + " allocations in run " + std::to_string(kWarmUps) +
            (who.empty() ? "" : " by " + who) + "; let the delegate keep its memory, or call the method");
    status.step = "check";
    return status;
  }

  Status record(const Settled& own) {
    WalkNotes notes;
    {
      CaptureGuard guard(device(), own.stream);
      if (Status status = guard.begin(); !status.ok()) return failed("begin_capture", status);
      Status status = self_.walk(graph_.memory, own, CaptureStage::kCapture, notes);
      auto recorded = guard.end();
      if (!status.ok()) return failed("record", also(std::move(status), recorded.status()));
      if (!recorded.ok()) return failed("end_capture", recorded.status());
      graph_.graph = std::move(*recorded);
    }
    graph_.uses = std::move(notes.uses);
    for (const auto& part : self_.parts_) {
      if (!part) continue;
      if (auto pin = part->pin()) graph_.pins.push_back(std::move(pin));
    }
    return {};
  }

  // The outputs of the one step that was run. Everything before is complete.
  Status hand_out(std::vector<Value>& outputs) {
    Call call{inputs_, out_, how_.settled, false, stats_};
    Status status = self_.take_memory(graph_, call);
    if (status.ok()) status = self_.deliver(graph_, out_, how_.borrow, call, outputs);
    if (status.ok()) {
      graph_.last = self_.last_;
      return {};
    }
    (void)drain(device(), how_.settled.stream);
    return failed("outputs", status);
  }

  // ---- the state of the delegates

  Status save() {
    for (const auto& part : self_.parts_) {
      if (!part) continue;
      for (const Access& access : part->state()) {
        auto block = graph_.ring->take(access.nbytes, stream_.handle());
        if (!block.ok()) return block.status();
        saved_.emplace_back(access, std::move(*block));
      }
    }
    for (auto& [access, block] : saved_) {
      if (access.nbytes == 0) continue;
      Status status = device().copy(block->data(), access.data, access.nbytes, stream_.handle());
      if (!status.ok()) return status;
    }
    return {};
  }

  Status restore(StreamHandle stream) {
    for (auto& [access, block] : saved_) {
      if (access.nbytes == 0) continue;
      Status status = device().copy(const_cast<void*>(access.data), block->data(), access.nbytes, stream);
      if (!status.ok()) return status;
    }
    return device().synchronize(stream);
  }

  Status undo() {
    if (stream_.handle() == 0) return {};
    (void)drain(device(), stream_.handle());
    if (!ran_ || saved_.empty()) return {};
    Status status = restore(stream_.handle());
    if (!status.ok()) status = restore(kPerThreadStream);
    if (status.ok()) return {};
    return Status(status.code(),
                  self_.plan_.name +
                      ", capture: the state of its delegates could not be put back: " + status.message());
  }

  Instance& self_;
  std::span<const Value> inputs_, out_;
  const Replay& how_;
  CapturedGraph& graph_;
  CallStats& stats_;
  std::vector<std::pair<Access, BlockRef>> saved_;
  bool ran_ = false;
  PrivateStream stream_;
};

// What came before on the caller's stream and in this instance: its failures are its own, and a capture
// cannot wait for events from outside.
Status Instance::settle_before(const Settled& settled) {
  if (last_) {
    if (Status status = device_->synchronize(*last_); !status.ok()) return status;
    host_reads_ = false;
  }
  auto event = shared_.events.take(*device_);
  if (!event.ok()) return event.status();
  if (Status status = device_->record(**event, settled.stream); !status.ok()) return status;
  return device_->synchronize(**event);
}

Status Instance::capture(std::span<const Value> inputs, std::span<const Value> out, const Replay& how,
                         CapturedGraph& graph, std::vector<Value>& outputs, CallStats& stats) try {
  RunScope scope;
  if (torn_) {
    if (Status status = mend(); !status.ok()) return status;
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].kind != Value::Kind::kTensor) continue;
    if (Status status = check_source(i, inputs[i]); !status.ok()) return status;
  }
  return Capturing(*this, inputs, out, how, graph, stats).run(outputs);
} catch (const std::bad_alloc&) {
  return failed_at(plan_.name, "memory",
                   Status(ErrorCode::kOutOfDeviceMemory, "expected memory on cpu, got none; free memory"));
}

}  // namespace headrace
