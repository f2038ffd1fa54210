// Arrays between Python and the run time: NumPy arrays by NumPy's C API, everything else by DLPack or the
// array interface. Converts and forwards; what fits a method is decided in native/program.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "headrace/block.h"
#include "headrace/program.h"
#include "python/dlpack.h"
#include "python/loan.h"

namespace headrace {

namespace nb = nanobind;

// Call once, from the module's init: NumPy's C API has to be imported.
void import_numpy();

struct PyDevice;

// Memory with a dtype, a shape and strides, on a device.
struct Buffer {
  TensorView view;
  BlockRef block;                    // null where the memory is lent for a call
  std::shared_ptr<PyDevice> device;  // null for host memory that no device knows
  int64_t most = -1;                 // elements that there is room for, where a delegate may say the shape
  StreamHandle lent_on = kPerThreadStream;  // of memory lent for a call: the stream of the call
  std::shared_ptr<const Loan> loan;         // of memory lent for a call
  bool lent() const { return loan != nullptr; }
  Lease borrowed = {};  // of a graph's output
};

// Raises InputError where the memory was lent for a call that has ended, or is a graph's output that a replay
// has written over.
void check_lease(const Buffer& buffer, const std::string& where);

// For whom an array is read or written: work that is enqueued on `stream` of `device` from now on. Memory of
// a GPU is ordered before it, by whoever made the array.
struct Reader {
  DeviceRef device;  // null: nobody who could use memory of a GPU
  StreamHandle stream = kPerThreadStream;
};

// A view on any Python argument. `keep` holds what must outlive the view. `where` opens a message.
// Raises InputError for arrays that cannot be read (byte order, dtype, more than 16 dimensions).
// DeviceError: memory of another device than the reader's.
Value to_value(nb::handle object, Value::Kind expected, nb::object& keep, const std::string& method,
               const char* role, size_t index, const Reader& reader = {});

// As to_value, for an array that the method writes to: an InputError too where it must not be written, or
// where one element stands for several.
Value to_out(nb::handle object, nb::object& keep, const std::string& method, size_t index,
             const Reader& reader);

// The two ways that memory of a GPU comes in (cuda_arrays.cpp). `message` opens what is raised.
// Whether the object says by DLPack that its memory is a GPU's.
bool is_cuda_dlpack(nb::handle object);
// Its capsule, for the reader's stream: the producer makes that stream wait for whatever still writes. No
// wait where the stream captures, which an event from outside would break: order it before the capture
// begins.
nb::object cuda_dlpack(nb::handle object, const Reader& reader, const std::string& message);
// A view by __cuda_array_interface__ (version 3), ordered before the reader by the stream that it names.
TensorView cuda_array(nb::handle object, const Reader& reader, bool write, const std::string& message);
// Raises where the driver does not confirm that the memory is the reader's device's, all of it.
void confirm(const TensorView& view, const Reader& reader, const std::string& message);
// Sets the dtype by NumPy's name for it ("<f4"); false where it is none of ours.
bool dtype_by_typestr(const std::string& typestr, DType& dtype);

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
