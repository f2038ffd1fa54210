// The delegate `CudaBackend`: AOTInductor libraries, on the stream of the call.
#pragma once

#include "headrace/status.h"

namespace headrace {

// Registers it with the engine, once; loading libheadrace_cuda.so does. kEngine: initialize() failed, or the
// engine has no free slot.
HEADRACE_API Status register_cuda_delegate();

}  // namespace headrace
