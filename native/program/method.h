// A method at run time: hands its instances to calls, one call to an instance at a time.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "headrace/program.h"
#include "program/instance.h"

namespace headrace {

// Counts of what the calling thread does, into `stats`, until end() or its own.
class CountScope {
 public:
  explicit CountScope(CallStats& stats) : stats_(stats), before_(thread_counts()) {}
  ~CountScope() { end(); }
  CountScope(const CountScope&) = delete;
  CountScope& operator=(const CountScope&) = delete;
  void end();

 private:
  CallStats& stats_;
  ThreadCounts before_;
  bool ended_ = false;
};
void add(CallStats& total, const CallStats& stats);

class MethodPool : public std::enable_shared_from_this<MethodPool> {
 public:
  static Result<std::shared_ptr<MethodPool>> load(std::shared_ptr<ProgramCore> core, const MethodPlan& plan,
                                                  int instances);
  const std::string& name() const { return name_; }
  const std::vector<ValueInfo>& inputs() const { return inputs_; }
  const std::vector<ValueInfo>& outputs() const { return outputs_; }
  const std::vector<IslandInfo>& islands() const { return islands_; }
  const DeviceRef& device() const { return device_; }
  int64_t stats(CallStats* last, CallStats* total) const;
  void memory(std::vector<MemoryUse>& out) const;

  bool outside_lanes(const Settled& settled) const;
  Result<Settled> settle(const CallStream& options) const;
  Status run(std::span<const Value> inputs, std::span<const Value> out, const CallOptions& options,
             std::vector<Value>& outputs);
  Result<std::shared_ptr<GraphSet>> capture(std::span<const Value> inputs, const CaptureOptions& options,
                                            std::vector<Value>& outputs);
  // Waits for running calls. What check_close() refuses is refused; any other failure is of work that was
  // waited for, and the method is closed.
  Status close();
  // kInput: from inside a call of this method; kDevice: from inside a host function.
  Status check_close() const;

 private:
  friend class GraphSet;
  MethodPool(std::shared_ptr<ProgramCore> core, const MethodPlan& plan);
  // The turn of one instance, which ends with it.
  class Turn {
   public:
    Turn(MethodPool& pool, size_t instance) : pool_(&pool), instance_(instance) {}
    Turn(Turn&& other) noexcept
        : stats(other.stats), pool_(std::exchange(other.pool_, nullptr)), instance_(other.instance_) {}
    Turn& operator=(Turn&&) = delete;
    ~Turn() {
      if (pool_ != nullptr) pool_->release(instance_, stats);
    }
    size_t instance() const { return instance_; }
    const CallStats* stats = nullptr;  // of a call; null: it was none

   private:
    MethodPool* pool_;
    size_t instance_;
  };
  // Of one instance, or of any that is idle.
  Result<Turn> acquire(std::optional<size_t> which = std::nullopt);
  void release(size_t instance, const CallStats* stats);
  Instance& instance(size_t which) { return *instances_[which]; }  // in its turn
  Retired& retired() { return shared_.retired; }
  // Why graphs are off for this method: a capture failed (GR6). Ok: they are not.
  Status graphs_off() const;
  // Returns `why`, and what to do about it.
  Status turn_graphs_off(Status why);
  Status check_inputs(std::span<const Value> inputs) const;
  Status check_out(std::span<const Value> out) const;

  std::string name_;
  std::vector<ValueInfo> inputs_, outputs_;
  std::vector<IslandInfo> islands_;
  DeviceRef device_;
  bool uses_device_;
  std::shared_ptr<const Lane> lane_;
  mutable std::atomic<bool> told_outside_{false};
  Shared shared_;

  std::shared_ptr<ProgramCore> core_;  // before the instances, which point into it; null once closed
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::unique_ptr<Instance>> instances_;
  std::vector<size_t> idle_;
  std::vector<std::thread::id> busy_;  // by instance; a default id when idle
  bool closed_ = false;
  Status graphs_off_;
  std::vector<std::weak_ptr<GraphSet>> graphs_;
  size_t next_graph_ = 0;  // whose instance the next one takes
  int64_t calls_ = 0;
  CallStats last_, total_;
};

}  // namespace headrace
