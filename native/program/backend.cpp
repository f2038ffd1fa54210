#include "program/backend.h"

#include <executorch/runtime/core/exec_aten/util/tensor_util.h>
#include <executorch/runtime/platform/log.h>

#include <algorithm>
#include <array>

#include "program/allocator.h"

namespace headrace {

namespace et = executorch::runtime;
using executorch::aten::SizesType;
using executorch::aten::Tensor;

TensorView view_of(const Tensor& tensor) {
  TensorView view;
  view.data = tensor.mutable_data_ptr();
  view.dtype = static_cast<DType>(tensor.scalar_type());
  view.ndim = static_cast<int>(tensor.dim());
  auto width = static_cast<int64_t>(itemsize(view.dtype));
  for (size_t d = 0; d < static_cast<size_t>(view.ndim); ++d) {
    view.sizes[d] = tensor.sizes()[d];
    view.strides_bytes[d] = tensor.strides()[d] * width;
  }
  return view;
}

Status resize_output(const Tensor& tensor, size_t output, std::span<const int64_t> sizes) {
  std::array<SizesType, kMaxDims> wanted{};
  bool same = sizes.size() == static_cast<size_t>(tensor.dim()), fits = same;
  for (size_t d = 0; d < sizes.size() && fits; ++d) {
    fits = sizes[d] >= 0 && sizes[d] <= INT32_MAX;
    wanted[d] = static_cast<SizesType>(fits ? sizes[d] : 0);
    same = same && fits && wanted[d] == tensor.sizes()[d];
  }
  if (same) return {};
  et::Error error =
      fits ? et::resize_tensor(tensor, {wanted.data(), sizes.size()}) : et::Error::InvalidArgument;
  if (error == et::Error::Ok) return {};
  std::string got;
  for (int64_t size : sizes) got += (got.empty() ? "[" : ", ") + std::to_string(size);
  return Status(ErrorCode::kDelegate,
                "output " + std::to_string(output) + ": expected a shape within the plan's bounds, got " +
                    (got.empty() ? "[" : got) + "], which the engine refuses (" + et::to_string(error) +
                    "); export it with larger bounds, or let the delegate give that shape");
}

Status island_failure(const std::string& method, int instruction, const std::string& delegate, Status why) {
  std::string where = method;
  if (instruction >= 0) where += ", instruction " + std::to_string(instruction);
  Status status(why.code(), where + ", delegate '" + delegate + "': " + why.message());
  status->delegate = delegate;
  status->method = method;
  status->island = instruction;
  status->device = std::move(why->device);
  status->log = std::move(why->log);
  status->cause = std::move(why->cause);
  return status;
}

et::Error tell(Status status, et::Error code) {
  const DeviceGuard* bound = DeviceGuard::current();
  if (bound != nullptr && bound->call() != nullptr && bound->call()->failure.ok()) {
    bound->call()->failure = std::move(status);
  } else {
    ET_LOG(Error, "%s", status.message().c_str());
  }
  return code;
}

Status register_delegate(const char* name, et::BackendInterface* backend) {
  et::Error error = et::register_backend({name, backend});
  if (error == et::Error::Ok) return {};
  return Status(ErrorCode::kEngine, "delegate '" + std::string(name) +
                                        "': expected a free slot among the engine's 16 delegates, got " +
                                        et::to_string(error) + "; define fewer names");
}

}  // namespace headrace
