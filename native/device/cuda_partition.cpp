// Partitions of the CUDA device: green contexts.
#include <algorithm>

#include "device/cuda.h"
#include "device/refusal.h"

namespace headrace {

// ---- the SMs

SmLimits CudaSms::limits() const {
  const cu::Driver& driver = device_.driver();
  int total = 0;
  (void)driver.DeviceGetAttribute(&total, cu::kAttributeSmCount, device_.device());
  cu::Resource all{};
  if (driver.missing_for_partitions() != nullptr ||
      driver.DeviceGetDevResource(device_.device(), &all, cu::kResourceSm) != cu::kSuccess)
    return {total, 0, 0};
  return {static_cast<int>(all.sm.sm_count), static_cast<int>(all.sm.least),
          static_cast<int>(all.sm.alignment)};
}

// Under mutex_.
Status CudaSms::split() {
  if (!groups_.empty()) return {};
  const cu::Driver& driver = device_.driver();
  cu::Resource all{}, rest{};
  if (cu::Code code = driver.DeviceGetDevResource(device_.device(), &all, cu::kResourceSm);
      code != cu::kSuccess)
    return device_.cannot_split("cuDeviceGetDevResource", code);
  unsigned count = 0;
  if (cu::Code code = driver.DevSmResourceSplitByCount(nullptr, &count, &all, nullptr, 0, all.sm.least);
      code != cu::kSuccess)
    return device_.cannot_split("cuDevSmResourceSplitByCount", code);
  std::vector<cu::Resource> groups(count);
  if (cu::Code code = driver.DevSmResourceSplitByCount(groups.data(), &count, &all, &rest, 0, all.sm.least);
      code != cu::kSuccess)
    return device_.cannot_split("cuDevSmResourceSplitByCount", code);
  groups.resize(count);
  if (groups.empty())
    return refusal(ErrorCode::kDevice, device_.name(), "split",
                   "groups of " + std::to_string(all.sm.least) + " SMs",
                   "none from " + std::to_string(all.sm.sm_count), "use the whole device");
  bool left_over = rest.type == cu::kResourceSm && rest.sm.sm_count != 0;
  if (left_over) groups.push_back(rest);
  used_.assign(groups.size(), false);
  groups_ = std::move(groups);
  return {};
}

Result<std::vector<CudaSms::Groups>> CudaSms::take(std::span<const int> sms, int* left) {
  std::lock_guard lock(mutex_);
  if (Status status = split(); !status.ok()) return status;
  *left = 0;
  for (size_t i = 0; i < groups_.size(); ++i) {
    if (!used_[i]) *left += static_cast<int>(groups_[i].sm.sm_count);
  }
  std::vector<bool> used = used_;
  std::vector<Groups> taken;
  for (int wanted : sms) {
    Groups one;
    // The remainder is the last of them: it comes to a lane only where whole groups do not do.
    for (size_t i = 0; i < groups_.size() && one.sm_count < wanted; ++i) {
      if (used[i]) continue;
      used[i] = true;
      one.indices.push_back(i);
      one.sm_count += static_cast<int>(groups_[i].sm.sm_count);
    }
    if (one.sm_count < wanted) return std::vector<Groups>();
    taken.push_back(std::move(one));
  }
  used_ = std::move(used);
  return taken;
}

void CudaSms::give(const Groups& groups) {
  std::lock_guard lock(mutex_);
  for (size_t group : groups.indices) used_[group] = false;
}

std::vector<cu::Resource> CudaSms::resources(const Groups& groups) const {
  std::lock_guard lock(mutex_);
  std::vector<cu::Resource> out;
  for (size_t group : groups.indices) out.push_back(groups_[group]);
  return out;
}

// ---- a partition

CudaPartition::CudaPartition(CudaDevice& device, CudaSms::Groups sms)
    : Partition(device), device_(device), groups_(std::move(sms)) {}

CudaPartition::~CudaPartition() {
  bool gone = context_ == nullptr;
  if (!gone) {
    Current current(device_);
    if (current.ok()) {
      Relaxed relaxed(device_.driver());
      device_.end(resting);
      gone = device_.driver().GreenCtxDestroy(context_) == cu::kSuccess;
    }
  }
  // Of a context that lives on, others must not get the multiprocessors.
  if (gone) device_.sms().give(groups_);
}

Status CudaPartition::close() {
  closed_ = true;
  return {};
}

Status CudaPartition::open() {
  const cu::Driver& driver = device_.driver();
  std::vector<cu::Resource> resources = device_.sms().resources(groups_);
  cu::ResourceDescription description = nullptr;
  cu::Code code =
      driver.DevResourceGenerateDesc(&description, resources.data(), static_cast<unsigned>(resources.size()));
  // Measured: with the null description of a failure, cuGreenCtxCreate makes a context of the whole device.
  if (code != cu::kSuccess) return device_.cannot_split("cuDevResourceGenerateDesc", code);
  if (description == nullptr)
    return refusal(ErrorCode::kDevice, device_.name(), "split", "a description of the partition", "none",
                   "update the driver");
  cu::GreenContext made = nullptr;
  code = driver.GreenCtxCreate(&made, description, device_.device(), cu::kGreenDefaultStream);
  if (code != cu::kSuccess) return device_.cannot_split("cuGreenCtxCreate", code);
  context_ = made;
  cu::Resource granted{};
  code = driver.GreenCtxGetDevResource(context_, &granted, cu::kResourceSm);
  if (code != cu::kSuccess) return device_.cannot_split("cuGreenCtxGetDevResource", code);
  sm_count_ = static_cast<int>(granted.sm.sm_count);
  if (sm_count_ != groups_.sm_count)
    return refusal(ErrorCode::kDevice, device_.name(), "split",
                   "a partition of " + std::to_string(groups_.sm_count) + " SMs",
                   "one of " + std::to_string(sm_count_) + ", read back from its context",
                   "report the driver's version with this message");
  return {};
}

// ---- the device

SmLimits CudaDevice::do_sm_limits() const { return sms_.limits(); }

// The driver's codes say little; what the process or the GPU is shared by says more.
Status CudaDevice::cannot_split(const char* entry, cu::Code code) const {
  bool refused = code == cu::kNotSupported || code == cu::kNotPermitted || code == cu::kInvalidResourceType ||
                 code == cu::kInvalidResourceConfiguration;
  int mps = 0;
  (void)driver_.DeviceGetAttribute(&mps, cu::kAttributeMps, device_);
  char text[256] = {};
  (void)driver_.DeviceGetName(text, sizeof text - 1, device_);
  const std::string gpu = text;
  // What an instance is called: "NVIDIA H200 MIG 1g.18gb".
  bool mig = gpu.find(" MIG ") != std::string::npos;
  if (!refused) {
    Status status = failed("split", code);
    if (mps == 0) return status;
    Status named(status.code(), status.message() + "; this process runs under MPS");
    named->device = status->device;
    return named;
  }
  std::string got = driver_.text(code) + " from " + entry + " on " + gpu;
  const char* advice =
      "use the whole device: its green contexts are missing in this GPU, or in this driver for it";
  if (mps != 0) {
    got += ", in a process under MPS";
    advice =
        "run the process without the MPS server (it is one when CUDA_MPS_PIPE_DIRECTORY leads to none), or "
        "let MPS "
        "divide the GPU (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE)";
  } else if (mig) {
    got += ", which is a MIG instance";
    advice =
        "give the process the whole GPU, or let an instance be the lane: it has multiprocessors and memory "
        "bandwidth "
        "of its own";
  }
  return refusal(ErrorCode::kDevice, name(), "split", "a GPU that is split into green contexts", got, advice);
}

Result<std::vector<PartitionRef>> CudaDevice::do_split(std::span<const int> sms) {
  if (const char* missing = driver_.missing_for_partitions())
    return refusal(
        ErrorCode::kDevice, name(), "split", "a driver with green contexts (CUDA 12.4, driver 550)",
        "one for CUDA " + cu::version_text(driver_.version) + ", without " + missing, "update the driver");
  Current current(*this);
  if (!current.ok()) return failed("split", current.code());
  reap();
  int left = 0;
  auto taken = sms_.take(sms, &left);
  if (taken.ok() && (*taken).empty() && any_retired_) {
    reap_all();
    taken = sms_.take(sms, &left);
  }
  if (!taken.ok()) return taken.status();
  if ((*taken).empty()) {
    SmLimits limits = do_sm_limits();
    std::string list;
    int64_t total = 0;
    for (int count : sms) {
      list += (list.empty() ? "" : " + ") + std::to_string(count);
      total += count;
    }
    return refusal(ErrorCode::kDevice, name(), "split",
                   "at most " + std::to_string(left) + " SMs (what is left of " +
                       std::to_string(limits.total) + ", in groups of " + std::to_string(limits.least) + ")",
                   std::to_string(total) + " (" + list + ", each rounded up to whole groups)",
                   "ask for fewer, or drop partitions and their streams");
  }
  std::vector<PartitionRef> made;
  Status status;
  for (CudaSms::Groups& groups : *taken) {
    // Made in every case, so that its end gives the SMs back.
    auto partition = std::make_shared<CudaPartition>(*this, std::move(groups));
    if (status.ok()) status = partition->open();
    made.push_back(std::move(partition));
  }
  if (!status.ok()) return status;
  return made;
}

}  // namespace headrace
