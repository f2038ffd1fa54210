#include "headrace/device.h"

#include <atomic>
#include <memory>

#include "device/faults.h"
#include "device/record.h"
#include "device/refusal.h"
#include "device/registry.h"

namespace headrace {

namespace {

using record::Kind;
using record::Operation;
using record::touch;

std::atomic<int32_t> next_id{1 << 16};  // above every CUDA ordinal
std::atomic<uint64_t> next_object{1};

StreamHandle normal(StreamHandle stream) { return stream == 0 ? kLegacyStream : stream; }

}  // namespace

Status Device::outside(const char* operation) const {
  if (!in_host_function()) return {};
  return refusal(
      ErrorCode::kDevice, name(), operation,
      "a call from outside every host function (CUDA: cuLaunchHostFunc, \"the host function must not "
      "make any CUDA API calls\")",
      "one from inside a host function", "enqueue it, or do it after the wait");
}

Status Device::enter(const char* operation) {
  if (Status status = outside(operation); !status.ok()) return status;
  Faults* faults = faults_.load(std::memory_order_acquire);
  return faults == nullptr ? Status() : faults->begin(operation);
}

Status Device::enter(const char* operation, const char* noun, const DeviceObject& object) {
  if (Status status = outside(operation); !status.ok()) return status;
  if (object.device_id() != id())
    return refusal(ErrorCode::kDevice, name(), operation, noun + (" of " + name()),
                   "one of " + object.device_name(), "use the device that made it");
  return enter(operation);
}

// What every entry point does first: HEADRACE_ENTER("launch", "an executable graph", exec).
#define HEADRACE_ENTER(...) \
  if (Status refused = enter(__VA_ARGS__); !refused.ok()) return refused

ThreadCounts& thread_counts() {
  static thread_local ThreadCounts counts;
  return counts;
}

DeviceObject::DeviceObject(const Device& device)
    : device_name_(device.name()), device_id_(device.id()), number_(next_object++) {}
DeviceObject::~DeviceObject() = default;

Partition::Partition(const Device& device) : DeviceObject(device), live_(device.partitions_) { ++*live_; }
Partition::~Partition() { --*live_; }

Device::Device(std::string name, Backend backend, int ordinal)
    : name_(std::move(name)),
      backend_(backend),
      ordinal_(ordinal),
      id_(backend == Backend::kCuda ? ordinal : next_id++) {
  remember_device_name(id_, name_);
  if (backend == Backend::kSim) (void)faults();
}

Device::~Device() {
  delete faults_.load();
  forget_device(this);
  record::forget_streams(id_);
}

Faults& Device::faults() {
  Faults* there = faults_.load(std::memory_order_acquire);
  if (there != nullptr) return *there;
  auto made = std::make_unique<Faults>(name_);
  return faults_.compare_exchange_strong(there, made.get()) ? *made.release() : *there;
}

Status Device::inject(const Fault& fault) { return faults().inject(fault); }

void Device::clear_faults() { faults().clear(); }

int64_t Device::calls(const std::string& operation) { return faults().count(operation); }

Result<void*> Device::allocate(size_t nbytes, StreamHandle stream) {
  HEADRACE_ENTER("allocate");
  auto data = do_allocate(nbytes, normal(stream));
  if (data.ok()) {
    remember_allocation(*data, nbytes, this);
    ++thread_counts().driver_allocations;
    if (record::recording())
      (void)record::add(this, Kind::kAllocate, stream, 0, {{touch(*data, nbytes, true)}});
  }
  return data;
}

Status Device::free(void* data, StreamHandle stream) {
  HEADRACE_ENTER("free");
  // Forgotten first: another thread may be given the same address as soon as do_free() has let it go.
  auto nbytes = forget_allocation(data, this);
  Operation recorded(*this, Kind::kFree, stream, 0, {touch(data, nbytes.value_or(0), true)});
  Status status = recorded.end(do_free(data, normal(stream)));
  if (status.ok()) {
    ++thread_counts().driver_frees;
  } else if (nbytes) {
    remember_allocation(data, *nbytes, this);
  }
  return status;
}

Status Device::copy(void* to, const void* from, size_t nbytes, StreamHandle stream) {
  HEADRACE_ENTER("copy");
  Operation recorded(*this, Kind::kCopy, stream, 0, {touch(from, nbytes, false), touch(to, nbytes, true)});
  return recorded.end(do_copy(to, from, nbytes, normal(stream)));
}

Status Device::fill(void* to, uint8_t byte, size_t nbytes, StreamHandle stream) {
  HEADRACE_ENTER("fill");
  return Operation(*this, Kind::kFill, stream, 0, {touch(to, nbytes, true)})
      .end(do_fill(to, byte, nbytes, normal(stream)));
}

PointerInfo Device::where(const void* address) const { return do_where(address); }
MemoryCounts Device::memory() const { return do_memory(); }

Status Device::trim() {
  if (Status refused = outside("trim"); !refused.ok()) return refused;
  return do_trim();
}

Result<StreamHandle> Device::create_stream(const StreamOptions& options) {
  if (options.partition) {
    HEADRACE_ENTER("create_stream", "a partition", *options.partition);
  } else {
    HEADRACE_ENTER("create_stream");
  }
  auto stream = do_create_stream(options);
  if (stream.ok()) {
    record::remember_stream(*this, *stream, options.blocking,
                            options.partition ? options.partition->sm_count() : 0);
  }
  return stream;
}

Status Device::destroy_stream(StreamHandle stream) {
  HEADRACE_ENTER("destroy_stream");
  record::StreamInfo known = record::forget_stream(*this, normal(stream));
  Status status = do_destroy_stream(normal(stream));
  if (!status.ok()) record::remember_stream(std::move(known));
  return status;
}

Status Device::check_stream(StreamHandle stream) const {
  if (Status refused = outside("check_stream"); !refused.ok()) return refused;
  return do_check_stream(normal(stream));
}

Result<PartitionRef> Device::partition_of(StreamHandle stream) const {
  if (Status refused = outside("partition_of"); !refused.ok()) return refused;
  return do_partition_of(normal(stream));
}

namespace {

WaitHooks wait_hooks;

// Around every wait on the host.
class WaitScope {
 public:
  WaitScope() : state_(wait_hooks.before ? wait_hooks.before() : nullptr) {
    ++thread_counts().synchronizations;
  }
  ~WaitScope() {
    if (wait_hooks.after) wait_hooks.after(state_);
  }
  WaitScope(const WaitScope&) = delete;
  WaitScope& operator=(const WaitScope&) = delete;

 private:
  void* state_;
};

}  // namespace

void set_wait_hooks(WaitHooks hooks) { wait_hooks = hooks; }

Status Device::synchronize(StreamHandle stream) {
  HEADRACE_ENTER("synchronize_stream");
  WaitScope waiting;
  record::Wait recorded(*this, Kind::kSynchronizeStream, stream);
  return recorded.end(do_synchronize(normal(stream)));
}

Status Device::synchronize() {
  HEADRACE_ENTER("synchronize_device");
  WaitScope waiting;
  record::Wait recorded(*this, Kind::kSynchronizeDevice, kLegacyStream);
  return recorded.end(do_synchronize());
}

Result<bool> Device::query(StreamHandle stream) {
  HEADRACE_ENTER("query_stream");
  record::Wait recorded(*this, Kind::kQueryStream, stream);
  return recorded.end(do_query(normal(stream)));
}

Status Device::call(StreamHandle stream, HostFunction function, std::vector<Access> accesses) {
  HEADRACE_ENTER("call");
  if (!function)
    return refusal(ErrorCode::kInput, name_, "call", "a function to run", "an empty one", "give it one");
  Operation recorded(*this, stream, accesses);
  return recorded.end(do_call(normal(stream), std::move(function), std::move(accesses)));
}

Result<EventRef> Device::create_event(bool timing) {
  HEADRACE_ENTER("create_event");
  return do_create_event(timing);
}

Status Device::record(Event& event, StreamHandle stream) {
  HEADRACE_ENTER("record", "an event", event);
  Operation recorded(*this, Kind::kRecord, stream, event.number());
  return recorded.end(do_record(event, normal(stream)));
}

Status Device::wait(StreamHandle stream, Event& event) {
  HEADRACE_ENTER("wait", "an event", event);
  Operation recorded(*this, Kind::kWait, stream, event.number());
  return recorded.end(do_wait(normal(stream), event));
}

Status Device::synchronize(Event& event) {
  HEADRACE_ENTER("synchronize_event", "an event", event);
  WaitScope waiting;
  record::Wait recorded(*this, Kind::kSynchronizeEvent, kLegacyStream, event.number());
  return recorded.end(do_synchronize(event));
}

Result<bool> Device::query(Event& event) {
  HEADRACE_ENTER("query_event", "an event", event);
  record::Wait recorded(*this, Kind::kQueryEvent, kLegacyStream, event.number());
  return recorded.end(do_query(event));
}

Result<double> Device::elapsed_ms(Event& from, Event& to) {
  for (Event* event : {&from, &to}) {
    if (event->device_id() != id()) HEADRACE_ENTER("elapsed_ms", "an event", *event);
  }
  HEADRACE_ENTER("elapsed_ms");
  return do_elapsed_ms(from, to);
}

Status Device::begin_capture(StreamHandle stream, CaptureMode mode) {
  HEADRACE_ENTER("begin_capture");
  Operation recorded(*this, Kind::kBeginCapture, stream);
  return recorded.end(do_begin_capture(normal(stream), mode));
}

Result<GraphRef> Device::end_capture(StreamHandle stream) {
  Status entered = enter("end_capture");
  if (!entered.ok() && in_host_function()) return entered;
  Result<GraphRef> graph = do_end_capture(normal(stream));
  // Ended all the same: that is this call's promise.
  if (!entered.ok()) graph = std::move(entered);
  if (record::recording()) {
    uint64_t number = graph.ok() ? (*graph)->number() : 0;
    (void)record::add(this, Kind::kEndCapture, stream, number, {});
  }
  return graph;
}

ContextScope::ContextScope(Device& device)
    : entered_(!in_host_function() && device.do_enter_context() ? &device : nullptr) {}

ContextScope::~ContextScope() {
  if (entered_ != nullptr) entered_->do_leave_context();
}

Result<CaptureStatus> Device::capture_status(StreamHandle stream) {
  HEADRACE_ENTER("capture_status");
  return do_capture_status(normal(stream));
}

CaptureMode Device::exchange_capture_mode(CaptureMode mode) { return do_exchange_capture_mode(mode); }

Result<GraphExecRef> Device::instantiate(Graph& graph) {
  HEADRACE_ENTER("instantiate", "a graph", graph);
  auto exec = do_instantiate(graph);
  if (exec.ok() && record::recording())
    (void)record::add(this, Kind::kInstantiate, kLegacyStream, (*exec)->number(), {}, graph.number());
  return exec;
}

Status Device::upload(GraphExec& exec, StreamHandle stream) {
  HEADRACE_ENTER("upload", "an executable graph", exec);
  return do_upload(exec, normal(stream));
}

Status Device::launch(GraphExec& exec, StreamHandle stream) {
  HEADRACE_ENTER("launch", "an executable graph", exec);
  Operation recorded(*this, Kind::kLaunch, stream, exec.number());
  return recorded.end(do_launch(exec, normal(stream)));
}

SmLimits Device::sm_limits() const { return do_sm_limits(); }

Result<std::vector<PartitionRef>> Device::split(std::span<const int> sms, const PartitionOptions& options) {
  HEADRACE_ENTER("split");
  for (int sm_count : sms) {
    if (sm_count < 1)
      return refusal(ErrorCode::kInput, name_, "split", "sizes of at least 1 SM", std::to_string(sm_count),
                     "ask for at least 1");
  }
  if (sms.empty())
    return refusal(ErrorCode::kInput, name_, "split", "at least one size", "none", "name the sizes");
  if (options.workqueue_concurrency_limit.value_or(1) < 1)
    return refusal(ErrorCode::kInput, name_, "split", "a workqueue concurrency limit of at least 1, or none",
                   std::to_string(*options.workqueue_concurrency_limit),
                   "say how many streams of the partition have work at once");
  return do_split(sms, options);
}

Result<std::vector<int>> Device::sms_seen(StreamHandle stream, bool replayed) {
  HEADRACE_ENTER("sms_seen");
  stream = normal(stream);
  if (backend_ != Backend::kCpu) {
    if (Status status = do_check_stream(stream); !status.ok()) return status;
    auto capturing = do_capture_status(stream);
    if (!capturing.ok()) return capturing.status();
    if (*capturing != CaptureStatus::kNone)
      return refusal(ErrorCode::kCapture, name_, "sms_seen", "a stream that does not capture",
                     "one that does", "ask before the capture or after it");
  }
  WaitScope waiting;
  return do_sms_seen(stream, replayed);
}

Result<GraphWork> Device::work_of(Graph& graph, const PartitionRef& partition) {
  if (!partition)
    return refusal(ErrorCode::kInput, name_, "work_of", "a partition to compare with", "none",
                   "capture the graph in a lane");
  if (partition->device_id() != id()) HEADRACE_ENTER("work_of", "a partition", *partition);
  HEADRACE_ENTER("work_of", "a graph", graph);
  WaitScope waiting;
  return do_work_of(graph, partition);
}

}  // namespace headrace
