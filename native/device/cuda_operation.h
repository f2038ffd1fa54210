// How the operations of CudaDevice begin, and how they call the driver. Each returns from the operation where
// it fails.
#pragma once

#include "device/cuda.h"

namespace headrace {

// What a caller can do about a failure of the driver's.
const char* advice_for(cu::Code code);

}  // namespace headrace

// The device's context is current from here on to the end of the operation.
#define HEADRACE_CURRENT(operation) \
  Current current(*this);           \
  if (!current.ok()) return failed(operation, current.code())
#define HEADRACE_USABLE(operation, stream) \
  if (Status refused = check_ended(operation, stream); !refused.ok()) return refused
#define HEADRACE_DRIVER(operation, call) \
  if (cu::Code code = driver_.call; code != cu::kSuccess) return failed(operation, code)
