// The one shape of the seam's error messages: where, what was expected, what came, what to do.
#pragma once

#include <cstdint>
#include <string>

#include "headrace/device.h"

namespace headrace {

inline Status refusal(ErrorCode code, const std::string& device, const std::string& operation,
                      const std::string& expected, const std::string& got, const std::string& advice) {
  Status status(code, device + ", " + operation + ": expected " + expected + ", got " + got + "; " + advice);
  status->device = device;
  return status;
}

inline std::string hex(uintptr_t value) {
  std::string digits;
  do {
    digits.insert(digits.begin(), "0123456789abcdef"[value & 15]);
    value >>= 4;
  } while (value);
  return "0x" + digits;
}
inline std::string hex(const void* address) { return hex(reinterpret_cast<uintptr_t>(address)); }

inline std::string stream_name(StreamHandle stream) {
  if (stream == kLegacyStream) return "the legacy stream";
  if (stream == kPerThreadStream) return "the per-thread stream";
  return "stream " + hex(stream);
}

}  // namespace headrace
