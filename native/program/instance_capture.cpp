// A method captured as one graph: the steps of one capture, and what undoes them.
#include <algorithm>
#include <new>
#include <optional>

#include "program/exit.h"
#include "program/instance.h"

namespace headrace {

namespace {

// Runs that a warm-up takes at most until no island allocates any more.
constexpr int kWarmUps = 3;

Status failed_at(const std::string& method, const char* step, Status why) {
  Status status(ErrorCode::kCapture, method + ", capture, step '" + step + "': " + why.message());
  status->step = step;
  status->log = std::move(why->log);
  status->cause = std::move(why->cause);
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
    status->step = "check";
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
    status->step = "check";
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
    return Status(status.code(), self_.plan_.name +
                                     ", capture: expected to put the state of its delegates back, got: " +
                                     status.message() + "; load the program again");
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
