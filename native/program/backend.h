// What our delegates share: views on the engine's tensors, and how a failure gets past an engine that carries
// a code only.
#pragma once

#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/core/error.h>
#include <executorch/runtime/core/exec_aten/exec_aten.h>

#include <span>
#include <string>

#include "headrace/status.h"
#include "headrace/tensor.h"

namespace headrace {

// Borrowed: the tensor's memory, shape and strides as they are now.
HEADRACE_API TensorView view_of(const executorch::aten::Tensor& tensor);

// Says the shape of a delegate's output number `output`. kDelegate: beyond the plan's bounds.
HEADRACE_API Status resize_output(const executorch::aten::Tensor& tensor, size_t output,
                                  std::span<const int64_t> sizes);

// `why` as the failure of one island: method, instruction (-1: not known) and delegate before its message and
// beside it.
HEADRACE_API Status island_failure(const std::string& method, int instruction, const std::string& delegate,
                                   Status why);

// Puts the Status beside `code`, for the frame that called the engine, and returns `code`. Where there is no
// such frame, or a failure came first, it goes to the engine's log.
HEADRACE_API executorch::runtime::Error tell(Status status, executorch::runtime::Error code);

// kEngine: the engine has no slot left. It never forgets a backend: name and backend must last as long as the
// process.
HEADRACE_API Status register_delegate(const char* name, executorch::runtime::BackendInterface* backend);

}  // namespace headrace
