// Arrays between Python and the run time: NumPy arrays by NumPy's C API, everything else by DLPack or the
// array interface. Converts and forwards; what fits a method is decided in native/program.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "headrace/block.h"
#include "headrace/program.h"
#include "python/dlpack.h"

namespace headrace {

namespace nb = nanobind;

// Call once, from the module's init: NumPy's C API has to be imported.
void import_numpy();

struct PyDevice;

// Lets a delegate say how large an output is this time, while its run() lasts. Returns the Status of the
// engine.
class Resizer {
 public:
  virtual ~Resizer() = default;
  virtual Status resize(const TensorView& view) = 0;
};

// Memory with a dtype, a shape and strides, on a device.
struct Buffer {
  TensorView view;
  BlockRef block;                    // null where the memory is lent for a call
  std::shared_ptr<PyDevice> device;  // null for host memory that no device knows
  std::shared_ptr<Resizer> resizer;  // of an output lent to a delegate
};

// A view on any Python argument. `keep` holds what must outlive the view. `where` opens a message.
// Raises InputError for arrays that cannot be read (byte order, dtype, more than 16 dimensions).
Value to_value(nb::handle object, Value::Kind expected, nb::object& keep, const std::string& method,
               const char* role, size_t index);

// As to_value, for an array that the method writes to: an InputError too where it must not be written, or
// where one element stands for several.
Value to_out(nb::handle object, nb::object& keep, const std::string& method, size_t index);

// A str of bytes that should be UTF-8, but come from a file or a path: what is not becomes "\\xff".
nb::object text_of(const std::string& bytes);

// An output: a NumPy array over its block, a Buffer for device memory and where NumPy lacks the dtype, a
// number as it is.
nb::object from_value(Value& value);

// NumPy's type number, or -1 where it has no such dtype; and a dtype by name (InputError where there is
// none).
int numpy_type(DType dtype);
DType dtype_by_name(nb::handle dtype, const char* where);
nb::object numpy_view(const TensorView& view, nb::object owner);
// Owns a reference to a block for as long as a NumPy array or a DLPack tensor looks at it.
nb::object block_owner(BlockRef block);
dl::DataType dlpack_type(DType dtype);
// Sets sizes and dense C-order strides; returns the number of bytes. InputError: rank, negative size,
// overflow.
size_t set_shape(TensorView& view, nb::handle shape, const char* where);

// Raises the Python exception of a Status.
[[noreturn]] void raise(const Status& status);
inline void check(const Status& status) {
  if (!status.ok()) raise(status);
}

}  // namespace headrace
