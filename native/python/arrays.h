// Arrays between Python and the run time: NumPy arrays by NumPy's C API, everything else by DLPack or the
// array interface. Converts and forwards; what fits a method is decided in native/program.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "headrace/program.h"
#include "python/dlpack.h"

namespace headrace {

namespace nb = nanobind;

// Call once, from the module's init: NumPy's C API has to be imported.
void import_numpy();

// Memory with a dtype, a shape and strides, on a device. What an output is where NumPy has no such dtype.
struct Buffer {
  TensorView view;
  std::shared_ptr<Block> block;
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

// A NumPy array over the block of an output, or a Buffer where NumPy lacks the dtype; numbers as they are.
nb::object from_value(Value& value);

// Raises the Python exception of a Status.
[[noreturn]] void raise(const Status& status);
inline void check(const Status& status) {
  if (!status.ok()) raise(status);
}

void bind_buffer(nb::module_& m);

}  // namespace headrace
