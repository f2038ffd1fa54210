#include "device/cuda.h"

#include <limits>

#include "device/cuda_operation.h"
#include "device/refusal.h"
#include "device/registry.h"

namespace headrace {

namespace {

bool about_capture(cu::Code code) {
  return code >= cu::kCaptureUnsupported && code <= cu::kCaptureWrongThread;
}

}  // namespace

const char* advice_for(cu::Code code) {
  switch (code) {
    case cu::kOutOfMemory:
      return "free memory, or ask for less";
    case cu::kInvalidHandle:
    case cu::kInvalidContext:
    case cu::kContextIsDestroyed:
      return "use a stream or event only while its owner keeps it, and one of this device's primary context";
    case cu::kInvalidValue:
      return "check addresses and sizes";
    case cu::kCaptureImplicit:
      return "capture on a non-blocking stream, or leave the legacy stream alone meanwhile; both sides of it "
             "are "
             "refused, and the capture is invalidated";
    case cu::kCaptureIsolation:
      return "wait for it before the capture begins; the capture is invalidated";
    case cu::kCaptureUnjoined:
      return "record an event on every forked stream and wait for it where the capture began";
    case cu::kCaptureWrongThread:
      return "end the capture on the thread that began it, or begin it in relaxed mode";
    case cu::kCaptureUnsupported:
      return "make the call before the capture or after it, or under exchange_capture_mode(relaxed); the "
             "capture "
             "is invalidated";
    case cu::kCaptureInvalidated:
      return "end the capture, and keep what broke it out of the next one";
    case cu::kDeinitialized:
      return "make no calls once the process is ending";
    case cu::kNoBinaryForGpu:
      return "export the program for this GPU";
    case cu::kNotSupported:
      return "use a GPU and a driver mode that offer it (MIG, MPS and vGPU lack some)";
    default:
      break;
  }
  if (about_capture(code)) return "end the capture and begin it anew";
  // Errors of kernels and of the hardware stay with the context for the rest of its life.
  if (code >= cu::kIllegalAddress && code <= cu::kLaunchFailed)
    return "a kernel failed, this one's or an earlier one's; the context is lost, end the process "
           "(compute-sanitizer "
           "finds the kernel)";
  return "see the CUDA driver API's reference for it";
}

// ---- the context, the thread's mode

Current::Current(const CudaDevice& device) : driver_(device.driver()) {
  cu::Context now = nullptr;
  // Without a context the driver says success and null.
  code_ = driver_.CtxGetCurrent(&now);
  if (code_ != cu::kSuccess || now == device.primary()) return;
  code_ = driver_.CtxPushCurrent(device.primary());
  pushed_ = code_ == cu::kSuccess;
}

Current::~Current() {
  cu::Context ours = nullptr;
  if (pushed_) (void)driver_.CtxPopCurrent(&ours);
}

// Always a push: one that replaces what is on top, as cudaSetDevice does, is undone too.
bool CudaDevice::do_enter_context() { return driver_.CtxPushCurrent(primary_) == cu::kSuccess; }

void CudaDevice::do_leave_context() {
  cu::Context ours = nullptr;
  (void)driver_.CtxPopCurrent(&ours);
}

Relaxed::Relaxed(const cu::Driver& driver) : driver_(driver) {
  if (driver_.ThreadExchangeStreamCaptureMode(&mode_) != cu::kSuccess) mode_ = cu::kCaptureRelaxed;
}

Relaxed::~Relaxed() { (void)driver_.ThreadExchangeStreamCaptureMode(&mode_); }

// ---- a device

CudaDevice::CudaDevice(const cu::Driver& driver, int ordinal, cu::Device device)
    : Device("cuda:" + std::to_string(ordinal), Backend::kCuda, ordinal),
      driver_(driver),
      device_(device),
      sms_(*this) {}

// Only of a device that did not start; see the header.
CudaDevice::~CudaDevice() {
  if (primary_ == nullptr) return;
  {
    Current current(*this);
    if (current.ok() && pool_ != nullptr) (void)driver_.MemPoolDestroy(pool_);
  }
  (void)driver_.DevicePrimaryCtxRelease(device_);
}

Status CudaDevice::start() {
  auto has = [&](int attribute) {
    int value = 0;
    return driver_.DeviceGetAttribute(&value, attribute, device_) == cu::kSuccess && value != 0;
  };
  if (!has(cu::kAttributeUnifiedAddressing))
    return refusal(ErrorCode::kDevice, name(), "open", "a GPU with unified addressing", "one without",
                   "use another GPU");
  if (!has(cu::kAttributeMemoryPools))
    return refusal(ErrorCode::kDevice, name(), "open", "a GPU with stream-ordered memory pools",
                   "one without (some vGPU profiles)", "use another GPU or profile");
  cu::Context context = nullptr;
  if (cu::Code code = driver_.DevicePrimaryCtxRetain(&context, device_); code != cu::kSuccess)
    return failed("open", code);
  primary_ = context;
  Current current(*this);
  if (!current.ok()) return failed("open", current.code());
  if (cu::Code code = driver_.CtxGetStreamPriorityRange(&least_priority_, &greatest_priority_);
      code != cu::kSuccess)
    return failed("open", code);
  cu::PoolProperties properties{};
  properties.allocation_type = cu::kAllocationPinned;
  properties.location_type = cu::kLocationDevice;
  properties.location_id = device_;
  if (cu::Code code = driver_.MemPoolCreate(&pool_, &properties); code != cu::kSuccess) {
    pool_ = nullptr;
    return failed("open", code);
  }
  // Memory stays with us over synchronizations, instead of going to the system and coming back.
  uint64_t keep_all = std::numeric_limits<uint64_t>::max();
  if (cu::Code code = driver_.MemPoolSetAttribute(pool_, cu::kPoolReleaseThreshold, &keep_all);
      code != cu::kSuccess)
    return failed("open", code);
  // Else an allocation on one stream may be made to wait for another stream's work, behind the caller's back.
  int no = 0;
  if (cu::Code code = driver_.MemPoolSetAttribute(pool_, cu::kPoolReuseInternalDependencies, &no);
      code != cu::kSuccess)
    return failed("open", code);
  return {};
}

Result<DeviceRef> CudaDevice::open(int ordinal) {
  auto driver = cu::driver();
  if (!driver.ok()) return driver.status();
  std::string name = "cuda:" + std::to_string(ordinal);
  int count = 0;
  if (cu::Code code = (*driver)->DeviceGetCount(&count); code != cu::kSuccess)
    return refusal(ErrorCode::kDevice, name, "open", "a count of GPUs", (*driver)->text(code),
                   "look at nvidia-smi");
  if (ordinal < 0 || ordinal >= count) {
    std::string there = count == 0   ? "none at all"
                        : count == 1 ? "cuda:0 alone"
                                     : "cuda:0 to cuda:" + std::to_string(count - 1);
    return refusal(ErrorCode::kDevice, name, "open", "a GPU that the driver sees",
                   "none of that number (" + there + ")", "look at nvidia-smi and at CUDA_VISIBLE_DEVICES");
  }
  cu::Device device = 0;
  if (cu::Code code = (*driver)->DeviceGet(&device, ordinal); code != cu::kSuccess)
    return refusal(ErrorCode::kDevice, name, "open", "the GPU", (*driver)->text(code), "look at nvidia-smi");
  std::shared_ptr<CudaDevice> opened(new CudaDevice(**driver, ordinal, device));
  if (Status status = opened->start(); !status.ok()) return status;
  return DeviceRef(opened);
}

Status CudaDevice::failed(const char* operation, cu::Code code) const {
  ErrorCode kind = ErrorCode::kDevice;
  switch (code) {
    case cu::kOutOfMemory:
      kind = ErrorCode::kOutOfDeviceMemory;
      break;
    case cu::kInvalidHandle:
    case cu::kInvalidContext:
    case cu::kContextIsDestroyed:
    case cu::kInvalidValue:
      kind = ErrorCode::kInput;
      break;
    default:
      if (about_capture(code)) kind = ErrorCode::kCapture;
  }
  return refusal(kind, name(), operation, "success", driver_.text(code), advice_for(code));
}

// ---- what outlives its owner

void CudaDevice::retire(std::shared_ptr<CudaEvent> event, Keep keep) {
  std::lock_guard lock(retired_mutex_);
  retired_.emplace_back(std::move(event), std::move(keep));
  any_retired_ = true;
}

void CudaDevice::reap() {
  // Both are destroyed at the end, with no lock held.
  std::vector<HostFunction> functions = calls_.take_done();
  std::vector<std::pair<std::shared_ptr<CudaEvent>, Keep>> ended;
  if (!any_retired_) return;
  Current current(*this);
  if (!current.ok()) return;
  std::lock_guard lock(retired_mutex_);
  Relaxed relaxed(driver_);
  for (size_t i = retired_.size(); i-- > 0;) {
    // After an error of the context nothing runs any more.
    if (driver_.EventQuery(retired_[i].first->event) == cu::kNotReady) continue;
    ended.push_back(std::move(retired_[i]));
    retired_.erase(retired_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  any_retired_ = !retired_.empty();
}

void CudaDevice::reap_all() {
  std::vector<std::pair<std::shared_ptr<CudaEvent>, Keep>> ended;
  {
    std::lock_guard lock(retired_mutex_);
    ended.swap(retired_);
    any_retired_ = false;
  }
  Relaxed relaxed(driver_);
  for (auto& [event, keep] : ended) (void)driver_.EventSynchronize(event->event);
}

// ---- makers

Result<DeviceRef> cuda_device(int ordinal) {
  struct Opened {
    std::mutex mutex;
    std::map<int, DeviceRef> devices;
  };
  // Never destroyed: buffers may be freed while the process ends.
  static auto* opened = new Opened();
  std::lock_guard lock(opened->mutex);
  if (auto found = opened->devices.find(ordinal); found != opened->devices.end()) return found->second;
  auto device = CudaDevice::open(ordinal);
  if (device.ok()) opened->devices[ordinal] = *device;
  return device;
}

Result<CudaInfo> cuda_info() {
  auto found = cu::driver();
  if (!found.ok()) return found.status();
  const cu::Driver& driver = **found;
  CudaInfo info;
  info.driver_version = driver.version;
  const char* missing = driver.missing_for_partitions();
  if (missing != nullptr) info.no_partitions = std::string("the driver has no ") + missing;
  if (std::string old = missing_for_workqueues(driver); !old.empty())
    info.no_workqueues = "the driver is " + old + "; they came with CUDA " +
                         cu::version_text(cu::kOldestWithWorkqueues) + " (driver 590)";
  int count = 0;
  if (cu::Code code = driver.DeviceGetCount(&count); code != cu::kSuccess)
    return refusal(ErrorCode::kDevice, "cuda", "info", "a count of GPUs", driver.text(code),
                   "look at nvidia-smi");
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    CudaInfo::Gpu gpu;
    gpu.ordinal = ordinal;
    cu::Device device = 0;
    if (cu::Code code = driver.DeviceGet(&device, ordinal); code != cu::kSuccess) {
      gpu.problem = driver.text(code);
      info.gpus.push_back(std::move(gpu));
      continue;
    }
    auto attribute = [&](int which) {
      int value = 0;
      return driver.DeviceGetAttribute(&value, which, device) == cu::kSuccess ? value : 0;
    };
    (void)driver.DeviceTotalMem(&gpu.memory_nbytes, device);
    gpu.capability_major = attribute(cu::kAttributeCapabilityMajor);
    gpu.capability_minor = attribute(cu::kAttributeCapabilityMinor);
    gpu.sm_count = attribute(cu::kAttributeSmCount);
    GpuSharing sharing = gpu_sharing(driver, device);
    gpu.name = sharing.gpu;
    gpu.mps = sharing.mps;
    gpu.mig = sharing.mig;
    if (cu::Resource all{}; missing == nullptr) {
      if (cu::Code code = driver.DeviceGetDevResource(device, &all, cu::kResourceSm); code != cu::kSuccess) {
        CannotSplit why = cannot_split(driver, device, "cuDeviceGetDevResource", code);
        gpu.no_partitions = why.got + "; " + why.advice;
      }
    }
    if (attribute(cu::kAttributeMemoryPools) == 0) gpu.problem = "it has no stream-ordered memory pools";
    if (attribute(cu::kAttributeUnifiedAddressing) == 0) gpu.problem = "it has no unified addressing";
    info.gpus.push_back(std::move(gpu));
  }
  return info;
}

}  // namespace headrace
