// The lane of a program: a stream in a partition of the device, for calls for which nobody chose a stream.
#pragma once

#include <memory>

#include "headrace/device.h"

namespace headrace {

class Lane {
 public:
  // kDevice: the partition is of another device. kInput: it is closed.
  static Result<std::shared_ptr<const Lane>> open(DeviceRef device, const PartitionRef& partition);
  // The stream goes, work on it goes on.
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;
  StreamHandle stream() const { return stream_; }

 private:
  Lane(DeviceRef device, StreamHandle stream) : device_(std::move(device)), stream_(stream) {}

  const DeviceRef device_;
  const StreamHandle stream_;
};

}  // namespace headrace
