#include "device/registry.h"

#include <cstdint>
#include <map>
#include <mutex>
#include <shared_mutex>

#include "headrace/device.h"

namespace headrace {

namespace {

struct Range {
  uintptr_t end;
  Device* device;
};

struct Registry {
  std::shared_mutex mutex;
  std::map<uintptr_t, Range> ranges;
  std::map<int32_t, std::string> names;
};

// Never destroyed: buffers may be freed while the process ends.
Registry& registry() {
  static auto* r = new Registry();
  return *r;
}

}  // namespace

void remember_allocation(void* data, size_t nbytes, Device* device) {
  auto at = reinterpret_cast<uintptr_t>(data);
  std::unique_lock lock(registry().mutex);
  registry().ranges[at] = {at + (nbytes ? nbytes : 1), device};
}

void forget_allocation(void* data) {
  std::unique_lock lock(registry().mutex);
  registry().ranges.erase(reinterpret_cast<uintptr_t>(data));
}

void remember_device(int32_t id, const std::string& name) {
  std::unique_lock lock(registry().mutex);
  registry().names[id] = name;
}

void forget_device(Device* device) {
  std::unique_lock lock(registry().mutex);
  registry().names.erase(device->id());
  std::erase_if(registry().ranges, [&](const auto& item) { return item.second.device == device; });
}

std::string device_name_of(int32_t id) {
  std::shared_lock lock(registry().mutex);
  auto at = registry().names.find(id);
  return at == registry().names.end() ? "device " + std::to_string(id) : at->second;
}

DeviceRef device_of(const void* address) {
  auto at = reinterpret_cast<uintptr_t>(address);
  std::shared_lock lock(registry().mutex);
  auto next = registry().ranges.upper_bound(at);
  if (next == registry().ranges.begin()) return nullptr;
  const Range& range = std::prev(next)->second;
  // A device whose last owner is going cannot be handed out any more.
  return at < range.end ? range.device->weak_from_this().lock() : nullptr;
}

}  // namespace headrace
