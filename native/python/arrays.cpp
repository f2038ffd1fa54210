#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_1_25_API_VERSION
#include "python/arrays.h"

#include <numpy/arrayobject.h>

#include <cstring>

#include "program/ring.h"

namespace headrace {

void import_numpy() {
  if (_import_array() < 0) nb::raise_python_error();
}

namespace {

// -1 where NumPy has no such dtype.
int numpy_type(DType dtype) {
  switch (dtype) {
    case DType::kUInt8:
      return NPY_UINT8;
    case DType::kInt8:
      return NPY_INT8;
    case DType::kInt16:
      return NPY_INT16;
    case DType::kInt32:
      return NPY_INT32;
    case DType::kInt64:
      return NPY_INT64;
    case DType::kFloat16:
      return NPY_HALF;
    case DType::kFloat32:
      return NPY_FLOAT;
    case DType::kFloat64:
      return NPY_DOUBLE;
    case DType::kBool:
      return NPY_BOOL;
    case DType::kUInt16:
      return NPY_UINT16;
    case DType::kUInt32:
      return NPY_UINT32;
    case DType::kUInt64:
      return NPY_UINT64;
    case DType::kBFloat16:
      return -1;
  }
  return -1;
}

bool from_numpy_type(int type, DType& dtype) {
  switch (type) {
    case NPY_BOOL:
      dtype = DType::kBool;
      return true;
    case NPY_BYTE:
      dtype = DType::kInt8;
      return true;
    case NPY_UBYTE:
      dtype = DType::kUInt8;
      return true;
    case NPY_SHORT:
      dtype = DType::kInt16;
      return true;
    case NPY_USHORT:
      dtype = DType::kUInt16;
      return true;
    case NPY_INT:
      dtype = DType::kInt32;
      return true;
    case NPY_UINT:
      dtype = DType::kUInt32;
      return true;
    case NPY_LONG:
    case NPY_LONGLONG:
      dtype = DType::kInt64;
      return true;
    case NPY_ULONG:
    case NPY_ULONGLONG:
      dtype = DType::kUInt64;
      return true;
    case NPY_HALF:
      dtype = DType::kFloat16;
      return true;
    case NPY_FLOAT:
      dtype = DType::kFloat32;
      return true;
    case NPY_DOUBLE:
      dtype = DType::kFloat64;
      return true;
    default:
      return false;
  }
}

[[noreturn]] void bad_input(const std::string& method, const char* role, size_t index,
                            const std::string& what) {
  raise(Status(ErrorCode::kInput, method + ", " + role + " " + std::to_string(index) + ": " + what));
}

// Reads the view of a NumPy array; false, with `what` set, where it cannot be read as it is.
bool view_numpy(PyArrayObject* array, TensorView& view, std::string& what) {
  int ndim = PyArray_NDIM(array);
  if (ndim > static_cast<int>(kMaxDims)) {
    what = "expected at most 16 dimensions, got " + std::to_string(ndim);
    return false;
  }
  PyArray_Descr* descr = PyArray_DESCR(array);
  if (!from_numpy_type(descr->type_num, view.dtype)) {
    // ml_dtypes registers bfloat16 with NumPy under a type number of its own in each process.
    std::string name = descr->typeobj->tp_name;
    if (name == "ml_dtypes.bfloat16" || name == "bfloat16") {
      view.dtype = DType::kBFloat16;
    } else {
      what = "expected an array of numbers, got dtype " +
             std::string(nb::str(nb::handle((PyObject*)descr)).c_str());
      return false;
    }
  }
  if (PyArray_ISBYTESWAPPED(array)) {
    what = "expected an array in this machine's byte order, got a big-endian " + dtype_name(view.dtype) +
           "; call x.astype(x.dtype.newbyteorder('='))";
    return false;
  }
  view.ndim = ndim;
  view.data = PyArray_DATA(array);
  for (int d = 0; d < ndim; ++d) {
    view.sizes[static_cast<size_t>(d)] = PyArray_DIM(array, d);
    view.strides_bytes[static_cast<size_t>(d)] = PyArray_STRIDE(array, d);
  }
  return true;
}

bool view_dlpack(const dl::Tensor& t, TensorView& view, std::string& what) {
  if (t.ndim < 0 || t.ndim > static_cast<int>(kMaxDims)) {
    what = "expected at most 16 dimensions, got " + std::to_string(t.ndim);
    return false;
  }
  static constexpr struct {
    uint8_t code, bits;
    DType dtype;
  } kTypes[] = {{dl::kFloat, 32, DType::kFloat32},   {dl::kFloat, 16, DType::kFloat16},
                {dl::kBfloat, 16, DType::kBFloat16}, {dl::kFloat, 64, DType::kFloat64},
                {dl::kInt, 64, DType::kInt64},       {dl::kInt, 32, DType::kInt32},
                {dl::kInt, 16, DType::kInt16},       {dl::kInt, 8, DType::kInt8},
                {dl::kUInt, 8, DType::kUInt8},       {dl::kUInt, 16, DType::kUInt16},
                {dl::kUInt, 32, DType::kUInt32},     {dl::kUInt, 64, DType::kUInt64},
                {dl::kBool, 8, DType::kBool}};
  bool known = false;
  for (const auto& type : kTypes) {
    if (t.dtype.lanes == 1 && t.dtype.code == type.code && t.dtype.bits == type.bits) {
      view.dtype = type.dtype;
      known = true;
    }
  }
  if (!known) {
    what = "expected an array of numbers, got DLPack type code " + std::to_string(t.dtype.code) + " of " +
           std::to_string(t.dtype.bits) + " bits";
    return false;
  }
  view.ndim = t.ndim;
  view.data = static_cast<char*>(t.data) + t.byte_offset;
  auto step = static_cast<int64_t>(itemsize(view.dtype));
  for (int d = t.ndim - 1; d >= 0; --d) {
    auto i = static_cast<size_t>(d);
    view.sizes[i] = t.shape[d];
    view.strides_bytes[i] = t.strides ? t.strides[d] * static_cast<int64_t>(itemsize(view.dtype)) : step;
    step *= t.shape[d];
  }
  bool host = t.device.type == dl::kCpu || t.device.type == dl::kCudaHost;
  view.device = {host ? DeviceKind::kCpu : DeviceKind::kCuda, static_cast<int8_t>(host ? 0 : t.device.id)};
  if (!host && t.device.type != dl::kCuda && t.device.type != dl::kCudaManaged) {
    what = "expected an array on the host or on a CUDA device, got DLPack device type " +
           std::to_string(t.device.type);
    return false;
  }
  return true;
}

dl::DataType dlpack_type(DType dtype) {
  uint8_t bits = static_cast<uint8_t>(8 * itemsize(dtype));
  switch (dtype) {
    case DType::kFloat16:
    case DType::kFloat32:
    case DType::kFloat64:
      return {dl::kFloat, bits, 1};
    case DType::kBFloat16:
      return {dl::kBfloat, bits, 1};
    case DType::kBool:
      return {dl::kBool, bits, 1};
    case DType::kUInt8:
    case DType::kUInt16:
    case DType::kUInt32:
    case DType::kUInt64:
      return {dl::kUInt, bits, 1};
    default:
      return {dl::kInt, bits, 1};
  }
}

// Owns a reference to a block for as long as a NumPy array or a DLPack tensor looks at it.
nb::object block_owner(std::shared_ptr<Block> block) {
  auto* held = new std::shared_ptr<Block>(std::move(block));
  return nb::capsule(held, [](void* p) noexcept { delete static_cast<std::shared_ptr<Block>*>(p); });
}

nb::object numpy_view(const TensorView& view, nb::object owner) {
  int type = numpy_type(view.dtype);
  npy_intp dims[kMaxDims], strides[kMaxDims];
  for (int d = 0; d < view.ndim; ++d) {
    dims[d] = view.sizes[static_cast<size_t>(d)];
    strides[d] = view.strides_bytes[static_cast<size_t>(d)];
  }
  PyObject* array = PyArray_New(&PyArray_Type, view.ndim, dims, type, strides, view.data, 0,
                                NPY_ARRAY_ALIGNED | NPY_ARRAY_WRITEABLE, nullptr);
  if (array == nullptr) nb::raise_python_error();
  nb::object out = nb::steal(array);
  if (PyArray_SetBaseObject((PyArrayObject*)array, owner.release().ptr()) < 0) nb::raise_python_error();
  return out;
}

}  // namespace

Value to_value(nb::handle object, Value::Kind expected, nb::object& keep, const std::string& method,
               const char* role, size_t index) {
  Value value;
  PyObject* o = object.ptr();
  std::string what;
  if (PyArray_Check(o)) {
    value.kind = Value::Kind::kTensor;
    if (!view_numpy((PyArrayObject*)o, value.tensor, what)) bad_input(method, role, index, what);
    return value;
  }
  if (Buffer* buffer = nullptr; nb::try_cast(object, buffer) && buffer != nullptr) {
    value.kind = Value::Kind::kTensor;
    value.tensor = buffer->view;
    value.block = buffer->block;
    return value;
  }
  if (o == Py_None) return value;
  if (expected == Value::Kind::kTensor && PyArray_CheckScalar(o)) {
    keep = nb::steal(PyArray_FromScalar(o, nullptr));
    if (!keep.is_valid()) nb::raise_python_error();
    return to_value(keep, expected, keep, method, role, index);
  }
  if (PyBool_Check(o)) {
    value.kind = Value::Kind::kBool;
    value.bool_value = o == Py_True;
    return value;
  }
  if (PyLong_Check(o)) {
    value.kind = Value::Kind::kInt;
    value.int_value = PyLong_AsLongLong(o);
    if (value.int_value == -1 && PyErr_Occurred()) {
      PyErr_Clear();
      bad_input(method, role, index, "expected an int of 64 bits, got a larger one");
    }
    return value;
  }
  if (PyFloat_Check(o)) {
    value.kind = Value::Kind::kDouble;
    value.double_value = PyFloat_AS_DOUBLE(o);
    return value;
  }
  if (PyUnicode_Check(o)) {
    value.kind = Value::Kind::kString;
    value.string_value = nb::cast<std::string>(object);
    return value;
  }
  if (nb::hasattr(object, "__dlpack__")) {
    try {
      keep = object.attr("__dlpack__")();
    } catch (nb::python_error& e) {
      bad_input(method, role, index,
                std::string("expected an array that gives itself by DLPack, got ") + e.what());
    }
    // The capsule stays as it is: whoever made it frees the tensor when the capsule goes.
    auto* managed = static_cast<dl::ManagedTensor*>(PyCapsule_GetPointer(keep.ptr(), "dltensor"));
    if (managed == nullptr) nb::raise_python_error();
    value.kind = Value::Kind::kTensor;
    if (!view_dlpack(managed->tensor, value.tensor, what)) bad_input(method, role, index, what);
    return value;
  }
  if (nb::hasattr(object, "__array_interface__")) {
    keep = nb::steal(PyArray_FROM_O(o));
    if (!keep.is_valid()) nb::raise_python_error();
    return to_value(keep, expected, keep, method, role, index);
  }
  bad_input(method, role, index,
            "expected an array (NumPy, DLPack or the array interface) or a number, got " +
                std::string(Py_TYPE(o)->tp_name) + "; convert it with numpy.asarray");
}

nb::object from_value(Value& value) {
  switch (value.kind) {
    case Value::Kind::kNone:
      return nb::none();
    case Value::Kind::kInt:
      return nb::int_(value.int_value);
    case Value::Kind::kDouble:
      return nb::float_(value.double_value);
    case Value::Kind::kBool:
      return nb::bool_(value.bool_value);
    case Value::Kind::kString:
      return nb::str(value.string_value.c_str(), value.string_value.size());
    case Value::Kind::kTensor:
      break;
  }
  if (numpy_type(value.tensor.dtype) < 0) return nb::cast(Buffer{value.tensor, std::move(value.block)});
  return numpy_view(value.tensor, block_owner(std::move(value.block)));
}

void raise(const Status& status) {
  static constexpr const char* kNames[] = {"HeadraceError",       "ProgramError", "InputError",
                                           "OptionError",         "NotSupported", "DelegateError",
                                           "DelegateUnavailable", "DeviceError",  "OutOfDeviceMemory",
                                           "CaptureError",        "EngineError"};
  nb::object cls = nb::module_::import_("headrace.errors").attr(kNames[static_cast<size_t>(status.code())]);
  // Messages quote paths and files, which need not be UTF-8.
  auto decoded = [](const std::string& s) {
    return nb::steal(PyUnicode_DecodeUTF8(s.data(), static_cast<Py_ssize_t>(s.size()), "replace"));
  };
  nb::list log;
  for (const std::string& line : status.log) log.append(decoded(line));
  nb::dict kwargs;
  kwargs["log"] = log;
  auto text = [&](const std::string& s) { return s.empty() ? nb::object(nb::none()) : decoded(s); };
  if (status.code() == ErrorCode::kDelegate || status.code() == ErrorCode::kDelegateUnavailable) {
    kwargs["delegate"] = text(status.delegate);
    kwargs["method"] = text(status.method);
    kwargs["island"] = status.island < 0 ? nb::object(nb::none()) : nb::object(nb::int_(status.island));
  }
  if (status.code() == ErrorCode::kDevice || status.code() == ErrorCode::kOutOfDeviceMemory) {
    kwargs["device"] = text(status.device);
  }
  nb::object error = cls(decoded(status.message()), **kwargs);
  PyErr_SetObject(cls.ptr(), error.ptr());
  nb::raise_python_error();
}

// -------------------------------------------------------------------- Buffer

namespace {

struct Exported {
  dl::ManagedTensor managed;
  std::shared_ptr<Block> block;
  int64_t shape[kMaxDims], strides[kMaxDims];
};

nb::object to_dlpack(const Buffer& buffer) {
  auto* out = new Exported();
  out->block = buffer.block;
  for (size_t d = 0; d < kMaxDims; ++d) {
    out->shape[d] = buffer.view.sizes[d];
    out->strides[d] = buffer.view.strides_bytes[d] / static_cast<int64_t>(itemsize(buffer.view.dtype));
  }
  out->managed = {{buffer.view.data,
                   {dl::kCpu, 0},
                   buffer.view.ndim,
                   dlpack_type(buffer.view.dtype),
                   out->shape,
                   out->strides,
                   0},
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

nb::object buffer_numpy(const Buffer& buffer) {
  if (numpy_type(buffer.view.dtype) < 0) {
    raise(Status(ErrorCode::kInput,
                 "Buffer.numpy: expected a dtype that NumPy has, got " + dtype_name(buffer.view.dtype) +
                     "; call .float32() for a converted copy, or pass the buffer on by DLPack"));
  }
  return numpy_view(buffer.view, block_owner(buffer.block));
}

nb::object buffer_float32(const Buffer& buffer) {
  if (buffer.view.dtype != DType::kBFloat16) return buffer_numpy(buffer).attr("astype")("float32");
  TensorView bits = buffer.view;
  bits.dtype = DType::kUInt16;
  // bfloat16 is the upper half of a float32.
  nb::object wide = numpy_view(bits, block_owner(buffer.block)).attr("astype")("uint32");
  return (wide.attr("__lshift__")(16)).attr("view")("float32");
}

// Rounds to nearest, ties to even; NaN stays NaN.
uint16_t round_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

Buffer buffer_from_float32(nb::handle array) {
  nb::object dense = nb::steal(PyArray_FROM_OTF(array.ptr(), NPY_FLOAT, NPY_ARRAY_CARRAY_RO));
  if (!dense.is_valid()) nb::raise_python_error();
  Buffer out;
  std::string what;
  if (!view_numpy((PyArrayObject*)dense.ptr(), out.view, what))
    bad_input("Buffer.from_float32", "argument", 0, what);
  const auto* from = static_cast<const float*>(out.view.data);
  out.view.dtype = DType::kBFloat16;
  for (int64_t& stride : out.view.strides_bytes) stride /= 2;
  out.block = std::make_shared<Ring>()->take(out.view.nbytes());
  if (!out.block) raise(Status(ErrorCode::kOutOfDeviceMemory, "Buffer.from_float32: no memory on cpu"));
  out.view.data = out.block->data();
  for (int64_t i = 0; i < out.view.numel(); ++i)
    static_cast<uint16_t*>(out.view.data)[i] = round_bfloat16(from[i]);
  return out;
}

}  // namespace

void bind_buffer(nb::module_& m) {
  nb::class_<Buffer>(m, "Buffer")
      .def_prop_ro("dtype", [](const Buffer& b) { return dtype_name(b.view.dtype); })
      .def_prop_ro("shape", [](const Buffer& b) { return tuple_of(b.view.sizes, b.view.ndim, 1); })
      .def_prop_ro("strides",
                   [](const Buffer& b) {
                     return tuple_of(b.view.strides_bytes, b.view.ndim,
                                     static_cast<int64_t>(itemsize(b.view.dtype)));
                   })
      .def_prop_ro("nbytes", [](const Buffer& b) { return b.view.nbytes(); })
      .def_prop_ro("device", [](const Buffer& b) { return device_name(b.view.device); })
      .def_static("from_float32", &buffer_from_float32, nb::arg("array"))
      .def("numpy", &buffer_numpy)
      .def("float32", &buffer_float32)
      .def("__dlpack__", [](const Buffer& b, nb::kwargs) { return to_dlpack(b); })
      .def("__dlpack_device__", [](const Buffer&) { return nb::make_tuple(static_cast<int>(dl::kCpu), 0); })
      .def("__repr__", [](const Buffer& b) {
        return "Buffer(" + describe(b.view) + " on " + device_name(b.view.device) + ")";
      });
}

}  // namespace headrace
