// Delegates written in Python: one native backend for each name, which finds the class behind it at each
// load.
#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <optional>

#include "device/record.h"
#include "headrace/capture.h"
#include "program/allocator.h"
#include "program/backend.h"
#include "program/engine.h"
#include "program/islands.h"
#include "python/gil.h"
#include "python/objects.h"

namespace headrace {

namespace et = executorch::runtime;

namespace {

// One delegate of one method: what the engine hands back at each call.
struct LoadedDelegate {
  PyObject* object;  // owned, or leaked with the interpreter
  std::string name, method;
  int num_inputs;
  int island;
  bool requires_device;
  // Greatest sizes of its tensors, by argument: as the engine has them before the first call.
  std::vector<std::vector<executorch::aten::SizesType>> greatest;
};

Status failure(const LoadedDelegate& loaded, ErrorCode code, const std::string& what) {
  return island_failure(loaded.method, loaded.island, loaded.name, Status(code, what));
}

// The code of an exception of ours; kOk for another's.
ErrorCode code_of(const nb::python_error& error) {
  static constexpr std::pair<const char*, ErrorCode> kClasses[] = {
      {"NotSupported", ErrorCode::kNotSupported},
      {"DelegateUnavailable", ErrorCode::kDelegateUnavailable},
      {"OutOfDeviceMemory", ErrorCode::kOutOfDeviceMemory},
      {"ProgramError", ErrorCode::kProgram},
      {"OptionError", ErrorCode::kOption},
      {"InputError", ErrorCode::kInput},
  };
  nb::module_ errors = nb::module_::import_("headrace.errors");
  for (const auto& [name, code] : kClasses) {
    if (PyObject_IsInstance(error.value().ptr(), nb::object(errors.attr(name)).ptr()) == 1) return code;
  }
  return ErrorCode::kOk;
}

// The Status of a Python exception; what the caller sees has it as its cause. `keep`: what is ours keeps its
// class and its words, which say who has to act.
Status failure(const LoadedDelegate& loaded, const char* where, nb::python_error& error, bool keep) {
  if (ErrorCode code = keep ? code_of(error) : ErrorCode::kOk; code != ErrorCode::kOk) {
    Status status = failure(loaded, code, nb::cast<std::string>(nb::str(error.value())));
    status->cause = hold(nb::borrow(error.value()));
    return status;
  }
  Status status = failure(loaded, ErrorCode::kDelegate, std::string(where) + " raised " + text_of(error));
  status->cause = hold(nb::borrow(error.value()));
  return status;
}

// A delegate of Python's, as captures ask it. It lives as long as what the engine has of it, or longer.
class PyIsland final : public IslandCapture {
 public:
  PyIsland(nb::handle object, bool has_state) : object_(hold(nb::borrow(object))), has_state_(has_state) {}

  std::string refusal() override {
    GilAcquire gil;
    try {
      nb::object answer;
      wait_for_gil([&] { answer = object().attr("capturable")(); });
      if (answer.is(nb::bool_(true))) {
        std::vector<Access> ignored;
        return read_state(ignored);
      }
      if (PyUnicode_Check(answer.ptr())) {
        auto why = nb::cast<std::string>(answer);
        return why.empty() ? "capturable() gave an empty reason" : why;
      }
      return "capturable() gave " + nb::cast<std::string>(nb::repr(answer));
    } catch (nb::python_error& e) {
      return "capturable() raised " + text_of(e);
    } catch (const std::exception& e) {
      return std::string("capturable() failed: ") + e.what();
    }
  }

  std::shared_ptr<void> pin() override {
    GilAcquire gil;
    try {
      nb::object used;
      wait_for_gil([&] { used = object().attr("captured")(); });
      return used.is_none() ? nullptr : hold(std::move(used));
    } catch (const std::exception&) {
      // The work is recorded; what it uses lives as long as the delegate, as without an answer.
      return nullptr;
    }
  }

  std::vector<Access> state() override {
    if (!has_state_) return {};
    GilAcquire gil;
    std::vector<Access> out;
    if (std::string problem = read_state(out); !problem.empty()) out.clear();  // refusal() says it
    return out;
  }

 private:
  // With the lock. Empty, or why it cannot be read.
  std::string read_state(std::vector<Access>& out) {
    if (!has_state_) return {};
    try {
      nb::object buffers;
      wait_for_gil(
          [&] { buffers = nb::steal(PySequence_Tuple(nb::object(object().attr("state")()).ptr())); });
      if (!buffers.is_valid()) nb::raise_python_error();
      for (nb::handle item : buffers) {
        Buffer* buffer = nullptr;
        if (!nb::try_cast(item, buffer) || buffer == nullptr || !buffer->device)
          return "state() gave a " + std::string(Py_TYPE(item.ptr())->tp_name) +
                 " where a Buffer was expected";
        out.push_back({buffer->view.data, buffer->view.nbytes(), true});
      }
      return {};
    } catch (nb::python_error& e) {
      return "state() raised " + text_of(e);
    } catch (const std::exception& e) {
      return std::string("state() failed: ") + e.what();
    }
  }

  nb::handle object() const { return static_cast<PyObject*>(object_.get()); }
  std::shared_ptr<void> object_;
  bool has_state_;
};

class PyBackend final : public et::BackendInterface {
 public:
  explicit PyBackend(std::string name) : name_(std::move(name)) {}
  PyObject* cls = nullptr;  // owned; exchanged when the name is defined anew

  bool is_available() const override { return true; }

  et::Result<et::DelegateHandle*> init(et::BackendInitContext& context, et::FreeableBuffer* payload,
                                       et::ArrayRef<et::CompileSpec> specs) const override {
    auto loaded = std::make_unique<LoadedDelegate>();
    loaded->name = name_;
    loaded->method = context.get_method_name() ? context.get_method_name() : "";
    const IslandPlan* island = claim_island(name_, payload->data());
    loaded->island = island ? island->instruction : -1;
    loaded->num_inputs = island ? island->num_inputs : -1;
    if (loaded->num_inputs < 0) {
      return tell(failure(*loaded, ErrorCode::kProgram,
                          "expected to know where its inputs end, got a plan that does not say it; export it "
                          "with the compile spec 'headrace.inputs'"),
                  et::Error::InvalidProgram);
    }
    if (!load(*loaded, context, *payload, specs)) return et::Error::DelegateInvalidCompatibility;
    payload->Free();
    return reinterpret_cast<et::DelegateHandle*>(loaded.release());
  }

  et::Error execute(et::BackendExecutionContext&, et::DelegateHandle* handle,
                    et::Span<et::EValue*> args) const override {
    auto& loaded = *reinterpret_cast<LoadedDelegate*>(handle);
    const DeviceGuard* bound = DeviceGuard::current();
    if (bound == nullptr) {
      return tell(failure(loaded, ErrorCode::kDevice,
                          "expected a thread bound to a device (headrace::DeviceGuard), got none; make a "
                          "guard before the call"),
                  et::Error::InvalidState);
    }
    GilAcquire gil;
    try {
      return run(loaded, *bound, args);
    } catch (nb::python_error& e) {
      return tell(failure(loaded, "run()", e, false), et::Error::DelegateInvalidHandle);
    } catch (const std::exception& e) {
      return tell(failure(loaded, ErrorCode::kDelegate, std::string("run() failed: ") + e.what()),
                  et::Error::DelegateInvalidHandle);
    }
  }

  void destroy(et::DelegateHandle* handle) const override {
    std::unique_ptr<LoadedDelegate> loaded(reinterpret_cast<LoadedDelegate*>(handle));
    if (!loaded || !nb::is_alive() || !Py_IsInitialized()) return;
    GilAcquire gil;
    nb::error_scope keep;  // often inside a dealloc with an exception in flight
    Py_DECREF(loaded->object);
  }

 private:
  bool load(LoadedDelegate& loaded, et::BackendInitContext& context, const et::FreeableBuffer& payload,
            et::ArrayRef<et::CompileSpec> specs) const {
    GilAcquire gil;
    try {
      nb::dict spec_dict, options;
      for (const auto& spec : specs) {
        spec_dict[spec.key] = nb::bytes(static_cast<const char*>(spec.value.buffer), spec.value.nbytes);
      }
      for (const auto& option : context.runtime_specs()) {
        if (const auto* flag = std::get_if<bool>(&option.value)) {
          options[option.key] = *flag;
        } else if (const auto* number = std::get_if<int>(&option.value)) {
          options[option.key] = *number;
        } else {
          options[option.key] = std::get<2>(option.value).data();
        }
      }
      // The map lives as long as this call: what a delegate wants of it, it reads while it loads.
      auto open = std::make_shared<bool>(true);
      struct Shut {
        std::shared_ptr<bool> open;
        ~Shut() { *open = false; }
      } shut{open};  // on every way out
      nb::object named =
          nb::cpp_function([map = context.get_named_data_map(), open](const std::string& key) -> nb::object {
            if (!*open)
              throw nb::value_error(
                  "named data: expected to be read in load(), got a read after it; keep what load() reads");
            if (map == nullptr) throw nb::key_error(key.c_str());
            auto data = map->get_data(key);
            if (!data.ok()) throw nb::key_error(key.c_str());
            return nb::bytes(static_cast<const char*>(data->data()), data->size());
          });
      DeviceRef device = DeviceGuard::current() ? DeviceGuard::current()->device() : cpu_device();
      nb::module_ module = nb::module_::import_("headrace.delegate");
      nb::object told = module.attr("Context")(loaded.method, loaded.island, loaded.num_inputs, spec_dict,
                                               options, device_object(device), named);
      nb::object made = nb::handle(cls)();
      nb::object bytes = nb::bytes(static_cast<const char*>(payload.data()), payload.size());
      wait_for_gil([&] { (void)nb::object(made.attr("load")(bytes, told)); });
      *open = false;
      loaded.requires_device = nb::cast<bool>(made.attr("requires_device"));
      bool has_state = !nb::object(made.type().attr("state")).is(module.attr("Delegate").attr("state"));
      (void)take_part(name_, payload.data(), std::make_shared<PyIsland>(made, has_state));
      loaded.object = made.release().ptr();
      return true;
    } catch (nb::python_error& e) {
      (void)tell(failure(loaded, "load()", e, true), et::Error::Internal);
    } catch (const std::exception& e) {
      (void)tell(failure(loaded, ErrorCode::kDelegate, std::string("load() failed: ") + e.what()),
                 et::Error::Internal);
    }
    return false;
  }

  static et::Error run(LoadedDelegate& loaded, const DeviceGuard& bound, et::Span<et::EValue*> args) {
    // A list of tensors cannot be an argument of a delegate; numbers and None pass as they are.
    bool any_host = false, any_device = false;
    for (et::EValue* arg : args) {
      if (!arg->isTensor()) continue;
      bool host = arg->toTensor().unsafeGetTensorImpl()->device_type() == et::etensor::DeviceType::CPU;
      (host ? any_host : any_device) = true;
    }
    if (any_host && any_device) {
      return tell(failure(loaded, ErrorCode::kDelegate,
                          "expected its tensors on one device, got some on cpu and some on " +
                              bound.device()->name() + "; export it with one target_device"),
                  et::Error::InvalidArgument);
    }
    if (loaded.requires_device && any_host) {
      return tell(failure(loaded, ErrorCode::kDelegate,
                          "expected device memory, got host memory; export the program with "
                          "target_device for this delegate"),
                  et::Error::InvalidArgument);
    }
    // Work on host memory must be done before the engine's next instruction reads it.
    DeviceRef device = any_device ? bound.device() : cpu_device();
    PyDeviceRef shown = device_object(device);
    auto stream = std::make_shared<PyStream>();
    stream->device = shown;
    stream->handle = any_device ? bound.stream() : kPerThreadStream;
    auto count = static_cast<size_t>(loaded.num_inputs);
    // The call before may have left its outputs smaller.
    bool first = loaded.greatest.empty();
    if (first) loaded.greatest.resize(args.size());
    for (size_t i = count; i < args.size(); ++i) {
      if (!args[i]->isTensor()) continue;
      const auto& t = args[i]->toTensor();
      if (first) loaded.greatest[i].assign(t.sizes().begin(), t.sizes().end());
      const auto& sizes = loaded.greatest[i];
      if (std::equal(sizes.begin(), sizes.end(), t.sizes().begin())) continue;
      if (et::Error error = et::resize_tensor(t, {sizes.data(), sizes.size()}); error != et::Error::Ok) {
        return tell(failure(loaded, ErrorCode::kDelegate,
                            "output " + std::to_string(i - count) +
                                ": expected to take its greatest size again, which the engine refuses: " +
                                et::to_string(error)),
                    error);
      }
    }
    auto loan = std::make_shared<Loan>();
    nb::object sides[2] = {
        nb::steal(PyTuple_New(static_cast<Py_ssize_t>(std::min(count, args.size())))),
        nb::steal(PyTuple_New(static_cast<Py_ssize_t>(args.size() - std::min(count, args.size()))))};
    for (size_t i = 0; i < args.size(); ++i) {
      bool out = i >= count;
      nb::object item;
      if (args[i]->isTensor()) {
        TensorView view = view_of(args[i]->toTensor());
        item = lend_buffer(view, shown, stream->handle, loan, out && is_dense(view));
      } else if (args[i]->isInt()) {
        item = nb::int_(args[i]->toInt());
      } else if (args[i]->isDouble()) {
        item = nb::float_(args[i]->toDouble());
      } else if (args[i]->isBool()) {
        item = nb::bool_(args[i]->toBool());
      } else {
        item = nb::none();
      }
      PyTuple_SET_ITEM(sides[out].ptr(), static_cast<Py_ssize_t>(out ? i - count : i), item.release().ptr());
    }
    std::optional<record::IslandScope> recorded;
    if (record::recording()) {
      std::vector<record::Touch> touches;
      for (size_t i = 0; i < args.size(); ++i) {
        if (!args[i]->isTensor()) continue;
        const auto& tensor = args[i]->toTensor();
        touches.push_back(record::touch(tensor.const_data_ptr(), tensor.nbytes(), i >= count));
      }
      recorded.emplace(*device, stream->handle, loaded.name, loaded.island, touches);
    }
    nb::object given = nb::cast(stream);
    struct End {
      Loan& loan;
      ~End() { loan.end(); }
    } end{*loan};
    AllocationWatch watch(loaded.island);
    // A delegate may give the lock up, and end there with the interpreter.
    wait_for_gil([&] { (void)nb::object(nb::handle(loaded.object).attr("run")(sides[0], sides[1], given)); });
    for (size_t i = count; i < args.size(); ++i) {
      if (!args[i]->isTensor()) continue;
      const TensorView& said = nb::cast<Buffer&>(sides[1][i - count]).view;
      Status status =
          resize_output(args[i]->toTensor(), i - count, {said.sizes.data(), static_cast<size_t>(said.ndim)});
      if (status.ok()) continue;
      return tell(failure(loaded, status.code(), status.message()), et::Error::InvalidArgument);
    }
    return et::Error::Ok;
  }

  std::string name_;
};

// The engine never forgets a backend, so neither do we.
std::map<std::string, PyBackend*>& backends() {
  static auto* b = new std::map<std::string, PyBackend*>();
  return *b;
}

void define(const std::string& name, nb::object cls, bool payload_is_code) {
  auto at = backends().find(name);
  if (at == backends().end()) {
    if (et::get_backend_class(name.c_str()) != nullptr) {
      raise(
          Status(ErrorCode::kEngine,
                 "delegate '" + name +
                     "': expected a name that is free, got one that a native delegate has; choose another"));
    }
    auto* backend = new PyBackend(name);
    // The engine keeps the pointer to the name; the key of the map stays where it is.
    at = backends().emplace(name, backend).first;
    if (Status status = register_delegate(at->first.c_str(), backend); !status.ok()) {
      backends().erase(at);
      delete backend;
      raise(status);
    }
  }
  Py_XDECREF(std::exchange(at->second->cls, cls.release().ptr()));
  set_payload_is_code(name, payload_is_code);
}

}  // namespace

void bind_delegates(nb::module_& m) {
  m.def("define_delegate", &define, nb::arg("name"), nb::arg("cls"), nb::arg("payload_is_code"));
}

}  // namespace headrace
