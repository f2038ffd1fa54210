// Partitions of the simulated device: counts of pretend SMs. Locked by themselves, so that the last reference
// may go anywhere.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "headrace/device.h"

namespace headrace::sim {

// Which SMs are left. Partitions hold it, so it outlives the device if they do.
class Sms {
 public:
  explicit Sms(const SmLimits& limits) : limits_(limits), used_(static_cast<size_t>(limits.total)) {}
  const SmLimits& limits() const { return limits_; }
  // What a request for `sm_count` is granted.
  int granted(int sm_count) const;
  // All or nothing, the lowest numbers first; what was left if nothing.
  bool take(std::span<const int> counts, std::vector<std::vector<int>>* numbers, int* left);
  void give(std::span<const int> numbers);

 private:
  const SmLimits limits_;
  std::mutex mutex_;
  std::vector<bool> used_;
};

class SimPartition final : public Partition {
 public:
  SimPartition(const Device& device, std::shared_ptr<Sms> sms, std::vector<int> numbers,
               const PartitionOptions& options);
  ~SimPartition() override;
  int sm_count() const override { return static_cast<int>(numbers_.size()); }
  // As asked for: this device has as many workqueues as anybody wants.
  std::optional<int> workqueue_concurrency_limit() const override {
    return options_.workqueue_concurrency_limit;
  }
  // Of its multiprocessors, ascending.
  const std::vector<int>& numbers() const { return numbers_; }
  Status close() override;
  bool closed() const override { return closed_; }

 private:
  std::shared_ptr<Sms> sms_;
  const std::vector<int> numbers_;
  const PartitionOptions options_;
  std::atomic<bool> closed_{false};
};

Result<std::vector<PartitionRef>> split(const Device& device, const std::shared_ptr<Sms>& sms,
                                        std::span<const int> counts, const PartitionOptions& options);

}  // namespace headrace::sim
