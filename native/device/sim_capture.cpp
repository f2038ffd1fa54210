#include "device/sim_capture.h"

#include <algorithm>

#include "device/refusal.h"

namespace headrace::sim {

namespace {

thread_local CaptureMode mode_of_thread = CaptureMode::kGlobal;  // CUDA's default too

void merge(std::vector<size_t>& into, const std::vector<size_t>& nodes) {
  into.insert(into.end(), nodes.begin(), nodes.end());
  std::sort(into.begin(), into.end());
  into.erase(std::unique(into.begin(), into.end()), into.end());
}

// Whether every node of `wanted` is one of `last` or before one.
bool reached(const Nodes& nodes, const std::vector<size_t>& last, const std::vector<size_t>& wanted) {
  std::vector<bool> seen(nodes.size());
  for (size_t node : last) seen[node] = true;
  for (size_t i = nodes.size(); i-- > 0;) {
    if (!seen[i]) continue;
    for (size_t before : nodes[i].after) seen[before] = true;
  }
  return std::all_of(wanted.begin(), wanted.end(), [&](size_t node) { return seen[node]; });
}

}  // namespace

Status Captures::refuse(const char* operation, const std::string& expected, const std::string& got,
                        const std::string& advice) const {
  return refusal(ErrorCode::kCapture, device_, operation, expected, got, advice);
}

Status Captures::broken(const char* operation, const Capture& capture) const {
  return refuse(
      operation, "a capture that is intact",
      "one that was invalidated (CUDA_ERROR_STREAM_CAPTURE_INVALIDATED) by: " + capture.broken->message(),
      "end it with end_capture(), and keep that call out of the next one");
}

void Captures::breaks(Capture& capture, const Status& why) {
  if (!capture.broken) capture.broken = why;
}

bool Captures::blocking_capture(const Capture& capture) const {
  return std::any_of(capture.streams.begin(), capture.streams.end(),
                     [](const Stream* stream) { return stream->blocking; });
}

Status Captures::begin(Stream& stream, CaptureMode mode, uint64_t thread) {
  if (stream.legacy())
    return refuse("begin_capture", "a stream that can capture",
                  "the legacy stream, which cannot (CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)",
                  "capture on a stream of your own, non-blocking");
  if (stream.capture) {
    // CUDA: CUDA_ERROR_ILLEGAL_STATE.
    return refuse("begin_capture", "a stream that does not capture",
                  stream_name(stream.handle) + ", which does", "end that capture first");
  }
  auto capture = std::make_shared<Capture>();
  capture->origin = &stream;
  capture->mode = mode;
  capture->thread = thread;
  capture->streams = {&stream};
  stream.capture = capture;
  stream.captured.clear();
  active_.push_back(std::move(capture));
  return {};
}

Result<std::shared_ptr<const Nodes>> Captures::end(Guard& guard, Stream& stream, uint64_t thread) {
  CaptureRef capture = stream.capture;
  if (!capture)
    return refuse("end_capture", "a stream that captures",
                  stream_name(stream.handle) + ", which does not (CUDA_ERROR_ILLEGAL_STATE)",
                  "begin a capture first, and end it once");
  if (capture->origin != &stream) {
    Status status = refuse(
        "end_capture", stream_name(capture->origin->handle) + ", where the capture began",
        stream_name(stream.handle) + ", which was forked into it (CUDA_ERROR_STREAM_CAPTURE_UNMATCHED)",
        "join it with an event, and end the capture where it began");
    breaks(*capture, status);
    return status;
  }
  Status status;
  if (capture->broken) {
    status = broken("end_capture", *capture);
  } else if (capture->mode != CaptureMode::kRelaxed && capture->thread != thread) {
    status = refuse("end_capture", "the thread that began the capture",
                    "another one (CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD)",
                    "end it there, or begin it in relaxed mode");
  } else {
    // Measured: it is the work that must be joined; a stream forked without any need not be.
    auto unjoined = [&](const std::string& name) {
      status = refuse("end_capture", "every forked stream joined",
                      name + ", which has work that nothing waits for (CUDA_ERROR_STREAM_CAPTURE_UNJOINED)",
                      "record an event there and wait for it on " + stream_name(stream.handle));
    };
    if (!reached(*capture->nodes, stream.captured, capture->orphans)) unjoined("a stream, destroyed since");
    for (const Stream* forked : capture->streams) {
      if (!reached(*capture->nodes, stream.captured, forked->captured)) unjoined(stream_name(forked->handle));
    }
  }
  std::shared_ptr<const Nodes> nodes = capture->nodes;
  finish(guard, *capture);
  if (!status.ok()) {
    guard.discard(std::move(nodes));
    return status;
  }
  return nodes;
}

void Captures::finish(Guard& guard, Capture& capture) {
  guard.discard(std::move(capture.nodes));
  capture.ended = true;
  std::vector<Stream*> streams = std::move(capture.streams);
  std::erase_if(active_, [&](const CaptureRef& other) { return other.get() == &capture; });
  for (Stream* stream : streams) {
    stream->captured.clear();
    guard.discard(std::move(stream->capture));
  }
}

CaptureStatus Captures::status(const Stream& stream) {
  if (!stream.capture) return CaptureStatus::kNone;
  return stream.capture->broken ? CaptureStatus::kInvalidated : CaptureStatus::kActive;
}

CaptureMode Captures::exchange_mode(CaptureMode mode) { return std::exchange(mode_of_thread, mode); }

// CUDA Programming Guide, "Prohibited and Unhandled Operations": the legacy stream encompasses the blocking
// ones, so that its use is invalid while one of them captures; measured: both sides get CAPTURE_IMPLICIT.
Status Captures::check_legacy(const char* operation, const Stream& stream) {
  Status status = stream.legacy() ? check_legacy_status(stream) : Status();
  if (status.ok()) return status;
  status = refuse(operation, "no capture on a blocking stream while the legacy stream is used",
                  "one (CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, on both sides: it is invalidated)",
                  "capture on a non-blocking stream, or leave the legacy stream alone meanwhile");
  for (const CaptureRef& capture : active_) {
    if (blocking_capture(*capture)) breaks(*capture, status);
  }
  return status;
}

Status Captures::check_legacy_status(const Stream& stream) const {
  if (!stream.legacy()) return {};
  for (const CaptureRef& capture : active_) {
    if (blocking_capture(*capture))
      return refuse("capture_status", "no capture on a blocking stream while the legacy stream is asked",
                    "one (CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)", "ask the stream that captures");
  }
  return {};
}

// cuThreadExchangeStreamCaptureMode says which threads may make "potentially unsafe API calls". Measured to
// be such, on unrelated objects: synchronizing or querying a stream or an event, allocating and freeing (the
// stream-ordered calls too), instantiating. Not: making and destroying streams and events, elapsed times.
Status Captures::check_unsafe(const char* operation, uint64_t thread) {
  if (mode_of_thread == CaptureMode::kRelaxed) return {};
  Status status;
  for (const CaptureRef& capture : active_) {
    bool own = capture->thread == thread && capture->mode != CaptureMode::kRelaxed;
    bool global = capture->mode == CaptureMode::kGlobal && mode_of_thread == CaptureMode::kGlobal;
    if (!own && !global) continue;
    if (status.ok())
      status = refuse(operation,
                      own ? "no such call in the thread that captures"
                          : "no such call in any thread during a global capture",
                      "one (CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED; the capture is invalidated)",
                      "make it before the capture or after, or under exchange_capture_mode(relaxed)");
    breaks(*capture, status);
  }
  return status;
}

// CUDA Programming Guide: the device encompasses its streams. Measured: in every mode, from any thread, under
// the thread's relaxed mode too.
Status Captures::check_device_wide(const char* operation) {
  if (active_.empty()) return {};
  Status status = refuse(operation, "no capture on the device",
                         "one (CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, in every mode; it is invalidated)",
                         "wait for the streams that are meant, or after the capture");
  for (const CaptureRef& capture : active_) breaks(*capture, status);
  return status;
}

Status Captures::check_waiting(const char* operation, const Stream& stream) {
  if (!stream.capture) return {};
  Status status = refuse(
      operation, "a stream that does not capture",
      stream_name(stream.handle) + ", which does (CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED; it is invalidated)",
      "end the capture; what it holds has not run");
  breaks(*stream.capture, status);
  return status;
}

Status Captures::check_waiting(const char* operation, const SimEvent& event) {
  if (!event.capture) return {};
  Status status = refuse(operation, "an event whose latest record is no part of a capture",
                         event.capture->ended
                             ? "one recorded in a capture that has ended (CUDA_ERROR_INVALID_VALUE)"
                             : "one recorded in a capture (CUDA_ERROR_CAPTURED_EVENT; it is invalidated)",
                         "record it again outside, or keep another event for the capture");
  breaks(*event.capture, status);
  return status;
}

Status Captures::check_outside(const char* operation, const Stream& stream, const std::string& why,
                               const std::string& advice) const {
  if (!stream.capture) return {};
  return refuse(operation, "a stream that does not capture",
                stream_name(stream.handle) + ", which does: " + why, advice);
}

Status Captures::add(const char* operation, Stream& stream, ActionRef action) {
  Capture& capture = *stream.capture;
  if (capture.broken) return broken(operation, capture);
  capture.nodes->push_back({std::move(action), stream.captured, stream.handle});
  stream.captured = {capture.nodes->size() - 1};
  return {};
}

Status Captures::record(const char* operation, Stream& stream, SimEvent& event) {
  if (stream.capture->broken) return broken(operation, *stream.capture);
  event.capture = stream.capture;
  event.captured = stream.captured;
  event.op = nullptr;
  return {};
}

Status Captures::wait(const char* operation, Stream& stream, SimEvent& event) {
  if (stream.capture && stream.capture->broken) return broken(operation, *stream.capture);
  if (!event.capture) {
    if (!event.op) return {};  // never recorded: no wait
    Status status = refuse(operation, "an event recorded in the same capture",
                           "one recorded outside (CUDA_ERROR_STREAM_CAPTURE_ISOLATION; it is invalidated)",
                           "wait for it before the capture begins");
    breaks(*stream.capture, status);
    return status;
  }
  if (event.capture->ended) {
    Status status = refuse(operation, "an event recorded in a capture that goes on, or outside",
                           "one recorded in a capture that has ended (CUDA_ERROR_INVALID_VALUE)",
                           "record it again, or wait for an event recorded behind the graph's launch");
    if (stream.capture) breaks(*stream.capture, status);
    return status;
  }
  if (event.capture->broken) return broken(operation, *event.capture);
  if (stream.capture && stream.capture != event.capture) {
    Status status = refuse(operation, "an event of the same capture",
                           "one of another (CUDA_ERROR_STREAM_CAPTURE_MERGE; both are invalidated)",
                           "keep captures apart");
    breaks(*stream.capture, status);
    breaks(*event.capture, status);
    return status;
  }
  if (!stream.capture) {
    if (stream.legacy()) {
      Status status =
          refuse(operation, "a stream that can capture",
                 "the legacy stream, which cannot (CUDA_ERROR_STREAM_CAPTURE_IMPLICIT; the capture "
                 "is invalidated)",
                 "fork into a non-blocking stream");
      breaks(*event.capture, status);
      return status;
    }
    stream.capture = event.capture;
    stream.capture->streams.push_back(&stream);
  }
  merge(stream.captured, event.captured);
  return {};
}

// Measured: destroying the origin succeeds, and nobody can end the capture any more, so it ends here;
// destroying a forked stream leaves the capture intact, and its work to be joined.
void Captures::forget(Guard& guard, Stream& stream) {
  CaptureRef capture = stream.capture;
  if (!capture) return;
  if (capture->origin == &stream) {
    finish(guard, *capture);
  } else {
    merge(capture->orphans, stream.captured);
    std::erase(capture->streams, &stream);
    guard.discard(std::move(stream.capture));
  }
}

}  // namespace headrace::sim
