// What a tensor is at the boundary of this library: a borrowed view on memory that somebody else owns, on the
// host or on a device. A view is a plain value: nothing here looks at the memory, waits or locks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "headrace/status.h"

namespace headrace {

// The codes of ExecuTorch's ScalarType (schema/scalar_type.fbs of 1.5.1).
enum class DType : int8_t {
  kUInt8 = 0,
  kInt8 = 1,
  kInt16 = 2,
  kInt32 = 3,
  kInt64 = 4,
  kFloat16 = 5,
  kFloat32 = 6,
  kFloat64 = 7,
  kBool = 11,
  kBFloat16 = 15,
  kUInt16 = 27,
  kUInt32 = 28,
  kUInt64 = 29,
};

// Bytes of one element; 0 for a code that is none of the above.
constexpr size_t itemsize(DType dtype) {
  switch (dtype) {
    case DType::kUInt8:
    case DType::kInt8:
    case DType::kBool:
      return 1;
    case DType::kInt16:
    case DType::kUInt16:
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kInt32:
    case DType::kUInt32:
    case DType::kFloat32:
      return 4;
    case DType::kInt64:
    case DType::kUInt64:
    case DType::kFloat64:
      return 8;
  }
  return 0;
}
// "float32", "bfloat16", …; "dtype 42" for a code that is none of the above.
HEADRACE_API std::string dtype_name(DType dtype);

// ExecuTorch's DeviceType codes: the kinds of device that a program can name.
enum class DeviceKind : int8_t { kCpu = 0, kCuda = 1 };

struct DeviceId {
  DeviceKind kind = DeviceKind::kCpu;
  int8_t index = 0;
  bool operator==(const DeviceId&) const = default;
};
// "cpu" or "cuda:0".
HEADRACE_API std::string device_name(DeviceId device);

constexpr size_t kMaxDims = 16;  // the engine's own limit (tensor_dimension_limit.h)

// A borrowed view: shape and strides by value, memory by pointer. Strides count bytes, since a NumPy view
// may step by less than an element. The owner keeps `data` alive for as long as the view is in use.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int ndim = 0;
  std::array<int64_t, kMaxDims> sizes{};
  std::array<int64_t, kMaxDims> strides_bytes{};
  DeviceId device;

  int64_t numel() const {
    int64_t n = 1;
    for (int i = 0; i < ndim; ++i) n *= sizes[i];
    return n;
  }
  size_t nbytes() const { return static_cast<size_t>(numel()) * itemsize(dtype); }
};

// What is wrong with a view in itself; empty: nothing. Nobody may look at the sizes of one whose rank is
// wrong.
HEADRACE_API std::string problem_of(const TensorView& view);

// "float32[2, 80]".
HEADRACE_API std::string describe(const TensorView& view);

// Strides of a dense tensor, counted in `unit`s. Its dimensions lie in `dim_order`, outermost first; null: in
// C order.
template <class Size, class Stride>
void dense_strides(int ndim, const Size* sizes, const uint8_t* dim_order, Stride* strides, int64_t unit = 1) {
  int64_t stride = unit;
  for (int i = ndim; i-- > 0;) {
    int d = dim_order != nullptr ? dim_order[i] : i;
    strides[d] = static_cast<Stride>(stride);
    stride *= sizes[d];
  }
}

// Sets the strides of a dense tensor, from sizes and dtype.
HEADRACE_API void set_dense_strides(TensorView& view, const uint8_t* dim_order = nullptr);
// Whether it lies in memory so. Dimensions of size 1 and empty tensors fit any strides.
HEADRACE_API bool is_dense(const TensorView& view, const uint8_t* dim_order = nullptr);
// Whether the two, of one shape and dtype, lie in memory alike: strides differ at most where they mean
// nothing.
HEADRACE_API bool same_strides(const TensorView& a, const TensorView& b);

}  // namespace headrace
