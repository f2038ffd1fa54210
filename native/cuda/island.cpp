#include "cuda/island.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <set>
#include <stdexcept>

#include "cuda/library_scope.h"
#include "cuda/shims.h"
#include "device/cuda.h"
#include "headrace/block.h"
#include "program/layout.h"
#include "program/text.h"

namespace headrace {

namespace {

// Of the kinds of constant that a library has, by torch 2.13's aoti_runtime/constant_type.h.
constexpr int32_t kBuffer = 2;

}  // namespace

Status Island::library_failed(const char* what, const std::string& said) {
  return Status(ErrorCode::kDelegate, std::string("library: expected success while ") + what +
                                          ", got: " + said +
                                          "; call it with values that the model accepts, or report this "
                                          "with the program");
}

Status Island::failed(const char* what) const {
  const char* text = nullptr;
  std::string said;
  if (library_->calls().last_error(&text) == 0 && text != nullptr) said = text;
  std::string shim = shims::take_error();
  if (!shim.empty() && said.find(shim) == std::string::npos) said = said.empty() ? shim : shim + "; " + said;
  if (said.empty()) said = "no reason given";
  if (device_ == nullptr) return library_failed(what, said);
  // What the device said is told as that; the library knows a text alone.
  Status why = temporaries_->failure();
  if (int32_t code = shims::counts(arena_).code; why.ok() && code != 0) why = gpu().failed("run", code);
  if (why.ok()) return library_failed(what, said);
  ErrorCode code =
      shims::counts(arena_).code == cu::kNoBinaryForGpu ? ErrorCode::kDelegateUnavailable : why.code();
  Status status(code, std::string("library, while ") + what + ": " + why.message());
  status->device = device_->name();
  status->log.push_back(said);
  return status;
}

Result<std::shared_ptr<Island>> Island::load(const AotiPayload& payload, std::optional<HostSpec> spec,
                                             const IslandSources& sources, const LibraryPlace& place) {
  static std::once_flag once;
  std::call_once(once, [] { shims::set_on_check_failed(&LibraryScope::on_check_failed); });
  if (spec) {
    if (Status status = check_march(spec->march); !status.ok()) return status;
  }
  auto image = sources.find(payload.library_key);
  if (!image) {
    return Status(ErrorCode::kProgram,
                  "expected the library under the key " + quoted(payload.library_key) +
                      ", got no such data; pass the .ptd files that were exported with it as data=");
  }
  std::span<const uint8_t> bytes(reinterpret_cast<const uint8_t*>(image->data()), image->size());
  auto library = Library::load(bytes, payload.library_key, place, payload.hashed);
  if (!library.ok()) return library.status();

  std::shared_ptr<Island> self(new Island());
  self->library_ = std::move(*library);
  self->spec_ = std::move(spec);
  self->device_ = sources.device;
  self->temporaries_ = sources.temporaries;
  if (self->device_ == nullptr) {
    Status status = self->open(payload, sources);
    return status.ok() ? Result<std::shared_ptr<Island>>(std::move(self)) : status;
  }
  if (Status status = self->check_architecture(); !status.ok()) return status;
  Status status = self->open(payload, sources);
  // What was enqueued uses memory that goes when this fails, and that other streams use when it does not.
  Status drained = drain(*self->device_, kPerThreadStream);
  if (!status.ok()) return status;
  if (!drained.ok()) return drained;
  return self;
}

Status Island::open(const AotiPayload& payload, const IslandSources& sources) {
  shims::Gpu gpu;
  std::optional<Current> current;
  if (device_ != nullptr) {
    gpu.driver = &this->gpu().driver();
    gpu.ordinal = device_->ordinal();
    gpu.owner = temporaries_.get();
    gpu.take = [](void* owner, size_t nbytes) { return static_cast<Temporaries*>(owner)->take(nbytes); };
    gpu.give = [](void* owner, void* data) { static_cast<Temporaries*>(owner)->give(data); };
    gpu.copied = [](void*, size_t to_device, size_t to_host) {
      thread_counts().bytes_to_device += static_cast<int64_t>(to_device);
      thread_counts().bytes_to_host += static_cast<int64_t>(to_host);
    };
    gpu.waited = [](void*) { ++thread_counts().synchronizations; };
    current.emplace(this->gpu());
    if (!current->ok()) return this->gpu().failed("load", current->code());
    temporaries_->begin(kPerThreadStream, false);
  }
  arena_ = shims::make_arena(device_ != nullptr ? &gpu : nullptr);
  if (arena_ == nullptr)
    return Status(ErrorCode::kOutOfDeviceMemory, "expected host memory, got none; free memory");
  LibraryScope now(arena_);
  void* stream = nullptr;
  if (device_ != nullptr) {
    shims::GpuRun run;
    run.stream = stream = reinterpret_cast<void*>(kPerThreadStream);
    run.events = true;
    shims::begin_gpu_run(arena_, run);
  }
  const LibraryCalls& calls = library_->calls();
  if (calls.create(&container_, 1, device_ != nullptr ? "cuda" : "cpu", nullptr) != 0) {
    container_ = nullptr;
    return failed("it made a container");
  }
  if (calls.num_inputs(container_, &num_inputs_) != 0 || calls.num_outputs(container_, &num_outputs_) != 0)
    return failed("it was asked for its inputs and outputs");
  if (spec_ && spec_->outputs.size() != num_outputs_) {
    return Status(ErrorCode::kProgram,
                  "compile spec 'headrace_host': expected the sizes of " + std::to_string(num_outputs_) +
                      " outputs, as the library has, got " + std::to_string(spec_->outputs.size()) +
                      "; the file is damaged, export it again");
  }
  if (spec_) {
    for (auto [input, dim] : spec_->symbols) {
      if (static_cast<size_t>(input) >= num_inputs_) {
        return Status(ErrorCode::kProgram, "compile spec 'headrace_host': expected symbols of " +
                                               std::to_string(num_inputs_) + " inputs, got one of input " +
                                               std::to_string(input) +
                                               "; the file is damaged, export it again");
      }
    }
  }
  Status bound = payload.blob_key.empty() ? bind(payload, sources) : bind_blob(payload, sources);
  if (!bound.ok()) return bound;
  // A library that computes none would print a warning.
  if (folds_ && calls.fold(container_, false, stream, nullptr) != 0) return failed("it computed constants");
  return {};
}

CudaDevice& Island::gpu() const { return static_cast<CudaDevice&>(*device_); }

// The driver would say no more than that there is no kernel image, and only when a kernel is wanted.
Status Island::check_architecture() const {
  const std::vector<GpuKernel>& kernels = facts().gpu_code;
  int major = 0, minor = 0;
  const cu::Driver& driver = gpu().driver();
  cu::Code code = driver.DeviceGetAttribute(&major, cu::kAttributeCapabilityMajor, gpu().device());
  if (code == cu::kSuccess)
    code = driver.DeviceGetAttribute(&minor, cu::kAttributeCapabilityMinor, gpu().device());
  if (code != cu::kSuccess) return gpu().failed("load", code);
  for (const GpuKernel& kernel : kernels) {
    bool runs = std::any_of(kernel.begin(), kernel.end(),
                            [&](const GpuCode& code) { return code.runs_on(major, minor); });
    if (runs) continue;
    std::string here = std::to_string(major) + std::to_string(minor);
    Status status(ErrorCode::kDelegateUnavailable,
                  "library: expected kernels that " + device_->name() +
                      " runs, a GPU of compute capability " + std::to_string(major) + "." +
                      std::to_string(minor) + " (sm_" + here + "), got some for " + gpu_code_names(kernels) +
                      "; export it with target=\"cuda:sm_" + here + "\"");
    status->device = device_->name();
    return status;
  }
  return {};
}

Status Island::bind(const AotiPayload& payload, const IslandSources& sources) {
  const LibraryCalls& calls = library_->calls();
  std::map<std::string, const AotiConstant*> by_fqn;
  for (const AotiConstant& c : payload.constants) by_fqn.emplace(c.fqn, &c);
  size_t count = 0;
  if (calls.num_constants(container_, &count) != 0) return failed("it was asked for its constants");
  std::vector<LibraryCalls::Constant> pairs;
  std::set<const AotiConstant*> seen;
  for (size_t i = 0; i < count; ++i) {
    const char* name = nullptr;
    const char* fqn = nullptr;
    bool folded = false;
    int32_t type = 0, dtype = 0;
    size_t nbytes = 0;
    if (calls.constant_folded(container_, i, &folded) != 0) return failed("it was asked for a constant");
    folds_ |= folded;
    if (folded) continue;
    if (calls.constant_name(container_, i, &name) != 0 || calls.constant_fqn(container_, i, &fqn) != 0 ||
        calls.constant_type(container_, i, &type) != 0 || calls.constant_dtype(container_, i, &dtype) != 0 ||
        calls.constant_nbytes(container_, i, &nbytes) != 0) {
      return failed("it was asked for a constant");
    }
    auto found = by_fqn.find(fqn);
    if (found == by_fqn.end()) found = by_fqn.find(name);
    std::string which = "constant " + quoted(fqn);
    if (found == by_fqn.end()) {
      return Status(ErrorCode::kProgram, which + ": expected it in the payload, got " +
                                             std::to_string(payload.constants.size()) +
                                             " others; the file is damaged, export it again");
    }
    const AotiConstant& c = *found->second;
    if (device_ == nullptr && c.device != 0) {
      return Status(ErrorCode::kProgram,
                    which + ": expected host memory (device 0) in a library for the host, got " + "device " +
                        std::to_string(c.device) + "; export it again");
    }
    if (static_cast<int32_t>(c.dtype) != dtype) {
      return Status(ErrorCode::kProgram, which + ": expected dtype number " + std::to_string(dtype) +
                                             ", as the library has, got " + dtype_name(c.dtype) +
                                             "; the file is damaged, export it again");
    }
    // The library counts whole steps of 64 bytes.
    if (nbytes > (c.nbytes + 63) / 64 * 64) {
      return Status(ErrorCode::kProgram, which + ": expected " + std::to_string(nbytes) +
                                             " bytes, as the library reads, got " + std::to_string(c.nbytes) +
                                             "; the file is damaged, export it again");
    }
    auto bytes = sources.find(c.key);
    if (!bytes || bytes->size() != c.nbytes) {
      return Status(ErrorCode::kProgram, which + ": expected " + std::to_string(c.nbytes) +
                                             " bytes under the key " + quoted(c.key) + ", got " +
                                             (bytes ? std::to_string(bytes->size()) : std::string("none")) +
                                             "; pass the .ptd files that were exported with it as data=");
    }
    // Nothing tells which buffers the library writes: each instance has its own, shared by its islands.
    bool state = type == kBuffer;
    // Keys are of contents, in which two buffers may be alike: each is one by its name.
    std::string key = state ? c.fqn + '\0' + c.key : c.key;
    void* data = nullptr;
    std::shared_ptr<void> held;
    if (c.device == 0) {
      auto constant =
          (state ? sources.state : sources.constants)->get(key, *bytes, state || !sources.lasting);
      if (!constant.ok()) return constant.status();
      data = (*constant)->data();
      held = std::move(*constant);
    } else {
      auto constant = (state ? sources.device_state : sources.device_constants)->get(device_, key, *bytes);
      if (!constant.ok()) return constant.status();
      data = (*constant)->data();
      held = std::move(*constant);
    }
    if (seen.insert(&c).second) {
      constants_.push_back(std::move(held));
      if (state && (c.device != 0 || device_ == nullptr)) state_.push_back({data, c.nbytes, true});
      // A graph cannot put host memory back to what it was.
      hides_state_ |= state && c.device == 0 && device_ != nullptr;
    }
    shims::Tensor* tensor = shims::borrow(
        arena_, data, c.nbytes, dtype, static_cast<int>(c.sizes.size()), c.sizes.data(), c.strides.data(),
        c.offset, c.device == 0 ? shims::kCpu : shims::kCuda, c.device == 0 ? 0 : device_->ordinal());
    if (tensor == nullptr)
      return Status(ErrorCode::kOutOfDeviceMemory, which + ": expected host memory, got none; free memory");
    pairs.push_back({name, tensor});
  }
  // What the library makes of them belongs to the arena, and ends with it.
  if (calls.bind(container_, pairs.data(), pairs.size(), false, true) != 0)
    return failed("its constants were bound");
  return {};
}

Status Island::bind_blob(const AotiPayload& payload, const IslandSources& sources) {
  const LibraryCalls& calls = library_->calls();
  size_t count = 0;
  uint64_t wanted = 0;
  if (calls.num_constants(container_, &count) != 0) return failed("it was asked for its constants");
  for (size_t i = 0; i < count; ++i) {
    bool folded = false;
    int32_t type = 0;
    size_t nbytes = 0;
    if (calls.constant_folded(container_, i, &folded) != 0 ||
        calls.constant_type(container_, i, &type) != 0 || calls.constant_nbytes(container_, i, &nbytes) != 0)
      return failed("it was asked for a constant");
    folds_ |= folded;
    if (folded) continue;
    hides_state_ |= type == kBuffer;
    if (__builtin_add_overflow(wanted, nbytes, &wanted))
      return Status(ErrorCode::kProgram, "expected constants that can be counted, got more; export it again");
  }
  if (wanted == 0) return {};
  uint64_t ignored = 0;
  // Asked whether it was compiled to take them so; another does nothing, and then reads what is not there.
  if (calls.bind_blob == nullptr || calls.blob_size == nullptr ||
      calls.blob_size(container_, &ignored) != 0) {
    return Status(
        ErrorCode::kProgram,
        "expected a library that takes its constants in one piece, as the payload has them, got one "
        "that does not; export it with executorch 1.5.1");
  }
  auto blob = sources.find(payload.blob_key);
  if (!blob || blob->size() < wanted) {
    return Status(ErrorCode::kProgram, "expected " + std::to_string(wanted) +
                                           " bytes of constants under the key " + quoted(payload.blob_key) +
                                           ", got " + (blob ? std::to_string(blob->size()) : "none") +
                                           "; pass the .ptd files that were exported with it as data=");
  }
  if (calls.bind_blob(container_, reinterpret_cast<const uint8_t*>(blob->data())) != 0)
    return failed("its constants were bound");
  return {};
}

Island::~Island() {
  std::optional<Current> current;
  std::optional<RelaxedScope> relaxed;
  if (device_ != nullptr) {
    current.emplace(gpu());
    if (!current->ok()) current.emplace(gpu());
    relaxed.emplace(*device_);
  }
  if (container_ != nullptr) {
    LibraryScope now(arena_);
    (void)library_->calls().destroy(container_);
  }
  shims::destroy_arena(arena_);
}

int64_t Island::allocations() const { return shims::counts(arena_).allocations; }
int64_t Island::launches() const { return shims::counts(arena_).launches; }

Result<std::vector<std::vector<int64_t>>> Island::output_sizes(std::span<const TensorView> inputs) const {
  std::vector<int64_t> symbols;
  for (size_t k = 0; k < spec_->symbols.size(); ++k) {
    auto [input, dim] = spec_->symbols[k];
    const TensorView& view = inputs[static_cast<size_t>(input)];
    if (dim >= view.ndim) {
      return Status(ErrorCode::kProgram,
                    "compile spec 'headrace_host', symbol " + quoted(spec_->symbol_names[k]) +
                        ": expected dimension " + std::to_string(dim) + " of input " + std::to_string(input) +
                        ", got " + describe(view) + "; the file is damaged, export it again");
    }
    symbols.push_back(view.sizes[static_cast<size_t>(dim)]);
  }
  std::vector<std::vector<int64_t>> out;
  for (const auto& dims : spec_->outputs) {
    auto& sizes = out.emplace_back();
    for (const SizeExpression& dim : dims) {
      auto size = dim.value(symbols);
      if (!size.ok()) {
        return Status(size.status().code(), "compile spec 'headrace_host', output " +
                                                std::to_string(out.size() - 1) + ": " +
                                                size.status().message());
      }
      sizes.push_back(*size);
    }
  }
  return out;
}

}  // namespace headrace
