// The CUDA device's streams: made, looked at when they are somebody else's, waited for; host functions on
// them.
#include "device/cuda.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "device/cuda_operation.h"
#include "device/refusal.h"

namespace headrace {

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
    // A stream in a capture cannot be given to others: it goes, and its handle is refused for good. (To ask
    // the driver of a handle that is gone ends the process.)
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
    else
      (void)driver_.StreamSynchronize(raw(handle));
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

}  // namespace headrace
