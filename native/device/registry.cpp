#include "device/registry.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <shared_mutex>

#include "device/address_map.h"
#include "device/record.h"
#include "headrace/device.h"

namespace headrace {

namespace {

struct Allocation {
  Device* device;  // null: it has ended
  int32_t device_id;
  Backend backend;
};

struct Registry {
  std::shared_mutex mutex;
  AddressMap<Allocation> live;
  AddressMap<Allocation> ended;
  std::map<int32_t, std::string> names;
};

// Never destroyed: buffers may be freed while the process ends.
Registry& registry() {
  static auto* r = new Registry();
  return *r;
}

// An empty allocation has an address of its own, too.
size_t extent(size_t nbytes) { return std::max<size_t>(nbytes, 1); }

}  // namespace

void remember_allocation(void* data, size_t nbytes, Device* device) {
  std::unique_lock lock(registry().mutex);
  registry().live.insert(data, extent(nbytes), {device, device->id(), device->backend()});
}

std::optional<size_t> forget_allocation(void* data, Device* device) {
  std::unique_lock lock(registry().mutex);
  const auto* range = registry().live.starting_at(data);
  if (range == nullptr || range->value.device != device) return std::nullopt;
  size_t nbytes = range->nbytes;
  registry().live.erase(data);
  return nbytes;
}

void forget_device(Device* device) {
  std::unique_lock lock(registry().mutex);
  registry().live.erase_if([&](const auto& range) { return range.value.device == device; });
}

DeviceRef device_of(const void* address) {
  std::shared_lock lock(registry().mutex);
  const auto* range = registry().live.holding(address);
  // A device whose last owner is going cannot be handed out any more.
  return range ? range->value.device->weak_from_this().lock() : nullptr;
}

std::optional<Owner> owner_of(const void* address) {
  std::shared_lock lock(registry().mutex);
  const auto* range = registry().live.holding(address);
  bool ended = range == nullptr;
  if (ended) range = registry().ended.holding(address);
  if (!range) return std::nullopt;
  int32_t id = range->value.device_id;
  auto name = registry().names.find(id);
  return Owner{id,          range->value.backend, name == registry().names.end() ? "" : name->second,
               range->base, range->nbytes,        ended};
}

void remember_ended(void* data, size_t nbytes, int32_t device_id) {
  std::unique_lock lock(registry().mutex);
  registry().ended.insert(data, extent(nbytes), {nullptr, device_id, Backend::kSim});
}

void forget_ended(void* data) {
  size_t nbytes = 0;
  {
    std::unique_lock lock(registry().mutex);
    // With its device ends also what was never freed.
    for (const auto* ranges : {&registry().live, &registry().ended}) {
      if (const auto* range = ranges->starting_at(data)) nbytes = std::max(nbytes, range->nbytes);
    }
    registry().ended.erase(data);
  }
  if (nbytes == 0 || !record::recording()) return;
  (void)record::add(nullptr, record::Kind::kGone, 0, 0, {{record::touch(data, nbytes, true)}});
}

void remember_device_name(int32_t id, const std::string& name) {
  std::unique_lock lock(registry().mutex);
  registry().names[id] = name;
}

bool known_device(int32_t id) {
  std::shared_lock lock(registry().mutex);
  return registry().names.count(id) != 0;
}

std::string device_name_of(int32_t id) {
  std::shared_lock lock(registry().mutex);
  auto name = registry().names.find(id);
  return name == registry().names.end() ? "device " + std::to_string(id) : name->second;
}

std::string device_name_of(int32_t id, const std::string& beside) {
  std::string name = device_name_of(id);
  return name == beside ? name + ", another device of that name" : name;
}

}  // namespace headrace
