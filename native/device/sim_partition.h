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
  explicit Sms(const SmLimits& limits) : limits_(limits) {}
  const SmLimits& limits() const { return limits_; }
  // What a request for `sm_count` is granted.
  int granted(int sm_count) const;
  // All or nothing; what was left if nothing.
  bool take(int sm_count, int* left);
  void give(int sm_count);

 private:
  const SmLimits limits_;
  std::mutex mutex_;
  int used_ = 0;
};

class SimPartition final : public Partition {
 public:
  SimPartition(const Device& device, std::shared_ptr<Sms> sms, int sm_count);
  ~SimPartition() override;
  int sm_count() const override { return sm_count_; }
  Status close() override;
  bool closed() const override { return closed_; }

 private:
  std::shared_ptr<Sms> sms_;
  const int sm_count_;
  std::atomic<bool> closed_{false};
};

Result<std::vector<PartitionRef>> split(const Device& device, const std::shared_ptr<Sms>& sms,
                                        std::span<const int> counts);

}  // namespace headrace::sim
