// The payload of an AOTInductor island ("CudaBackend"): which library it is, and which constants it wants, by
// name. Format: ETCUDAFQN3 of ExecuTorch 1.5.1 (backends/cuda/cuda_weight_collector.py).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "headrace/status.h"
#include "headrace/tensor.h"
#include "program/xnnpack.h"  // FindBytes

namespace headrace {

constexpr std::string_view kCudaBackend = "CudaBackend";

struct CudaConstant {
  std::string fqn;  // the model's name for it; one constant may have several names inside the library
  std::string key;  // of its bytes in the named data
  uint64_t nbytes = 0;
  DType dtype = DType::kFloat32;
  int32_t device = 0;                   // 0: host memory, 1: a GPU's
  int64_t offset = 0;                   // of the first element, in elements
  std::vector<int64_t> sizes, strides;  // strides in elements
};

struct CudaPayload {
  std::string library_key;  // of the library in the named data: its SHA-256 and "_so_blob"
  std::vector<CudaConstant> constants;
};

// Reads a payload, any bytes. Afterwards every constant lies inside its `nbytes`. kProgram.
HEADRACE_API Result<CudaPayload> read_cuda_payload(std::string_view payload);

// Reads it and compares it with the data that there is. Empty when all is well, else what was expected and
// what came.
std::string check_cuda_payload(std::string_view payload, const FindBytes& find);

}  // namespace headrace
