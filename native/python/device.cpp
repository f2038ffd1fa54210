// headrace.Device.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <mutex>
#include <optional>

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
      raise(Status(ErrorCode::kInput,
                   "Device.to_device: expected dense device memory, got a strided view; make it contiguous "
                   "first, or pass a copy on the host"));
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
    raise(Status(ErrorCode::kInput,
                 "Device.to_device, out: expected a Buffer of " + self->device->name() +
                     (lent ? " with memory of its own, got memory lent for a call" : ", got another object") +
                     "; pass one that empty() gave, or none"));
  } else if (target->view.dtype != value.tensor.dtype || target->view.ndim != value.tensor.ndim ||
             !std::equal(value.tensor.sizes.begin(), value.tensor.sizes.begin() + value.tensor.ndim,
                         target->view.sizes.begin()) ||
             !is_dense(target->view)) {
    raise(Status(ErrorCode::kInput, "Device.to_device, out: expected a dense " + describe(value.tensor) +
                                        ", got " + describe(target->view) +
                                        "; pass one of that dtype and shape, or none"));
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

// A ContextScope as a block of Python's; entered and left by one thread.
struct CurrentContext {
  explicit CurrentContext(PyDeviceRef of) : device(std::move(of)) {}
  PyDeviceRef device;
  std::optional<ContextScope> scope;
};

std::shared_ptr<SimDevice> sim_of(PyDevice& device, const char* what) {
  auto sim = std::dynamic_pointer_cast<SimDevice>(device.device);
  if (!sim) {
    raise(Status(ErrorCode::kDevice,
                 device.device->name() + ", " + what +
                     ": expected a simulated device, got a real one; open one with headrace.device('sim')"));
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

nb::list split(const PyDeviceRef& self, const std::vector<int>& sms, std::optional<int> workqueue_limit) {
  nb::list out;
  for (auto& partition : unwrap(self->device->split(sms, {workqueue_limit}))) {
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

void bind_devices(nb::module_& m) {
  // Whoever waits for a device lets other threads run Python: its host functions may be among them.
  set_wait_hooks(
      {[]() -> void* { return Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr; },
       [](void* state) {
         if (state == nullptr) return;
         wait_for_gil([&] { PyEval_RestoreThread(static_cast<PyThreadState*>(state)); });
       }});

  nb::class_<CurrentContext>(m, "CurrentContext")
      .def("__enter__", [](CurrentContext& self) { self.scope.emplace(*self.device->device); })
      .def(
          "__exit__", [](CurrentContext& self, nb::handle, nb::handle, nb::handle) { self.scope.reset(); },
          nb::arg("kind").none(), nb::arg("error").none(), nb::arg("trace").none());

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
          [](const PyDeviceRef& self, int sms, std::optional<int> workqueue_limit) -> nb::object {
            return split(self, {sms}, workqueue_limit)[0];
          },
          nb::kw_only(), nb::arg("sms"), nb::arg("workqueue_concurrency_limit").none() = nb::none(),
          "A partition of at least `sms` multiprocessors, rounded up to what the device grants: see "
          "sm_count.\n\n"
          "`workqueue_concurrency_limit`: how many of its streams are expected to have work at once, 1 or "
          "more. "
          "The partition "
          "then has workqueues, which hand kernels to the multiprocessors, that are balanced with those of "
          "other "
          "such partitions: where possible not shared with them, so that no stream waits for another lane's. "
          "It is an expectation and not a cap. None: the device's workqueues are shared. What was granted is "
          "Partition.workqueue_concurrency_limit. Source: cuda.h of CUDA 13.5, \"Green Contexts: "
          "Workqueues\" "
          "(CU_WORKQUEUE_SCOPE_GREEN_CTX_BALANCED), which does not say whether a driver changes a limit; it "
          "was "
          "not run on such a driver yet.\n\n"
          "Raises DeviceError when there are not so many multiprocessors left, and for a limit where the "
          "driver "
          "is older than "
          "CUDA 13.1 (driver 590); InputError for a size or a limit below 1. Waits only for work of "
          "partitions "
          "that were dropped, "
          "where their multiprocessors are needed.")
      .def(
          "split", &split, nb::arg("sms"), nb::kw_only(),
          nb::arg("workqueue_concurrency_limit").none() = nb::none(),
          "Disjoint partitions of the given sizes, in one split. Each has the workqueues that are asked for, "
          "and what is raised is as "
          "in partition(); where one fails, none is made.")
      .def(
          "synchronize", [](PyDevice& self) { check(unlocked([&] { return self.device->synchronize(); })); },
          "Wait for all work of the device. Raises what failed in it.")
      // For delegates that call libraries which work on the thread's current GPU.
      .def("_context", [](const PyDeviceRef& self) { return std::make_unique<CurrentContext>(self); })
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
                                                   "function, got one from inside; call it behind them"));
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

  m.def("cpu", [] { return device_object(cpu_device()); });
  m.def("cuda",
        [](int ordinal) { return device_object(unwrap(unlocked([&] { return cuda_device(ordinal); }))); });
  m.def("cuda_info", [] {
    CudaInfo info = unwrap(cuda_info());
    nb::list gpus;
    for (const CudaInfo::Gpu& gpu : info.gpus) {
      gpus.append(nb::make_tuple(gpu.ordinal, text_of(gpu.name), gpu.capability_major, gpu.capability_minor,
                                 gpu.sm_count, gpu.memory_nbytes, text_of(gpu.problem),
                                 text_of(gpu.no_partitions), gpu.mps, gpu.mig));
    }
    return nb::make_tuple(info.driver_version, info.no_partitions, info.no_workqueues, gpus);
  });
  m.def("sim", &make_sim, nb::arg("schedule"), nb::arg("seed"), nb::arg("ordinal"), nb::arg("sms"),
        nb::arg("memory"));
  m.def("device_by_id", [](int32_t id) -> PyDeviceRef {
    // Let go of after the lock: the last one of a device waits for it, and others want the lock meanwhile.
    std::vector<PyDeviceRef> seen;
    PyDeviceRef found;
    {
      std::lock_guard lock(objects().mutex);
      for (auto& [device, object] : objects().by_device) {
        PyDeviceRef there = object.lock();
        if (there && there->device->id() == id) found = there;
        seen.push_back(std::move(there));
      }
    }
    return found;
  });
}

}  // namespace headrace
