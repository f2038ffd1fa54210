#include "device/sim_partition.h"

#include <algorithm>

#include "device/refusal.h"

namespace headrace::sim {

// As cuDevSmResourceSplitByCount does it (measured on an H200, least 8, alignment 8: 1 to 8 give 8, 9 gives
// 16, 100 gives 104), and all 132 of 132 though 132 is no multiple of 8.
int Sms::granted(int sm_count) const {
  if (sm_count >= limits_.total) return sm_count;
  int alignment = std::max(limits_.alignment, 1);
  int64_t up =
      (static_cast<int64_t>(std::max(sm_count, limits_.least)) + alignment - 1) / alignment * alignment;
  return static_cast<int>(up);
}

bool Sms::take(std::span<const int> counts, std::vector<std::vector<int>>* numbers, int* left) {
  std::lock_guard lock(mutex_);
  *left = static_cast<int>(std::count(used_.begin(), used_.end(), false));
  int64_t total = 0;
  for (int count : counts) total += count;
  if (total > *left) return false;
  size_t next = 0;
  for (int count : counts) {
    std::vector<int>& taken = numbers->emplace_back();
    for (; std::ssize(taken) < count; ++next) {
      if (used_[next]) continue;
      used_[next] = true;
      taken.push_back(static_cast<int>(next));
    }
  }
  return true;
}

void Sms::give(std::span<const int> numbers) {
  std::lock_guard lock(mutex_);
  for (int number : numbers) used_[static_cast<size_t>(number)] = false;
}

SimPartition::SimPartition(const Device& device, std::shared_ptr<Sms> sms, std::vector<int> numbers,
                           const PartitionOptions& options)
    : Partition(device), sms_(std::move(sms)), numbers_(std::move(numbers)), options_(options) {}

SimPartition::~SimPartition() { sms_->give(numbers_); }

Status SimPartition::close() {
  closed_ = true;
  return {};
}

Result<std::vector<PartitionRef>> split(const Device& device, const std::shared_ptr<Sms>& sms,
                                        std::span<const int> counts, const PartitionOptions& options) {
  std::string list;
  std::vector<int> granted;
  int64_t total = 0;
  for (int count : counts) {
    granted.push_back(sms->granted(count));
    total += granted.back();
    list += (list.empty() ? "" : " + ") + std::to_string(granted.back());
  }
  int left = 0;
  std::vector<std::vector<int>> taken;
  if (!sms->take(granted, &taken, &left)) {
    const SmLimits& limits = sms->limits();
    return refusal(
        ErrorCode::kDevice, device.name(), "split",
        "at most " + std::to_string(left) + " SMs (what is left of " + std::to_string(limits.total) + ")",
        std::to_string(total) + " (" + list + ", rounded up to multiples of " +
            std::to_string(limits.alignment) + ", at least " + std::to_string(limits.least) + ")",
        "ask for fewer, or drop partitions (CUDA: CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION)");
  }
  std::vector<PartitionRef> made;
  for (auto& numbers : taken)
    made.push_back(std::make_shared<SimPartition>(device, sms, std::move(numbers), options));
  return made;
}

}  // namespace headrace::sim
