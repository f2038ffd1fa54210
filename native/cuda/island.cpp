#include "cuda/island.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <set>
#include <stdexcept>

#include "cuda/shims.h"
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
  return Status(ErrorCode::kDelegate, std::string("the library failed while ") + what + ": " + said);
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
  auto library = Library::load(bytes, payload.library_key, place);
  if (!library.ok()) return library.status();

  std::shared_ptr<Island> self(new Island());
  self->library_ = std::move(*library);
  self->spec_ = std::move(spec);
  self->arena_ = shims::make_arena();
  if (self->arena_ == nullptr) return Status(ErrorCode::kOutOfDeviceMemory, "expected host memory, got none");
  Inside now(self->arena_);
  const LibraryCalls& calls = self->library_->calls();
  if (calls.create(&self->container_, 1, "cpu", nullptr) != 0) {
    self->container_ = nullptr;
    return self->failed("it made a container");
  }
  if (calls.num_inputs(self->container_, &self->num_inputs_) != 0 ||
      calls.num_outputs(self->container_, &self->num_outputs_) != 0) {
    return self->failed("it was asked for its inputs and outputs");
  }
  if (self->spec_ && self->spec_->outputs.size() != self->num_outputs_) {
    return Status(ErrorCode::kProgram,
                  "compile spec 'headrace_host': expected the sizes of " +
                      std::to_string(self->num_outputs_) + " outputs, as the library has, got " +
                      std::to_string(self->spec_->outputs.size()) + "; the file is damaged, export it again");
  }
  if (self->spec_) {
    for (auto [input, dim] : self->spec_->symbols) {
      if (static_cast<size_t>(input) >= self->num_inputs_) {
        return Status(ErrorCode::kProgram, "compile spec 'headrace_host': expected symbols of " +
                                               std::to_string(self->num_inputs_) +
                                               " inputs, got one of input " + std::to_string(input) +
                                               "; the file is damaged, export it again");
      }
    }
  }
  if (Status status = self->bind(payload, sources); !status.ok()) return status;
  // A library that computes none would print a warning.
  if (self->folds_ && calls.fold(self->container_, false, nullptr, nullptr) != 0)
    return self->failed("it computed constants");
  return self;
}

Status Island::bind(const CudaPayload& payload, const IslandSources& sources) {
  const LibraryCalls& calls = library_->calls();
  std::map<std::string, const CudaConstant*> by_fqn;
  for (const CudaConstant& c : payload.constants) by_fqn.emplace(c.fqn, &c);
  size_t count = 0;
  if (calls.num_constants(container_, &count) != 0) return failed("it was asked for its constants");
  std::vector<LibraryCalls::Constant> pairs;
  std::set<const CudaConstant*> seen;
  // Those that the library has, by torch 2.13's aoti_runtime/constant_type.h.
  constexpr int32_t kBuffer = 2;
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
    if (c.device != 0) {
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
    auto constant =
        (state ? sources.state : sources.constants)->get(c.key, *bytes, state || !sources.lasting);
    if (!constant.ok()) return constant.status();
    if (seen.insert(&c).second) (state ? state_ : constants_).push_back(*constant);
    shims::Tensor* tensor =
        shims::borrow(arena_, (*constant)->data(), c.nbytes, dtype, static_cast<int>(c.sizes.size()),
                      c.sizes.data(), c.strides.data(), c.offset, shims::kCpu, 0);
    if (tensor == nullptr)
      return Status(ErrorCode::kOutOfDeviceMemory, which + ": expected host memory, got none");
    pairs.push_back({name, tensor});
  }
  // What the library makes of them belongs to the arena, and ends with it.
  if (calls.bind(container_, pairs.data(), pairs.size(), false, true) != 0)
    return failed("its constants were bound");
  return {};
}

Island::~Island() {
  if (container_ != nullptr) {
    Inside now(arena_);
    (void)library_->calls().destroy(container_);
  }
  shims::destroy_arena(arena_);
}

int64_t Island::allocations() const { return shims::counts(arena_).allocations; }

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

Status Island::run(std::span<const TensorView> inputs, const Place& place) {
  Inside now(arena_);
  std::vector<shims::Tensor*> given, taken, made(num_outputs_, nullptr);
  struct End {
    std::vector<shims::Tensor*>& given;
    std::vector<shims::Tensor*>& made;
    ~End() {
      std::sort(made.begin(), made.end());
      made.erase(std::unique(made.begin(), made.end()), made.end());
      for (shims::Tensor* t : made) shims::release(t);
      for (shims::Tensor* t : given) shims::end_borrow(t);
    }
  } end{given, made};
  for (const TensorView& view : inputs) {
    std::array<int64_t, kMaxDims> strides;
    auto width = static_cast<int64_t>(itemsize(view.dtype));
    for (size_t d = 0; d < static_cast<size_t>(view.ndim); ++d) strides[d] = view.strides_bytes[d] / width;
    shims::Tensor* tensor = shims::borrow(arena_, view.data, view.nbytes(), static_cast<int32_t>(view.dtype),
                                          view.ndim, view.sizes.data(), strides.data(), 0, shims::kCpu, 0);
    if (tensor == nullptr)
      return Status(ErrorCode::kOutOfDeviceMemory, "expected host memory for a call, got none");
    given.push_back(tensor);
  }
  taken = given;  // the library writes into the array
  int64_t before = count_elsewhere();
  int code = 0;
  try {
    code = library_->calls().run(container_, taken.data(), taken.size(), made.data(), made.size(), nullptr,
                                 nullptr);
  } catch (const std::exception& error) {
    // AOTInductor's own functions let none out; the engine must not meet one.
    std::fill(made.begin(), made.end(), nullptr);
    return Status(ErrorCode::kDelegate, std::string("the library failed while it ran: ") + error.what());
  }
  if (code != 0) {
    std::fill(made.begin(), made.end(), nullptr);
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
    shims::View from = shims::view(made[i]);
    TensorView view;
    view.data = from.data;
    view.dtype = static_cast<DType>(from.dtype);
    view.ndim = from.ndim;
    auto width = static_cast<int64_t>(itemsize(view.dtype));
    for (size_t d = 0; d < static_cast<size_t>(from.ndim); ++d) {
      view.sizes[d] = from.sizes[d];
      view.strides_bytes[d] = from.strides[d] * width;
    }
    auto target = place(i, view);
    if (!target.ok()) return target.status();
    const TensorView& to = target->view;
    bool same = to.dtype == view.dtype && to.ndim == view.ndim &&
                std::equal(view.sizes.begin(), view.sizes.begin() + view.ndim, to.sizes.begin());
    if (!same || from.device_type != shims::kCpu) {
      return Status(ErrorCode::kDelegate, "output " + std::to_string(i) + ": expected " + describe(to) +
                                              " in host memory, got " + describe(view) +
                                              " from the library; export the program again");
    }
    if (view.nbytes() != 0) repack(view, target->dim_order, to.data);
  }
  return {};
}

}  // namespace headrace
