// Methods at run time: an Instance owns the planned memory and the engine's method; a MethodPool hands
// instances to calls, one call to an instance at a time.
#pragma once

#include <executorch/extension/memory_allocator/malloc_memory_allocator.h>
#include <executorch/runtime/backend/backend_options_map.h>
#include <executorch/runtime/executor/method.h>
#include <executorch/runtime/executor/program.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "headrace/program.h"
#include "program/data_map.h"
#include "program/pages.h"
#include "program/plan.h"
#include "program/ring.h"

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
  int64_t max_steps = 0;
};

// One copy of a method's memory and of its delegates' state.
class Instance {
 public:
  static Result<std::unique_ptr<Instance>> load(const ProgramCore& core, const MethodPlan& plan);
  ~Instance();

  Status run(std::span<const Value> inputs, std::span<const Value> out, Ring& ring,
             std::vector<Value>& outputs, CallStats& stats);
  const std::vector<BufferPlan>& buffers() const { return plan_.buffers; }

 private:
  struct TensorSlot;  // the engine's view on one input of one call
  Instance(const ProgramCore& core, const MethodPlan& plan);
  Status open();
  Status reopen();
  Status allocate();
  Status bind_input(size_t i, const Value& value, CallStats& stats);
  Status bind_output(size_t i, const Value* given, Ring& ring, Value& out);
  Status collect_output(size_t i, const Value* given, Ring& ring, Value& out);
  Status execute();

  const ProgramCore& core_;
  const MethodPlan& plan_;
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  std::vector<Pages> arenas_;
  std::vector<executorch::runtime::Span<uint8_t>> spans_;
  executorch::extension::MallocMemoryAllocator method_allocator_, temp_allocator_;
  std::optional<executorch::runtime::HierarchicalAllocator> planned_;
  std::optional<executorch::runtime::MemoryManager> memory_;
  std::optional<executorch::runtime::Method> method_;
  std::vector<std::unique_ptr<TensorSlot>> slots_;
  std::vector<char>
      output_is_caller_memory_;  // unplanned outputs, bound to a block or to `out` for each call
  bool broken_ = false;          // reopen() before the next call
};

class MethodPool {
 public:
  static Result<std::shared_ptr<MethodPool>> load(std::shared_ptr<ProgramCore> core, const MethodPlan& plan,
                                                  int instances);
  const std::string& name() const { return name_; }
  const std::vector<ValueInfo>& inputs() const { return inputs_; }
  const std::vector<ValueInfo>& outputs() const { return outputs_; }
  const std::vector<IslandInfo>& islands() const { return islands_; }
  CallStats stats() const;
  void memory(std::vector<MemoryUse>& out) const;

  Status run(std::span<const Value> inputs, std::span<const Value> out, const CallOptions& options,
             std::vector<Value>& outputs);
  // Waits for running calls. kInput: called from inside a call of this method.
  Status close();

 private:
  MethodPool(std::shared_ptr<ProgramCore> core, const MethodPlan& plan);
  Result<size_t> acquire();
  void release(size_t instance, const CallStats& stats);
  Status check_inputs(std::span<const Value> inputs) const;
  Status check_out(std::span<const Value> out) const;

  std::string name_;
  std::vector<ValueInfo> inputs_, outputs_;
  std::vector<IslandInfo> islands_;
  std::shared_ptr<Ring> ring_ = std::make_shared<Ring>();

  std::shared_ptr<ProgramCore> core_;  // before the instances, which point into it; null once closed
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::unique_ptr<Instance>> instances_;
  std::vector<size_t> idle_;
  std::vector<std::thread::id> busy_;  // by instance; a default id when idle
  bool closed_ = false;
  CallStats stats_;
};

}  // namespace headrace
