// Arrays of GPUs, as other libraries hand them around: DLPack with its stream argument, and
// __cuda_array_interface__ (https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html).
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "device/refusal.h"
#include "python/objects.h"

namespace headrace {

namespace {

// Of arrays whose owner breaks the protocol that it gives them by.
constexpr char kOwnersFault[] = "; report it to the library whose array it is, or pass a copy on the host";

[[noreturn]] void bad(const std::string& message, const std::string& what) {
  raise(Status(ErrorCode::kInput, message + ": " + what));
}

bool reads_cuda(const Reader& reader) {
  return reader.device != nullptr && reader.device->backend() == Backend::kCuda;
}

// Another GPU is a matter of devices; where the program has none, the argument is wrong.
[[noreturn]] void elsewhere(const std::string& message, const Reader& reader, const std::string& where) {
  std::string expected = "memory of the host";
  if (reader.device != nullptr && reader.device->backend() != Backend::kCpu)
    expected = "memory of " + reader.device->name() + " or of the host";
  Status status(reads_cuda(reader) ? ErrorCode::kDevice : ErrorCode::kInput,
                message + ": expected " + expected + ", got memory of " + where + "; copy it first");
  status->device = where;
  raise(status);
}

// Puts the reader's stream behind what is on `stream` now.
void order_before(const Reader& reader, StreamHandle stream) {
  order_streams(*device_object(reader.device), stream, reader.stream);
}

bool captures(const Reader& reader) {
  auto status = reader.device->capture_status(reader.stream);
  check(status.status());
  return *status != CaptureStatus::kNone;
}

}  // namespace

bool is_cuda_dlpack(nb::handle object) {
  if (!nb::hasattr(object, "__dlpack_device__")) return false;
  std::pair<int, int> said;
  nb::object device = object.attr("__dlpack_device__")();
  if (!nb::try_cast(device, said)) {
    raise(Status(ErrorCode::kInput, "__dlpack_device__: expected a tuple of two ints, got " +
                                        std::string(Py_TYPE(device.ptr())->tp_name) + " of other things" +
                                        kOwnersFault));
  }
  int type = said.first;
  return type == dl::kCuda || type == dl::kCudaManaged;
}

nb::object cuda_dlpack(nb::handle object, const Reader& reader, const std::string& message) {
  auto [type, ordinal] = nb::cast<std::pair<int, int>>(object.attr("__dlpack_device__")());
  bool here = reads_cuda(reader) && (type == dl::kCudaManaged || ordinal == reader.device->ordinal());
  if (!here) elsewhere(message, reader, "cuda:" + std::to_string(ordinal));
  // Before the producer is given the handle: it would pass it on to the driver.
  check(reader.device->check_stream(reader.stream));
  auto capsule = [&](int64_t stream) {
    nb::dict arguments;
    arguments["stream"] = stream;
    return object.attr("__dlpack__")(**arguments);
  };
  if (captures(reader)) return capsule(-1);
  if (reader.stream != kPerThreadStream) return capsule(static_cast<int64_t>(reader.stream));
  try {
    return capsule(static_cast<int64_t>(kPerThreadStream));
  } catch (nb::python_error& e) {
    // PyTorch knows no per-thread stream.
    if (!e.matches(PyExc_BufferError)) throw;
  }
  nb::object out = capsule(static_cast<int64_t>(kLegacyStream));
  order_before(reader, kLegacyStream);
  return out;
}

TensorView cuda_array(nb::handle object, const Reader& reader, bool write, const std::string& message) {
  nb::dict face;
  if (!nb::try_cast(nb::object(object.attr("__cuda_array_interface__")), face))
    bad(message,
        std::string("expected __cuda_array_interface__ to be a dict, got another object") + kOwnersFault);
  if (!reads_cuda(reader)) elsewhere(message, reader, "a GPU (__cuda_array_interface__)");
  for (const char* key : {"shape", "typestr", "data", "version"}) {
    if (!face.contains(key))
      bad(message,
          std::string("expected __cuda_array_interface__ with '") + key + "', got none" + kOwnersFault);
  }
  // Whatever the producer put there.
  auto member = [&](const char* key, auto& out, const char* expected) {
    if (!nb::try_cast(nb::object(face[key]), out))
      bad(message, std::string("expected '") + key + "' of __cuda_array_interface__ to be " + expected +
                       ", got another object" + kOwnersFault);
  };
  int version = 0;
  member("version", version, "an int");
  if (version < 3)
    bad(message,
        "expected __cuda_array_interface__ of version 3, which names the stream that the array is ready on, "
        "got an "
        "older one; pass the array by DLPack");
  if (face.contains("mask") && !nb::object(face["mask"]).is_none())
    bad(message, "expected an array without a mask, got one with a mask; pass its data alone");
  TensorView view;
  std::string typestr;
  member("typestr", typestr, "text");
  if (!dtype_by_typestr(typestr, view.dtype))
    bad(message, "expected an array of numbers, got '" + typestr + "'; convert it before calling");
  std::vector<int64_t> shape, steps;
  member("shape", shape, "a tuple of ints");
  if (shape.size() > kMaxDims)
    bad(message, "expected at most 16 dimensions, got " + std::to_string(shape.size()) + "; reshape it");
  bool strided = face.contains("strides") && !nb::object(face["strides"]).is_none();
  if (strided) member("strides", steps, "None or a tuple of ints");
  if (strided && steps.size() != shape.size())
    bad(message, "expected as many strides as sizes, got " + std::to_string(steps.size()) + " and " +
                     std::to_string(shape.size()) + kOwnersFault);
  view.ndim = static_cast<int>(shape.size());
  view.device = {DeviceKind::kCuda, static_cast<int8_t>(reader.device->ordinal())};
  for (size_t d = 0; d < shape.size(); ++d) {
    view.sizes[d] = shape[d];
    if (view.sizes[d] < 0)
      bad(message, "expected sizes of 0 or more, got " + std::to_string(view.sizes[d]) + kOwnersFault);
  }
  set_dense_strides(view);
  std::copy(steps.begin(), steps.end(), view.strides_bytes.begin());
  std::pair<uintptr_t, bool> data;
  member("data", data, "a tuple of an address and a bool");
  auto [address, read_only] = data;
  view.data = reinterpret_cast<void*>(address);
  if (write && read_only)
    bad(message, "expected an array that can be written, got a read-only one; pass a copy to be written to");
  confirm(view, reader, message);
  nb::object stream = face.contains("stream") ? nb::object(face["stream"]) : nb::object(nb::none());
  if (stream.is_none()) return view;  // it needs no order, its owner says
  int64_t handle = 0;
  member("stream", handle, "None or an int");
  if (handle <= 0)
    bad(message, "expected a stream of 1, 2 or an address, got " + std::to_string(handle) +
                     " (the array interface forbids 0)" + kOwnersFault);
  check(reader.device->check_stream(static_cast<StreamHandle>(handle)));
  check(reader.device->check_stream(reader.stream));
  if (!captures(reader)) order_before(reader, static_cast<StreamHandle>(handle));
  return view;
}

void confirm(const TensorView& view, const Reader& reader, const std::string& message) {
  if (view.numel() == 0) return;
  auto at = reinterpret_cast<uintptr_t>(view.data), low = at, high = at + itemsize(view.dtype);
  for (size_t d = 0; d < static_cast<size_t>(view.ndim); ++d) {
    int64_t reach = (view.sizes[d] - 1) * view.strides_bytes[d];
    (reach < 0 ? low : high) += static_cast<uintptr_t>(reach);
  }
  PointerInfo info = reader.device->where(reinterpret_cast<void*>(low));
  if (info.kind == PointerInfo::Kind::kOther)
    elsewhere(message, reader, "cuda:" + std::to_string(info.device_id));
  if (info.kind != PointerInfo::Kind::kDevice)
    bad(message, "expected memory that the driver knows as " + reader.device->name() + "'s, got " + hex(low) +
                     ", which it does not; pass memory that CUDA allocated there, or a copy on the host");
  if (high - reinterpret_cast<uintptr_t>(info.base) > info.nbytes)
    bad(message, "expected an array inside one allocation, got one that leaves the " +
                     std::to_string(info.nbytes) + " bytes at " + hex(info.base) + kOwnersFault);
}

}  // namespace headrace
