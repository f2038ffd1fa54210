// Memory of views: what two of them share, and copies between any layout and a dense one.
#pragma once

#include <cstdint>

#include "headrace/tensor.h"

namespace headrace {

// Whether `view` lies in memory exactly as `strides` (in elements) says. Dimensions of size 1 and empty
// tensors fit any strides.
bool is_dense(const TensorView& view, const int32_t* strides);

// Whether the two may share a byte: their extents in memory meet.
bool overlaps(const TensorView& a, const TensorView& b);

// Copies `view`, of any strides (negative and zero included), to dense memory in `dim_order`.
void repack(const TensorView& view, const uint8_t* dim_order, void* to);

// Copies dense memory `from`, laid out as `dense` says, to `to`, of the same shape and any strides.
void unpack(const void* from, const TensorView& dense, const TensorView& to);

}  // namespace headrace
