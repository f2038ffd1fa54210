// The payload of an AOTInductor island ("CudaBackend"): which library it is, and where its constants are.
// Formats, all of which ExecuTorch 1.5.1 writes or reads:
//   ETCUDAFQN3 (backends/cuda/cuda_weight_collector.py): the constants by name, each a piece of named data;
//   two keys in two lines (backends/aoti/aoti_backend.py): the library, and all its constants in one piece;
//   nothing: the same with keys made of the method's name.
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

struct AotiConstant {
  std::string fqn;  // the model's name for it; one constant may have several names inside the library
  std::string key;  // of its bytes in the named data
  uint64_t nbytes = 0;
  DType dtype = DType::kFloat32;
  int32_t device = 0;                   // 0: host memory, 1: a GPU's
  int64_t offset = 0;                   // of the first element, in elements
  std::vector<int64_t> sizes, strides;  // strides in elements
};

struct AotiPayload {
  std::string library_key;  // of the library in the named data: "…_so_blob"
  bool hashed = true;       // the key begins with the library's SHA-256
  std::vector<AotiConstant> constants;
  std::string blob_key;  // of all constants in one piece, as the library orders them; empty: they are above
};

// Reads a payload of `method`, any bytes. Afterwards every constant lies inside its `nbytes`. kProgram.
HEADRACE_API Result<AotiPayload> read_aoti_payload(std::string_view payload, std::string_view method);

// Reads it and compares it with the data that there is. Empty when all is well, else what was expected and
// what came.
std::string check_aoti_payload(std::string_view payload, std::string_view method, const FindBytes& find);

}  // namespace headrace
