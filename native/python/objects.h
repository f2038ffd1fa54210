// The Python objects over the seam: Device, Stream, Event, Partition, Buffer. What they mean is told by the
// stubs and docs of headrace.device; here they are converted and forwarded.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <vector>

#include "headrace/block.h"
#include "headrace/device.h"
#include "python/arrays.h"
#include "python/gil.h"

namespace headrace {

// A device as Python sees it: one object for one device for as long as somebody holds it.
struct PyDevice {
  DeviceRef device;
  std::shared_ptr<Ring> ring;
  EventPool events;
  // Foreign memory that a copy of to_device() may still read. Guarded by the interpreter's lock.
  std::vector<std::pair<EventRef, std::shared_ptr<void>>> kept;
  ~PyDevice();  // waits for those copies
};
using PyDeviceRef = std::shared_ptr<PyDevice>;
PyDeviceRef device_object(const DeviceRef& device);

struct PyStream {
  PyDeviceRef device;
  StreamHandle handle = kPerThreadStream;
  bool owned = false;
  bool closed = false;
  PartitionRef partition;
  ~PyStream();
};
using PyStreamRef = std::shared_ptr<PyStream>;

struct PyEvent {
  PyDeviceRef device;
  EventRef event;
};

struct PyPartition {
  PyDeviceRef device;
  PartitionRef partition;
};

// A Python object that C++ keeps, from any thread, and lets go of with the interpreter's lock or not at all.
std::shared_ptr<void> hold(nb::object object);

// A stream argument: a Stream, anything with __cuda_stream__, or an int together with a device.
struct StreamChoice {
  StreamHandle handle = kPerThreadStream;
  int32_t device = -1;
};
StreamChoice to_stream(nb::handle object, const DeviceRef& device, const char* where);

PyStreamRef make_stream(const PyDeviceRef& device, StreamHandle handle);
PyStreamRef create_stream(const PyDeviceRef& device, const StreamOptions& options);
// The same, or the per-thread stream for None; DeviceError for a stream of another device.
StreamHandle stream_or_own(nb::handle stream, const DeviceRef& device, const char* where);

// Puts the stream `later` behind what is on `earlier` now. Does not wait.
void order_streams(PyDevice& device, StreamHandle earlier, StreamHandle later);

// Puts an event behind what is on the stream now, for the buffer's next reader or writer. What a graph uses
// is marked by its replays.
Status mark_used(PyDevice& device, StreamHandle stream, const BlockRef& shared, bool write,
                 EventRef* marked = nullptr);

// Runs a call of the seam without the interpreter's lock: host functions may want it.
template <class F>
auto unlocked(F&& call) {
  GilRelease release;
  run_put_off();
  return call();
}
template <class T>
T unwrap(Result<T> result) {
  if (!result.ok()) raise(result.status());
  return std::move(*result);
}

// Memory that a call lends to a delegate: no block, valid while `loan` covers it.
nb::object lend_buffer(const TensorView& view, const PyDeviceRef& device, StreamHandle stream,
                       std::shared_ptr<const Loan> loan, bool resizable);

// What the exception says, "TypeError: …"; whatever its __str__ does. And the same with its traceback.
std::string text_of(const nb::python_error& error);
std::string traceback_of(const nb::python_error& error);

void bind_devices(nb::module_& m);
void bind_streams(nb::module_& m);
void bind_buffer(nb::module_& m);
void bind_delegates(nb::module_& m);
void bind_record(nb::module_& m);
void bind_aoti(nb::module_& m);
void bind_graphs(nb::module_& m);

}  // namespace headrace
