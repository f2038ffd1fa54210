// Which device a live allocation belongs to, for frees and copies that come with an address alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace headrace {

class Device;

void remember_allocation(void* data, size_t nbytes, Device* device);
void forget_allocation(void* data);
void remember_device(int32_t id, const std::string& name);
void forget_device(Device* device);

}  // namespace headrace
