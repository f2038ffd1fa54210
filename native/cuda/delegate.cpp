#include "cuda/delegate.h"

#include <executorch/runtime/backend/interface.h>

#include <algorithm>
#include <array>
#include <charconv>

#include "cuda/island.h"
#include "cuda/options.h"
#include "device/record.h"
#include "headrace/capture.h"
#include "headrace/program.h"
#include "program/allocator.h"
#include "program/backend.h"
#include "program/islands.h"
#include "program/text.h"

namespace headrace {

namespace et = executorch::runtime;
using executorch::aten::Tensor;

namespace {

// Never destroyed: daemon threads may be in a call when the process ends.
const std::string& kName = *new std::string(kCudaBackend);

// What the engine hands back at each call. Shared with work in flight.
struct Loaded {
  std::string method;
  int instruction = -1;
  HostConstants own_constants, own_state;           // where no program of ours says whose they are
  std::shared_ptr<HostConstants> constants, state;  // the program's and the instance's
  std::shared_ptr<Island> island;
};
using LoadedRef = std::shared_ptr<Loaded>;

Status failure(const Loaded& loaded, const Status& why) {
  return island_failure(loaded.method, loaded.instruction, kName, why);
}

bool on_device(const Tensor& t) {
  return t.unsafeGetTensorImpl()->device_type() != et::etensor::DeviceType::CPU;
}

// One output of a call: where it goes, and in which order its dimensions lie there.
struct Output {
  TensorView view;
  std::array<uint8_t, kMaxDims> dim_order{};
};

Output output_of(const Tensor& t) {
  Output out{view_of(t), {}};
  std::copy(t.dim_order().begin(), t.dim_order().end(), out.dim_order.begin());
  return out;
}

// On a simulated device the island is host work in stream order, and is recorded as that.
class Part final : public IslandCapture {
 public:
  explicit Part(LoadedRef loaded) : loaded_(std::move(loaded)) {}
  std::string refusal() override { return {}; }
  std::vector<Access> state() override {
    std::vector<Access> out;
    for (const auto& state : loaded_->island->state()) out.push_back({state->data(), state->nbytes(), true});
    return out;
  }

 private:
  LoadedRef loaded_;
};

class CudaBackend final : public et::BackendInterface {
 public:
  bool is_available() const override { return true; }

  et::Result<et::DelegateHandle*> init(et::BackendInitContext& context, et::FreeableBuffer* payload,
                                       et::ArrayRef<et::CompileSpec> specs) const override {
    auto loaded = std::make_shared<Loaded>();
    loaded->method = context.get_method_name() ? context.get_method_name() : "";
    const IslandPlan* plan = claim_island(kName, payload->data());
    if (plan != nullptr) loaded->instruction = plan->instruction;
    if (Status status = load(*loaded, plan, context, *payload, specs); !status.ok()) {
      return tell(failure(*loaded, status), et::Error::DelegateInvalidCompatibility);
    }
    (void)take_part(kName, payload->data(), std::make_shared<Part>(loaded));
    payload->Free();
    return reinterpret_cast<et::DelegateHandle*>(new LoadedRef(std::move(loaded)));
  }

  et::Error execute(et::BackendExecutionContext&, et::DelegateHandle* handle,
                    et::Span<et::EValue*> args) const override {
    const LoadedRef& loaded = *reinterpret_cast<LoadedRef*>(handle);
    Status status = run(loaded, args);
    if (status.ok()) return et::Error::Ok;
    return tell(failure(*loaded, status), et::Error::DelegateInvalidHandle);
  }

  void destroy(et::DelegateHandle* handle) const override { delete reinterpret_cast<LoadedRef*>(handle); }

 private:
  static Status load(Loaded& loaded, const IslandPlan* plan, et::BackendInitContext& context,
                     const et::FreeableBuffer& bytes, et::ArrayRef<et::CompileSpec> specs) {
    CudaOptions options;
    for (const auto& option : context.runtime_specs()) {
      std::variant<bool, int, std::string> value;
      if (const auto* flag = std::get_if<bool>(&option.value)) {
        value = *flag;
      } else if (const auto* number = std::get_if<int>(&option.value)) {
        value = *number;
      } else {
        value = std::string(std::get<2>(option.value).data());
      }
      if (Status status = options.set(option.key, value); !status.ok()) return status;
    }
    std::string target;
    std::optional<HostSpec> host;
    std::optional<size_t> num_inputs;
    for (const auto& spec : specs) {
      std::string_view value(static_cast<const char*>(spec.value.buffer), spec.value.nbytes);
      if (std::string_view(spec.key) == "target_device") target = value;
      if (std::string_view(spec.key) == "headrace.inputs") {
        size_t count = 0;
        auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), count);
        if (error == std::errc() && end == value.data() + value.size()) num_inputs = count;
      }
      if (std::string_view(spec.key) == "headrace_host") {
        auto read = read_host_spec(value);
        if (!read.ok()) return Status(ErrorCode::kProgram, read.status().message() + "; export it again");
        host = std::move(*read);
      }
    }
    auto payload = read_cuda_payload({static_cast<const char*>(bytes.data()), bytes.size()});
    if (!payload.ok()) return payload.status();
    if (Status status = check_place(plan, host.has_value() || target == "cpu"); !status.ok()) return status;

    // Buffers that a loader owns go when this function returns.
    std::vector<et::FreeableBuffer> kept;
    const et::NamedDataMap* named = context.get_named_data_map();
    IslandSources sources;
    sources.find = [&](const std::string& key) -> std::optional<std::string_view> {
      if (named == nullptr) return std::nullopt;
      auto data = named->get_data(key);
      if (!data.ok()) return std::nullopt;
      kept.push_back(std::move(*data));
      return std::string_view(static_cast<const char*>(kept.back().data()), kept.back().size());
    };
    LoadOwners owners = load_owners();
    if (owners.program != nullptr) {
      loaded.constants = owners.program->get<HostConstants>(kName);
      loaded.state = owners.instance->get<HostConstants>(kName);
    }
    // The files of a program of ours stay in memory for as long as it is loaded.
    sources.lasting = owners.program != nullptr;
    sources.constants = loaded.constants ? loaded.constants.get() : &loaded.own_constants;
    sources.state = loaded.state ? loaded.state.get() : &loaded.own_state;
    auto island = Island::load(*payload, std::move(host), sources, {options.library_directory, true});
    if (!island.ok()) return island.status();
    loaded.island = std::move(*island);
    return check_arguments(loaded, plan, num_inputs);
  }

  // Whether the library's code can run where the program's memory is.
  static Status check_place(const IslandPlan* plan, bool host) {
    DeviceRef device = DeviceGuard::current() ? DeviceGuard::current()->device() : cpu_device();
    const MethodPlan* method = loading_method();
    std::string host_memory;
    bool device_memory = false;
    for (size_t i = 0; plan != nullptr && method != nullptr && i < plan->args.size(); ++i) {
      const TensorPlan* t = method->tensor_of(plan->args[i]);
      if (t == nullptr) continue;
      if (t->device.kind != DeviceKind::kCpu) {
        device_memory = true;
      } else if (host_memory.empty()) {
        host_memory = "argument " + std::to_string(i);
      }
    }
    if (host) {
      if (!device_memory || device->backend() != Backend::kCuda) return {};
      Status status(
          ErrorCode::kDelegateUnavailable,
          "expected memory that the host can use, got memory of " + device->name() +
              " for a library that was compiled for the host; load it with device=\"cpu\", or export it "
              "for CUDA");
      status.device = device->name();
      return status;
    }
    if (!host_memory.empty()) {
      return Status(
          ErrorCode::kDelegateUnavailable,
          "expected device memory for a library that was compiled for CUDA, got host memory for its " +
              host_memory + "; export it with the compile spec target_device=cuda:0");
    }
    Status status(
        ErrorCode::kDelegateUnavailable,
        "expected a library that was compiled for the host, got one for CUDA, whose kernels do not run on " +
            device->name() + (device->backend() == Backend::kCuda ? " with this version of headrace" : "") +
            "; export it with target=\"host\"");
    status.device = device->name();
    return status;
  }

  // The program's call of the island against what the library takes.
  static Status check_arguments(const Loaded& loaded, const IslandPlan* plan, std::optional<size_t> said) {
    const Island& island = *loaded.island;
    size_t inputs = island.num_inputs(), outputs = island.num_outputs();
    std::string want =
        std::to_string(inputs) + " inputs and " + std::to_string(outputs) + " outputs, as the library has";
    if (said && *said != inputs) {
      return Status(ErrorCode::kProgram, "expected " + want + ", got the compile spec 'headrace.inputs' of " +
                                             std::to_string(*said) +
                                             "; the file is damaged, export it again");
    }
    const MethodPlan* method = loading_method();
    if (plan == nullptr || method == nullptr) return {};
    if (plan->args.size() != inputs + outputs) {
      return Status(ErrorCode::kProgram, "expected " + want + ", got a call with " +
                                             std::to_string(plan->args.size()) +
                                             " arguments; the file is damaged, export it again");
    }
    for (size_t i = 0; i < plan->args.size(); ++i) {
      const TensorPlan* t = method->tensor_of(plan->args[i]);
      std::string which = i < inputs ? "input " + std::to_string(i) : "output " + std::to_string(i - inputs);
      if (t == nullptr) {
        return Status(ErrorCode::kProgram, which + ": expected a tensor, got another value; export it again");
      }
      bool unknown = i >= inputs && t->dynamism != Dynamism::kStatic && t->device.kind != DeviceKind::kCpu;
      if (unknown && !island.knows_sizes()) {
        return Status(
            ErrorCode::kProgram,
            which +
                ": expected its size as an expression in the compile spec 'headrace_host', since work in "
                "device memory is enqueued before it runs, got none; export it with headrace.export()");
      }
    }
    return {};
  }

  static Status run(const LoadedRef& loaded, et::Span<et::EValue*> args) {
    const Island& island = *loaded->island;
    size_t count = island.num_inputs();
    if (args.size() != count + island.num_outputs()) {
      return Status(ErrorCode::kDelegate, "expected " + std::to_string(count) + " inputs and " +
                                              std::to_string(island.num_outputs()) + " outputs, got " +
                                              std::to_string(args.size()) + " arguments; export it again");
    }
    bool any_host = false, any_device = false;
    for (size_t i = 0; i < args.size(); ++i) {
      if (!args[i]->isTensor()) {
        return Status(ErrorCode::kDelegate, "argument " + std::to_string(i) +
                                                ": expected a tensor, got another value; export it again");
      }
      (on_device(args[i]->toTensor()) ? any_device : any_host) = true;
    }
    const DeviceGuard* bound = DeviceGuard::current();
    if (any_device && (any_host || bound == nullptr)) {
      return Status(
          ErrorCode::kDelegate,
          any_host ? "expected its tensors on one device, got some on cpu and some in device memory; export "
                     "it with one target_device"
                   : "expected a thread bound to a device (headrace::DeviceGuard) for tensors in device "
                     "memory, got none");
    }
    Device& device = any_device ? *bound->device() : *cpu_device();
    StreamHandle stream = any_device ? bound->stream() : kPerThreadStream;
    bool later = device.backend() == Backend::kSim;
    if (device.backend() == Backend::kCuda) {
      return Status(ErrorCode::kDelegate,
                    "expected memory that the host can use, got memory of " + device.name());
    }

    std::vector<TensorView> inputs;
    for (size_t i = 0; i < count; ++i) inputs.push_back(view_of(args[i]->toTensor()));
    if (island.knows_sizes()) {
      auto sizes = island.output_sizes(inputs);
      if (!sizes.ok()) return sizes.status();
      for (size_t k = 0; k < sizes->size(); ++k) {
        if (Status status = resize_output(args[count + k]->toTensor(), k, (*sizes)[k]); !status.ok())
          return status;
      }
    }
    std::vector<Output> outputs;
    for (size_t i = count; i < args.size(); ++i) outputs.push_back(output_of(args[i]->toTensor()));
    if (later) {
      for (size_t i = 0; i < args.size(); ++i) {
        const TensorView& view = i < count ? inputs[i] : outputs[i - count].view;
        if (view.nbytes() == 0 || device.where(view.data).kind == PointerInfo::Kind::kDevice) continue;
        Status status(ErrorCode::kDelegate,
                      (i < count ? "input " + std::to_string(i) : "output " + std::to_string(i - count)) +
                          ": expected memory of " + device.name() +
                          ", got host memory; copy it to the device first");
        status.device = device.name();
        return status;
      }
    }
    std::vector<Access> accesses;
    auto touch = [&](const TensorView& view, bool write) {
      if (view.nbytes() != 0) accesses.push_back({view.data, view.nbytes(), write});
    };
    for (const TensorView& view : inputs) touch(view, false);
    for (const Output& out : outputs) touch(out.view, true);
    for (const auto& state : island.state()) {
      if (state->nbytes() != 0) accesses.push_back({state->data(), state->nbytes(), true});
    }
    std::optional<record::IslandScope> recorded;
    if (record::recording()) {
      std::vector<record::Touch> touches;
      for (const Access& a : accesses) touches.push_back(record::touch(a.data, a.nbytes, a.write));
      recorded.emplace(device, stream, kName, loaded->instruction, touches);
    }
    if (!later) {
      // Work on host memory is done before the engine's next instruction reads it. The cpu does at once what
      // is enqueued, and writes it down for whoever records.
      Status ran;
      auto now = [&]() -> Status {
        ran = loaded->island->run(inputs, [&](size_t k, const TensorView& made) -> Result<Island::Target> {
          const Tensor& t = args[count + k]->toTensor();
          Status status = resize_output(t, k, {made.sizes.data(), static_cast<size_t>(made.ndim)});
          if (!status.ok()) return status;
          outputs[k] = output_of(t);
          return Island::Target{outputs[k].view, outputs[k].dim_order.data()};
        });
        return {};
      };
      Status called = device.call(stream, now, std::move(accesses));
      return called.ok() ? ran : called;
    }
    auto work = [loaded, inputs = std::move(inputs), outputs = std::move(outputs)]() -> Status {
      Status status = loaded->island->run(inputs, [&](size_t k, const TensorView&) -> Result<Island::Target> {
        return Island::Target{outputs[k].view, outputs[k].dim_order.data()};
      });
      return status.ok() ? status : failure(*loaded, status);
    };
    return device.call(stream, std::move(work), std::move(accesses));
  }
};

}  // namespace

Status register_cuda_delegate() {
  static const Status status = []() -> Status {
    if (Status ready = initialize(); !ready.ok()) return ready;
    // The engine never forgets a backend.
    static auto* backend = new CudaBackend();
    return register_delegate(kCudaBackend.data(), backend);
  }();
  return status;
}

namespace {
// Whoever needs to know asks again.
[[maybe_unused]] const bool registered = register_cuda_delegate().ok();
}  // namespace

}  // namespace headrace
