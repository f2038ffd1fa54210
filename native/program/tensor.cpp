#include "headrace/tensor.h"

namespace headrace {

std::string dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kUInt8:
      return "uint8";
    case DType::kInt8:
      return "int8";
    case DType::kInt16:
      return "int16";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kFloat16:
      return "float16";
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
    case DType::kBool:
      return "bool";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kUInt16:
      return "uint16";
    case DType::kUInt32:
      return "uint32";
    case DType::kUInt64:
      return "uint64";
  }
  return "dtype " + std::to_string(static_cast<int>(dtype));
}

std::string device_name(DeviceId device) {
  return device.kind == DeviceKind::kCpu ? "cpu" : "cuda:" + std::to_string(device.index);
}

std::string problem_of(const TensorView& view) {
  if (view.ndim < 0 || view.ndim > static_cast<int>(kMaxDims))
    return "a rank of " + std::to_string(view.ndim) + ", where 0 to " + std::to_string(kMaxDims) +
           " is possible";
  for (int d = 0; d < view.ndim; ++d) {
    int64_t size = view.sizes[static_cast<size_t>(d)];
    if (size < 0) return "a size of " + std::to_string(size) + " in dimension " + std::to_string(d);
  }
  return view.data == nullptr && view.numel() != 0 ? "no memory: its data is null" : "";
}

std::string describe(const TensorView& view) {
  std::string out = dtype_name(view.dtype) + "[";
  for (int i = 0; i < view.ndim; ++i)
    out += (i ? ", " : "") + std::to_string(view.sizes[static_cast<size_t>(i)]);
  return out + "]";
}

void set_dense_strides(TensorView& view, const uint8_t* dim_order) {
  dense_strides(view.ndim, view.sizes.data(), dim_order, view.strides_bytes.data(),
                static_cast<int64_t>(itemsize(view.dtype)));
}

bool is_dense(const TensorView& view, const uint8_t* dim_order) {
  TensorView dense = view;
  set_dense_strides(dense, dim_order);
  return same_strides(view, dense);
}

bool same_strides(const TensorView& a, const TensorView& b) {
  bool same = true;
  for (size_t d = 0; d < static_cast<size_t>(a.ndim); ++d) {
    if (a.sizes[d] == 0) return true;
    same &= a.sizes[d] == 1 || a.strides_bytes[d] == b.strides_bytes[d];
  }
  return same;
}

}  // namespace headrace
