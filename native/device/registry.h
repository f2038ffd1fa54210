// Which device a live allocation belongs to, for frees and copies that come with an address alone.
#pragma once

#include <cstddef>

namespace headrace {

class Device;

void remember_allocation(void* data, size_t nbytes, Device* device);
void forget_allocation(void* data);
void forget_device(Device* device);

}  // namespace headrace
