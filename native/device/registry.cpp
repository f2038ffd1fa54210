#include "device/registry.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <shared_mutex>

#include "device/record.h"
#include "headrace/device.h"

namespace headrace {

namespace {

struct Range {
  uintptr_t end;
  Device* device;  // null: the allocation has ended
  int32_t device_id;
  Backend backend;
};

using Ranges = std::map<uintptr_t, Range>;

struct Registry {
  std::shared_mutex mutex;
  Ranges live;
  Ranges ended;
  std::map<int32_t, std::string> names;
};

// Never destroyed: buffers may be freed while the process ends.
Registry& registry() {
  static auto* r = new Registry();
  return *r;
}

uintptr_t end_of(void* data, size_t nbytes) {
  return reinterpret_cast<uintptr_t>(data) + (nbytes ? nbytes : 1);
}

const Ranges::value_type* find(const Ranges& ranges, const void* address) {
  auto at = reinterpret_cast<uintptr_t>(address);
  auto next = ranges.upper_bound(at);
  if (next == ranges.begin()) return nullptr;
  auto range = std::prev(next);
  return at < range->second.end ? &*range : nullptr;
}

}  // namespace

void remember_allocation(void* data, size_t nbytes, Device* device) {
  std::unique_lock lock(registry().mutex);
  registry().live[reinterpret_cast<uintptr_t>(data)] = {end_of(data, nbytes), device, device->id(),
                                                        device->backend()};
}

std::optional<size_t> forget_allocation(void* data, Device* device) {
  std::unique_lock lock(registry().mutex);
  auto range = registry().live.find(reinterpret_cast<uintptr_t>(data));
  if (range == registry().live.end() || range->second.device != device) return std::nullopt;
  size_t nbytes = range->second.end - range->first;
  registry().live.erase(range);
  return nbytes;
}

void forget_device(Device* device) {
  std::unique_lock lock(registry().mutex);
  std::erase_if(registry().live, [&](const auto& item) { return item.second.device == device; });
}

DeviceRef device_of(const void* address) {
  std::shared_lock lock(registry().mutex);
  const auto* range = find(registry().live, address);
  // A device whose last owner is going cannot be handed out any more.
  return range ? range->second.device->weak_from_this().lock() : nullptr;
}

std::optional<Owner> owner_of(const void* address) {
  std::shared_lock lock(registry().mutex);
  const auto* range = find(registry().live, address);
  bool ended = range == nullptr;
  if (ended) range = find(registry().ended, address);
  if (!range) return std::nullopt;
  int32_t id = range->second.device_id;
  auto name = registry().names.find(id);
  return Owner{id,
               range->second.backend,
               name == registry().names.end() ? "" : name->second,
               reinterpret_cast<void*>(range->first),
               range->second.end - range->first,
               ended};
}

void remember_ended(void* data, size_t nbytes, int32_t device_id) {
  std::unique_lock lock(registry().mutex);
  registry().ended[reinterpret_cast<uintptr_t>(data)] = {end_of(data, nbytes), nullptr, device_id,
                                                         Backend::kSim};
}

void forget_ended(void* data) {
  auto at = reinterpret_cast<uintptr_t>(data);
  uintptr_t end = at;
  {
    std::unique_lock lock(registry().mutex);
    // With its device ends also what was never freed.
    for (const Ranges* ranges : {&registry().live, &registry().ended}) {
      auto found = ranges->find(at);
      if (found != ranges->end()) end = std::max(end, found->second.end);
    }
    registry().ended.erase(at);
  }
  if (end == at || !record::recording()) return;
  (void)record::add(nullptr, record::Kind::kGone, 0, 0, {{record::touch(data, end - at, true)}});
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
