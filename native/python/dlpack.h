// The C structures of DLPack 1.0 that cross between libraries
// (https://dmlc.github.io/dlpack/latest/c_api.html).
#pragma once

#include <cstdint>

namespace headrace::dl {

enum DeviceType : int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kExtension = 12, kCudaManaged = 13 };
enum TypeCode : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6 };

struct Device {
  int32_t type;
  int32_t id;
};
struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};
struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null means dense in C order
  uint64_t byte_offset;
};
struct ManagedTensor {
  Tensor tensor;
  void* owner;
  void (*deleter)(ManagedTensor*);
};

}  // namespace headrace::dl
