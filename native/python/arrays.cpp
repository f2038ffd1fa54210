#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_1_25_API_VERSION
#include "python/arrays.h"

#include <numpy/arrayobject.h>

#include <cstring>
#include <utility>

#include "python/objects.h"

namespace headrace {

void import_numpy() {
  if (_import_array() < 0) nb::raise_python_error();
}

namespace {

// Each dtype as NumPy and DLPack know it. NumPy has no bfloat16; ml_dtypes registers one under a number of
// its own in each process.
constexpr struct Known {
  DType dtype;
  int numpy;
  uint8_t dlpack;
} kKnown[] = {
    {DType::kFloat32, NPY_FLOAT, dl::kFloat}, {DType::kFloat64, NPY_DOUBLE, dl::kFloat},
    {DType::kFloat16, NPY_HALF, dl::kFloat},  {DType::kBFloat16, -1, dl::kBfloat},
    {DType::kInt64, NPY_INT64, dl::kInt},     {DType::kInt32, NPY_INT32, dl::kInt},
    {DType::kInt16, NPY_INT16, dl::kInt},     {DType::kInt8, NPY_INT8, dl::kInt},
    {DType::kUInt64, NPY_UINT64, dl::kUInt},  {DType::kUInt32, NPY_UINT32, dl::kUInt},
    {DType::kUInt16, NPY_UINT16, dl::kUInt},  {DType::kUInt8, NPY_UINT8, dl::kUInt},
    {DType::kBool, NPY_BOOL, dl::kBool},
};

const Known& known(DType dtype) {
  for (const Known& one : kKnown) {
    if (one.dtype == dtype) return one;
  }
  raise(Status(ErrorCode::kInput, "expected a dtype of numbers, got " + dtype_name(dtype) +
                                      "; export the program with one that NumPy or DLPack has"));
}

bool from_numpy_type(int type, DType& dtype) {
  // Two names for integers of 64 bits.
  if (type == NPY_LONGLONG || type == NPY_LONG) type = NPY_INT64;
  if (type == NPY_ULONGLONG || type == NPY_ULONG) type = NPY_UINT64;
  for (const Known& one : kKnown) {
    if (one.numpy != type || type < 0) continue;
    dtype = one.dtype;
    return true;
  }
  return false;
}

[[noreturn]] void bad_input(const std::string& method, const char* role, size_t index,
                            const std::string& what) {
  raise(Status(ErrorCode::kInput, method + ", " + role + " " + std::to_string(index) + ": " + what));
}

// The InputError for an argument whose own protocol raised `e`.
[[noreturn]] void refused(nb::python_error& e, const std::string& expected, const std::string& method,
                          const char* role, size_t index) {
  std::string what = "expected " + expected + ", got ";
  what += nb::type_name(e.type()).c_str();
  nb::object text = nb::steal(PyObject_Str(e.value().ptr()));
  if (text.is_valid()) {
    if (const char* utf8 = PyUnicode_AsUTF8(text.ptr())) what += std::string(": ") + utf8;
  }
  PyErr_Clear();
  bad_input(method, role, index, what + "; do what that says, or pass a NumPy array of it");
}

// Reads the view of a NumPy array; false, with `what` set, where it cannot be read as it is.
bool view_numpy(PyArrayObject* array, TensorView& view, std::string& what) {
  int ndim = PyArray_NDIM(array);
  if (ndim > static_cast<int>(kMaxDims)) {
    what = "expected at most 16 dimensions, got " + std::to_string(ndim) + "; reshape it";
    return false;
  }
  PyArray_Descr* descr = PyArray_DESCR(array);
  if (!from_numpy_type(descr->type_num, view.dtype)) {
    std::string name = descr->typeobj->tp_name;
    if (name == "ml_dtypes.bfloat16" || name == "bfloat16") {
      view.dtype = DType::kBFloat16;
    } else {
      what = "expected an array of numbers, got dtype " +
             std::string(nb::str(nb::handle((PyObject*)descr)).c_str()) + "; convert it with astype()";
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
    what = "expected at most 16 dimensions, got " + std::to_string(t.ndim) + "; reshape it";
    return false;
  }
  const Known* type = nullptr;
  for (const Known& one : kKnown) {
    if (t.dtype.lanes == 1 && t.dtype.code == one.dlpack && t.dtype.bits == 8 * itemsize(one.dtype))
      type = &one;
  }
  if (type == nullptr) {
    what = "expected an array of numbers, got DLPack type code " + std::to_string(t.dtype.code) + " of " +
           std::to_string(t.dtype.bits) + " bits; convert it before calling";
    return false;
  }
  view.dtype = type->dtype;
  view.ndim = t.ndim;
  view.data = static_cast<char*>(t.data) + t.byte_offset;
  for (int d = 0; d < t.ndim; ++d) view.sizes[static_cast<size_t>(d)] = t.shape[d];
  set_dense_strides(view);
  for (int d = 0; t.strides != nullptr && d < t.ndim; ++d)
    view.strides_bytes[static_cast<size_t>(d)] = t.strides[d] * static_cast<int64_t>(itemsize(view.dtype));
  bool host = t.device.type == dl::kCpu || t.device.type == dl::kCudaHost;
  view.device = {host ? DeviceKind::kCpu : DeviceKind::kCuda, static_cast<int8_t>(host ? 0 : t.device.id)};
  if (!host && t.device.type != dl::kCuda && t.device.type != dl::kCudaManaged) {
    what = "expected an array on the host or on a CUDA device, got DLPack device type " +
           std::to_string(t.device.type) + "; copy it to the host first";
    return false;
  }
  return true;
}

}  // namespace

int numpy_type(DType dtype) { return known(dtype).numpy; }

dl::DataType dlpack_type(DType dtype) {
  return {known(dtype).dlpack, static_cast<uint8_t>(8 * itemsize(dtype)), 1};
}

nb::object block_owner(BlockRef block) {
  auto* held = new BlockRef(std::move(block));
  return nb::capsule(held, [](void* p) noexcept { delete static_cast<BlockRef*>(p); });
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

DType dtype_by_name(nb::handle dtype, const char* where) {
  std::string name = PyUnicode_Check(dtype.ptr()) ? nb::cast<std::string>(dtype) : std::string();
  for (const Known& one : kKnown) {
    if (name == dtype_name(one.dtype)) return one.dtype;
  }
  // numpy.float32, numpy.dtype("f4"), ml_dtypes.bfloat16, …
  PyArray_Descr* descr = nullptr;
  if (PyArray_DescrConverter(dtype.ptr(), &descr) == NPY_SUCCEED && descr != nullptr) {
    nb::object owner = nb::steal((PyObject*)descr);
    DType out;
    if (from_numpy_type(descr->type_num, out)) return out;
    name = nb::cast<std::string>(nb::str(owner));
    if (name == "bfloat16") return DType::kBFloat16;
  }
  PyErr_Clear();
  raise(Status(ErrorCode::kInput,
               std::string(where) + ": expected a dtype such as 'float32' or 'bfloat16', got " +
                   (name.empty() ? nb::cast<std::string>(nb::repr(dtype)) : "'" + name + "'") +
                   "; name another"));
}

size_t set_shape(TensorView& view, nb::handle shape, const char* where) {
  nb::object given = PyLong_Check(shape.ptr()) ? nb::object(nb::make_tuple(shape))
                                               : nb::steal(PySequence_Tuple(shape.ptr()));
  if (!given.is_valid()) {
    PyErr_Clear();
    raise(Status(ErrorCode::kInput, std::string(where) + ": expected a shape as a sequence of ints, got " +
                                        Py_TYPE(shape.ptr())->tp_name + "; pass a tuple such as (2, 3)"));
  }
  auto dims = nb::borrow<nb::tuple>(given);
  if (dims.size() > kMaxDims) {
    raise(Status(ErrorCode::kInput, std::string(where) + ": expected at most 16 dimensions, got " +
                                        std::to_string(dims.size()) + "; merge some of them"));
  }
  view.ndim = static_cast<int>(dims.size());
  size_t nbytes = itemsize(view.dtype);
  for (size_t d = 0; d < dims.size(); ++d) {
    int64_t size = 0;
    if (!nb::try_cast(dims[d], size)) {
      raise(Status(ErrorCode::kInput, std::string(where) + ": expected sizes as ints of 64 bits, got " +
                                          nb::cast<std::string>(nb::repr(dims[d])) + " in dimension " +
                                          std::to_string(d) + "; convert it with int()"));
    }
    view.sizes[d] = size;
    if (size < 0 || size > INT32_MAX || __builtin_mul_overflow(nbytes, static_cast<size_t>(size), &nbytes)) {
      raise(Status(ErrorCode::kInput, std::string(where) +
                                          ": expected sizes of 0 or more that memory can hold, got " +
                                          std::to_string(size) + " in dimension " + std::to_string(d) +
                                          "; choose sizes within that"));
    }
  }
  set_dense_strides(view);
  return nbytes;
}

bool dtype_by_typestr(const std::string& typestr, DType& dtype) {
  nb::str text(typestr.c_str());
  PyArray_Descr* descr = nullptr;
  if (PyArray_DescrConverter(text.ptr(), &descr) != NPY_SUCCEED || descr == nullptr) {
    PyErr_Clear();
    return false;
  }
  nb::object owner = nb::steal((PyObject*)descr);
  return !PyDataType_ISBYTESWAPPED(descr) && from_numpy_type(descr->type_num, dtype);
}

Value to_value(nb::handle object, Value::Kind expected, nb::object& keep, const std::string& method,
               const char* role, size_t index, const Reader& reader) {
  Value value;
  PyObject* o = object.ptr();
  std::string what;
  auto message = [&] { return method + ", " + role + " " + std::to_string(index); };
  if (PyArray_Check(o)) {
    value.kind = Value::Kind::kTensor;
    if (!view_numpy((PyArrayObject*)o, value.tensor, what)) bad_input(method, role, index, what);
    return value;
  }
  if (Buffer* buffer = nullptr; nb::try_cast(object, buffer) && buffer != nullptr) {
    value.kind = Value::Kind::kTensor;
    value.tensor = buffer->view;
    value.block = buffer->block;
    value.lease = buffer->borrowed;
    if (buffer->device) value.device = buffer->device->device;
    check_lease(*buffer, message());
    // No event says when lent memory is written: it is in order on the stream of its call alone.
    if (buffer->lent() && value.device->backend() != Backend::kCpu &&
        (reader.device != value.device || reader.stream != buffer->lent_on)) {
      bad_input(
          method, role, index,
          "expected lent memory on the stream of the call that lent it, got it on another stream; use that "
          "stream, or copy it there first");
    }
    return value;
  }
  if (o == Py_None) return value;
  if (PyArray_IsScalar(o, Generic)) {
    // A NumPy scalar is a 0-d array, or the Python number that a method takes there.
    keep =
        expected == Value::Kind::kTensor ? nb::steal(PyArray_FromScalar(o, nullptr)) : object.attr("item")();
    if (!keep.is_valid()) nb::raise_python_error();
    if (!PyArray_IsScalar(keep.ptr(), Generic))
      return to_value(keep, expected, keep, method, role, index, reader);
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
      bad_input(method, role, index, "expected an int of 64 bits, got a larger one; pass a smaller one");
    }
    return value;
  }
  if (PyFloat_Check(o)) {
    value.kind = Value::Kind::kDouble;
    value.double_value = PyFloat_AS_DOUBLE(o);
    return value;
  }
  if (PyUnicode_Check(o)) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(o, &size);
    if (text == nullptr) {
      PyErr_Clear();
      bad_input(method, role, index, "expected text, got a str with lone surrogates; remove them");
    }
    value.kind = Value::Kind::kString;
    value.string_value.assign(text, static_cast<size_t>(size));
    return value;
  }
  if (nb::hasattr(object, "__dlpack__")) {
    bool cuda = false;
    try {
      cuda = is_cuda_dlpack(object);
      keep = cuda ? cuda_dlpack(object, reader, message()) : object.attr("__dlpack__")();
    } catch (nb::python_error& e) {
      if (e.matches(nb::module_::import_("headrace.errors").attr("HeadraceError"))) throw;
      refused(e, "an array that gives itself by DLPack", method, role, index);
    }
    if (!PyCapsule_IsValid(keep.ptr(), "dltensor")) {
      bad_input(method, role, index,
                "expected a capsule 'dltensor' from __dlpack__, got " +
                    std::string(Py_TYPE(keep.ptr())->tp_name) +
                    "; report it to the library whose array it is, or pass a NumPy array of it");
    }
    // The capsule stays as it is: whoever made it frees the tensor when the capsule goes.
    auto* managed = static_cast<dl::ManagedTensor*>(PyCapsule_GetPointer(keep.ptr(), "dltensor"));
    value.kind = Value::Kind::kTensor;
    if (!view_dlpack(managed->tensor, value.tensor, what)) bad_input(method, role, index, what);
    if (cuda) {
      confirm(value.tensor, reader, message());
      value.device = reader.device;
    }
    return value;
  }
  if (nb::hasattr(object, "__cuda_array_interface__")) {
    value.kind = Value::Kind::kTensor;
    value.tensor = cuda_array(object, reader, std::strcmp(role, "out") == 0, message());
    value.device = reader.device;
    keep = nb::borrow(object);
    return value;
  }
  if (nb::hasattr(object, "__array_interface__")) {
    keep = nb::steal(PyArray_FROM_O(o));
    if (!keep.is_valid()) {
      nb::python_error e;
      refused(e, "an array that gives itself by the array interface", method, role, index);
    }
    return to_value(keep, expected, keep, method, role, index, reader);
  }
  bad_input(method, role, index,
            "expected an array (NumPy, DLPack or an array interface) or a number, got " +
                std::string(Py_TYPE(o)->tp_name) + "; convert it with numpy.asarray");
}

Value to_out(nb::handle object, nb::object& keep, const std::string& method, size_t index,
             const Reader& reader) {
  Value value = to_value(object, Value::Kind::kTensor, keep, method, "out", index, reader);
  if (value.kind != Value::Kind::kTensor) return value;
  PyObject* array = PyArray_Check(object.ptr()) ? object.ptr() : keep.ptr();
  if (PyArray_IsScalar(object.ptr(), Generic) ||
      (array != nullptr && PyArray_Check(array) && !PyArray_ISWRITEABLE((PyArrayObject*)array))) {
    bad_input(method, "out", index,
              "expected an array that can be written, got a read-only one; pass a copy to be written to");
  }
  for (size_t d = 0; d < static_cast<size_t>(value.tensor.ndim); ++d) {
    if (value.tensor.sizes[d] > 1 && value.tensor.strides_bytes[d] == 0) {
      bad_input(method, "out", index,
                "expected memory of its own for every element, got a stride of 0 in dimension " +
                    std::to_string(d) + "; pass an array that was not broadcast");
    }
  }
  return value;
}

nb::object text_of(const std::string& bytes) {
  PyObject* text =
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "backslashreplace");
  if (text == nullptr) nb::raise_python_error();
  return nb::steal(text);
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
      return text_of(value.string_value);
    case Value::Kind::kTensor:
      break;
  }
  if (value.device != nullptr || numpy_type(value.tensor.dtype) < 0) {
    Buffer buffer;
    buffer.view = value.tensor;
    buffer.block = std::move(value.block);
    if (value.device) buffer.device = device_object(value.device);
    buffer.borrowed = std::move(value.lease);
    return nb::cast(std::move(buffer));
  }
  return numpy_view(value.tensor, block_owner(std::move(value.block)));
}

std::string text_of(const nb::python_error& error) {
  nb::handle value = error.value();
  std::string out = Py_TYPE(value.ptr())->tp_name;
  // As bytes that are always there: an exception may fail to say what it is, or say it in lone surrogates.
  nb::object text = nb::steal(PyObject_Str(value.ptr()));
  if (text.is_valid()) text = nb::steal(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"));
  if (!text.is_valid()) {
    PyErr_Clear();
    return out + " (whose text raised an exception itself)";
  }
  return out + ": " +
         std::string(PyBytes_AS_STRING(text.ptr()), static_cast<size_t>(PyBytes_GET_SIZE(text.ptr())));
}

std::string traceback_of(const nb::python_error& error) {
  std::string out = text_of(error);
  nb::handle trace = error.traceback();
  if (!trace.is_valid() || trace.is_none()) return out;
  try {
    nb::object lines = nb::module_::import_("traceback").attr("format_tb")(trace);
    return out + "\n" + nb::cast<std::string>(nb::str("").attr("join")(lines));
  } catch (const std::exception&) {
    PyErr_Clear();
    return out;
  }
}

void raise(const Status& status) {
  static constexpr const char* kNames[] = {"HeadraceError",       "ProgramError", "InputError",
                                           "OptionError",         "NotSupported", "DelegateError",
                                           "DelegateUnavailable", "DeviceError",  "OutOfDeviceMemory",
                                           "CaptureError",        "EngineError"};
  nb::object cls = nb::module_::import_("headrace.errors").attr(kNames[static_cast<size_t>(status.code())]);
  nb::list log;
  for (const std::string& line : status->log) log.append(text_of(line));
  nb::dict kwargs;
  kwargs["log"] = log;
  auto text = [](const std::string& s) { return s.empty() ? nb::object(nb::none()) : text_of(s); };
  if (status.code() == ErrorCode::kDelegate || status.code() == ErrorCode::kDelegateUnavailable) {
    kwargs["delegate"] = text(status->delegate);
    kwargs["method"] = text(status->method);
    kwargs["island"] = status->island < 0 ? nb::object(nb::none()) : nb::object(nb::int_(status->island));
  }
  if (status.code() == ErrorCode::kDevice || status.code() == ErrorCode::kOutOfDeviceMemory) {
    kwargs["device"] = text(status->device);
  }
  if (status.code() == ErrorCode::kCapture) kwargs["step"] = text(status->step);
  nb::object error = cls(text_of(status.message()), **kwargs);
  if (status->cause != nullptr) {
    nb::object cause = nb::borrow(static_cast<PyObject*>(status->cause.get()));
    if (!PyObject_IsInstance(cause.ptr(), PyExc_Exception)) {
      // KeyboardInterrupt and SystemExit are not the delegate's to fail with.
      PyErr_SetObject((PyObject*)Py_TYPE(cause.ptr()), cause.ptr());
      nb::raise_python_error();
    }
    PyException_SetCause(error.ptr(), cause.release().ptr());
  }
  PyErr_SetObject(cls.ptr(), error.ptr());
  nb::raise_python_error();
}

}  // namespace headrace
