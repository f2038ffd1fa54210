// Runs of an island: what goes into its library and what becomes of what it made, on the host and on a GPU.
#include <algorithm>
#include <array>
#include <bit>
#include <span>
#include <stdexcept>
#include <vector>

#include "cuda/island.h"
#include "cuda/library_scope.h"
#include "cuda/shims.h"
#include "device/cuda.h"
#include "program/layout.h"
#include "program/text.h"

namespace headrace {

// The tensors of one run, ended with it. The lists of a few take no memory but their own.
struct Island::RunTensors {
 private:
  std::array<shims::Tensor*, 24> room_;
  std::vector<shims::Tensor*> more_;

 public:
  std::span<shims::Tensor*> given, taken, made;
  size_t num_given = 0;
  std::vector<shims::Tensor*> replaced;

  RunTensors(size_t inputs, size_t outputs) {
    shims::Tensor** at = room_.data();
    if (2 * inputs + outputs > room_.size()) {
      more_.resize(2 * inputs + outputs);
      at = more_.data();
    }
    given = {at, inputs};
    taken = {at + inputs, inputs};
    made = {at + 2 * inputs, outputs};
    std::fill(made.begin(), made.end(), nullptr);
  }
  ~RunTensors() {
    std::span<shims::Tensor*> ended = made;
    if (!replaced.empty()) {
      replaced.insert(replaced.end(), made.begin(), made.end());
      ended = replaced;
    }
    // A library may give one tensor as several outputs.
    if (ended.size() > 1) {
      std::sort(ended.begin(), ended.end());
      ended = {ended.begin(), std::unique(ended.begin(), ended.end())};
    }
    for (shims::Tensor* t : ended) shims::release(t);
    for (size_t i = 0; i < num_given; ++i) shims::end_borrow(given[i]);
  }
  RunTensors(const RunTensors&) = delete;
  RunTensors& operator=(const RunTensors&) = delete;
};

namespace {

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

Status no_host_memory() {
  return Status(ErrorCode::kOutOfDeviceMemory, "expected host memory for a call, got none; free memory");
}

bool meet(const void* a, size_t a_nbytes, const void* b, size_t b_nbytes) {
  const auto *p = static_cast<const char*>(a), *q = static_cast<const char*>(b);
  return p < q + b_nbytes && q < p + a_nbytes;
}

}  // namespace

bool Island::borrow(std::span<const TensorView> inputs, RunTensors& tensors) const {
  for (const TensorView& view : inputs) {
    std::array<int64_t, kMaxDims> strides;
    // Widths are powers of two; a division takes as long as the rest of the loop several times over.
    int shift = std::countr_zero(itemsize(view.dtype));
    for (size_t d = 0; d < static_cast<size_t>(view.ndim); ++d) strides[d] = view.strides_bytes[d] >> shift;
    shims::Tensor* tensor =
        shims::borrow(arena_, view.data, view.nbytes(), static_cast<int32_t>(view.dtype), view.ndim,
                      view.sizes.data(), strides.data(), 0, device_ != nullptr ? shims::kCuda : shims::kCpu,
                      device_ != nullptr ? device_->ordinal() : 0);
    if (tensor == nullptr) return false;
    tensors.given[tensors.num_given++] = tensor;
  }
  return true;
}

Status Island::call(RunTensors& tensors, StreamHandle stream) {
  std::span taken = tensors.taken, made = tensors.made;
  std::copy(tensors.given.begin(), tensors.given.end(), taken.begin());  // the library writes into the array
  int64_t before = LibraryScope::failures_elsewhere();
  int code = 0;
  try {
    code = library_->calls().run(container_, taken.data(), taken.size(), made.data(), made.size(),
                                 reinterpret_cast<void*>(stream), nullptr);
  } catch (const std::exception& error) {
    // AOTInductor's own functions let none out; the engine must not meet one.
    std::fill(made.begin(), made.end(), nullptr);
    return library_failed("it ran", error.what());
  }
  if (code != 0 || (device_ != nullptr && shims::counts(arena_).code != 0)) {
    if (code != 0) std::fill(made.begin(), made.end(), nullptr);
    return failed("it ran");
  }
  std::string check = LibraryScope::failed_check(before);
  if (!check.empty()) return library_failed("it ran", check);
  for (size_t i = 0; i < made.size(); ++i) {
    if (made[i] == nullptr) {
      return Status(ErrorCode::kDelegate,
                    "output " + std::to_string(i) + ": expected a tensor, got none; export it again");
    }
  }
  return {};
}

Status Island::run(std::span<const TensorView> inputs, const Place& place) {
  LibraryScope now(arena_);
  RunTensors tensors(inputs.size(), num_outputs_);
  if (!borrow(inputs, tensors)) return no_host_memory();
  if (Status status = call(tensors, 0); !status.ok()) return status;
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
  LibraryScope now(arena_);
  temporaries_->begin(kPerThreadStream, true);
  shims::GpuRun run;
  run.stream = reinterpret_cast<void*>(kPerThreadStream);
  run.rehearsal = true;
  shims::begin_gpu_run(arena_, run);
  RunTensors tensors(inputs.size(), num_outputs_);
  if (!borrow(inputs, tensors)) return no_host_memory();
  std::lock_guard lock(library_->first_run());
  Status status = call(tensors, kPerThreadStream);
  // What the pool gave it is there in the order of this thread's stream, and the first call has another.
  if (Status waited = drain(*device_, kPerThreadStream); !waited.ok()) return waited;
  if (status.ok()) {
    kernels_loaded_ = true;
    learn(inputs, tensors.made);
    return {};
  }
  bool device = shims::counts(arena_).code != 0 || !temporaries_->failure().ok();
  return device ? status : Status();
}

bool Island::as_settled(const shims::View& made, const Made::Output& output) {
  return output.settled && made.dtype == output.dtype && made.device_type == output.device_type &&
         made.ndim == output.ndim && std::equal(made.sizes, made.sizes + made.ndim, output.sizes.begin()) &&
         std::equal(made.strides, made.strides + made.ndim, output.strides.begin());
}

void Island::settle(Made::Output& output, const shims::View& made) {
  output.settled = true;
  output.dtype = made.dtype;
  output.device_type = made.device_type;
  output.ndim = made.ndim;
  std::copy(made.sizes, made.sizes + made.ndim, output.sizes.begin());
  std::copy(made.strides, made.strides + made.ndim, output.strides.begin());
}

Status Island::run_on_gpu(std::span<const TensorView> inputs, std::span<void* const> targets,
                          StreamHandle stream, GpuRunKind kind, const Place& place) {
  Current current(gpu());
  if (!current.ok()) return gpu().failed("run", current.code());
  LibraryScope now(arena_);
  bool replayed = kind == GpuRunKind::kReplayed;
  temporaries_->begin(stream, replayed);
  place_outputs(inputs, targets);
  shims::GpuRun run;
  run.stream = reinterpret_cast<void*>(stream);
  run.replayed = replayed;
  run.placements = placements_.data();
  run.num_placements = placements_.size();
  shims::begin_gpu_run(arena_, run);
  RunTensors tensors(inputs.size(), num_outputs_);
  if (!borrow(inputs, tensors)) return no_host_memory();
  {
    std::unique_lock lock(library_->first_run(), std::defer_lock);
    if (!kernels_loaded_) lock.lock();
    if (Status status = call(tensors, stream); !status.ok()) return status;
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
    Made::Output& known = made_->outputs[i];
    if (from.data == targets[i] && as_settled(from, known)) continue;
    TensorView view = view_of_made(from);
    auto target = place(i, view);
    if (!target.ok()) return target.status();
    const TensorView& to = target->view;
    if (Status status = check_made(i, view, from.device_type, shims::kCuda, to); !status.ok()) return status;
    if (view.nbytes() == 0) continue;
    std::array<int32_t, kMaxDims> sizes{}, dense{};
    for (size_t d = 0; d < static_cast<size_t>(to.ndim); ++d) sizes[d] = static_cast<int32_t>(to.sizes[d]);
    dense_strides(to.ndim, sizes.data(), target->dim_order, dense.data());
    if (from.data == to.data && is_dense(view, dense.data())) {
      if (target->fixed) settle(known, from);
      continue;
    }
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
