// headrace.Device, Stream, Event and Partition, and the thread's selection.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <mutex>

#include "device/record.h"
#include "headrace/caller_stream.h"
#include "headrace/capture.h"
#include "python/gil.h"
#include "python/objects.h"

namespace headrace {

namespace {

struct Objects {
  std::mutex mutex;
  std::map<const Device*, std::weak_ptr<PyDevice>> by_device;
};
Objects& objects() {
  static auto* o = new Objects();  // used by destructors at interpreter exit
  return *o;
}

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

PyStreamRef make_stream(const PyDeviceRef& device, StreamHandle handle) {
  auto stream = std::make_shared<PyStream>();
  stream->device = device;
  stream->handle = handle == 0 ? kLegacyStream : handle;
  return stream;
}

StreamHandle usable(const PyStream& stream) {
  if (stream.closed) {
    raise(Status(ErrorCode::kInput, "stream: expected an open stream of " + stream.device->device->name() +
                                        ", got one that was closed"));
  }
  return stream.handle;
}

StreamHandle stream_or_own(nb::handle stream, const DeviceRef& device, const char* where) {
  if (stream.is_none()) return kPerThreadStream;
  StreamChoice choice = to_stream(stream, device, where);
  if (choice.device != -1 && choice.device != device->id()) {
    Status status(ErrorCode::kDevice, std::string(where) + ", stream: expected a stream of " +
                                          device->name() + ", got one of " +
                                          device_name_of(choice.device, device->name()));
    status.device = device->name();
    raise(status);
  }
  return choice.handle;
}

PyStreamRef create_stream(const PyDeviceRef& self, const StreamOptions& options) {
  auto stream = make_stream(self, unwrap(self->device->create_stream(options)));
  stream->owned = true;
  stream->partition = options.partition;
  return stream;
}

void close_stream(PyStream& stream) {
  if (std::exchange(stream.closed, true) || !stream.owned) return;
  PartitionRef partition = std::move(stream.partition);  // what it held is free with it
  check(stream.device->device->destroy_stream(stream.handle));
}

// Puts an event behind what is on the stream now, for the buffer's next reader or writer. What a graph uses
// is marked by its replays.
Status mark_used(PyDevice& device, StreamHandle stream, const BlockRef& shared, bool write,
                 EventRef* marked = nullptr) {
  captured_use(shared, write);
  if (capture_stage() == CaptureStage::kCapture) return {};
  Block& block = *shared;
  auto event = device.events.take(*device.device);
  Status status = event.ok() ? device.device->record(**event, stream) : event.status();
  if (status.ok() && marked != nullptr) *marked = *event;
  if (status.ok()) block.used(std::move(*event), write);
  return status;
}

// Lets go of foreign arrays that were copied from.
void release_copied(PyDevice& device) {
  std::vector<std::shared_ptr<void>> done;  // let go at the end: it may run any code
  std::erase_if(device.kept, [&](auto& item) {
    auto ended = device.device->query(*item.first);
    if (!ended.ok() || !*ended) return false;
    done.push_back(std::move(item.second));
    return true;
  });
}

nb::object empty(const PyDeviceRef& self, nb::handle shape, nb::handle dtype, nb::handle stream) {
  Buffer out;
  out.device = self;
  out.view.dtype = dtype_by_name(dtype, "Device.empty");
  size_t nbytes = set_shape(out.view, shape, "Device.empty");
  StreamHandle handle = stream_or_own(stream, self->device, "Device.empty");
  out.block = unwrap(unlocked([&]() -> Result<BlockRef> {
    auto block = self->ring->take(nbytes, handle);
    if (!block.ok()) return block;
    // Whoever orders its work behind the Buffer, on whatever stream, is behind the allocation.
    Status status = mark_used(*self, handle, *block, true);
    if (status.ok()) return block;
    (void)drain(*self->device, handle);
    return status;
  }));
  out.view.data = out.block->data();
  return nb::cast(std::move(out));
}

nb::object to_device(const PyDeviceRef& self, nb::handle array, nb::handle stream, nb::handle out) {
  nb::object keep;
  nb::object source = nb::borrow(array);
  StreamHandle handle = stream_or_own(stream, self->device, "Device.to_device");
  Reader reader{self->device, handle};
  Value value =
      to_value(source, Value::Kind::kTensor, keep, self->device->name(), "to_device, argument", 0, reader);
  if (value.kind != Value::Kind::kTensor) {
    raise(Status(ErrorCode::kInput,
                 self->device->name() + ", to_device: expected an array, got a number; use numpy.asarray"));
  }
  if (capture_stage() == CaptureStage::kCapture && !(value.device != nullptr && value.block)) {
    raise(Status(ErrorCode::kCapture,
                 self->device->name() +
                     ", to_device: expected a Buffer of the device while a method is captured, "
                     "got memory that a replay would not read again; copy it in load()"));
  }
  // Made dense by NumPy; host memory of any layout comes in.
  if (!is_dense(value.tensor)) {
    if (value.device != nullptr) {
      raise(Status(ErrorCode::kInput, "Device.to_device: expected dense device memory, got a strided view"));
    }
    source = nb::module_::import_("numpy").attr("ascontiguousarray")(source);
    value =
        to_value(source, Value::Kind::kTensor, keep, self->device->name(), "to_device, argument", 0, reader);
  }
  nb::object result = out.is_none() ? nb::object() : nb::borrow(out);
  Buffer* target = nullptr;
  if (out.is_none()) {
    Buffer fresh;
    fresh.device = self;
    fresh.view = value.tensor;
    fresh.view.device = {};
    set_dense_strides(fresh.view);
    fresh.block = unwrap(unlocked([&] { return self->ring->take(fresh.view.nbytes(), handle); }));
    fresh.view.data = fresh.block->data();
    result = nb::cast(std::move(fresh));
    target = nb::cast<Buffer*>(result);
  } else if (!nb::try_cast(out, target) || target == nullptr || target->device != self || !target->block) {
    bool lent = target != nullptr && target->lent();
    raise(Status(ErrorCode::kInput, "Device.to_device, out: expected a Buffer of " + self->device->name() +
                                        (lent ? " with memory of its own, got memory lent for a call"
                                              : ", got another object")));
  } else if (target->view.dtype != value.tensor.dtype || target->view.ndim != value.tensor.ndim ||
             !std::equal(value.tensor.sizes.begin(), value.tensor.sizes.begin() + value.tensor.ndim,
                         target->view.sizes.begin()) ||
             !is_dense(target->view)) {
    raise(Status(ErrorCode::kInput, "Device.to_device, out: expected a dense " + describe(value.tensor) +
                                        ", got " + describe(target->view)));
  } else {
    check(unlocked([&] { return target->block->order(handle, true); }));
  }
  size_t nbytes = value.tensor.nbytes();
  if (nbytes == 0) return result;
  if (value.block) check(unlocked([&] { return value.block->order(handle, false); }));
  EventRef copied;
  check(unlocked([&] {
    Status status = self->device->copy(target->view.data, value.tensor.data, nbytes, handle);
    if (!status.ok()) return status;
    status = mark_used(*self, handle, target->block, true, &copied);
    if (status.ok() && value.block && value.device) status = mark_used(*self, handle, value.block, false);
    // Host memory is the caller's again when this returns, and so is everything where no event says when.
    if (status.ok() && value.device == nullptr) status = target->block->wait(false);
    if (!status.ok()) (void)drain(*self->device, handle);
    return status;
  }));
  // What a running call lent lasts longer than its stream's work.
  if (value.device != nullptr && !value.block && keep.is_valid()) {
    release_copied(*self);
    self->kept.emplace_back(std::move(copied), hold(keep));
  }
  return result;
}

// The Buffers that work on a stream touches.
struct Touched {
  std::vector<Access> accesses;
  std::vector<std::pair<BlockRef, bool>> blocks;  // to be told of that work
  nb::list kept;
};

Touched touched_by(const PyStream& stream, nb::iterable reads, nb::iterable writes, const char* where) {
  Touched out;
  for (auto [list, write] : {std::pair{reads, false}, std::pair{writes, true}}) {
    for (nb::handle item : list) {
      Buffer* buffer = nullptr;
      if (!nb::try_cast(item, buffer) || buffer == nullptr) {
        raise(Status(ErrorCode::kInput, std::string(where) + (write ? ", writes" : ", reads") +
                                            ": expected Buffers, got " + Py_TYPE(item.ptr())->tp_name));
      }
      check_lease(*buffer, std::string(where) + (write ? ", writes" : ", reads"));
      if (buffer->device && buffer->device->device->backend() != Backend::kCpu &&
          buffer->device != stream.device) {
        Status status(ErrorCode::kDevice,
                      std::string(where) + (write ? ", writes" : ", reads") + ": expected memory of " +
                          stream.device->device->name() + " or of the host, got memory of " +
                          device_name_of(buffer->device->device->id(), stream.device->device->name()));
        status.device = stream.device->device->name();
        raise(status);
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

void call(PyStream& stream, nb::object function, nb::iterable reads, nb::iterable writes) {
  if (!PyCallable_Check(function.ptr())) {
    raise(Status(ErrorCode::kInput, "Stream.call: expected a function without arguments, got " +
                                        std::string(Py_TYPE(function.ptr())->tp_name)));
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
  HostFunction run = [held, name = stream.device->device->name()]() -> Status {
    if (!nb::is_alive()) {
      return Status(ErrorCode::kDevice, name + ", stream.call: expected a running interpreter, got its end");
    }
    GilAcquire gil;
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

std::shared_ptr<SimDevice> sim_of(PyDevice& device, const char* what) {
  auto sim = std::dynamic_pointer_cast<SimDevice>(device.device);
  if (!sim) {
    raise(Status(ErrorCode::kDevice,
                 device.device->name() + ", " + what + ": expected a simulated device, got a real one"));
  }
  return sim;
}

PyDeviceRef make_sim(const std::string& schedule, uint64_t seed, int ordinal, int sms, size_t memory) {
  SimOptions options;
  options.schedule = schedule == "eager"  ? SimOptions::Schedule::kEager
                     : schedule == "late" ? SimOptions::Schedule::kLate
                                          : SimOptions::Schedule::kRandom;
  options.seed = seed;
  options.ordinal = ordinal;
  options.sm_count = sms;
  options.memory_nbytes = memory;
  return device_object(make_sim_device(options));
}

nb::list split(const PyDeviceRef& self, const std::vector<int>& sms) {
  nb::list out;
  for (auto& partition : unwrap(self->device->split(sms))) {
    out.append(nb::cast(std::make_shared<PyPartition>(PyPartition{self, partition})));
  }
  return out;
}

}  // namespace

std::shared_ptr<void> hold(nb::object object) {
  return {object.release().ptr(), [](void* p) {
            // After the interpreter there is nothing to give the reference back to.
            if (!nb::is_alive() || !Py_IsInitialized()) return;
            GilAcquire gil;
            nb::error_scope keep;
            Py_DECREF(static_cast<PyObject*>(p));
          }};
}

PyDeviceRef device_object(const DeviceRef& device) {
  std::lock_guard lock(objects().mutex);
  auto& slot = objects().by_device[device.get()];
  if (PyDeviceRef there = slot.lock()) return there;
  std::erase_if(objects().by_device,
                [&](const auto& item) { return item.first != device.get() && item.second.expired(); });
  auto made = std::make_shared<PyDevice>();
  made->device = device;
  made->ring = std::make_shared<Ring>(device->backend() == Backend::kCpu ? nullptr : device);
  slot = made;
  return made;
}

PyDevice::~PyDevice() {
  for (auto& [event, array] : kept) (void)device->synchronize(*event);
}

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
      raise(Status(
          ErrorCode::kInput,
          std::string(where) + ": expected a stream, or an int together with device=, got an int alone"));
    }
    StreamHandle handle = 0;
    if (!nb::try_cast(object, handle))
      raise(Status(ErrorCode::kInput, std::string(where) +
                                          ": expected a stream handle of 0 to 64 bits, got " +
                                          nb::cast<std::string>(nb::str(object))));
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
      raise(Status(ErrorCode::kInput, std::string(where) +
                                          ": expected __cuda_stream__ to give (0, handle), got " +
                                          nb::cast<std::string>(nb::repr(pair))));
    }
    return {handle == 0 ? kLegacyStream : handle, device ? device->id() : -1};
  }
  raise(
      Status(ErrorCode::kInput,
             std::string(where) +
                 ": expected a headrace.Stream, an object with __cuda_stream__ or an int with device=, got " +
                 Py_TYPE(object.ptr())->tp_name));
}

void bind_objects(nb::module_& m) {
  // Whoever waits for a device lets other threads run Python: its host functions may be among them.
  set_wait_hooks(
      {[]() -> void* { return Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr; },
       [](void* state) {
         if (state == nullptr) return;
         wait_for_gil([&] { PyEval_RestoreThread(static_cast<PyThreadState*>(state)); });
       }});

  nb::class_<PyDevice>(m, "Device", "A device: memory, streams, partitions. Get it from headrace.device().")
      .def_prop_ro(
          "name", [](const PyDevice& d) { return d.device->name(); }, "Such as 'cpu', 'sim:0' or 'cuda:1'.")
      .def_prop_ro("ordinal", [](const PyDevice& d) { return d.device->ordinal(); })
      .def_prop_ro("_id", [](const PyDevice& d) { return d.device->id(); })
      .def_prop_ro(
          "sm_limits",
          [](const PyDevice& d) {
            SmLimits limits = d.device->sm_limits();
            nb::dict out;
            out["total"] = limits.total;
            out["least"] = limits.least;
            out["alignment"] = limits.alignment;
            return out;
          },
          "Of partitions, in multiprocessors: how many there are, the smallest partition, what sizes are "
          "multiples "
          "of; the last two are 0 where there are no partitions.")
      .def_prop_ro(
          "sm_count", [](const PyDevice& d) { return d.device->sm_limits().total; },
          "Streaming multiprocessors in all; 0 on the cpu.")
      .def(
          "stream",
          [](const PyDeviceRef& self, int priority, bool blocking) {
            return create_stream(self, {priority, blocking, nullptr});
          },
          nb::arg("priority") = 0, nb::kw_only(), nb::arg("blocking") = false,
          "A new stream. Lower priorities are more urgent. A blocking stream and the legacy stream order "
          "each other. It "
          "ends when its last reference does; work on it goes on.")
      .def(
          "legacy_stream", [](const PyDeviceRef& self) { return make_stream(self, kLegacyStream); },
          "The legacy default stream (handle 1).")
      .def(
          "per_thread_stream", [](const PyDeviceRef& self) { return make_stream(self, kPerThreadStream); },
          "The calling thread's default stream (handle 2).")
      .def("empty", &empty, nb::arg("shape").none(), nb::arg("dtype") = "float32", nb::kw_only(),
           nb::arg("stream") = nb::none(),
           "A Buffer whose content is undefined, for work on `stream` (default: the per-thread stream). Does "
           "not wait.\n\n"
           "Raises InputError (shape, dtype) and OutOfDeviceMemory.")
      .def("to_device", &to_device, nb::arg("array"), nb::arg("stream") = nb::none(),
           nb::arg("out") = nb::none(),
           "Copy an array to the device: to a new Buffer, or to `out` of the same dtype and shape, on "
           "`stream` (default: the "
           "per-thread stream). Waits for the copy if the array is host memory.\n\nRaises InputError, "
           "OutOfDeviceMemory.")
      .def(
          "event",
          [](const PyDeviceRef& self, bool timing) {
            return std::make_shared<PyEvent>(PyEvent{self, unwrap(self->device->create_event(timing))});
          },
          nb::kw_only(), nb::arg("timing") = false, "An event that was not recorded yet, which is no wait.")
      .def(
          "partition",
          // An object, not an accessor: the list is gone when the function returns.
          [](const PyDeviceRef& self, int sms) -> nb::object { return split(self, {sms})[0]; }, nb::kw_only(),
          nb::arg("sms"),
          "A partition of at least `sms` multiprocessors, rounded up to what the device grants: see "
          "sm_count.\n\n"
          "Raises DeviceError when there are not so many left.")
      .def("split", &split, nb::arg("sms"), "Disjoint partitions of the given sizes, in one split.")
      .def(
          "synchronize", [](PyDevice& self) { check(unlocked([&] { return self.device->synchronize(); })); },
          "Wait for all work of the device. Raises what failed in it.")
      .def(
          "memory",
          [](const PyDevice& self) {
            MemoryCounts c = self.device->memory();
            nb::dict out;
            out["current_nbytes"] = c.current_nbytes;
            out["peak_nbytes"] = c.peak_nbytes;
            out["allocations"] = c.allocations;
            out["frees"] = c.frees;
            return out;
          },
          "Bytes in use and at most so far, and how often memory was asked for and given back.")
      .def(
          "trim",
          [](PyDevice& self) {
            release_copied(self);
            check(unlocked([&] {
              self.ring->trim();
              return self.device->trim();
            }));
          },
          "Give back memory of dropped Buffers, on a GPU to the system.")
      .def(
          "fail",
          [](PyDevice& self, const std::string& operation, int64_t at, bool memory) {
            check(self.device->inject(
                {operation, at, memory ? ErrorCode::kOutOfDeviceMemory : ErrorCode::kDevice}));
          },
          nb::arg("operation") = "", nb::arg("at") = 0, nb::kw_only(), nb::arg("memory") = false,
          "For tests: the `at`-th call of `operation` from now on (any, if empty) fails once, before it does "
          "anything.")
      .def(
          "delay",
          [](PyDevice& self, const std::string& operation, int64_t at) {
            check(sim_of(self, "delay")->delay(operation, at));
          },
          nb::arg("operation"), nb::arg("at") = 0,
          "Simulated devices: the `at`-th operation from now on is held back until a wait demands it.")
      .def(
          "drop_pending",
          [](PyDevice& self) {
            auto sim = sim_of(self, "drop_pending");
            if (in_host_function()) {
              raise(Status(ErrorCode::kDevice, self.device->name() +
                                                   ", drop_pending: expected a call from outside every host "
                                                   "function, got one from inside"));
            }
            unlocked([&] {
              sim->drop_pending();
              return 0;
            });
          },
          "Simulated devices: skip all work that has not run. A function given to Stream.call that never ran "
          "keeps its Buffers, and these the device: where work may be left behind for good, this ends it.")
      // For tests: the SMs of the partition that the host function of the calling thread runs on; 0: all.
      .def_prop_ro("_running_sms",
                   [](PyDevice& self) {
                     auto partition = sim_of(self, "_running_sms")->current_partition();
                     return partition ? partition->sm_count() : 0;
                   })
      .def("clear_faults", [](PyDevice& self) { self.device->clear_faults(); })
      .def(
          "calls", [](PyDevice& self, const std::string& operation) { return self.device->calls(operation); },
          nb::arg("operation") = "",
          "For tests: how often an operation was called so far; on cpu and cuda, since this was first asked "
          "or a fault "
          "was first put there.")
      .def_prop_ro(
          "pending", [](PyDevice& self) { return sim_of(self, "pending")->pending(); },
          "Simulated devices: operations that were enqueued and have not run.")
      .def_prop_ro(
          "submissions", [](PyDevice& self) { return sim_of(self, "submissions")->submissions(); },
          "Simulated devices: (thread number, operation) in the order of submission.")
      .def("__repr__", [](const PyDevice& d) { return "<headrace.Device " + d.device->name() + ">"; });

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
      .def("__eq__",
           [](const PyStream& a, nb::handle b) {
             PyStream* other = nullptr;
             return nb::try_cast(b, other) && other != nullptr && other->handle == a.handle &&
                    other->device == a.device;
           })
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

  m.def("cpu", [] { return device_object(cpu_device()); });
  m.def("cuda",
        [](int ordinal) { return device_object(unwrap(unlocked([&] { return cuda_device(ordinal); }))); });
  m.def("cuda_info", [] {
    CudaInfo info = unwrap(cuda_info());
    nb::list gpus;
    for (const CudaInfo::Gpu& gpu : info.gpus) {
      gpus.append(nb::make_tuple(gpu.ordinal, text_of(gpu.name), gpu.capability_major, gpu.capability_minor,
                                 gpu.sm_count, gpu.memory_nbytes, text_of(gpu.problem)));
    }
    return nb::make_tuple(info.driver_version, info.no_partitions, gpus);
  });
  m.def("sim", &make_sim, nb::arg("schedule"), nb::arg("seed"), nb::arg("ordinal"), nb::arg("sms"),
        nb::arg("memory"));
  m.def(
      "select",
      [](nb::handle stream, nb::handle device) {
        PyDeviceRef of;
        if (!device.is_none() && (!nb::try_cast(device, of) || of == nullptr)) {
          raise(Status(ErrorCode::kInput, std::string("caller_stream, device: expected a Device, got ") +
                                              Py_TYPE(device.ptr())->tp_name));
        }
        StreamChoice choice = to_stream(stream, of ? of->device : nullptr, "caller_stream");
        if (of != nullptr && choice.device != of->device->id()) {
          Status status(ErrorCode::kDevice, "caller_stream: expected a stream of " + of->device->name() +
                                                ", got one of " +
                                                device_name_of(choice.device, of->device->name()));
          status.device = of->device->name();
          raise(status);
        }
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
  m.def("device_by_id", [](int32_t id) -> PyDeviceRef {
    std::lock_guard lock(objects().mutex);
    for (auto& [device, object] : objects().by_device) {
      PyDeviceRef there = object.lock();
      if (there && there->device->id() == id) return there;
    }
    return nullptr;
  });
  m.def("stream_on", [](PyDeviceRef device, uintptr_t handle) { return make_stream(device, handle); });
}

}  // namespace headrace
