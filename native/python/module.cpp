// The extension `headrace._core`: bindings convert and forward, nothing else.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "cuda/delegate.h"
#include "headrace/program.h"
#include "python/call.h"
#include "python/gil.h"
#include "python/objects.h"

namespace headrace {
namespace {

std::shared_ptr<const Bytes> bytes_of(nb::handle source, const char* what) {
  if (PyObject_CheckBuffer(source.ptr())) {
    Py_buffer view;
    if (PyObject_GetBuffer(source.ptr(), &view, PyBUF_C_CONTIGUOUS) < 0) {
      PyErr_Clear();
      raise(Status(ErrorCode::kProgram, std::string(what) + ": expected contiguous memory, got a buffer with "
                                                            "gaps; pass bytes() of it"));
    }
    auto copied = Bytes::copy(view.buf, static_cast<size_t>(view.len), what);
    PyBuffer_Release(&view);
    check(copied.status());
    return *copied;
  }
  nb::object path = nb::steal(PyOS_FSPath(source.ptr()));
  if (!path.is_valid()) nb::raise_python_error();
  if (PyUnicode_Check(path.ptr())) {
    path = nb::steal(PyUnicode_EncodeFSDefault(path.ptr()));
    if (!path.is_valid()) nb::raise_python_error();
  }
  std::string text(PyBytes_AS_STRING(path.ptr()), static_cast<size_t>(PyBytes_GET_SIZE(path.ptr())));
  if (text.find('\0') != std::string::npos) {
    raise(Status(ErrorCode::kProgram, text + ": expected a path, got one with a null character; remove it"));
  }
  Result<std::shared_ptr<const Bytes>> file = Status();
  {
    GilRelease release;
    file = Bytes::read(text);
  }
  check(file.status());
  return *file;
}

std::shared_ptr<Program> load(nb::handle source, nb::sequence data, int instances, bool allow_native_code,
                              int64_t max_steps, nb::dict options, PyDeviceRef device,
                              const PyPartition* lane) {
  LoadOptions load;
  if (device) load.device = device->device;
  if (lane != nullptr) load.lane = lane->partition;
  for (nb::handle d : data) load.data.push_back(bytes_of(d, "data file (bytes)"));
  load.instances = instances;
  load.allow_native_code = allow_native_code;
  load.max_steps = max_steps;
  for (auto [delegate, entries] : options) {
    auto& list = load.options[nb::cast<std::string>(delegate)];
    for (auto [key, value] : nb::cast<nb::dict>(entries)) {
      auto& slot = list[nb::cast<std::string>(key)];
      if (PyBool_Check(value.ptr())) {
        slot = nb::cast<bool>(value);
      } else if (PyLong_Check(value.ptr())) {
        slot = nb::cast<int>(value);
      } else {
        slot = nb::cast<std::string>(value);
      }
    }
  }
  auto file = bytes_of(source, "program (bytes)");
  Result<std::shared_ptr<Program>> program = Status();
  {
    GilRelease release;
    program = Program::load(std::move(file), std::move(load));
  }
  check(program.status());
  return *program;
}

nb::tuple call(Method& method, nb::tuple inputs, nb::object stream, nb::object out, nb::object strict) {
  if (!PyBool_Check(strict.ptr())) {
    raise(Status(ErrorCode::kInput, method.name() + ", strict: expected a bool, got " +
                                        Py_TYPE(strict.ptr())->tp_name + "; pass True or False"));
  }
  CallArguments args(method, inputs, stream, out);
  CallOptions options{args.on, strict.is(nb::bool_(true))};
  std::vector<Value> outputs;
  Status status;
  {
    GilRelease release;
    status = method.run(args.values, args.given, options, outputs);
  }
  check(status);
  return args.results(outputs);
}

nb::dict describe_value(const ValueInfo& info) {
  static constexpr const char* kKinds[] = {"none", "tensor", "int", "float", "bool", "string"};
  nb::dict out;
  out["kind"] = kKinds[static_cast<size_t>(info.kind)];
  out["name"] = text_of(info.name);
  if (info.kind == Value::Kind::kTensor) {
    out["dtype"] = dtype_name(info.dtype);
    out["shape"] = nb::tuple(nb::cast(info.shape));
    out["dynamic"] = info.dynamic;
    out["device"] = device_name(info.device);
    out["planned"] = info.planned;
  }
  return out;
}

nb::list describe_all(const std::vector<ValueInfo>& infos) {
  nb::list out;
  for (const auto& info : infos) out.append(describe_value(info));
  return out;
}

}  // namespace

NB_MODULE(_core, m) {
  // Programs held in globals outlive the interpreter's own tables; that is no leak.
  nb::set_leak_warnings(false);
  import_numpy();

  m.def("initialize", [] {
    check(initialize());
    check(register_cuda_delegate());
  });
  m.def("delegates", &registered_delegates);
  m.def("kernels", &registered_kernels);
  m.def("num_threads", &num_threads);
  m.def("set_num_threads", [](int count) { check(set_num_threads(count)); });

  bind_devices(m);
  bind_streams(m);
  bind_buffer(m);
  bind_delegates(m);
  bind_record(m);
  bind_aoti(m);
  bind_graphs(m);

  nb::class_<Method>(m, "Method")
      .def_prop_ro("name", &Method::name)
      .def("inputs", [](const Method& self) { return describe_all(self.inputs()); })
      .def("outputs", [](const Method& self) { return describe_all(self.outputs()); })
      .def("islands",
           [](const Method& self) {
             nb::list out;
             for (const IslandInfo& i : self.islands()) {
               out.append(nb::make_tuple(i.instruction, text_of(i.delegate), i.payload_nbytes, i.num_args));
             }
             return out;
           })
      .def_prop_ro("device", [](const Method& self) { return device_object(self.device()); })
      .def("stats",
           [](const Method& self) {
             CallStats last, total;
             int64_t calls = self.stats(&last, &total);
             return nb::make_tuple(calls, describe_stats(last), describe_stats(total));
           })
      // The stream that a call without one would run on now.
      .def("settled",
           [](const Method& self) {
             return make_stream(device_object(self.device()), unwrap(self.settle({})).stream);
           })
      .def("call", &call, nb::arg("inputs"), nb::arg("stream").none(), nb::arg("out").none(),
           nb::arg("strict"));

  nb::class_<Program>(m, "Program")
      .def_static("load", &load, nb::arg("source"), nb::arg("data"), nb::arg("instances"),
                  nb::arg("allow_native_code"), nb::arg("max_steps"), nb::arg("options"),
                  nb::arg("device").none(), nb::arg("lane").none())
      .def_static(
          "verify",
          [](nb::handle source, nb::sequence data) {
            std::vector<std::shared_ptr<const Bytes>> files;
            for (nb::handle d : data) files.push_back(bytes_of(d, "data file (bytes)"));
            check(Program::verify(bytes_of(source, "program (bytes)"), std::move(files)));
          },
          nb::arg("source"), nb::arg("data"))
      .def("method_names", &Program::method_names)
      .def("method", &Program::method)
      .def("memory",
           [](const Program& self) {
             nb::list out;
             for (const MemoryUse& use : self.memory()) {
               out.append(nb::make_tuple(use.what, use.method, use.instance, use.device, use.nbytes));
             }
             return out;
           })
      .def("close", [](Program& self) {
        Status status;
        {
          GilRelease release;
          status = self.close();
        }
        check(status);
      });
}

}  // namespace headrace
