// Streams of the simulated device, and which operations a new one runs behind. Not locked: the device's lock
// is held around every call.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "device/sim_op.h"
#include "device/sim_schedule.h"
#include "headrace/device.h"

namespace headrace::sim {

struct Capture;

struct Stream {
  StreamHandle handle = 0;
  int priority = 0;
  bool blocking = false;  // the legacy stream and this one order each other
  PartitionRef partition;
  OpRef last;
  std::shared_ptr<Capture> capture;
  std::vector<size_t> captured;  // the nodes that the next one comes behind

  bool legacy() const { return handle == kLegacyStream; }
};

class Streams {
 public:
  Streams(std::string device, int32_t device_id);

  StreamHandle create(const StreamOptions& options);
  // The stream of a handle, for the thread of that number.
  Result<Stream*> find(const char* operation, StreamHandle handle, uint64_t thread);
  Status check(const char* operation, StreamHandle handle) const;
  PartitionRef partition(StreamHandle handle) const;  // null for special handles
  // Its work goes on.
  void destroy(Stream* stream);

  // Puts `op` behind what is on the stream, and behind what the legacy stream's rule says.
  void order(Schedule& schedule, Op& op, const Stream& stream);
  // What a wait for the stream waits for.
  std::vector<OpRef> targets(const Stream& stream);

 private:
  // Last operations of everything that the legacy stream orders itself behind.
  std::vector<OpRef> blocking_work();

  std::string device_;
  int32_t device_id_;
  uint32_t made_ = 0;
  Stream legacy_;
  std::map<StreamHandle, std::unique_ptr<Stream>> streams_;
  std::map<uint64_t, std::unique_ptr<Stream>> per_thread_;
  std::vector<OpRef> orphans_;  // last operations of destroyed blocking streams
};

}  // namespace headrace::sim
