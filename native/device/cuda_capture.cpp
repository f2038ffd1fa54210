// Capture and graphs of the CUDA device.
#include "device/cuda.h"
#include "device/cuda_operation.h"
#include "device/refusal.h"

namespace headrace {

namespace {

// CUstreamCaptureMode counts as the seam does.
static_assert(static_cast<int>(CaptureMode::kGlobal) == cu::kCaptureGlobal &&
              static_cast<int>(CaptureMode::kThreadLocal) == cu::kCaptureThreadLocal &&
              static_cast<int>(CaptureMode::kRelaxed) == cu::kCaptureRelaxed);

}  // namespace

CudaGraph::CudaGraph(const CudaDevice& device, cu::Graph graph, Keep keep, std::vector<CudaCallRef> calls)
    : Graph(device), graph(graph), keep(std::move(keep)), calls(std::move(calls)), device_(device) {}

CudaGraph::~CudaGraph() {
  Current current(device_);
  if (!current.ok()) return;
  Relaxed relaxed(device_.driver());
  (void)device_.driver().GraphDestroy(graph);
}

CudaGraphExec::CudaGraphExec(CudaDevice& device, cu::GraphExec exec, Keep keep,
                             std::vector<CudaCallRef> calls)
    : GraphExec(device), exec(exec), keep(std::move(keep)), calls(std::move(calls)), device_(device) {}

CudaGraphExec::~CudaGraphExec() {
  Current current(device_);
  if (!current.ok()) return;
  {
    Relaxed relaxed(device_.driver());
    // A launch in flight goes on; the driver frees the rest when it ends (cuGraphExecDestroy).
    (void)device_.driver().GraphExecDestroy(exec);
  }
  if (!last) return;
  Keep all = keep;
  all.insert(all.end(), calls.begin(), calls.end());
  device_.retire(std::move(last), std::move(all));
}

Status CudaDevice::do_begin_capture(StreamHandle stream, CaptureMode mode) {
  if (stream == kLegacyStream)
    return refusal(ErrorCode::kCapture, name(), "begin_capture", "a stream that can capture",
                   "the legacy stream, which cannot (CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)",
                   "capture on a stream of your own, non-blocking");
  HEADRACE_CURRENT("begin_capture");
  HEADRACE_USABLE("begin_capture", stream);
  auto busy = capturing("begin_capture", stream);
  if (!busy.ok()) return busy.status();
  if (*busy)
    return refusal(ErrorCode::kCapture, name(), "begin_capture", "a stream that does not capture",
                   stream_name(stream) + ", which does", "end that capture first");
  if (cu::Code code = driver_.StreamBeginCapture(raw(stream), static_cast<int>(mode)); code != cu::kSuccess)
    return failed("begin_capture", code);
  Capture capture;
  int status = cu::kStatusNone;
  cu::Code code = driver_.StreamGetCaptureInfo(raw(stream), &status, &capture.id, nullptr, nullptr, nullptr);
  if (code != cu::kSuccess || status != cu::kStatusActive) {
    cu::Graph graph = nullptr;
    if (driver_.StreamEndCapture(raw(stream), &graph) == cu::kSuccess && graph != nullptr)
      (void)driver_.GraphDestroy(graph);
    return failed("begin_capture", code != cu::kSuccess ? code : cu::kCaptureInvalidated);
  }
  if (auto partition = partition_of(stream)) capture.keep.push_back(std::move(partition));
  std::lock_guard lock(captures_mutex_);
  captures_[stream_key(stream)] = std::move(capture);
  capturing_ = static_cast<int>(captures_.size());
  return {};
}

Result<GraphRef> CudaDevice::do_end_capture(StreamHandle stream) {
  HEADRACE_CURRENT("end_capture");
  HEADRACE_USABLE("end_capture", stream);
  cu::Graph graph = nullptr;
  cu::Code code = driver_.StreamEndCapture(raw(stream), &graph);
  Capture capture;
  int status = cu::kStatusNone;
  // A stream that was forked into the capture, or another thread's call, may leave it going on.
  bool goes_on = code != cu::kSuccess && driver_.StreamIsCapturing(raw(stream), &status) == cu::kSuccess &&
                 status != cu::kStatusNone;
  if (!goes_on) {
    std::lock_guard lock(captures_mutex_);
    if (auto found = captures_.find(stream_key(stream)); found != captures_.end()) {
      capture = std::move(found->second);
      captures_.erase(found);
      capturing_ = static_cast<int>(captures_.size());
    }
  }
  if (code == cu::kSuccess && graph != nullptr)
    return GraphRef(
        std::make_shared<CudaGraph>(*this, graph, std::move(capture.keep), std::move(capture.calls)));
  if (graph != nullptr) (void)driver_.GraphDestroy(graph);
  if (code == cu::kIllegalState)
    return refusal(ErrorCode::kCapture, name(), "end_capture", "a stream that captures",
                   stream_name(stream) + ", which does not (" + driver_.text(code) + ")",
                   "begin a capture first, and end it once");
  return failed("end_capture", code != cu::kSuccess ? code : cu::kCaptureInvalidated);
}

Result<CaptureStatus> CudaDevice::do_capture_status(StreamHandle stream) {
  HEADRACE_CURRENT("capture_status");
  HEADRACE_USABLE("capture_status", stream);
  int status = cu::kStatusNone;
  if (cu::Code code = driver_.StreamIsCapturing(raw(stream), &status); code != cu::kSuccess)
    return failed("capture_status", code);
  if (status == cu::kStatusActive) return CaptureStatus::kActive;
  return status == cu::kStatusNone ? CaptureStatus::kNone : CaptureStatus::kInvalidated;
}

CaptureMode CudaDevice::do_exchange_capture_mode(CaptureMode mode) {
  Current current(*this);
  int number = static_cast<int>(mode);
  if (!current.ok() || driver_.ThreadExchangeStreamCaptureMode(&number) != cu::kSuccess)
    return CaptureMode::kGlobal;
  return static_cast<CaptureMode>(number);
}

Result<GraphExecRef> CudaDevice::do_instantiate(Graph& graph) {
  HEADRACE_CURRENT("instantiate");
  auto& from = static_cast<CudaGraph&>(graph);
  cu::GraphExec exec = nullptr;
  if (cu::Code code = driver_.GraphInstantiate(&exec, from.graph, 0); code != cu::kSuccess)
    return failed("instantiate", code);
  return GraphExecRef(std::make_shared<CudaGraphExec>(*this, exec, from.keep, from.calls));
}

Status CudaDevice::do_upload(GraphExec& exec, StreamHandle stream) {
  HEADRACE_CURRENT("upload");
  HEADRACE_USABLE("upload", stream);
  auto& made = static_cast<CudaGraphExec&>(exec);
  std::lock_guard lock(made.mutex);
  if (cu::Code code = driver_.GraphUpload(made.exec, raw(stream)); code != cu::kSuccess)
    return failed("upload", code);
  return {};
}

Status CudaDevice::do_launch(GraphExec& exec, StreamHandle stream) {
  HEADRACE_CURRENT("launch");
  HEADRACE_USABLE("launch", stream);
  auto& launched = static_cast<CudaGraphExec&>(exec);
  std::lock_guard lock(launched.mutex);
  bool keeps = !launched.keep.empty() || !launched.calls.empty();
  if (keeps && !launched.last) {
    auto event = make_event(false);
    if (!event.ok()) return event.status();
    launched.last = *event;
  }
  // Asked before: a captured stream would take the launch for a child graph, which keeps nothing of ours.
  auto busy = capturing("launch", stream);
  if (!busy.ok()) return busy.status();
  if (*busy)
    return refusal(ErrorCode::kCapture, name(), "launch", "a stream that does not capture",
                   stream_name(stream) + ", which does", "launch it before the capture or after");
  calls_.enqueued(stream_key(stream), launched.calls);
  if (cu::Code code = driver_.GraphLaunch(launched.exec, raw(stream)); code != cu::kSuccess) {
    CudaCalls::withdrawn(launched.calls);
    return failed("launch", code);
  }
  if (!keeps) return {};
  // Launches of one graph run one after the other, so the latest stands for all.
  if (cu::Code code = driver_.EventRecord(launched.last->event, raw(stream)); code != cu::kSuccess)
    return failed("launch", code);
  return {};
}

}  // namespace headrace
