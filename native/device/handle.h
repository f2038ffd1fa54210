// Stream handles of the host-side makers: the device's number above, a count below. So a handle is never used
// again, says whose it is, and cannot be taken for an address (those stay below 2^47, device numbers start at
// 2^16 and stand above bit 32).
#pragma once

#include <string>

#include "device/refusal.h"
#include "device/registry.h"
#include "headrace/device.h"

namespace headrace {

inline StreamHandle make_handle(int32_t device_id, uint32_t count) {
  return static_cast<StreamHandle>(device_id) << 32 | count;
}

// Why a handle is not one of the device's live streams. `made`: how many handles the device has given out.
inline Status not_a_stream(const std::string& device, int32_t device_id, const std::string& operation,
                           StreamHandle stream, uint32_t made) {
  auto owner = static_cast<int32_t>(stream >> 32);
  auto count = static_cast<uint32_t>(stream);
  std::string expected = "a live stream of " + device;
  if (owner == device_id && count >= 1 && count <= made)
    return refusal(ErrorCode::kInput, device, operation, expected, "stream " + hex(stream) + ", destroyed",
                   "use a stream only while its owner keeps it (CUDA: CUDA_ERROR_INVALID_HANDLE or "
                   "CUDA_ERROR_CONTEXT_IS_DESTROYED)");
  if (owner != device_id && known_device(owner)) {
    return refusal(ErrorCode::kDevice, device, operation, expected,
                   "stream " + hex(stream) + " of " + device_name_of(owner, device),
                   "use a stream of " + device);
  }
  return refusal(ErrorCode::kInput, device, operation, expected,
                 hex(stream) + ", which no stream of " + device + " ever was",
                 "pass a handle that create_stream() returned, or 0, 1 or 2");
}

}  // namespace headrace
