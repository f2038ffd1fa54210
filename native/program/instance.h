// One copy of a method at run time: its planned memory, the engine's method, and a call from the inputs'
// binding to the outputs.
#pragma once

#include <executorch/extension/memory_allocator/malloc_memory_allocator.h>
#include <executorch/runtime/backend/backend_options_map.h>
#include <executorch/runtime/executor/method.h>
#include <executorch/runtime/executor/program.h>

#include <array>
#include <cstdlib>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "headrace/program.h"
#include "program/allocator.h"
#include "program/data_map.h"
#include "program/graph.h"
#include "program/islands.h"
#include "program/lane.h"
#include "program/pages.h"
#include "program/plan.h"

namespace headrace {

// What all methods of a program share. Immutable once loaded.
class ProgramCore {
 public:
  ProgramCore();
  ~ProgramCore();
  ProgramCore(const ProgramCore&) = delete;
  ProgramCore& operator=(const ProgramCore&) = delete;

  std::shared_ptr<const Bytes> file;
  std::vector<std::shared_ptr<const Bytes>> data;
  ProgramPlan plan;
  DataMap data_map;
  std::unique_ptr<executorch::runtime::DataLoader> loader;
  std::optional<executorch::runtime::Program> program;
  std::map<std::string, std::map<std::string, OptionValue>> options;
  DeviceRef device;                  // never null
  std::shared_ptr<const Lane> lane;  // null: calls without a stream are on the per-thread one
  int64_t max_steps = 0;
  mutable DelegateState delegate_state;
};

// `status`, and what else failed while it was cleaned up after.
Status also(Status status, const Status& other);

// What the calls of one method share beside its instances.
struct Shared {
  explicit Shared(const DeviceRef& device) : host(std::make_shared<Ring>(nullptr)) {
    if (device->backend() == Backend::kCpu) return;
    on_device = std::make_shared<Ring>(device);
    planned = std::make_shared<Ring>(device);
  }
  std::shared_ptr<Ring> host, on_device;  // outputs and staging
  std::shared_ptr<Ring> planned;          // planned buffers on the device
  EventPool events;
  Retired retired;  // what launches of graphs still use
};

// One copy of a method's memory and of its delegates' state. One call at a time.
class Instance {
 public:
  static Result<std::unique_ptr<Instance>> load(const ProgramCore& core, const MethodPlan& plan,
                                                Shared& shared);
  // As close(), where nobody asks.
  ~Instance();
  // Waits for the last call's work and returns what failed in it, which its outputs say too.
  Status close();

  Status run(std::span<const Value> inputs, std::span<const Value> out, const Settled& settled, bool strict,
             std::vector<Value>& outputs, CallStats& stats);
  const std::vector<BufferPlan>& buffers() const { return plan_.buffers; }

  // ---- graphs (instance_capture.cpp, instance_graph.cpp)
  // Why the method cannot be captured; asks the plan and every delegate, and does nothing else (GR7).
  Status check_capturable();
  // What a graph captured now would bake in of this instance, beside shapes and partition.
  void baked(GraphKey& key);
  // Waits for what came before in this instance and on the stream, whose failures are told as they are.
  Status settle_before(const Settled& settled);
  // After settle_before(). Runs the method once on `inputs` and captures it: the outputs are those of that
  // one step, and the state of the delegates has advanced by one step. On failure it is what it was, and
  // nothing is kept.
  Status capture(std::span<const Value> inputs, std::span<const Value> out, const Replay& how,
                 CapturedGraph& graph, std::vector<Value>& outputs, CallStats& stats);
  Status replay(std::span<const Value> inputs, std::span<const Value> out, const Replay& how,
                CapturedGraph& graph, std::vector<Value>& outputs, CallStats& stats);

 private:
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  // The engine's view on one input of one call.
  struct TensorSlot {
    std::array<int32_t, kMaxDims> sizes, strides;
    std::array<uint8_t, kMaxDims> dim_order;
    std::optional<executorch::aten::TensorImpl> impl;
    std::unique_ptr<uint8_t, Free> scratch;
    size_t scratch_capacity = 0;
  };
  // What one call gathers.
  struct Call {
    std::span<const Value> inputs, out;
    const Settled& settled;
    bool strict;
    CallStats& stats;
    CallContext context{};
    std::vector<BlockRef> reads{}, writes{};
    std::vector<std::shared_ptr<void>> keeps{};
    EventRef behind{};  // the call before, which the stream was ordered behind; none: nothing was
  };
  Instance(const ProgramCore& core, const MethodPlan& plan, Shared& shared);
  Status allocate();
  Status load_method();
  Status mend();
  // instance_io.cpp: how the caller's values and the engine's meet.
  Status bind_input(size_t i, const Value& value, Call& call);
  Status bind_tensor(size_t i, const Value& value, Call& call);
  Status stage_in(size_t i, const TensorView& view, Call& call, void*& data);
  Status stage_out(size_t i, const Value& value, Call& call, void*& data);
  // Makes room in the input's scratch memory, whose bytes are lost. `purpose`: for the message.
  Status reserve_scratch(size_t i, size_t nbytes, const char* purpose);
  Status dense_on_host(size_t i, const TensorView& view, Call& call, void*& data);
  // Whether `out` lies where the output does.
  Status check_out_device(size_t i, const Value& given) const;
  // Memory of the caller's or a block for an output that the plan leaves without.
  Status bind_output_memory(size_t i, void* data);
  Status bind_output(size_t i, const Value* given, Call& call, Value& out);
  Status collect_output(size_t i, const Value* given, Call& call, Value& out);
  Status execute(const Settled& settled);
  // What surrounds a run of the engine: the thread's bindings to device and stream (instance_scope.h).
  class Scope;
  class Capturing;  // the steps of one capture (instance_capture.cpp, instance_graph.cpp)
  // One walk over a graph's memory: `stage` says what for.
  Status walk(GraphMemory& memory, const Settled& settled, CaptureStage stage, WalkNotes& notes);
  Status note_outputs(GraphMemory& memory, const Settled& settled);
  Status prepare(std::span<const Value> inputs, StreamHandle stream, CapturedGraph& graph);
  Status fill(GraphMemory& memory, std::span<const Value> inputs, Call& call);
  Status check_targets(const GraphMemory& memory, std::span<const Value> out) const;
  Status take_memory(CapturedGraph& graph, Call& call);
  Status deliver(CapturedGraph& graph, std::span<const Value> out, bool borrow, Call& call,
                 std::vector<Value>& outputs);
  // Lets go of foreign memory whose work is done.
  void reap();
  // Whether an input may be read from where it lies; nothing is read.
  Status check_source(size_t i, const Value& value) const;
  // Kind, shape and dtype of the engine's output, or the number; returns where it lies.
  const void* describe_output(size_t i, Value& out) const;
  // instance_record.h: the same, instruction by instruction, for whoever records.
  class Walk;
  std::vector<std::string> value_labels() const;
  Status begin(Call& call);
  Status finish(Call& call);
  // Whether the value lies on a device whose memory the host cannot touch.
  bool apart(const TensorPlan& t) const;
  void* planned_address(const TensorPlan& t) const;
  bool read_later(int32_t value) const;

  const ProgramCore& core_;
  const MethodPlan& plan_;
  DeviceRef device_;
  Shared& shared_;
  bool uses_device_;
  DelegateState delegate_state_;  // before the method, whose delegates use it
  std::vector<Pages> arenas_;
  std::vector<BlockRef> device_arenas_;
  std::vector<executorch::runtime::Span<uint8_t>> spans_;
  std::vector<executorch::runtime::etensor::Device> span_devices_;
  executorch::extension::MallocMemoryAllocator method_allocator_, temp_allocator_;
  std::optional<executorch::runtime::HierarchicalAllocator> planned_;
  std::optional<executorch::runtime::MemoryManager> memory_;
  std::optional<executorch::runtime::Method> method_;
  std::vector<std::unique_ptr<TensorSlot>> slots_;
  std::vector<char>
      output_is_caller_memory_;        // unplanned outputs, bound to a block or to `out` for each call
  std::vector<char> output_is_final_;  // no instruction reads the output after the one that makes it
  std::vector<char> output_place_is_its_own_;  // a copy to its address is that of the output
  std::vector<char> input_is_written_;         // by the program itself: never the caller's memory
  std::vector<const void*> overwritten_;       // see overwritten_sources()
  bool torn_ = false;  // a call ended in the middle of a loop, whose counters are now anything
  std::vector<std::shared_ptr<IslandCapture>>
      parts_;           // of the method's delegates, as they take part in graphs
  uint64_t loads_ = 0;  // of the engine's method: each makes new delegates

  const uint64_t number_;            // unique in the process, for records
  std::vector<IslandPlan> islands_;  // once a call was recorded

  EventRef last_;                              // behind the work of the last call, where it may still run
  std::vector<std::weak_ptr<Block>> written_;  // by that work, while nobody waited for it
  bool host_reads_ = false;                    // that work reads planned host memory
  std::vector<std::pair<EventRef, std::shared_ptr<void>>> kept_;  // foreign memory that work in flight reads
};

}  // namespace headrace
