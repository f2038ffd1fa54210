#include "device/cuda.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>

#include "device/refusal.h"
#include "device/registry.h"

namespace headrace {

namespace {

CudaEvent& own(Event& event) { return static_cast<CudaEvent&>(event); }

cu::Address address_of(const void* data) { return reinterpret_cast<uintptr_t>(data); }

bool about_capture(cu::Code code) {
  return code >= cu::kCaptureUnsupported && code <= cu::kCaptureWrongThread;
}

// What a caller can do about it.
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
      return "the process is ending";
    case cu::kNoBinaryForGpu:
      return "export the program for this GPU";
    case cu::kNotSupported:
      return "the device or the driver's mode (MIG, MPS, vGPU) does not offer it";
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

}  // namespace

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

// What every operation does first.
#define HEADRACE_CURRENT(operation) \
  Current current(*this);           \
  if (!current.ok()) return failed(operation, current.code())
#define HEADRACE_USABLE(operation, stream) \
  if (Status refused = check_ended(operation, stream); !refused.ok()) return refused
#define HEADRACE_DRIVER(operation, call) \
  if (cu::Code code = driver_.call; code != cu::kSuccess) return failed(operation, code)

// ---- memory

CudaDevice::Block CudaDevice::find(const void* address) const {
  std::shared_lock lock(memory_mutex_);
  auto at = reinterpret_cast<uintptr_t>(address);
  auto next = allocations_.upper_bound(at);
  if (next == allocations_.begin()) return {};
  auto [base, nbytes] = *std::prev(next);
  if (at >= base + (nbytes ? nbytes : 1)) return {};
  return {reinterpret_cast<void*>(base), nbytes};
}

Result<void*> CudaDevice::do_allocate(size_t nbytes, StreamHandle stream) {
  HEADRACE_CURRENT("allocate");
  HEADRACE_USABLE("allocate", stream);
  auto busy = capturing("allocate", stream);
  if (!busy.ok()) return busy.status();
  if (*busy)
    return refusal(ErrorCode::kCapture, name(), "allocate", "a stream that does not capture",
                   stream_name(stream) + ", which does: memory of a capture would be its graph's",
                   "allocate before the capture, or from a cache");
  cu::Address address = 0;
  cu::Code code = driver_.MemAllocFromPoolAsync(&address, nbytes ? nbytes : 1, pool_, raw(stream));
  if (code == cu::kOutOfMemory) {
    size_t free = 0, total = 0;
    (void)driver_.MemGetInfo(&free, &total);
    return refusal(ErrorCode::kOutOfDeviceMemory, name(), "allocate",
                   "memory for " + std::to_string(nbytes) + " bytes",
                   driver_.text(code) + ": " + std::to_string(free) + " of " + std::to_string(total) +
                       " bytes are free, " + std::to_string(do_memory().current_nbytes) + " are in use here",
                   advice_for(code));
  }
  if (code != cu::kSuccess) return failed("allocate", code);
  std::unique_lock lock(memory_mutex_);
  allocations_[static_cast<uintptr_t>(address)] = nbytes;
  ++counts_.allocations;
  counts_.current_nbytes += nbytes;
  counts_.peak_nbytes = std::max(counts_.peak_nbytes, counts_.current_nbytes);
  return reinterpret_cast<void*>(address);
}

Status CudaDevice::do_free(void* data, StreamHandle stream) {
  HEADRACE_CURRENT("free");
  HEADRACE_USABLE("free", stream);
  auto busy = capturing("free", stream);
  if (!busy.ok()) return busy.status();
  if (*busy)
    return refusal(ErrorCode::kCapture, name(), "free", "a stream that does not capture",
                   stream_name(stream) +
                       ", which does: memory allocated outside cannot be freed in it "
                       "(CUDA_ERROR_INVALID_VALUE, measured)",
                   "free it after the capture");
  size_t nbytes = 0;
  {
    // Forgotten first: another thread may be given the address as soon as the driver has it back.
    std::unique_lock lock(memory_mutex_);
    auto found = allocations_.find(reinterpret_cast<uintptr_t>(data));
    if (found == allocations_.end())
      return refusal(ErrorCode::kInput, name(), "free", "the start of a live allocation of " + name(),
                     hex(data), "free what allocate() returned, once, with its device");
    nbytes = found->second;
    allocations_.erase(found);
  }
  cu::Code code = driver_.MemFreeAsync(address_of(data), raw(stream));
  std::unique_lock lock(memory_mutex_);
  if (code != cu::kSuccess) {
    allocations_[reinterpret_cast<uintptr_t>(data)] = nbytes;
    return failed("free", code);
  }
  ++counts_.frees;
  counts_.current_nbytes -= nbytes;
  return {};
}

PointerInfo CudaDevice::do_where(const void* address) const {
  if (Block block = find(address); block.base != nullptr)
    return {PointerInfo::Kind::kDevice, block.base, block.nbytes, id()};
  Current current(*this);
  if (!current.ok() || address == nullptr) return {};
  unsigned type = 0, managed = 0;
  int ordinal = -1;
  cu::Address start = 0;
  size_t nbytes = 0;
  int attributes[] = {cu::kPointerMemoryType, cu::kPointerIsManaged, cu::kPointerDeviceOrdinal,
                      cu::kPointerRangeStart, cu::kPointerRangeSize};
  void* values[] = {&type, &managed, &ordinal, &start, &nbytes};
  // For memory that CUDA does not know it says success and zeros.
  if (driver_.PointerGetAttributes(5, attributes, values, address_of(address)) != cu::kSuccess) return {};
  if (type != cu::kMemoryDevice && managed == 0) return {};
  PointerInfo info{PointerInfo::Kind::kDevice, reinterpret_cast<void*>(start), nbytes, id()};
  if (managed == 0 && ordinal != this->ordinal()) {
    info.kind = PointerInfo::Kind::kOther;
    info.device_id = ordinal;  // a GPU's Device::id() is its ordinal
  }
  return info;
}

Result<bool> CudaDevice::on_device(const char* operation, const void* data, size_t nbytes) const {
  if (nbytes == 0) return false;
  if (data == nullptr)
    return refusal(ErrorCode::kInput, name(), operation, "an address",
                   "null for " + std::to_string(nbytes) + " bytes", "pass the memory's address");
  auto foreign = [&](const std::string& whose) {
    return refusal(ErrorCode::kDevice, name(), operation, "memory of " + name() + ", or of the host",
                   hex(data) + ", memory of " + whose,
                   "work on one device with that device; go through host memory between two");
  };
  PointerInfo info;
  if (Block block = find(data); block.base != nullptr) {
    info = {PointerInfo::Kind::kDevice, block.base, block.nbytes, id()};
  } else {
    // A simulated device's memory is host memory that only that device may touch.
    auto owner = owner_of(data);
    if (owner && owner->device_id != id() && owner->device_id != cpu_device()->id())
      return foreign(owner->device_name);
    info = do_where(data);
  }
  if (info.kind == PointerInfo::Kind::kHost) return false;
  if (info.kind == PointerInfo::Kind::kOther) return foreign("cuda:" + std::to_string(info.device_id));
  size_t left = static_cast<char*>(info.base) + info.nbytes - static_cast<const char*>(data);
  if (nbytes > left)
    return refusal(ErrorCode::kInput, name(), operation, "a range inside one allocation",
                   std::to_string(nbytes) + " bytes at " + hex(data) + ", of which " + std::to_string(left) +
                       " are inside the allocation of " + std::to_string(info.nbytes) + " at " +
                       hex(info.base),
                   "check the size");
  return true;
}

Status CudaDevice::do_copy(void* to, const void* from, size_t nbytes, StreamHandle stream) {
  HEADRACE_CURRENT("copy");
  HEADRACE_USABLE("copy", stream);
  auto source = on_device("copy", from, nbytes);
  if (!source.ok()) return source.status();
  auto target = on_device("copy", to, nbytes);
  if (!target.ok()) return target.status();
  if (nbytes == 0) return {};
  HEADRACE_DRIVER("copy", MemcpyAsync(address_of(to), address_of(from), nbytes, raw(stream)));
  if (*target && !*source) thread_counts().bytes_to_device += static_cast<int64_t>(nbytes);
  if (*source && !*target) thread_counts().bytes_to_host += static_cast<int64_t>(nbytes);
  return {};
}

Status CudaDevice::do_fill(void* to, uint8_t byte, size_t nbytes, StreamHandle stream) {
  HEADRACE_CURRENT("fill");
  HEADRACE_USABLE("fill", stream);
  if (auto target = on_device("fill", to, nbytes); !target.ok()) return target.status();
  if (nbytes == 0) return {};
  HEADRACE_DRIVER("fill", MemsetD8Async(address_of(to), byte, nbytes, raw(stream)));
  return {};
}

MemoryCounts CudaDevice::do_memory() const {
  std::shared_lock lock(memory_mutex_);
  return counts_;
}

Status CudaDevice::do_trim() {
  HEADRACE_CURRENT("trim");
  Relaxed relaxed(driver_);
  reap();
  std::vector<RestingStream> resting;
  {
    std::unique_lock lock(streams_mutex_);
    resting.swap(resting_);
  }
  end(resting);
  HEADRACE_DRIVER("trim", MemPoolTrimTo(pool_, 0));
  return {};
}

// ---- streams

Result<bool> CudaDevice::capturing(const char* operation, StreamHandle stream) const {
  int status = cu::kStatusNone;
  HEADRACE_DRIVER(operation, StreamIsCapturing(raw(stream), &status));
  return status != cu::kStatusNone;
}

Result<StreamHandle> CudaDevice::do_create_stream(const StreamOptions& options) {
  HEADRACE_CURRENT("create_stream");
  reap();
  auto partition = std::static_pointer_cast<CudaPartition>(options.partition);
  if (partition && partition->closed())
    return refusal(ErrorCode::kInput, name(), "create_stream", "an open partition", "a closed one",
                   "make the stream before closing it");
  if (partition && options.blocking)
    return refusal(ErrorCode::kInput, name(), "create_stream", "a non-blocking stream in a partition",
                   "a blocking one",
                   "leave `blocking` false (cuGreenCtxStreamCreate requires CU_STREAM_NON_BLOCKING)");
  // Greatest is the most urgent, the lower number (cuCtxGetStreamPriorityRange).
  int priority = std::clamp(options.priority, std::min(greatest_priority_, least_priority_),
                            std::max(greatest_priority_, least_priority_));
  OwnStream made{options.blocking, priority, std::move(partition)};
  auto stream = stream_for(made);
  if (!stream.ok()) return stream.status();
  std::unique_lock lock(streams_mutex_);
  ended_.erase(*stream);
  streams_[*stream] = std::move(made);
  return stream;
}

Result<StreamHandle> CudaDevice::stream_for(const OwnStream& options) {
  {
    Relaxed relaxed(driver_);
    std::unique_lock lock(streams_mutex_);
    std::vector<RestingStream>& resting = options.partition ? options.partition->resting : resting_;
    for (size_t i = 0; i < resting.size(); ++i) {
      if (resting[i].blocking != options.blocking || resting[i].priority != options.priority) continue;
      // Work of the former owner would be in the way of the next one's.
      if (driver_.StreamQuery(resting[i].stream) != cu::kSuccess) continue;
      auto handle = reinterpret_cast<StreamHandle>(resting[i].stream);
      resting.erase(resting.begin() + static_cast<std::ptrdiff_t>(i));
      return handle;
    }
  }
  cu::Stream stream = nullptr;
  if (options.partition) {
    HEADRACE_DRIVER("create_stream", GreenCtxStreamCreate(&stream, options.partition->context(),
                                                          cu::kStreamNonBlocking, options.priority));
  } else {
    HEADRACE_DRIVER(
        "create_stream",
        StreamCreateWithPriority(&stream, options.blocking ? 0u : cu::kStreamNonBlocking, options.priority));
  }
  return reinterpret_cast<StreamHandle>(stream);
}

void CudaDevice::end(std::vector<RestingStream>& streams) {
  for (const RestingStream& resting : streams) {
    {
      std::unique_lock lock(streams_mutex_);
      ended_.erase(reinterpret_cast<StreamHandle>(resting.stream));
    }
    (void)driver_.StreamDestroy(resting.stream);
  }
  streams.clear();
}

Status CudaDevice::do_destroy_stream(StreamHandle handle) {
  HEADRACE_CURRENT("destroy_stream");
  HEADRACE_USABLE("destroy_stream", handle);
  OwnStream ended;
  {
    std::unique_lock lock(streams_mutex_);
    auto found = streams_.find(handle);
    if (found == streams_.end())
      return refusal(ErrorCode::kInput, name(), "destroy_stream", "a stream that create_stream() made",
                     stream_name(handle), "leave it to its owner");
    ended = std::move(found->second);
    streams_.erase(found);
    ended_.insert(handle);
    any_ended_ = true;
  }
  calls_.destroyed(stream_key(handle));
  if (capturing_ != 0) {
    // Measured: destroying the stream where a capture began succeeds, and nobody can end that capture.
    std::lock_guard lock(captures_mutex_);
    captures_.erase(stream_key(handle));
    capturing_ = static_cast<int>(captures_.size());
  }
  if (auto busy = capturing("destroy_stream", handle); !busy.ok() || *busy) {
    // A stream in a capture cannot be given to others: it goes, and its handle is refused for good.
    cu::Code code = driver_.StreamDestroy(raw(handle));
    reap();
    return code == cu::kSuccess ? Status() : failed("destroy_stream", code);
  }
  std::shared_ptr<CudaEvent> last;
  if (ended.partition) {
    // Work that goes on keeps its SMs.
    if (auto event = make_event(false);
        event.ok() && driver_.EventRecord((*event)->event, raw(handle)) == cu::kSuccess)
      last = *event;
  }
  {
    std::unique_lock lock(streams_mutex_);
    auto& resting = ended.partition ? ended.partition->resting : resting_;
    resting.push_back({raw(handle), ended.blocking, ended.priority});
  }
  if (last) retire(std::move(last), {std::move(ended.partition)});
  reap();
  return {};
}

Status CudaDevice::check_ended(const char* operation, StreamHandle stream) const {
  if (!any_ended_ || stream == kLegacyStream || stream == kPerThreadStream) return {};
  {
    std::shared_lock lock(streams_mutex_);
    if (!ended_.contains(stream)) return {};
  }
  return refusal(ErrorCode::kInput, name(), operation, "a live stream of " + name(),
                 "stream " + hex(stream) + ", destroyed", "use a stream only while its owner keeps it");
}

Status CudaDevice::do_check_stream(StreamHandle stream) const {
  if (stream == kLegacyStream || stream == kPerThreadStream) return {};
  {
    std::shared_lock lock(streams_mutex_);
    if (streams_.contains(stream)) return {};
  }
  HEADRACE_CURRENT("check_stream");
  HEADRACE_USABLE("check_stream", stream);
  return check_foreign("check_stream", stream);
}

Status CudaDevice::check_foreign(const char* operation, StreamHandle stream) const {
  // A handle is the address of an object, which the driver reads without asking: an invalid handle is
  // "undefined behavior" to it.
  auto page = static_cast<StreamHandle>(sysconf(_SC_PAGESIZE));
  bool object =
      stream >= page && stream % alignof(void*) == 0 &&
      (msync(reinterpret_cast<void*>(stream / page * page), page, MS_ASYNC) == 0 || errno != ENOMEM);
  if (!object)
    return refusal(ErrorCode::kInput, name(), operation, "a stream of " + name(),
                   hex(stream) + ", which is no stream", "pass a CUstream or cudaStream_t, or 0, 1 or 2");
  cu::Context context = nullptr;
  cu::GreenContext green = nullptr;
  cu::Code code = driver_.StreamGetCtxBoth ? driver_.StreamGetCtxBoth(raw(stream), &context, &green)
                                           : driver_.StreamGetCtx(raw(stream), &context);
  if (code != cu::kSuccess) return failed(operation, code);
  if (context == primary_) return {};
  cu::Device device = -1;
  if (driver_.StreamGetDevice) {
    code = driver_.StreamGetDevice(raw(stream), &device);
  } else if (code = driver_.CtxPushCurrent(context); code == cu::kSuccess) {
    code = driver_.CtxGetDevice(&device);
    (void)driver_.CtxPopCurrent(&context);
  }
  if (code != cu::kSuccess) return failed(operation, code);
  if (device != device_)
    return refusal(ErrorCode::kDevice, name(), operation, "a stream of " + name(),
                   "stream " + hex(stream) + " of cuda:" + std::to_string(device),
                   "use a stream of " + name());
  // An older driver does not tell a green context of the primary one from a context of its own.
  if (!driver_.StreamGetCtxBoth) return {};
  return refusal(ErrorCode::kDevice, name(), operation, "a stream of " + name() + "'s primary context",
                 "stream " + hex(stream) + " of another context (cuCtxCreate)",
                 "make the stream in the primary context, as the CUDA runtime, CuPy and PyTorch do");
}

Result<PartitionRef> CudaDevice::do_partition_of(StreamHandle stream) const {
  if (stream == kLegacyStream || stream == kPerThreadStream) return PartitionRef();
  {
    std::shared_lock lock(streams_mutex_);
    if (auto found = streams_.find(stream); found != streams_.end())
      return PartitionRef(found->second.partition);
  }
  if (!driver_.StreamGetCtxBoth) return PartitionRef();  // an older driver does not tell
  HEADRACE_CURRENT("partition_of");
  cu::Context context = nullptr;
  cu::GreenContext green = nullptr;
  HEADRACE_DRIVER("partition_of", StreamGetCtxBoth(raw(stream), &context, &green));
  if (green == nullptr) return PartitionRef();
  return refusal(ErrorCode::kNotSupported, name(), "partition_of",
                 "a stream of a headrace.Partition, or of none",
                 "stream " + hex(stream) + " of a green context made by others",
                 "make the lane by Device.partition(), and the stream in it");
}

std::shared_ptr<CudaPartition> CudaDevice::partition_of(StreamHandle stream) const {
  std::shared_lock lock(streams_mutex_);
  auto found = streams_.find(stream);
  return found == streams_.end() ? nullptr : found->second.partition;
}

Status CudaDevice::do_synchronize(StreamHandle stream) {
  HEADRACE_CURRENT("synchronize_stream");
  HEADRACE_USABLE("synchronize_stream", stream);
  HEADRACE_DRIVER("synchronize_stream", StreamSynchronize(raw(stream)));
  reap();
  return calls_.tell(stream_key(stream));
}

Status CudaDevice::do_synchronize() {
  HEADRACE_CURRENT("synchronize_device");
  // Of the primary context: work in green contexts is waited for too (the reference of cuCtxSynchronize).
  HEADRACE_DRIVER("synchronize_device", CtxSynchronize());
  reap();
  return calls_.tell_all();
}

Result<bool> CudaDevice::do_query(StreamHandle stream) {
  HEADRACE_CURRENT("query_stream");
  HEADRACE_USABLE("query_stream", stream);
  cu::Code code = driver_.StreamQuery(raw(stream));
  if (code == cu::kNotReady) return false;
  if (code != cu::kSuccess) return failed("query_stream", code);
  return true;
}

Status CudaDevice::do_call(StreamHandle stream, HostFunction function, std::vector<Access> accesses) {
  HEADRACE_CURRENT("call");
  HEADRACE_USABLE("call", stream);
  reap();
  for (const Access& access : accesses) {
    if (auto there = on_device("call", access.data, access.nbytes); !there.ok()) return there.status();
  }
  auto call = std::make_shared<CudaCall>();
  call->function = std::move(function);
  call->device = name();
  int status = cu::kStatusNone;
  unsigned long long id = 0;
  HEADRACE_DRIVER("call", StreamGetCaptureInfo(raw(stream), &status, &id, nullptr, nullptr, nullptr));
  if (status != cu::kStatusNone) {
    // Runs at each launch: the graph keeps it, which only a graph of ours can.
    std::lock_guard lock(captures_mutex_);
    for (auto& [origin, capture] : captures_) {
      if (status != cu::kStatusActive || capture.id != id) continue;
      HEADRACE_DRIVER("call", LaunchHostFunc(raw(stream), CudaCalls::run_again, call.get()));
      capture.calls.push_back(std::move(call));
      return {};
    }
    return refusal(ErrorCode::kCapture, name(), "call",
                   "a stream that does not capture, or a capture begun here",
                   stream_name(stream) + (status == cu::kStatusActive ? ", which somebody else captures"
                                                                      : ", whose capture was invalidated"),
                   "enqueue it before the capture or after");
  }
  auto owned = std::make_unique<CudaCallRef>(call);
  calls_.enqueued(stream_key(stream), {&call, 1});
  if (cu::Code code = driver_.LaunchHostFunc(raw(stream), CudaCalls::run_once, owned.get());
      code != cu::kSuccess) {
    CudaCalls::withdrawn({&call, 1});
    return failed("call", code);
  }
  (void)owned.release();  // the driver's now
  return {};
}

// ---- events

CudaEvent::CudaEvent(const CudaDevice& device, cu::Event event, bool timing)
    : Event(device), event(event), timing(timing), device_(device) {}

CudaEvent::~CudaEvent() {
  Current current(device_);
  if (current.ok()) (void)device_.driver().EventDestroy(event);
}

Result<std::shared_ptr<CudaEvent>> CudaDevice::make_event(bool timing) {
  cu::Event event = nullptr;
  HEADRACE_DRIVER("create_event", EventCreate(&event, timing ? 0u : cu::kEventDisableTiming));
  return std::make_shared<CudaEvent>(*this, event, timing);
}

Result<EventRef> CudaDevice::do_create_event(bool timing) {
  HEADRACE_CURRENT("create_event");
  auto event = make_event(timing);
  if (!event.ok()) return event.status();
  return EventRef(*event);
}

Status CudaDevice::do_record(Event& event, StreamHandle stream) {
  HEADRACE_CURRENT("record");
  HEADRACE_USABLE("record", stream);
  auto busy = capturing("record", stream);
  if (!busy.ok()) return busy.status();
  HEADRACE_DRIVER("record", EventRecord(own(event).event, raw(stream)));
  own(event).recorded = true;
  own(event).captured = *busy;
  calls_.recorded(stream_key(stream), own(event).calls);
  return {};
}

namespace {

// A wait on the host for it would invalidate the capture (CUDA_ERROR_CAPTURED_EVENT), or after the capture
// has ended be an invalid value: refused before the driver is asked.
Status of_a_capture(const std::string& device, const char* operation) {
  return refusal(ErrorCode::kCapture, device, operation,
                 "an event whose latest record is no part of a capture",
                 "one recorded in a capture (CUDA_ERROR_CAPTURED_EVENT)",
                 "record it again outside, or keep another event for the capture");
}

}  // namespace

Status CudaDevice::do_wait(StreamHandle stream, Event& event) {
  HEADRACE_CURRENT("wait");
  HEADRACE_USABLE("wait", stream);
  CudaEvent& waited = own(event);
  cu::Code code = driver_.StreamWaitEvent(raw(stream), waited.event, 0);
  if (code == cu::kInvalidValue && waited.captured)
    return refusal(ErrorCode::kCapture, name(), "wait",
                   "an event recorded in a capture that goes on, or outside",
                   "one recorded in a capture that has ended (" + driver_.text(code) + ")",
                   "record it again, or wait for an event recorded behind the graph's launch");
  if (code != cu::kSuccess) return failed("wait", code);
  if (!waited.captured) calls_.waited(stream_key(stream), waited.calls);
  if (capturing_ == 0) return {};
  auto partition = partition_of(stream);
  if (!partition) return {};
  // It may have joined a capture just now: what is captured in a partition runs there wherever the graph is
  // launched (measured), so the graph keeps it.
  int status = cu::kStatusNone;
  unsigned long long id = 0;
  HEADRACE_DRIVER("wait", StreamGetCaptureInfo(raw(stream), &status, &id, nullptr, nullptr, nullptr));
  if (status != cu::kStatusActive) return {};
  std::lock_guard lock(captures_mutex_);
  for (auto& [origin, capture] : captures_) {
    if (capture.id == id) capture.keep.push_back(std::move(partition));
  }
  return {};
}

Status CudaDevice::do_synchronize(Event& event) {
  HEADRACE_CURRENT("synchronize_event");
  CudaEvent& waited = own(event);
  if (waited.captured) return of_a_capture(name(), "synchronize_event");
  if (!waited.recorded) return {};
  HEADRACE_DRIVER("synchronize_event", EventSynchronize(waited.event));
  reap();
  return calls_.tell(waited.calls);
}

Result<bool> CudaDevice::do_query(Event& event) {
  HEADRACE_CURRENT("query_event");
  CudaEvent& asked = own(event);
  if (asked.captured) return of_a_capture(name(), "query_event");
  if (!asked.recorded) return true;
  cu::Code code = driver_.EventQuery(asked.event);
  if (code == cu::kNotReady) return false;
  if (code != cu::kSuccess) return failed("query_event", code);
  return true;
}

Result<double> CudaDevice::do_elapsed_ms(Event& from, Event& to) {
  HEADRACE_CURRENT("elapsed_ms");
  for (const CudaEvent* event : {&own(from), &own(to)}) {
    if (!event->timing)
      return refusal(ErrorCode::kInput, name(), "elapsed_ms", "two events made for timing",
                     "one made without (CUDA_ERROR_INVALID_HANDLE)", "make them with create_event(true)");
    if (!event->recorded || event->captured)
      return refusal(ErrorCode::kInput, name(), "elapsed_ms", "two recorded events",
                     event->captured ? "one recorded in a capture" : "one never recorded",
                     "record both on a stream before (CUDA_ERROR_INVALID_HANDLE)");
  }
  float ms = 0;
  cu::Code code = driver_.EventElapsedTime(&ms, own(from).event, own(to).event);
  if (code == cu::kNotReady)
    return refusal(ErrorCode::kDevice, name(), "elapsed_ms", "two events that are complete",
                   "one that is not (" + driver_.text(code) + ")", "synchronize() with it before");
  if (code != cu::kSuccess) return failed("elapsed_ms", code);
  return static_cast<double>(ms);
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
  int count = 0;
  if (cu::Code code = driver.DeviceGetCount(&count); code != cu::kSuccess)
    return refusal(ErrorCode::kDevice, "cuda", "info", "a count of GPUs", driver.text(code),
                   "look at nvidia-smi");
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    CudaInfo::Gpu gpu;
    gpu.ordinal = ordinal;
    cu::Device device = 0;
    char name[256] = "";
    if (cu::Code code = driver.DeviceGet(&device, ordinal); code != cu::kSuccess) {
      gpu.problem = driver.text(code);
      info.gpus.push_back(std::move(gpu));
      continue;
    }
    auto attribute = [&](int which) {
      int value = 0;
      return driver.DeviceGetAttribute(&value, which, device) == cu::kSuccess ? value : 0;
    };
    (void)driver.DeviceGetName(name, sizeof name - 1, device);
    (void)driver.DeviceTotalMem(&gpu.memory_nbytes, device);
    gpu.name = name;
    gpu.capability_major = attribute(cu::kAttributeCapabilityMajor);
    gpu.capability_minor = attribute(cu::kAttributeCapabilityMinor);
    gpu.sm_count = attribute(cu::kAttributeSmCount);
    if (attribute(cu::kAttributeMemoryPools) == 0) gpu.problem = "it has no stream-ordered memory pools";
    if (attribute(cu::kAttributeUnifiedAddressing) == 0) gpu.problem = "it has no unified addressing";
    info.gpus.push_back(std::move(gpu));
  }
  return info;
}

}  // namespace headrace
