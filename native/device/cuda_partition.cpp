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

CudaPartition::CudaPartition(CudaDevice& device, CudaSms::Groups sms, const PartitionOptions& options)
    : Partition(device), device_(device), groups_(std::move(sms)), options_(options) {}

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
  if (options_.workqueue_concurrency_limit) {
    // As the reference has it: the device's own configuration, changed in place, beside the multiprocessors.
    cu::Resource workqueues{};
    if (cu::Code code =
            driver.DeviceGetDevResource(device_.device(), &workqueues, cu::kResourceWorkqueueConfig);
        code != cu::kSuccess)
      return device_.cannot_give_workqueues("cuDeviceGetDevResource", code);
    workqueues.workqueues.scope = cu::kWorkqueuesBalanced;
    workqueues.workqueues.concurrency_limit = static_cast<unsigned>(*options_.workqueue_concurrency_limit);
    resources.push_back(workqueues);
  }
  cu::ResourceDescription description = nullptr;
  cu::Code code =
      driver.DevResourceGenerateDesc(&description, resources.data(), static_cast<unsigned>(resources.size()));
  // Measured: with the null description of a failure, cuGreenCtxCreate makes a context of the whole device.
  if (code != cu::kSuccess) return cannot_open("cuDevResourceGenerateDesc", code);
  if (description == nullptr)
    return refusal(ErrorCode::kDevice, device_.name(), "split", "a description of the partition", "none",
                   "update the driver");
  cu::GreenContext made = nullptr;
  code = driver.GreenCtxCreate(&made, description, device_.device(), cu::kGreenDefaultStream);
  if (code != cu::kSuccess) return cannot_open("cuGreenCtxCreate", code);
  context_ = made;
  return read_back();
}

Status CudaPartition::cannot_open(const char* entry, cu::Code code) const {
  return options_.workqueue_concurrency_limit ? device_.cannot_give_workqueues(entry, code)
                                              : device_.cannot_split(entry, code);
}

Status CudaPartition::read_back() {
  const cu::Driver& driver = device_.driver();
  cu::Resource granted{};
  cu::Code code = driver.GreenCtxGetDevResource(context_, &granted, cu::kResourceSm);
  if (code != cu::kSuccess) return device_.cannot_split("cuGreenCtxGetDevResource", code);
  sm_count_ = static_cast<int>(granted.sm.sm_count);
  if (sm_count_ != groups_.sm_count)
    return refusal(ErrorCode::kDevice, device_.name(), "split",
                   "a partition of " + std::to_string(groups_.sm_count) + " SMs",
                   "one of " + std::to_string(sm_count_) + ", read back from its context",
                   "report the driver's version with this message");
  if (!options_.workqueue_concurrency_limit) return {};
  granted = {};
  code = driver.GreenCtxGetDevResource(context_, &granted, cu::kResourceWorkqueueConfig);
  if (code != cu::kSuccess) return device_.cannot_give_workqueues("cuGreenCtxGetDevResource", code);
  unsigned limit = granted.workqueues.concurrency_limit;
  if (granted.workqueues.scope != cu::kWorkqueuesBalanced || limit < 1 || limit > INT32_MAX)
    return refusal(
        ErrorCode::kDevice, device_.name(), "split",
        "workqueues that are balanced with those of other partitions",
        "a limit of " + std::to_string(limit) + " in scope " + std::to_string(granted.workqueues.scope) +
            ", read back from its context",
        "ask for no workqueue concurrency limit, and report the driver's version with this message");
  workqueue_limit_ = static_cast<int>(limit);
  return {};
}

// ---- the device

SmLimits CudaDevice::do_sm_limits() const { return sms_.limits(); }

GpuSharing gpu_sharing(const cu::Driver& driver, cu::Device device) {
  GpuSharing sharing;
  int mps = 0;
  (void)driver.DeviceGetAttribute(&mps, cu::kAttributeMps, device);
  sharing.mps = mps != 0;
  char text[256] = {};
  (void)driver.DeviceGetName(text, sizeof text - 1, device);
  sharing.gpu = text;
  // What an instance is called: "NVIDIA H200 MIG 1g.18gb".
  sharing.mig = sharing.gpu.find(" MIG ") != std::string::npos;
  return sharing;
}

// The driver's codes say little; what the process or the GPU is shared by says more.
CannotSplit cannot_split(const cu::Driver& driver, cu::Device device, const char* entry, cu::Code code) {
  GpuSharing sharing = gpu_sharing(driver, device);
  std::string got = driver.text(code) + " from " + entry + " on " + sharing.gpu;
  if (sharing.mps)
    return {
        got + ", in a process under MPS",
        "run the process without the MPS server (it is one when CUDA_MPS_PIPE_DIRECTORY leads to none), or "
        "let MPS divide the GPU (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE)"};
  if (sharing.mig)
    return {
        got + ", which is a MIG instance",
        "give the process the whole GPU, or let an instance be the lane: it has multiprocessors and memory "
        "bandwidth of its own"};
  return {got, "use the whole device: its green contexts are missing in this GPU, or in this driver for it"};
}

namespace {

// Codes by which a driver says that it does not do this, rather than that something is broken.
bool refuses(cu::Code code) {
  return code == cu::kNotSupported || code == cu::kNotPermitted || code == cu::kInvalidResourceType ||
         code == cu::kInvalidResourceConfiguration;
}

}  // namespace

Status CudaDevice::cannot_split(const char* entry, cu::Code code) const {
  if (!refuses(code)) {
    Status status = failed("split", code);
    if (!gpu_sharing(driver_, device_).mps) return status;
    Status named(status.code(), status.message() + "; this process runs under MPS");
    named->device = status->device;
    return named;
  }
  CannotSplit why = headrace::cannot_split(driver_, device_, entry, code);
  return refusal(ErrorCode::kDevice, name(), "split", "a GPU that is split into green contexts", why.got,
                 why.advice);
}

std::string missing_for_workqueues(const cu::Driver& driver) {
  if (driver.version >= cu::kOldestWithWorkqueues) return "";
  return "one for CUDA " + cu::version_text(driver.version);
}

Status CudaDevice::no_workqueues(const std::string& got) const {
  return refusal(ErrorCode::kDevice, name(), "split",
                 "a driver that gives green contexts workqueues (CUDA " +
                     cu::version_text(cu::kOldestWithWorkqueues) + ", driver 590)",
                 got, "update the driver, or ask for no workqueue concurrency limit");
}

Status CudaDevice::cannot_give_workqueues(const char* entry, cu::Code code) const {
  // A driver that does not know the type may call it an invalid value.
  if (!refuses(code) && code != cu::kInvalidValue) return cannot_split(entry, code);
  return no_workqueues(headrace::cannot_split(driver_, device_, entry, code).got);
}

Result<std::vector<PartitionRef>> CudaDevice::do_split(std::span<const int> sms,
                                                       const PartitionOptions& options) {
  if (const char* missing = driver_.missing_for_partitions())
    return refusal(
        ErrorCode::kDevice, name(), "split", "a driver with green contexts (CUDA 12.4, driver 550)",
        "one for CUDA " + cu::version_text(driver_.version) + ", without " + missing, "update the driver");
  if (options.workqueue_concurrency_limit) {
    if (std::string missing = missing_for_workqueues(driver_); !missing.empty())
      return no_workqueues(missing);
  }
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
    auto partition = std::make_shared<CudaPartition>(*this, std::move(groups), options);
    if (status.ok()) status = partition->open();
    made.push_back(std::move(partition));
  }
  if (!status.ok()) return status;
  return made;
}

}  // namespace headrace
