// headrace.Buffer: memory with a dtype and a shape, on a device.
#define NO_IMPORT_ARRAY
#include <nanobind/stl/pair.h>

#include <cstring>

#include "device/record.h"
#include "python/gil.h"
#include "python/objects.h"

namespace headrace {

namespace {

// DLPack's capsule for a Buffer: shape and strides live beside the reference to the block.
struct Exported {
  dl::ManagedTensor managed;
  BlockRef block;
  int64_t shape[kMaxDims], strides[kMaxDims];
};

Backend backend_of(const Buffer& buffer) {
  return buffer.device ? buffer.device->device->backend() : Backend::kCpu;
}

// Whether the host may touch the memory now: it always may where memory is the host's, and on a simulated
// device inside a host function alone, which is where that device's work runs.
bool host_may_touch(const Buffer& buffer) {
  Backend backend = backend_of(buffer);
  return backend == Backend::kCpu || (backend == Backend::kSim && in_host_function());
}

// Puts a consumer's stream behind what writes the buffer.
void order_before(const Buffer& buffer, StreamHandle consumer) {
  if (buffer.block) {
    check(buffer.block->order(consumer, false));
  } else {
    order_streams(*buffer.device, buffer.lent_on, consumer);
  }
}

// Raises where a replay wrote over a graph's output that was borrowed.
void check_borrowed(const Buffer& buffer, const std::string& where) {
  if (!buffer.borrowed.ended()) return;
  raise(Status(ErrorCode::kInput,
               where +
                   ": expected memory that still holds what it held, got an output borrowed from replay " +
                   std::to_string(buffer.borrowed.number) +
                   " of a graph, which a later replay has written over; read it before, or replay without "
                   "borrow=True"));
}

std::string device_text(const Buffer& buffer) {
  return buffer.device ? buffer.device->device->name() : "cpu";
}

dl::Device dlpack_device(const Buffer& buffer) {
  if (buffer.device == nullptr) return {dl::kCpu, 0};
  const Device& device = *buffer.device->device;
  switch (device.backend()) {
    case Backend::kCpu:
      return {dl::kCpu, 0};
    case Backend::kCuda:
      return {dl::kCuda, device.ordinal()};
    // No library knows this device, so none reads its memory before the work is done.
    case Backend::kSim:
      return {dl::kExtension, device.ordinal()};
  }
  return {dl::kExtension, 0};
}

// Makes the consumer's stream wait for the writer, as DLPack's `stream` argument asks; -1 asks for nothing.
void hand_over(const Buffer& buffer, nb::handle stream) {
  if (host_may_touch(buffer)) return;
  int64_t handle = kLegacyStream;
  if (!stream.is_none() && !nb::try_cast(stream, handle)) {
    raise(Status(ErrorCode::kInput, std::string("Buffer.__dlpack__: expected a stream as an int, got ") +
                                        Py_TYPE(stream.ptr())->tp_name + "; pass its address, or None"));
  }
  if (handle == -1) return;
  if (handle <= 0) {
    raise(Status(ErrorCode::kInput,
                 "Buffer.__dlpack__: expected a stream of 1, 2 or an address, or -1 for none, got " +
                     std::to_string(handle) + " (DLPack forbids 0); pass 1 for the legacy stream"));
  }
  order_before(buffer, static_cast<StreamHandle>(handle));
}

// For consumers without DLPack. The stream that it names is the calling thread's own, put behind the writer,
// or the call's where memory is lent for a call.
nb::dict cuda_array_interface(const Buffer& buffer) {
  check_lease(buffer, "Buffer.__cuda_array_interface__");
  int type = numpy_type(buffer.view.dtype);
  if (backend_of(buffer) != Backend::kCuda)
    throw nb::attribute_error(
        "__cuda_array_interface__: expected memory of a GPU, got another device's; call numpy()");
  if (type < 0)
    throw nb::attribute_error(
        "__cuda_array_interface__: expected a dtype that it has, got bfloat16; use DLPack");
  StreamHandle stream = buffer.block ? kPerThreadStream : buffer.lent_on;
  order_before(buffer, stream);
  nb::list shape, strides;
  for (size_t d = 0; d < static_cast<size_t>(buffer.view.ndim); ++d) {
    shape.append(buffer.view.sizes[d]);
    strides.append(buffer.view.strides_bytes[d]);
  }
  nb::dict out;
  out["version"] = 3;
  out["shape"] = nb::tuple(shape);
  out["strides"] = nb::tuple(strides);
  out["typestr"] = nb::module_::import_("numpy").attr("dtype")(dtype_name(buffer.view.dtype)).attr("str");
  // No memory: a null pointer, as the interface asks for size 0.
  out["data"] =
      nb::make_tuple(buffer.view.numel() ? reinterpret_cast<uintptr_t>(buffer.view.data) : 0, false);
  out["stream"] = stream;
  return out;
}

nb::object to_dlpack(const Buffer& buffer, nb::handle stream, nb::handle, nb::handle device,
                     nb::handle copy) {
  check_lease(buffer, "Buffer.__dlpack__");
  if (!buffer.block && buffer.device && backend_of(buffer) != Backend::kCuda) {
    raise(Status(ErrorCode::kInput,
                 "Buffer.__dlpack__: expected memory of its own, got memory lent for a call; call numpy() in "
                 "a function given to stream.call()"));
  }
  dl::Device here = dlpack_device(buffer);
  if (!device.is_none()) {
    std::pair<int, int> wanted;
    if (!nb::try_cast(device, wanted) || wanted.first != here.type || wanted.second != here.id) {
      raise(Status(ErrorCode::kInput, "Buffer.__dlpack__: expected its own device " + device_text(buffer) +
                                          ", got DLPack's device " + nb::cast<std::string>(nb::repr(device)) +
                                          "; leave device= out, and copy it afterwards"));
    }
  }
  if (copy.is(nb::bool_(true))) {
    // The protocol's own exception, so that a consumer may try without.
    PyErr_SetString(PyExc_BufferError,
                    "Buffer.__dlpack__: expected copy=None or False, got True; copy it afterwards");
    nb::raise_python_error();
  }
  hand_over(buffer, stream);
  auto* out = new Exported();
  out->block = buffer.block;
  for (size_t d = 0; d < kMaxDims; ++d) {
    out->shape[d] = buffer.view.sizes[d];
    out->strides[d] = buffer.view.strides_bytes[d] / static_cast<int64_t>(itemsize(buffer.view.dtype));
  }
  out->managed = {
      {buffer.view.data, here, buffer.view.ndim, dlpack_type(buffer.view.dtype), out->shape, out->strides, 0},
      out,
      [](dl::ManagedTensor* m) { delete static_cast<Exported*>(m->owner); }};
  PyObject* capsule = PyCapsule_New(&out->managed, "dltensor", [](PyObject* o) {
    // A consumer renames the capsule and frees the tensor itself.
    if (!PyCapsule_IsValid(o, "dltensor")) return;
    auto* managed = static_cast<dl::ManagedTensor*>(PyCapsule_GetPointer(o, "dltensor"));
    managed->deleter(managed);
  });
  if (capsule == nullptr) {
    delete out;
    nb::raise_python_error();
  }
  return nb::steal(capsule);
}

nb::tuple tuple_of(const std::array<int64_t, kMaxDims>& values, int count, int64_t divisor) {
  nb::list out;
  for (int i = 0; i < count; ++i) out.append(values[static_cast<size_t>(i)] / divisor);
  return nb::tuple(out);
}

// The memory as a host view: its own where the host may touch it, else a copy that is complete.
std::pair<TensorView, nb::object> on_host(const Buffer& buffer) {
  check_lease(buffer, "Buffer.numpy");
  if (host_may_touch(buffer)) {
    // Inside a host function it is the device's work that reads, and that declared it.
    if (!in_host_function())
      record::host("Buffer.numpy", {record::touch(buffer.view.data, buffer.view.nbytes(), false)});
    nb::object owner = buffer.block ? block_owner(buffer.block) : nb::object(nb::none());
    return {buffer.view, owner};
  }
  if (!buffer.block) {
    raise(
        Status(ErrorCode::kInput,
               "Buffer.numpy: expected " +
                   std::string(backend_of(buffer) == Backend::kCuda
                                   ? "memory of its own"
                                   : "to be inside stream.call, where the device's work runs") +
                   ", got memory of " + device_text(buffer) + " that a running call lent; " +
                   (backend_of(buffer) == Backend::kCuda ? "copy it with Device.to_device() first"
                                                         : "call it in a function given to stream.call()")));
  }
  Device& device = *buffer.device->device;
  size_t nbytes = buffer.view.nbytes();
  auto host = std::make_shared<Ring>(nullptr)->take(nbytes, kPerThreadStream);
  check(host.status());
  Status status;
  {
    GilRelease release;
    run_put_off();
    // The event of the last writer, and nothing else that the device may be doing.
    status = (*buffer.block).wait(false);
    if (status.ok() && nbytes != 0) {
      status = device.copy((*host)->data(), buffer.view.data, nbytes, kPerThreadStream);
      if (status.ok()) status = device.synchronize(kPerThreadStream);
      // The copy still writes to memory that goes with this frame.
      if (!status.ok()) (void)drain(device, kPerThreadStream);
    }
  }
  check(status);
  record::host("Buffer.numpy", {record::touch((*host)->data(), nbytes, false)});
  TensorView view = buffer.view;
  view.data = (*host)->data();
  view.device = {};
  return {view, block_owner(std::move(*host))};
}

nb::object to_numpy(const Buffer& buffer) {
  if (numpy_type(buffer.view.dtype) < 0) {
    raise(Status(ErrorCode::kInput,
                 "Buffer.numpy: expected a dtype that NumPy has, got " + dtype_name(buffer.view.dtype) +
                     "; call .float32() for a converted copy, or pass the buffer on by DLPack"));
  }
  auto [view, owner] = on_host(buffer);
  return numpy_view(view, owner);
}

nb::object to_float32(const Buffer& buffer) {
  if (buffer.view.dtype != DType::kBFloat16) return to_numpy(buffer).attr("astype")("float32");
  auto [bits, owner] = on_host(buffer);
  bits.dtype = DType::kUInt16;
  // bfloat16 is the upper half of a float32.
  nb::object wide = numpy_view(bits, owner).attr("astype")("uint32");
  return wide.attr("__lshift__")(16).attr("view")("float32");
}

// Rounds to nearest, ties to even; NaN stays NaN.
uint16_t round_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

Buffer from_float32(nb::handle array) {
  nb::object dense = nb::module_::import_("numpy").attr("ascontiguousarray")(array, "float32"), keep;
  Value value = to_value(dense, Value::Kind::kTensor, keep, "Buffer.from_float32", "argument", 0);
  Buffer out;
  out.view = value.tensor;
  out.view.dtype = DType::kBFloat16;
  for (int64_t& stride : out.view.strides_bytes) stride /= 2;
  auto block = std::make_shared<Ring>(nullptr)->take(out.view.nbytes(), kPerThreadStream);
  check(block.status());
  out.block = std::move(*block);
  out.view.data = out.block->data();
  const auto* from = static_cast<const float*>(value.tensor.data);
  for (int64_t i = 0; i < out.view.numel(); ++i)
    static_cast<uint16_t*>(out.view.data)[i] = round_bfloat16(from[i]);
  return out;
}

}  // namespace

nb::object lend_buffer(const TensorView& view, const PyDeviceRef& device, StreamHandle stream,
                       std::shared_ptr<const Loan> loan, bool resizable) {
  return nb::cast(Buffer{view, nullptr, device, resizable ? view.numel() : -1, stream, std::move(loan), {}});
}

void check_lease(const Buffer& buffer, const std::string& where) {
  check_borrowed(buffer, where);
  if (!buffer.lent() || buffer.loan->covers()) return;
  raise(Status(ErrorCode::kInput, where + ": expected memory that is there, got a Buffer that a delegate was "
                                          "lent for a call which has ended; copy what is to outlive run()"));
}

void bind_buffer(nb::module_& m) {
  nb::class_<Buffer>(
      m, "Buffer",
      "Memory with a dtype, a shape and strides (in elements), on a device. It knows the event of its last "
      "writer: reading it on the host waits for that event alone.")
      .def_prop_ro(
          "dtype", [](const Buffer& b) { return dtype_name(b.view.dtype); },
          "Such as 'float32' or 'bfloat16'.")
      .def_prop_ro("shape", [](const Buffer& b) { return tuple_of(b.view.sizes, b.view.ndim, 1); })
      .def_prop_ro(
          "strides",
          [](const Buffer& b) {
            return tuple_of(b.view.strides_bytes, b.view.ndim, static_cast<int64_t>(itemsize(b.view.dtype)));
          },
          "In elements.")
      .def_prop_ro("nbytes", [](const Buffer& b) { return b.view.nbytes(); })
      .def_prop_ro("device",
                   [](const Buffer& b) { return b.device ? b.device : device_object(cpu_device()); })
      .def_prop_ro(
          "address", [](const Buffer& b) { return reinterpret_cast<uintptr_t>(b.view.data); },
          "Where the memory starts, as the device counts.")
      .def("numpy", &to_numpy,
           "A NumPy array: a view of host memory, a copy of device memory. Waits for the last writer of "
           "device memory.\n\n"
           "Raises InputError for a dtype that NumPy lacks, and for memory lent by a running call outside "
           "stream.call.")
      .def(
          "resize",
          [](Buffer& b, nb::handle shape) {
            if (b.most < 0) {
              raise(Status(ErrorCode::kInput,
                           "Buffer.resize: expected a dense output of a running delegate, got another "
                           "Buffer; call it in run(), on one of its outputs"));
            }
            check_lease(b, "Buffer.resize");
            if (!b.loan->running()) {
              raise(Status(ErrorCode::kInput,
                           "Buffer.resize: expected to be called by run(), got a call from a host function; "
                           "the shape is read when run() returns"));
            }
            TensorView view = b.view;
            (void)set_shape(view, shape, "Buffer.resize");
            if (view.ndim != b.view.ndim || view.numel() > b.most) {
              raise(Status(ErrorCode::kInput, "Buffer.resize: expected at most " + std::to_string(b.most) +
                                                  " elements in " + std::to_string(b.view.ndim) +
                                                  " dimensions, got " + headrace::describe(view) +
                                                  "; keep within the plan, or export it with wider bounds"));
            }
            b.view = view;
          },
          nb::arg("shape"),
          "Say the shape of a delegate's output, where it is smaller than the greatest one of the plan. "
          "Before "
          "run() returns.")
      .def(
          "__array__",
          [](const Buffer& b, nb::handle dtype, nb::handle copy) {
            bool device = backend_of(b) != Backend::kCpu;
            if (device && copy.is(nb::bool_(false))) {
              throw nb::value_error(
                  "Buffer.__array__: expected copy=None or True for device memory, got False; leave it out");
            }
            nb::object array = to_numpy(b);
            if (dtype.is_none() && !copy.is(nb::bool_(true))) return array;
            nb::dict how;
            how["copy"] = copy.is(nb::bool_(true)) && !device;
            return nb::object(
                array.attr("astype")(dtype.is_none() ? array.attr("dtype") : nb::borrow(dtype), **how));
          },
          nb::arg("dtype") = nb::none(), nb::arg("copy") = nb::none(),
          "NumPy's protocol, as numpy(): a view of host memory, a copy of device memory.")
      .def("float32", &to_float32,
           "A float32 copy as a NumPy array, exact for bfloat16. Waits as numpy() does.")
      .def_static("from_float32", &from_float32, nb::arg("array"),
                  "A bfloat16 Buffer on the host, rounded to nearest even from an array of float32.")
      .def("__dlpack__", &to_dlpack, nb::kw_only(), nb::arg("stream") = nb::none(),
           nb::arg("max_version") = nb::none(), nb::arg("dl_device") = nb::none(),
           nb::arg("copy") = nb::none(),
           "DLPack: makes the consumer's stream wait for the last writer; does not wait on the host.")
      .def("__dlpack_device__",
           [](const Buffer& b) {
             dl::Device device = dlpack_device(b);
             return nb::make_tuple(device.type, device.id);
           })
      .def_prop_ro("__cuda_array_interface__", &cuda_array_interface,
                   "Version 3, on a GPU alone (else AttributeError); does not wait on the host.")
      .def("__repr__", [](const Buffer& b) {
        return "<headrace.Buffer " + describe(b.view) + " on " + device_text(b) + ">";
      });
}

}  // namespace headrace
