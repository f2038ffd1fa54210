// headrace.Stream, Event and Partition, and the thread's selection.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "device/record.h"
#include "headrace/caller_stream.h"
#include "headrace/capture.h"
#include "python/gil.h"
#include "python/objects.h"

namespace headrace {

namespace {

// What belongs to another device than `device`.
[[noreturn]] void elsewhere(const std::string& where, const std::string& expected, const std::string& got,
                            const Device& device, const char* advice) {
  Status status(ErrorCode::kDevice, where + ": expected " + expected + ", got " + got + "; " + advice);
  status.device = device.name();
  raise(status);
}

[[noreturn]] void stream_elsewhere(const std::string& where, const Device& device, int32_t got) {
  elsewhere(where, "a stream of " + device.name(), "one of " + device_name_of(got, device.name()), device,
            "pass a stream of that device");
}

StreamHandle usable(const PyStream& stream) {
  if (stream.closed) {
    raise(Status(ErrorCode::kInput,
                 "stream: expected an open stream of " + stream.device->device->name() +
                     ", got one that was closed; use one that is open, or make one with stream()"));
  }
  return stream.handle;
}

void close_stream(PyStream& stream) {
  if (std::exchange(stream.closed, true) || !stream.owned) return;
  PartitionRef partition = std::move(stream.partition);  // what it held is free with it
  check(stream.device->device->destroy_stream(stream.handle));
}

}  // namespace

PyStreamRef make_stream(const PyDeviceRef& device, StreamHandle handle) {
  auto stream = std::make_shared<PyStream>();
  stream->device = device;
  stream->handle = handle == 0 ? kLegacyStream : handle;
  return stream;
}

StreamHandle stream_or_own(nb::handle stream, const DeviceRef& device, const char* where) {
  if (stream.is_none()) return kPerThreadStream;
  StreamChoice choice = to_stream(stream, device, where);
  if (choice.device != -1 && choice.device != device->id())
    stream_elsewhere(std::string(where) + ", stream", *device, choice.device);
  return choice.handle;
}

PyStreamRef create_stream(const PyDeviceRef& self, const StreamOptions& options) {
  auto stream = make_stream(self, unwrap(self->device->create_stream(options)));
  stream->owned = true;
  stream->partition = options.partition;
  return stream;
}

void order_streams(PyDevice& device, StreamHandle earlier, StreamHandle later) {
  if (earlier == later) return;
  auto event = device.events.take(*device.device);
  check(event.status());
  check(device.device->record(**event, earlier));
  check(device.device->wait(later, **event));
}

Status mark_used(PyDevice& device, StreamHandle stream, const BlockRef& shared, bool write,
                 EventRef* marked) {
  captured_use(shared, write);
  if (capture_stage() == CaptureStage::kCapture) return {};
  Block& block = *shared;
  auto event = device.events.take(*device.device);
  Status status = event.ok() ? device.device->record(**event, stream) : event.status();
  if (status.ok() && marked != nullptr) *marked = *event;
  if (status.ok()) block.used(std::move(*event), write);
  return status;
}

namespace {

// The Buffers that work on a stream touches.
struct Touched {
  std::vector<Access> accesses;
  std::vector<std::pair<BlockRef, bool>> blocks;  // to be told of that work
  nb::list kept;
};

Touched touched_by(const PyStream& stream, nb::iterable reads, nb::iterable writes, const char* where) {
  Touched out;
  for (auto [list, write] : {std::pair{reads, false}, std::pair{writes, true}}) {
    std::string side = std::string(where) + (write ? ", writes" : ", reads");
    for (nb::handle item : list) {
      Buffer* buffer = nullptr;
      if (!nb::try_cast(item, buffer) || buffer == nullptr) {
        raise(Status(ErrorCode::kInput, side + ": expected Buffers, got " + Py_TYPE(item.ptr())->tp_name +
                                            "; make them with Device.empty() or Device.to_device()"));
      }
      check_lease(*buffer, side);
      if (buffer->device && buffer->device->device->backend() != Backend::kCpu &&
          buffer->device != stream.device) {
        const Device& device = *stream.device->device;
        elsewhere(side, "memory of " + device.name() + " or of the host",
                  "memory of " + device_name_of(buffer->device->device->id(), device.name()), device,
                  "copy it there first");
      }
      out.accesses.push_back({buffer->view.data, buffer->view.nbytes(), write});
      if (buffer->block && buffer->device == stream.device) out.blocks.emplace_back(buffer->block, write);
      out.kept.append(item);
    }
  }
  return out;
}

// Whoever uses these Buffers from now on comes behind what is on the stream.
void mark_all_used(const PyStream& stream, StreamHandle handle, const Touched& touched) {
  check(unlocked([&] {
    Status status;
    for (const auto& [block, write] : touched.blocks) {
      if (status.ok()) status = mark_used(*stream.device, handle, block, write);
    }
    // Without an event the memory could be used again before the work is done.
    if (!status.ok()) (void)drain(*stream.device->device, handle);
    return status;
  }));
}

void declare(PyStream& stream, nb::iterable reads, nb::iterable writes, const std::string& name) {
  StreamHandle handle = usable(stream);
  Touched touched = touched_by(stream, reads, writes, "Stream.declare");
  if (record::recording()) {
    std::vector<record::Touch> touches;
    for (const Access& a : touched.accesses) touches.push_back(record::touch(a.data, a.nbytes, a.write));
    (void)record::add(stream.device->device.get(), record::Kind::kCall, handle, 0, touches, 0,
                      name.empty() ? nullptr : name.c_str());
  }
  mark_all_used(stream, handle, touched);
}

void copy(PyStream& stream, nb::handle source, nb::handle target, std::optional<size_t> limit) {
  StreamHandle handle = usable(stream);
  auto only = [](nb::handle item) { return nb::borrow<nb::iterable>(nb::make_tuple(item)); };
  Touched touched = touched_by(stream, only(source), only(target), "Stream.copy");
  const Access &from = touched.accesses[0], &to = touched.accesses[1];
  if (!is_dense(nb::cast<Buffer&>(source).view) || !is_dense(nb::cast<Buffer&>(target).view)) {
    raise(Status(
        ErrorCode::kInput,
        "Stream.copy: expected dense memory, got a strided view; copy it by numpy() and Device.to_device()"));
  }
  size_t nbytes = limit.value_or(from.nbytes);
  if (nbytes > from.nbytes || nbytes > to.nbytes) {
    raise(Status(ErrorCode::kInput, "Stream.copy: expected room for " + std::to_string(nbytes) +
                                        " bytes, got a source of " + std::to_string(from.nbytes) +
                                        " and a target of " + std::to_string(to.nbytes) +
                                        "; pass fewer nbytes, or larger memory"));
  }
  if (nbytes == 0) return;
  check(unlocked(
      [&] { return stream.device->device->copy(const_cast<void*>(to.data), from.data, nbytes, handle); }));
  mark_all_used(stream, handle, touched);
}

// Of the partition that the stream's work stays in; None where it is in none.
nb::object partition_of(const PyStream& stream) {
  PartitionRef found = unwrap(stream.device->device->partition_of(usable(stream)));
  if (found == nullptr) return nb::none();
  return nb::cast(std::make_shared<PyPartition>(PyPartition{stream.device, std::move(found)}));
}

void call(PyStream& stream, nb::object function, nb::iterable reads, nb::iterable writes) {
  if (!PyCallable_Check(function.ptr())) {
    raise(Status(ErrorCode::kInput, "Stream.call: expected a function without arguments, got " +
                                        std::string(Py_TYPE(function.ptr())->tp_name) +
                                        "; pass a callable, such as a lambda"));
  }
  StreamHandle handle = usable(stream);
  if (stream.device->device->backend() == Backend::kCuda) {
    // CUDA: a host function must not call CUDA, and it would wait for the interpreter's lock in the driver's
    // thread while whoever holds the lock may wait for the driver.
    raise(Status(ErrorCode::kNotSupported,
                 stream.device->device->name() +
                     ", Stream.call: expected the cpu or a simulated device, got a GPU, "
                     "where Python functions cannot run in stream order; launch on "
                     "stream.handle by a library such as CuPy or cuda.core"));
  }
  Touched touched = touched_by(stream, reads, writes, "Stream.call");
  std::shared_ptr<void> held = hold(nb::make_tuple(function, touched.kept));
  HostFunction run = [held, given = Loan::now(), name = stream.device->device->name()]() -> Status {
    if (!nb::is_alive()) {
      return Status(ErrorCode::kDevice, name +
                                            ", stream.call: expected a running interpreter, got its end; "
                                            "synchronize before the program ends");
    }
    GilAcquire gil;
    Loan::Scope scope(given);
    nb::handle pair(static_cast<PyObject*>(held.get()));
    try {
      // The function may give the lock up and end here with the interpreter.
      wait_for_gil([&] { (void)nb::object(pair[0]()); });
      return {};
    } catch (nb::python_error& e) {
      // With its traceback as text: the wait that reports this may be far away. Not as an object: its frames
      // hold Buffers, these the device, and that keeps the failure until somebody is told.
      Status status(ErrorCode::kDelegate, name + ", stream.call: " + traceback_of(e));
      PyException_SetTraceback(e.value().ptr(), Py_None);
      status.cause = hold(nb::borrow(e.value()));
      return status;
    }
  };
  check(unlocked(
      [&] { return stream.device->device->call(handle, std::move(run), std::move(touched.accesses)); }));
  mark_all_used(stream, handle, touched);
}

}  // namespace

PyStream::~PyStream() {
  if (!owned || closed) return;
  // Nobody is left to be told; the device forgets the stream with itself.
  put_off([device = device, handle = handle] { (void)device->device->destroy_stream(handle); });
}

StreamChoice to_stream(nb::handle object, const DeviceRef& device, const char* where) {
  PyStream* stream = nullptr;
  if (nb::try_cast(object, stream) && stream != nullptr)
    return {usable(*stream), stream->device->device->id()};
  if (PyLong_Check(object.ptr()) && !PyBool_Check(object.ptr())) {
    if (device == nullptr) {
      raise(Status(ErrorCode::kInput, std::string(where) +
                                          ": expected a stream, or an int together with device=, got an int "
                                          "alone; name the handle's device"));
    }
    StreamHandle handle = 0;
    if (!nb::try_cast(object, handle))
      raise(Status(
          ErrorCode::kInput,
          std::string(where) + ": expected a stream handle, an int of at most 64 bits from 0 up, got " +
              nb::cast<std::string>(nb::str(object)) + "; pass it as the stream's library gives it"));
    return {handle == 0 ? kLegacyStream : handle, device->id()};
  }
  if (nb::hasattr(object, "__cuda_stream__")) {
    nb::object pair = object.attr("__cuda_stream__");
    // A method since version 0 of the protocol (cuda.core); early implementers had an attribute.
    if (PyCallable_Check(pair.ptr())) pair = pair();
    int64_t version = -1;
    StreamHandle handle = 0;
    if (!PySequence_Check(pair.ptr()) || nb::len(pair) != 2 || !nb::try_cast(pair[0], version) ||
        version != 0 || !nb::try_cast(pair[1], handle)) {
      raise(Status(ErrorCode::kInput,
                   std::string(where) + ": expected __cuda_stream__ to give (0, handle), got " +
                       nb::cast<std::string>(nb::repr(pair)) +
                       "; report it to the library whose stream it is, or pass the handle with device="));
    }
    return {handle == 0 ? kLegacyStream : handle, device ? device->id() : -1};
  }
  raise(
      Status(ErrorCode::kInput,
             std::string(where) +
                 ": expected a headrace.Stream, an object with __cuda_stream__ or an int with device=, got " +
                 Py_TYPE(object.ptr())->tp_name + "; make one with Device.stream()"));
}

void bind_streams(nb::module_& m) {
  nb::class_<PyStream>(m, "Stream",
                       "A stream of a device. Get it from Device.stream() or Partition.stream().")
      .def_prop_ro(
          "handle", [](const PyStream& s) { return usable(s); },
          "The handle, as CUDA counts: 1 legacy, 2 per-thread.")
      .def_prop_ro("device", [](const PyStream& s) { return s.device; })
      .def(
          "__cuda_stream__", [](const PyStream& s) { return nb::make_tuple(0, usable(s)); },
          "The stream protocol of cuda.core: (version, handle).")
      .def(
          "synchronize",
          [](PyStream& s) {
            StreamHandle handle = usable(s);
            check(unlocked([&] { return s.device->device->synchronize(handle); }));
          },
          "Wait for the work that is on the stream now. Raises what failed in it.")
      .def(
          "query",
          [](PyStream& s) {
            StreamHandle handle = usable(s);
            return unwrap(unlocked([&] { return s.device->device->query(handle); }));
          },
          "Whether the stream's work is done. Does not wait.")
      .def(
          "record",
          [](PyStream& s, nb::object event) {
            StreamHandle handle = usable(s);
            std::shared_ptr<PyEvent> target;
            if (event.is_none()) {
              target =
                  std::make_shared<PyEvent>(PyEvent{s.device, unwrap(s.device->device->create_event(true))});
            } else {
              target = nb::cast<std::shared_ptr<PyEvent>>(event);
            }
            check(unlocked([&] { return s.device->device->record(*target->event, handle); }));
            return target;
          },
          nb::arg("event") = nb::none(), "An event behind the work that is on the stream now. Does not wait.")
      .def(
          "wait",
          [](PyStream& s, PyEvent& event) {
            StreamHandle handle = usable(s);
            check(unlocked([&] { return s.device->device->wait(handle, *event.event); }));
          },
          nb::arg("event"),
          "Work enqueued from now on runs behind the event's latest record. Does not wait on the host.")
      .def("call", &call, nb::arg("function"), nb::arg("reads") = nb::tuple(),
           nb::arg("writes") = nb::tuple(),
           "Run a Python function in stream order (cpu and simulated devices). `reads` and `writes` are the "
           "Buffers that it "
           "touches: they are kept, and whoever checks the order knows them. Inside it Buffer.numpy() is the "
           "memory itself. "
           "It must not call the device. What it raises is raised by the next wait for anything behind it.")
      .def("declare", &declare, nb::arg("reads") = nb::tuple(), nb::arg("writes") = nb::tuple(),
           nb::arg("name") = "",
           "Say that work which another library has just enqueued on this stream reads and writes these "
           "Buffers. Whatever uses them through headrace from now on comes behind that work, Buffer.numpy() "
           "too, their memory is not given to others before it is done, and a record that is open has it as "
           "one "
           "operation on this stream, called `name`. Does not wait. Raises InputError for what is no Buffer.")
      .def(
          "copy", &copy, nb::arg("source"), nb::arg("target"), nb::arg("nbytes") = nb::none(),
          "Copy the bytes of a dense Buffer (`nbytes` of them) to the start of another, in stream order. "
          "Does not wait: memory of "
          "the "
          "host has to stay as it is until the copy is done. Buffers that a running call lent are taken "
          "too.\n\n"
          "Raises InputError where there is no room, or memory is strided; DeviceError for another device's.")
      .def_prop_ro("partition", &partition_of,
                   "The `Partition` that the stream's work stays in; None where it is in none.")
      .def(
          "_sms_seen",
          [](PyStream& s, bool replayed) {
            StreamHandle handle = usable(s);
            return unwrap(unlocked([&] { return s.device->device->sms_seen(handle, replayed); }));
          },
          nb::arg("replayed"))
      // For tests of what happens inside a capture that headrace did not begin.
      .def(
          "_begin_capture",
          [](const PyStream& self, int mode) {
            StreamHandle handle = usable(self);
            check(unlocked(
                [&] { return self.device->device->begin_capture(handle, static_cast<CaptureMode>(mode)); }));
          },
          nb::arg("mode") = static_cast<int>(CaptureMode::kThreadLocal))
      .def("_capture_status",
           [](const PyStream& self) {
             return static_cast<int>(unwrap(self.device->device->capture_status(usable(self))));
           })
      // A function that launches the graph on a stream and waits.
      .def("_end_capture",
           [](const PyStream& self) {
             auto graph = unwrap(unlocked([&] { return self.device->device->end_capture(usable(self)); }));
             auto exec = unwrap(unlocked([&] { return self.device->device->instantiate(*graph); }));
             return nb::cpp_function([exec, device = self.device](const PyStream& stream) {
               check(unlocked([&] {
                 Status status = device->device->launch(*exec, stream.handle);
                 return status.ok() ? device->device->synchronize(stream.handle) : status;
               }));
             });
           })
      .def("close", &close_stream,
           "End the stream; work on it goes on. It can be neither used nor selected afterwards.")
      .def(
          "__eq__",
          [](const PyStream& a, nb::handle b) {
            PyStream* other = nullptr;
            return nb::try_cast(b, other) && other != nullptr && other->handle == a.handle &&
                   other->device == a.device;
          },
          nb::arg("other").none())
      .def("__hash__",
           [](const PyStream& s) {
             return static_cast<int64_t>(s.handle ^ reinterpret_cast<uintptr_t>(s.device.get()));
           })
      .def("__repr__", [](const PyStream& s) {
        char text[32];
        std::snprintf(text, sizeof text, "%#zx", static_cast<size_t>(s.handle));
        return "<headrace.Stream " + std::string(text) + " on " + s.device->device->name() +
               (s.closed ? ", closed>" : ">");
      });

  nb::class_<PyEvent>(m, "Event", "A point in a stream's work. Get it from Stream.record().")
      .def("__repr__",
           [](const PyEvent& e) { return "<headrace.Event on " + e.device->device->name() + ">"; })
      .def_prop_ro("device", [](const PyEvent& e) { return e.device; })
      .def(
          "query",
          [](PyEvent& e) { return unwrap(unlocked([&] { return e.device->device->query(*e.event); })); },
          "Whether the work before it is done. Does not wait.")
      .def(
          "synchronize",
          [](PyEvent& e) { check(unlocked([&] { return e.device->device->synchronize(*e.event); })); },
          "Wait on the host for the work before it. Raises what failed in it.")
      .def(
          "elapsed_ms",
          [](PyEvent& e, PyEvent& since) {
            return unwrap(unlocked([&] { return e.device->device->elapsed_ms(*since.event, *e.event); }));
          },
          nb::arg("since"), "Milliseconds of device time since another event; both must be complete.");

  nb::class_<PyPartition>(m, "Partition",
                          "A part of a device's multiprocessors. Get it from Device.partition() or split().")
      .def("__repr__",
           [](const PyPartition& p) {
             return "<headrace.Partition of " + std::to_string(p.partition->sm_count()) + " SMs on " +
                    p.device->device->name() + ">";
           })
      .def(
          "__eq__",
          [](const PyPartition& a, nb::handle b) {
            PyPartition* other = nullptr;
            return nb::try_cast(b, other) && other != nullptr && other->partition == a.partition;
          },
          nb::arg("other").none())
      .def("__hash__",
           [](const PyPartition& p) {
             return static_cast<int64_t>(reinterpret_cast<uintptr_t>(p.partition.get()));
           })
      .def_prop_ro(
          "sm_count", [](const PyPartition& p) { return p.partition->sm_count(); },
          "As granted, read back from the device.")
      .def_prop_ro("device", [](const PyPartition& p) { return p.device; })
      .def(
          "stream",
          [](const std::shared_ptr<PyPartition>& self, int priority) {
            return create_stream(self->device, {priority, false, self->partition});
          },
          nb::arg("priority") = 0, "A stream whose work stays on the partition.")
      .def(
          "close", [](PyPartition& p) { check(p.partition->close()); },
          "Refuse new streams; those that exist go on.");

  m.def(
      "select",
      [](nb::handle stream, nb::handle device) {
        PyDeviceRef of;
        if (!device.is_none() && (!nb::try_cast(device, of) || of == nullptr)) {
          raise(Status(ErrorCode::kInput, std::string("caller_stream, device: expected a Device, got ") +
                                              Py_TYPE(device.ptr())->tp_name +
                                              "; get one from headrace.device()"));
        }
        StreamChoice choice = to_stream(stream, of ? of->device : nullptr, "caller_stream");
        if (of != nullptr && choice.device != of->device->id())
          stream_elsewhere("caller_stream", *of->device, choice.device);
        headrace_selection next{reinterpret_cast<cudaStream_t>(choice.handle), choice.device, 1};
        headrace_selection former = headrace_exchange_selection(next);
        return nb::make_tuple(reinterpret_cast<uintptr_t>(former.stream), former.device, former.selected);
      },
      nb::arg("stream").none(), nb::arg("device").none());
  m.def("restore", [](uintptr_t stream, int32_t device, int32_t selected) {
    (void)headrace_exchange_selection({reinterpret_cast<cudaStream_t>(stream), device, selected});
  });
  m.def("selection", [] {
    headrace_selection now = headrace_get_selection();
    return nb::make_tuple(reinterpret_cast<uintptr_t>(now.stream), now.device, now.selected);
  });
  m.def("stream_on", [](PyDeviceRef device, uintptr_t handle) { return make_stream(device, handle); });
}

}  // namespace headrace
