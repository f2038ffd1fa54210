#include "cuda/delegate.h"

#include <executorch/runtime/backend/interface.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <functional>
#include <memory_resource>

#include "cuda/island.h"
#include "cuda/options.h"
#include "device/record.h"
#include "headrace/block.h"
#include "headrace/capture.h"
#include "headrace/program.h"
#include "program/allocator.h"
#include "program/backend.h"
#include "program/islands.h"
#include "program/layout.h"
#include "program/text.h"

namespace headrace {

namespace et = executorch::runtime;
using executorch::aten::Tensor;

namespace {

// Never destroyed: daemon threads may be in a call when the process ends.
const std::string& kName = *new std::string(kCudaBackend);

// What the islands of a program, or of one instance of a method, have in common.
struct IslandMemory {
  HostConstants host;
  DeviceConstants device;
  // Of an instance. The device is told at the first question; it is one for a program's life.
  std::shared_ptr<Temporaries> temporaries(const DeviceRef& device_of_program) {
    std::lock_guard lock(mutex);
    if (temporaries_ == nullptr) temporaries_ = std::make_shared<Temporaries>(device_of_program);
    return temporaries_;
  }

 private:
  std::mutex mutex;
  std::shared_ptr<Temporaries> temporaries_;
};

// What the engine hands back at each call. Shared with work in flight, and with graphs.
struct LoadedIsland {
  std::string method;
  int instruction = -1;
  std::shared_ptr<IslandMemory> program,
      instance;      // of the island alone where no program of ours says whose it is
  DeviceRef device;  // of a library for CUDA; null: for the host
  // Nobody above orders the calls, and waits for the last one: the engine's own Module.
  bool alone = false;
  EventRef last;  // behind the work of the last call, where `alone`
  StreamHandle last_stream = 0;
  std::shared_ptr<Island> island;
};
using LoadedIslandRef = std::shared_ptr<LoadedIsland>;

Status failure(const LoadedIsland& loaded, const Status& why) {
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

// On a simulated device the island is host work in stream order, and is recorded as that. On a GPU its
// kernels are recorded, with the addresses of its temporaries and constants: a graph keeps them, and the
// library.
class AotiCapture final : public IslandCapture {
 public:
  explicit AotiCapture(LoadedIslandRef loaded) : loaded_(std::move(loaded)) {}
  std::string refusal() override {
    if (loaded_->device == nullptr) return {};
    if (loaded_->island->hides_state())
      return "it keeps state where a capture that fails could not put it back";
    for (const std::string& name : loaded_->island->facts().shims) {
      if (name.starts_with("aoti_torch_item_"))
        return "it reads values back from the device while it runs (" + name + ")";
    }
    return {};
  }
  std::vector<Access> state() override { return loaded_->island->state(); }
  std::shared_ptr<void> pin() override {
    if (loaded_->device == nullptr) return nullptr;
    return std::make_shared<std::pair<LoadedIslandRef, std::shared_ptr<void>>>(
        loaded_, loaded_->instance->temporaries(loaded_->device)->pin());
  }

 private:
  LoadedIslandRef loaded_;
};

template <class F>
Status caught(F&& work) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    return Status(ErrorCode::kOutOfDeviceMemory, "expected host memory, got none; free some");
  } catch (const std::exception& thrown) {
    return Status(ErrorCode::kDelegate, std::string("expected no C++ exception, got: ") + thrown.what() +
                                            "; report it with the program");
  }
}

class CudaBackend final : public et::BackendInterface {
 public:
  bool is_available() const override { return true; }

  et::Result<et::DelegateHandle*> init(et::BackendInitContext& context, et::FreeableBuffer* payload,
                                       et::ArrayRef<et::CompileSpec> specs) const override {
    auto loaded = std::make_shared<LoadedIsland>();
    loaded->method = context.get_method_name() ? context.get_method_name() : "";
    const IslandPlan* plan = claim_island(kName, payload->data());
    if (plan != nullptr) loaded->instruction = plan->instruction;
    Status status = caught([&] { return load(*loaded, plan, context, *payload, specs); });
    if (!status.ok()) {
      return tell(failure(*loaded, status), et::Error::DelegateInvalidCompatibility);
    }
    (void)take_part(kName, payload->data(), std::make_shared<AotiCapture>(loaded));
    payload->Free();
    return reinterpret_cast<et::DelegateHandle*>(new LoadedIslandRef(std::move(loaded)));
  }

  et::Error execute(et::BackendExecutionContext&, et::DelegateHandle* handle,
                    et::Span<et::EValue*> args) const override {
    const LoadedIslandRef& loaded = *reinterpret_cast<LoadedIslandRef*>(handle);
    // The engine's frames must not meet an exception.
    Status status = caught([&] { return run(loaded, args); });
    if (status.ok()) return et::Error::Ok;
    return tell(failure(*loaded, status), et::Error::DelegateInvalidHandle);
  }

  void destroy(et::DelegateHandle* handle) const override {
    std::unique_ptr<LoadedIslandRef> loaded(reinterpret_cast<LoadedIslandRef*>(handle));
    // The event, not the stream: that one may be gone (LT1).
    if (loaded && (*loaded)->last && !(*loaded)->device->synchronize(*(*loaded)->last).ok())
      (void)(*loaded)->device->synchronize();
  }

 private:
  static Status load(LoadedIsland& loaded, const IslandPlan* plan, et::BackendInitContext& context,
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
        if (error != std::errc() || end != value.data() + value.size()) {
          return Status(ErrorCode::kProgram,
                        "compile spec 'headrace.inputs': expected a number in decimal, got " +
                            quoted(std::string(value)) + "; the file is damaged, export it again");
        }
        num_inputs = count;
      }
      if (std::string_view(spec.key) == "headrace_host") {
        auto read = read_host_spec(value);
        if (!read.ok()) return Status(ErrorCode::kProgram, read.status().message() + "; export it again");
        host = std::move(*read);
      }
    }
    auto payload = read_aoti_payload({static_cast<const char*>(bytes.data()), bytes.size()}, loaded.method);
    if (!payload.ok()) return payload.status();
    bool for_host = host.has_value() || target == "cpu";
    if (Status status = check_place(plan, for_host); !status.ok()) return status;
    if (!for_host) loaded.device = DeviceGuard::current()->device();

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
    loaded.alone = owners.program == nullptr;
    loaded.program =
        loaded.alone ? std::make_shared<IslandMemory>() : owners.program->get<IslandMemory>(kName);
    loaded.instance = loaded.alone ? loaded.program : owners.instance->get<IslandMemory>(kName);
    // The files of a program of ours stay in memory for as long as it is loaded.
    sources.lasting = !loaded.alone;
    sources.constants = &loaded.program->host;
    sources.state = &loaded.instance->host;
    if (loaded.device != nullptr) {
      sources.device = loaded.device;
      sources.device_constants = &loaded.program->device;
      sources.device_state = &loaded.instance->device;
      sources.temporaries = loaded.instance->temporaries(loaded.device);
    }
    auto island = Island::load(*payload, std::move(host), sources, {options.library_directory, true});
    if (!island.ok()) return island.status();
    // It may be let go of where nothing may be freed: by a language's collector in the middle of a capture.
    Island* made = island->get();
    loaded.island = std::shared_ptr<Island>(made, [held = std::move(*island)](Island*) mutable {
      put_off([last = std::move(held)]() mutable { last.reset(); });
    });
    if (Status status = check_arguments(loaded, plan, num_inputs); !status.ok()) return status;
    return loaded.device == nullptr ? Status() : rehearse(*loaded.island, plan);
  }

  // Kernels and memory are had while the program loads, where the plan says what a call will need.
  static Status rehearse(Island& island, const IslandPlan* plan) {
    const MethodPlan* method = loading_method();
    if (plan == nullptr || method == nullptr) return {};
    std::vector<TensorView> inputs;
    for (size_t i = 0; i < island.num_inputs(); ++i) {
      const TensorPlan& t = *method->tensor_of(plan->args[i]);
      if (t.dynamism != Dynamism::kStatic) return {};
      TensorView& view = inputs.emplace_back();
      view.data = reinterpret_cast<void*>(uintptr_t{4096});  // never looked at; as aligned as memory is
      view.dtype = t.dtype;
      view.ndim = static_cast<int>(t.sizes.size());
      std::copy(t.sizes.begin(), t.sizes.end(), view.sizes.begin());
      set_dense_strides(view, t.dim_order.data());
    }
    return island.rehearse(inputs);
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
      status->device = device->name();
      return status;
    }
    if (!host_memory.empty()) {
      return Status(
          ErrorCode::kDelegateUnavailable,
          "expected device memory for a library that was compiled for CUDA, got host memory for its " +
              host_memory + "; export it with the compile spec target_device=cuda:0");
    }
    if (device->backend() != Backend::kCuda || DeviceGuard::current() == nullptr) {
      Status status(
          ErrorCode::kDelegateUnavailable,
          "expected a GPU for a library that was compiled for CUDA, whose kernels run nowhere else, "
          "got " +
              device->name() +
              "; load it with device=\"cuda:0\" on a machine with an NVIDIA GPU, or export it with "
              "target=\"host\"");
      status->device = device->name();
      return status;
    }
    return {};
  }

  // The program's call of the island against what the library takes.
  static Status check_arguments(const LoadedIsland& loaded, const IslandPlan* plan,
                                std::optional<size_t> said) {
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
      // A library for CUDA tells its sizes before its work runs.
      bool unknown = loaded.device == nullptr && i >= inputs && t->dynamism != Dynamism::kStatic &&
                     t->device.kind != DeviceKind::kCpu;
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

  static void note(std::optional<record::IslandScope>& recorded, Device& device, StreamHandle stream,
                   const LoadedIsland& loaded, std::span<const Access> accesses) {
    std::vector<record::Touch> touches;
    for (const Access& a : accesses) touches.push_back(record::touch(a.data, a.nbytes, a.write));
    recorded.emplace(device, stream, kName, loaded.instruction, touches);
  }

  static Status run_on_gpu(LoadedIsland& loaded, et::Span<et::EValue*> args, StreamHandle stream) {
    Island& island = *loaded.island;
    Device& device = *loaded.device;
    size_t count = island.num_inputs();
    // The lists of a few tensors take no memory but this.
    std::array<std::byte, 4096> room;
    std::pmr::monotonic_buffer_resource memory(room.data(), room.size());
    std::pmr::vector<TensorView> inputs(&memory);
    std::pmr::vector<void*> targets(&memory);
    inputs.reserve(count);
    targets.reserve(island.num_outputs());
    for (size_t i = 0; i < count; ++i) inputs.push_back(view_of(args[i]->toTensor()));
    std::vector<Access> accesses;
    std::optional<record::IslandScope> recorded;
    for (size_t k = 0; k < island.num_outputs(); ++k)
      targets.push_back(args[count + k]->toTensor().mutable_data_ptr());
    if (record::recording()) {
      for (const TensorView& view : inputs) accesses.push_back({view.data, view.nbytes(), false});
      for (size_t k = 0; k < targets.size(); ++k)
        accesses.push_back({targets[k], args[count + k]->toTensor().nbytes(), true});
      accesses.insert(accesses.end(), island.state().begin(), island.state().end());
      std::erase_if(accesses, [](const Access& a) { return a.nbytes == 0; });
      note(recorded, device, stream, loaded, accesses);
    }
    if (loaded.alone) {
      if (Status status = begin_alone(loaded, inputs, args, stream); !status.ok()) return status;
    }
    AllocationWatch watch(loaded.instruction);
    GpuRunKind kind = capture_stage() == CaptureStage::kNone ? GpuRunKind::kCall : GpuRunKind::kReplayed;
    std::array<uint8_t, kMaxDims> dim_order{};
    auto place = [&](size_t k, const TensorView& made) -> Result<Island::Target> {
      const Tensor& t = args[count + k]->toTensor();
      Status resized = resize_output(t, k, {made.sizes.data(), static_cast<size_t>(made.ndim)});
      if (!resized.ok()) return resized;
      std::copy(t.dim_order().begin(), t.dim_order().end(), dim_order.begin());
      bool fixed = t.shape_dynamism() == executorch::aten::TensorShapeDynamism::STATIC;
      return Island::Target{view_of(t), dim_order.data(), fixed};
    };
    // By reference: a copy of it would be on the heap.
    Status status = island.run_on_gpu(inputs, targets, stream, kind, std::ref(place));
    if (loaded.alone) return end_alone(loaded, std::move(status), stream);
    return status;
  }

  // Where nobody of ours checked the memory, or orders one call behind the other (LT1).
  static Status begin_alone(LoadedIsland& loaded, std::span<const TensorView> inputs,
                            et::Span<et::EValue*> args, StreamHandle stream) {
    Device& device = *loaded.device;
    for (size_t i = 0; i < args.size(); ++i) {
      const Tensor& t = args[i]->toTensor();
      if (t.nbytes() == 0 || device.where(t.const_data_ptr()).kind == PointerInfo::Kind::kDevice) continue;
      std::string which =
          i < inputs.size() ? "input " + std::to_string(i) : "output " + std::to_string(i - inputs.size());
      Status status(ErrorCode::kDelegate, which + ": expected memory of " + device.name() +
                                              ", got other memory; copy it to the device first");
      status->device = device.name();
      return status;
    }
    if (loaded.last == nullptr || loaded.last_stream == stream) return {};
    return device.wait(stream, *loaded.last);
  }

  static Status end_alone(LoadedIsland& loaded, Status status, StreamHandle stream) {
    Device& device = *loaded.device;
    if (status.ok() && loaded.last == nullptr) {
      auto event = device.create_event();
      if (event.ok()) loaded.last = *event;
      status = event.status();
    }
    if (status.ok()) status = device.record(*loaded.last, stream);
    loaded.last_stream = stream;
    // What was enqueued has no event behind it, so it has to end here (LT2).
    if (!status.ok()) (void)drain(device, stream);
    return status;
  }

  static Status run(const LoadedIslandRef& loaded, et::Span<et::EValue*> args) {
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
                     "memory, got none; make a guard around the call");
    }
    Device& device = any_device ? *bound->device() : *cpu_device();
    StreamHandle stream = any_device ? bound->stream() : kPerThreadStream;
    if (loaded->device != nullptr) {
      if (&device != loaded->device.get()) {
        return Status(ErrorCode::kDelegate, "expected memory of " + loaded->device->name() +
                                                ", where the program was loaded, got memory of " +
                                                device.name() + "; bind the thread to that device");
      }
      return run_on_gpu(*loaded, args, stream);
    }
    bool later = device.backend() == Backend::kSim;
    std::vector<TensorView> inputs;
    for (size_t i = 0; i < count; ++i) inputs.push_back(view_of(args[i]->toTensor()));
    if (device.backend() == Backend::kCuda) {
      return Status(ErrorCode::kDelegate, "expected memory that the host can use, got memory of " +
                                              device.name() +
                                              "; bind the thread to another device, or export it for CUDA");
    }
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
        status->device = device.name();
        return status;
      }
    }
    std::vector<Access> accesses;
    auto touch = [&](const TensorView& view, bool write) {
      if (view.nbytes() != 0) accesses.push_back({view.data, view.nbytes(), write});
    };
    for (const TensorView& view : inputs) touch(view, false);
    for (const Output& out : outputs) touch(out.view, true);
    for (const Access& state : island.state()) {
      if (state.nbytes != 0) accesses.push_back(state);
    }
    std::optional<record::IslandScope> recorded;
    if (record::recording()) note(recorded, device, stream, *loaded, accesses);
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
