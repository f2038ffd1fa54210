#include "headrace/device.h"

#include <atomic>

#include "device/registry.h"

namespace headrace {

namespace {

std::atomic<int32_t> next_id{1 << 16};  // above every CUDA ordinal

StreamHandle normal(StreamHandle stream) { return stream == 0 ? kLegacyStream : stream; }

}  // namespace

ThreadCounts& thread_counts() {
  static thread_local ThreadCounts counts;
  return counts;
}

Device::Device(std::string name, Backend backend, int ordinal)
    : name_(std::move(name)),
      backend_(backend),
      ordinal_(ordinal),
      id_(backend == Backend::kCuda ? ordinal : next_id++) {
  remember_device(id_, name_);
}

Device::~Device() { forget_device(this); }

Result<void*> Device::allocate(size_t nbytes, StreamHandle stream) {
  auto data = do_allocate(nbytes, normal(stream));
  if (data.ok()) {
    remember_allocation(*data, nbytes, this);
    ++thread_counts().driver_allocations;
  }
  return data;
}

Status Device::free(void* data, StreamHandle stream) {
  Status status = do_free(data, normal(stream));
  if (status.ok()) {
    forget_allocation(data);
    ++thread_counts().driver_frees;
  }
  return status;
}

Status Device::copy(void* to, const void* from, size_t nbytes, StreamHandle stream) {
  return do_copy(to, from, nbytes, normal(stream));
}

Status Device::fill(void* to, uint8_t byte, size_t nbytes, StreamHandle stream) {
  return do_fill(to, byte, nbytes, normal(stream));
}

PointerInfo Device::where(const void* address) const { return do_where(address); }
MemoryCounts Device::memory() const { return do_memory(); }
Result<StreamHandle> Device::create_stream(const StreamOptions& options) { return do_create_stream(options); }
Status Device::destroy_stream(StreamHandle stream) { return do_destroy_stream(normal(stream)); }
Status Device::check_stream(StreamHandle stream) const { return do_check_stream(normal(stream)); }

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
  WaitScope waiting;
  return do_synchronize(normal(stream));
}

Status Device::synchronize() {
  WaitScope waiting;
  return do_synchronize();
}

Result<bool> Device::query(StreamHandle stream) { return do_query(normal(stream)); }

Status Device::call(StreamHandle stream, HostFunction function, std::vector<Access> accesses) {
  return do_call(normal(stream), std::move(function), std::move(accesses));
}

Result<EventRef> Device::create_event(bool timing) { return do_create_event(timing); }
Status Device::record(Event& event, StreamHandle stream) { return do_record(event, normal(stream)); }
Status Device::wait(StreamHandle stream, Event& event) { return do_wait(normal(stream), event); }

Status Device::synchronize(Event& event) {
  WaitScope waiting;
  return do_synchronize(event);
}

Result<bool> Device::query(Event& event) { return do_query(event); }
Result<double> Device::elapsed_ms(Event& from, Event& to) { return do_elapsed_ms(from, to); }
Status Device::begin_capture(StreamHandle stream, CaptureMode mode) {
  return do_begin_capture(normal(stream), mode);
}
Result<GraphRef> Device::end_capture(StreamHandle stream) { return do_end_capture(normal(stream)); }
Result<CaptureStatus> Device::capture_status(StreamHandle stream) {
  return do_capture_status(normal(stream));
}
CaptureMode Device::exchange_capture_mode(CaptureMode mode) { return do_exchange_capture_mode(mode); }
Result<GraphExecRef> Device::instantiate(Graph& graph) { return do_instantiate(graph); }
Status Device::upload(GraphExec& exec, StreamHandle stream) { return do_upload(exec, normal(stream)); }
Status Device::launch(GraphExec& exec, StreamHandle stream) { return do_launch(exec, normal(stream)); }
SmLimits Device::sm_limits() const { return do_sm_limits(); }
Result<std::vector<PartitionRef>> Device::split(std::span<const int> sms) { return do_split(sms); }

}  // namespace headrace
