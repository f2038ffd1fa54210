// Captures and graphs of the simulated device. Not locked: the device's lock is held around every call.
//
// Where CUDA's reference is silent the rules are as measured on an H200 (driver 580.159, CUDA 13.0).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "device/sim_op.h"
#include "device/sim_stream.h"
#include "headrace/device.h"

namespace headrace::sim {

struct Node {
  ActionRef action;
  std::vector<size_t> after;  // nodes before it; always smaller numbers
  StreamHandle stream = 0;    // that it was captured on
};
using Nodes = std::vector<Node>;

class SimGraph final : public Graph {
 public:
  SimGraph(const Device& device, std::shared_ptr<const Nodes> nodes)
      : Graph(device), nodes(std::move(nodes)) {}
  const std::shared_ptr<const Nodes> nodes;
};

class SimGraphExec final : public GraphExec {
 public:
  SimGraphExec(const Device& device, std::shared_ptr<const Nodes> nodes)
      : GraphExec(device), nodes(std::move(nodes)) {}
  const std::shared_ptr<const Nodes> nodes;
  OpRef last;  // the end of its latest launch
};

struct Capture {
  Stream* origin = nullptr;
  CaptureMode mode = CaptureMode::kGlobal;
  uint64_t thread = 0;
  std::shared_ptr<Nodes> nodes = std::make_shared<Nodes>();
  std::vector<Stream*> streams;  // the origin and those that were forked into it
  std::vector<size_t> orphans;   // last nodes of forked streams that were destroyed
  std::optional<Status> broken;  // why, once it is invalidated
  bool ended = false;
};
using CaptureRef = std::shared_ptr<Capture>;

// What an event was recorded as: an operation, or a point in a capture.
class SimEvent final : public Event {
 public:
  SimEvent(const Device& device, bool timing) : Event(device), timing(timing) {}
  const bool timing;
  OpRef op;
  CaptureRef capture;
  std::vector<size_t> captured;
};

class Captures {
 public:
  explicit Captures(std::string device) : device_(std::move(device)) {}

  Status begin(Stream& stream, CaptureMode mode, uint64_t thread);
  // The nodes, or why there are none. The capture is over in every case but one: asked of a forked stream.
  Result<std::shared_ptr<const Nodes>> end(Guard& guard, Stream& stream, uint64_t thread);
  static CaptureStatus status(const Stream& stream);
  // The calling thread's mode, for every device.
  static CaptureMode exchange_mode(CaptureMode mode);

  // Refuses a use of the legacy stream, and breaks what it would have joined, while a blocking stream
  // captures.
  Status check_legacy(const char* operation, const Stream& stream);
  // The same without breaking it.
  Status check_legacy_status(const Stream& stream) const;
  // Refuses a call that a capture forbids even on unrelated objects, and breaks it.
  Status check_unsafe(const char* operation, uint64_t thread);
  // Refuses a wait for the whole device, and breaks every capture.
  Status check_device_wide(const char* operation);
  // Refuses what cannot be done on a stream that captures, and breaks its capture.
  Status check_waiting(const char* operation, const Stream& stream);
  Status check_waiting(const char* operation, const SimEvent& event);
  // Refuses an operation that a capture cannot take; the capture goes on.
  Status check_outside(const char* operation, const Stream& stream, const std::string& why,
                       const std::string& advice) const;

  // On a stream that captures: they become part of it.
  Status add(const char* operation, Stream& stream, ActionRef action);
  Status record(const char* operation, Stream& stream, SimEvent& event);
  // Also for a stream that does not, when the event is a point in a capture: it is forked into it.
  Status wait(const char* operation, Stream& stream, SimEvent& event);

  // A stream is destroyed.
  void forget(Guard& guard, Stream& stream);

 private:
  Status refuse(const char* operation, const std::string& expected, const std::string& got,
                const std::string& advice) const;
  Status broken(const char* operation, const Capture& capture) const;
  void breaks(Capture& capture, const Status& why);
  void finish(Guard& guard, Capture& capture);
  bool blocking_capture(const Capture& capture) const;

  std::string device_;
  std::vector<CaptureRef> active_;
};

}  // namespace headrace::sim
