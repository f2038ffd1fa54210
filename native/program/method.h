// A method at run time: hands its instances to calls, one call to an instance at a time.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "headrace/program.h"
#include "program/instance.h"

namespace headrace {

class MethodPool {
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

  Status run(std::span<const Value> inputs, std::span<const Value> out, const CallOptions& options,
             std::vector<Value>& outputs);
  // Waits for running calls. What check_close() refuses is refused; any other failure is of work that was waited
  // for, and the method is closed.
  Status close();
  // kInput: from inside a call of this method; kDevice: from inside a host function.
  Status check_close() const;

 private:
  MethodPool(std::shared_ptr<ProgramCore> core, const MethodPlan& plan);
  Result<size_t> acquire();
  void release(size_t instance, const CallStats& stats);
  Result<Settled> settle(const CallOptions& options) const;
  Status check_inputs(std::span<const Value> inputs) const;
  Status check_out(std::span<const Value> out) const;

  std::string name_;
  std::vector<ValueInfo> inputs_, outputs_;
  std::vector<IslandInfo> islands_;
  DeviceRef device_;
  bool uses_device_;
  Shared shared_;

  std::shared_ptr<ProgramCore> core_;  // before the instances, which point into it; null once closed
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::unique_ptr<Instance>> instances_;
  std::vector<size_t> idle_;
  std::vector<std::thread::id> busy_;  // by instance; a default id when idle
  bool closed_ = false;
  int64_t calls_ = 0;
  CallStats last_, total_;
};

}  // namespace headrace
