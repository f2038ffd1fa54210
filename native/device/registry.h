// Process-wide: which device an address belongs to, for frees and copies that come with an address alone, and
// which device a number stands for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "headrace/device.h"

namespace headrace {

void remember_allocation(void* data, size_t nbytes, Device* device);
// Forgets the allocation that begins at `data` if it is the device's; its size.
std::optional<size_t> forget_allocation(void* data, Device* device);
void forget_device(Device* device);

struct Owner {
  int32_t device_id;
  Backend backend;
  std::string device_name;
  void* base;
  size_t nbytes;
  bool ended;
};
// The allocation, of whichever device, that the address is in. Ended ones are known while their device keeps
// the memory from being used again.
std::optional<Owner> owner_of(const void* address);

// Of a simulated device.
void remember_ended(void* data, size_t nbytes, int32_t device_id);
void forget_ended(void* data);

// Numbers are never used again, so names stay known after their device is gone.
bool known_device(int32_t id);
void remember_device_name(int32_t id, const std::string& name);

}  // namespace headrace
