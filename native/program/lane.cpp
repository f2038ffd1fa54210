#include "program/lane.h"

#include "headrace/block.h"

namespace headrace {

Result<std::shared_ptr<const Lane>> Lane::open(DeviceRef device, const PartitionRef& partition) {
  if (partition->device_id() != device->id()) {
    Status status(ErrorCode::kDevice, "lane: expected a partition of the program's device, " +
                                          device->name() + ", got one of " +
                                          device_name_of(partition->device_id(), device->name()) +
                                          "; load the program on the partition's device");
    status->device = device->name();
    return status;
  }
  auto stream = device->create_stream({.priority = 0, .blocking = false, .partition = partition});
  if (!stream.ok()) return stream.status();
  return std::shared_ptr<const Lane>(new Lane(std::move(device), *stream));
}

Lane::~Lane() {
  put_off([device = device_, stream = stream_] { (void)device->destroy_stream(stream); });
}

}  // namespace headrace
