#include "program/layout.h"

#include <cstring>
#include <utility>

namespace headrace {

bool is_dense(const TensorView& view, const int32_t* strides) {
  auto width = static_cast<int64_t>(itemsize(view.dtype));
  bool fits = true;
  for (size_t d = 0; d < static_cast<size_t>(view.ndim); ++d) {
    if (view.sizes[d] == 0) return true;
    fits &= view.sizes[d] == 1 || view.strides_bytes[d] == strides[d] * width;
  }
  return fits;
}

namespace {

// [first, last) byte of a view that is not empty.
std::pair<uintptr_t, uintptr_t> extent(const TensorView& view) {
  auto first = reinterpret_cast<uintptr_t>(view.data), last = first + itemsize(view.dtype);
  for (size_t d = 0; d < static_cast<size_t>(view.ndim); ++d) {
    int64_t reach = (view.sizes[d] - 1) * view.strides_bytes[d];
    (reach < 0 ? first : last) += static_cast<uintptr_t>(reach);
  }
  return {first, last};
}

}  // namespace

bool overlaps(const TensorView& a, const TensorView& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  auto [a_first, a_last] = extent(a);
  auto [b_first, b_last] = extent(b);
  return a_first < b_last && b_first < a_last;
}

namespace {

// Copies elements of `width` bytes along dimensions `order[level..]`; steps are in bytes.
void copy_strided(const uint8_t* from, uint8_t* to, const TensorView& shape, const int64_t* from_steps,
                  const int64_t* to_steps, const uint8_t* order, int level, size_t width) {
  if (level == shape.ndim) {
    std::memcpy(to, from, width);
    return;
  }
  size_t d = order[level];
  int64_t count = shape.sizes[d], from_step = from_steps[d], to_step = to_steps[d];
  if (level + 1 == shape.ndim && from_step == static_cast<int64_t>(width) && to_step == from_step) {
    std::memcpy(to, from, width * static_cast<size_t>(count));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    copy_strided(from + i * from_step, to + i * to_step, shape, from_steps, to_steps, order, level + 1,
                 width);
  }
}

}  // namespace

void repack(const TensorView& view, const uint8_t* dim_order, void* to) {
  if (view.numel() == 0) return;
  TensorView dense = view;
  set_dense_strides(dense, dim_order);
  copy_strided(static_cast<const uint8_t*>(view.data), static_cast<uint8_t*>(to), view,
               view.strides_bytes.data(), dense.strides_bytes.data(), dim_order, 0, itemsize(view.dtype));
}

void unpack(const void* from, const TensorView& dense, const TensorView& to) {
  if (dense.numel() == 0) return;
  std::array<uint8_t, kMaxDims> order;
  for (size_t d = 0; d < kMaxDims; ++d) order[d] = static_cast<uint8_t>(d);
  copy_strided(static_cast<const uint8_t*>(from), static_cast<uint8_t*>(to.data), dense,
               dense.strides_bytes.data(), to.strides_bytes.data(), order.data(), 0, itemsize(dense.dtype));
}

}  // namespace headrace
