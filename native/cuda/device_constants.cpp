#include "cuda/constants.h"

namespace headrace {

Result<std::shared_ptr<DeviceConstant>> DeviceConstant::make(const DeviceRef& device,
                                                             std::string_view bytes) {
  std::shared_ptr<DeviceConstant> self(new DeviceConstant());
  self->nbytes_ = bytes.size();
  auto ring = std::make_shared<Ring>(device);
  ring->close();
  auto block = ring->take(bytes.size(), kPerThreadStream);
  if (!block.ok()) return block.status();
  self->block_ = std::move(*block);
  if (bytes.empty()) return self;
  Status status = device->copy(self->block_->data(), bytes.data(), bytes.size(), kPerThreadStream);
  // Waited for also where the copy failed: the bytes may go.
  Status waited = drain(*device, kPerThreadStream);
  if (!status.ok()) return status;
  if (!waited.ok()) return waited;
  return self;
}

Result<std::shared_ptr<DeviceConstant>> DeviceConstants::get(const DeviceRef& device, const std::string& key,
                                                             std::string_view bytes) {
  // Under the lock, so that nobody finds one that is not there yet.
  std::lock_guard lock(mutex_);
  auto found = constants_.find(key);
  if (found != constants_.end() && found->second->nbytes() == bytes.size()) return found->second;
  auto made = DeviceConstant::make(device, bytes);
  if (made.ok()) constants_[key] = *made;
  return made;
}

}  // namespace headrace
