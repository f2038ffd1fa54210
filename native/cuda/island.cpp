#include "cuda/island.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <set>
#include <stdexcept>

#include "cuda/shims.h"
#include "device/cuda.h"
#include "headrace/block.h"
#include "program/layout.h"
#include "program/text.h"

namespace headrace {

namespace {

// A check of the library's own that failed while the calling thread ran it.
thread_local std::string failed_check;
// The same, on a thread of OpenMP: how many, and what the last one said. They cannot be told from those of a
// call that runs beside, and a call that may have failed has.
std::mutex elsewhere_mutex;
int64_t failures_elsewhere = 0;
std::string failed_elsewhere;

int64_t count_elsewhere() {
  std::lock_guard lock(elsewhere_mutex);
  return failures_elsewhere;
}

// Whether the calling thread is inside Island::run.
thread_local bool inside = false;

// An exception would end the process on its way out of a parallel region.
bool in_parallel_region() {
  static auto* function = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "omp_in_parallel"));
  static auto* ours = [] {
    void* gomp = dlopen("libgomp.so.1", RTLD_LAZY | RTLD_NOLOAD);
    return gomp == nullptr ? nullptr : reinterpret_cast<int (*)()>(dlsym(gomp, "omp_in_parallel"));
  }();
  auto* ask = ours != nullptr ? ours : function;
  return ask != nullptr && ask() != 0;
}

void on_check_failed(const char* message, bool may_throw) {
  if (!inside) {
    std::lock_guard lock(elsewhere_mutex);
    ++failures_elsewhere;
    failed_elsewhere = message;
    return;
  }
  if (failed_check.empty()) failed_check = message;
  // The library turns it into an error code, in its own frame.
  if (may_throw && !in_parallel_region()) throw std::runtime_error(message);
}

// Of the kinds of constant that a library has, by torch 2.13's aoti_runtime/constant_type.h.
constexpr int32_t kBuffer = 2;

// The thread's arena is ours while this lives.
class Inside {
 public:
  explicit Inside(shims::Arena* arena) : former_(shims::exchange_arena(arena)), former_inside_(inside) {
    inside = true;
    failed_check.clear();
    shims::begin_run();
  }
  ~Inside() {
    shims::exchange_arena(former_);
    inside = former_inside_;
  }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  shims::Arena* former_;
  bool former_inside_;
};

}  // namespace

Status Island::failed(const char* what) const {
  const char* text = nullptr;
  std::string said;
  if (library_->calls().last_error(&text) == 0 && text != nullptr) said = text;
  std::string shim = shims::take_error();
  if (!shim.empty() && said.find(shim) == std::string::npos) said = said.empty() ? shim : shim + "; " + said;
  if (said.empty()) said = "no reason given";
  std::string where = std::string("the library failed while ") + what + ": ";
  if (device_ == nullptr) return Status(ErrorCode::kDelegate, where + said);
  // What the device said is told as that; the library knows a text alone.
  Status why = temporaries_->failure();
  if (int32_t code = shims::counts(arena_).code; why.ok() && code != 0) why = gpu().failed("run", code);
  if (why.ok()) return Status(ErrorCode::kDelegate, where + said);
  ErrorCode code =
      shims::counts(arena_).code == cu::kNoBinaryForGpu ? ErrorCode::kDelegateUnavailable : why.code();
  Status status(code, where + why.message());
  status.device = device_->name();
  status.log.push_back(said);
  return status;
}

Result<std::shared_ptr<Island>> Island::load(const CudaPayload& payload, std::optional<HostSpec> spec,
                                             const IslandSources& sources, const LibraryPlace& place) {
  static std::once_flag once;
  std::call_once(once, [] { shims::set_on_check_failed(&on_check_failed); });
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

Status Island::open(const CudaPayload& payload, const IslandSources& sources) {
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
  if (arena_ == nullptr) return Status(ErrorCode::kOutOfDeviceMemory, "expected host memory, got none");
  Inside now(arena_);
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
    status.device = device_->name();
    return status;
  }
  return {};
}

Status Island::bind(const CudaPayload& payload, const IslandSources& sources) {
  const LibraryCalls& calls = library_->calls();
  std::map<std::string, const CudaConstant*> by_fqn;
  for (const CudaConstant& c : payload.constants) by_fqn.emplace(c.fqn, &c);
  size_t count = 0;
  if (calls.num_constants(container_, &count) != 0) return failed("it was asked for its constants");
  std::vector<LibraryCalls::Constant> pairs;
  std::set<const CudaConstant*> seen;
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
    const CudaConstant& c = *found->second;
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
    void* data = nullptr;
    std::shared_ptr<void> held;
    if (c.device == 0) {
      auto constant =
          (state ? sources.state : sources.constants)->get(c.key, *bytes, state || !sources.lasting);
      if (!constant.ok()) return constant.status();
      data = (*constant)->data();
      held = std::move(*constant);
    } else {
      auto constant = (state ? sources.device_state : sources.device_constants)->get(device_, c.key, *bytes);
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
      return Status(ErrorCode::kOutOfDeviceMemory, which + ": expected host memory, got none");
    pairs.push_back({name, tensor});
  }
  // What the library makes of them belongs to the arena, and ends with it.
  if (calls.bind(container_, pairs.data(), pairs.size(), false, true) != 0)
    return failed("its constants were bound");
  return {};
}

Status Island::bind_blob(const CudaPayload& payload, const IslandSources& sources) {
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
    Inside now(arena_);
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
      return Status(ErrorCode::kProgram, "compile spec 'headrace_host', symbol " +
                                             quoted(spec_->symbol_names[k]) + ": expected dimension " +
                                             std::to_string(dim) + " of input " + std::to_string(input) +
                                             ", got " + describe(view));
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

namespace {

// The tensors of one run, ended with it.
struct RunTensors {
  std::vector<shims::Tensor*> given, made, replaced;
  explicit RunTensors(size_t outputs) : made(outputs, nullptr) {}
  ~RunTensors() {
    made.insert(made.end(), replaced.begin(), replaced.end());
    std::sort(made.begin(), made.end());
    made.erase(std::unique(made.begin(), made.end()), made.end());
    for (shims::Tensor* t : made) shims::release(t);
    for (shims::Tensor* t : given) shims::end_borrow(t);
  }
  RunTensors(const RunTensors&) = delete;
  RunTensors& operator=(const RunTensors&) = delete;
};

TensorView view_of_made(const shims::View& from) {
  TensorView view;
  view.data = from.data;
  view.dtype = static_cast<DType>(from.dtype);
  view.ndim = from.ndim;
  auto width = static_cast<int64_t>(itemsize(view.dtype));
  for (size_t d = 0; d < static_cast<size_t>(from.ndim); ++d) {
    view.sizes[d] = from.sizes[d];
    view.strides_bytes[d] = from.strides[d] * width;
  }
  return view;
}

Status check_made(size_t i, const TensorView& made, int32_t device_type, int32_t wanted_type,
                  const TensorView& to) {
  bool same = to.dtype == made.dtype && to.ndim == made.ndim &&
              std::equal(made.sizes.begin(), made.sizes.begin() + made.ndim, to.sizes.begin());
  if (same && device_type == wanted_type) return {};
  const char* where = wanted_type == shims::kCpu ? " in host memory" : " in device memory";
  const char* is = device_type == shims::kCpu ? " in host memory" : " in device memory";
  return Status(ErrorCode::kDelegate, "output " + std::to_string(i) + ": expected " + describe(to) + where +
                                          ", got " + describe(made) + is +
                                          " from the library; export the program again");
}

bool meet(const void* a, size_t a_nbytes, const void* b, size_t b_nbytes) {
  const auto *p = static_cast<const char*>(a), *q = static_cast<const char*>(b);
  return p < q + b_nbytes && q < p + a_nbytes;
}

}  // namespace

Status Island::borrow(std::span<const TensorView> inputs, std::vector<shims::Tensor*>& given) const {
  for (const TensorView& view : inputs) {
    std::array<int64_t, kMaxDims> strides;
    auto width = static_cast<int64_t>(itemsize(view.dtype));
    for (size_t d = 0; d < static_cast<size_t>(view.ndim); ++d) strides[d] = view.strides_bytes[d] / width;
    shims::Tensor* tensor =
        shims::borrow(arena_, view.data, view.nbytes(), static_cast<int32_t>(view.dtype), view.ndim,
                      view.sizes.data(), strides.data(), 0, device_ != nullptr ? shims::kCuda : shims::kCpu,
                      device_ != nullptr ? device_->ordinal() : 0);
    if (tensor == nullptr)
      return Status(ErrorCode::kOutOfDeviceMemory, "expected host memory for a call, got none");
    given.push_back(tensor);
  }
  return {};
}

Status Island::call(std::vector<shims::Tensor*>& inputs, StreamHandle stream,
                    std::vector<shims::Tensor*>& made) {
  std::vector<shims::Tensor*> taken = inputs;  // the library writes into the array
  int64_t before = count_elsewhere();
  int code = 0;
  try {
    code = library_->calls().run(container_, taken.data(), taken.size(), made.data(), made.size(),
                                 reinterpret_cast<void*>(stream), nullptr);
  } catch (const std::exception& error) {
    // AOTInductor's own functions let none out; the engine must not meet one.
    std::fill(made.begin(), made.end(), nullptr);
    return Status(ErrorCode::kDelegate, std::string("the library failed while it ran: ") + error.what());
  }
  if (code != 0 || (device_ != nullptr && shims::counts(arena_).code != 0)) {
    if (code != 0) std::fill(made.begin(), made.end(), nullptr);
    return failed("it ran");
  }
  std::string check = failed_check;
  if (check.empty() && count_elsewhere() != before) {
    std::lock_guard lock(elsewhere_mutex);
    check = failed_elsewhere;
  }
  if (!check.empty()) return Status(ErrorCode::kDelegate, "the library failed while it ran: " + check);
  for (size_t i = 0; i < made.size(); ++i) {
    if (made[i] == nullptr) {
      return Status(ErrorCode::kDelegate, "output " + std::to_string(i) + ": expected a tensor, got none");
    }
  }
  return {};
}

Status Island::run(std::span<const TensorView> inputs, const Place& place) {
  Inside now(arena_);
  RunTensors tensors(num_outputs_);
  if (Status status = borrow(inputs, tensors.given); !status.ok()) return status;
  if (Status status = call(tensors.given, 0, tensors.made); !status.ok()) return status;
  for (size_t i = 0; i < tensors.made.size(); ++i) {
    shims::View from = shims::view(tensors.made[i]);
    TensorView view = view_of_made(from);
    auto target = place(i, view);
    if (!target.ok()) return target.status();
    const TensorView& to = target->view;
    if (Status status = check_made(i, view, from.device_type, shims::kCpu, to); !status.ok()) return status;
    if (view.nbytes() != 0) repack(view, target->dim_order, to.data);
  }
  return {};
}

// ---- on a GPU

void Island::learn(std::span<const TensorView> inputs, std::span<shims::Tensor* const> made) {
  Made found;
  for (const TensorView& view : inputs)
    found.sizes.insert(found.sizes.end(), view.sizes.begin(), view.sizes.begin() + view.ndim);
  for (shims::Tensor* t : made) {
    shims::View view = shims::view(t);
    Made::Output output;
    bool again = std::any_of(found.outputs.begin(), found.outputs.end(),
                             [&](const Made::Output& o) { return o.ordinal == view.ordinal; });
    // Storage that the output fills and shares with no other.
    if (view.ordinal >= 0 && view.whole && !again && view.storage_nbytes == view_of_made(view).nbytes())
      output = {view.ordinal, view.storage_nbytes};
    found.outputs.push_back(output);
  }
  made_ = std::move(found);
}

void Island::place_outputs(std::span<const TensorView> inputs, std::span<void* const> targets) {
  placements_.clear();
  if (!made_) return;
  size_t at = 0;
  for (const TensorView& view : inputs) {
    for (size_t d = 0; d < static_cast<size_t>(view.ndim); ++d, ++at) {
      if (at >= made_->sizes.size() || made_->sizes[at] != view.sizes[d]) return made_.reset();
    }
  }
  if (at != made_->sizes.size()) return made_.reset();
  for (size_t i = 0; i < targets.size(); ++i) {
    const Made::Output& output = made_->outputs[i];
    auto* data = static_cast<char*>(targets[i]);
    // Kernels are compiled for memory aligned to 16 bytes, as an allocation is.
    if (output.ordinal < 0 || output.nbytes == 0 || data == nullptr ||
        reinterpret_cast<uintptr_t>(data) % 16 != 0)
      continue;
    bool free = true;
    for (const TensorView& view : inputs) free = free && !meet(data, output.nbytes, view.data, view.nbytes());
    for (size_t k = 0; k < targets.size(); ++k) {
      if (k != i && targets[k] != nullptr)
        free = free && !meet(data, output.nbytes, targets[k], std::max<size_t>(made_->outputs[k].nbytes, 1));
    }
    if (free) placements_.push_back({output.ordinal, output.nbytes, data});
  }
}

Status Island::rehearse(std::span<const TensorView> inputs) {
  Current current(gpu());
  if (!current.ok()) return gpu().failed("load", current.code());
  Inside now(arena_);
  temporaries_->begin(kPerThreadStream, true);
  shims::GpuRun run;
  run.stream = reinterpret_cast<void*>(kPerThreadStream);
  run.rehearsal = true;
  shims::begin_gpu_run(arena_, run);
  RunTensors tensors(num_outputs_);
  if (Status status = borrow(inputs, tensors.given); !status.ok()) return status;
  std::lock_guard lock(library_->first_run());
  Status status = call(tensors.given, kPerThreadStream, tensors.made);
  if (status.ok()) {
    kernels_loaded_ = true;
    learn(inputs, tensors.made);
    return {};
  }
  bool device = shims::counts(arena_).code != 0 || !temporaries_->failure().ok();
  return device ? status : Status();
}

Status Island::run_on_gpu(std::span<const TensorView> inputs, std::span<void* const> targets,
                          StreamHandle stream, GpuRunKind kind, const Place& place) {
  Current current(gpu());
  if (!current.ok()) return gpu().failed("run", current.code());
  Inside now(arena_);
  bool replayed = kind == GpuRunKind::kReplayed;
  temporaries_->begin(stream, replayed);
  place_outputs(inputs, targets);
  shims::GpuRun run;
  run.stream = reinterpret_cast<void*>(stream);
  run.replayed = replayed;
  run.placements = placements_.data();
  run.num_placements = placements_.size();
  shims::begin_gpu_run(arena_, run);
  RunTensors tensors(num_outputs_);
  if (Status status = borrow(inputs, tensors.given); !status.ok()) return status;
  {
    std::unique_lock lock(library_->first_run(), std::defer_lock);
    if (!kernels_loaded_) lock.lock();
    if (Status status = call(tensors.given, stream, tensors.made); !status.ok()) return status;
    kernels_loaded_ = true;
  }
  if (!made_) learn(inputs, tensors.made);

  struct Copy {
    size_t output;
    TensorView to;
    std::array<int64_t, kMaxDims> strides;
  };
  std::vector<Copy> copies;
  for (size_t i = 0; i < tensors.made.size(); ++i) {
    shims::View from = shims::view(tensors.made[i]);
    TensorView view = view_of_made(from);
    auto target = place(i, view);
    if (!target.ok()) return target.status();
    const TensorView& to = target->view;
    if (Status status = check_made(i, view, from.device_type, shims::kCuda, to); !status.ok()) return status;
    if (view.nbytes() == 0) continue;
    std::array<int32_t, kMaxDims> sizes{}, dense{};
    for (size_t d = 0; d < static_cast<size_t>(to.ndim); ++d) sizes[d] = static_cast<int32_t>(to.sizes[d]);
    dense_strides(to.ndim, sizes.data(), target->dim_order, dense.data());
    if (from.data == to.data && is_dense(view, dense.data())) continue;
    Copy copy{i, to, {}};
    std::copy(dense.begin(), dense.end(), copy.strides.begin());
    copies.push_back(copy);
  }
  // A copy must not write what it, or another one, has yet to read. Where requests for memory came in another
  // order than before, that may lie in a target.
  for (const Copy& copy : copies) {
    for (const Copy& other : copies) {
      shims::View from = shims::view(tensors.made[other.output]);
      if (!meet(copy.to.data, copy.to.nbytes(), from.data, from.storage_nbytes)) continue;
      shims::Tensor* apart = shims::clone(tensors.made[other.output]);
      if (apart == nullptr) return failed("its outputs were copied");
      tensors.replaced.push_back(std::exchange(tensors.made[other.output], apart));
    }
  }
  for (const Copy& copy : copies) {
    if (!shims::copy_on_device(tensors.made[copy.output], copy.to.data, copy.strides.data()))
      return failed("its outputs were copied");
  }
  return {};
}

}  // namespace headrace
