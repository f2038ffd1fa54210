// The CUDA device's events.
#include "device/cuda.h"

#include "device/cuda_operation.h"
#include "device/refusal.h"

namespace headrace {

namespace {

CudaEvent& own(Event& event) { return static_cast<CudaEvent&>(event); }

}  // namespace

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

}  // namespace headrace
