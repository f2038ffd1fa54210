// One AOTInductor island of one instance of a method: a library's container with its constants, and how a
// call of it is put on a stream.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/constants.h"
#include "cuda/host_spec.h"
#include "cuda/library.h"
#include "cuda/temporaries.h"
#include "headrace/device.h"
#include "headrace/tensor.h"
#include "program/aoti_payload.h"

namespace headrace {

namespace shims {
struct Arena;
struct Placement;
struct Tensor;
struct View;
}  // namespace shims
class CudaDevice;

// Where an island finds what its payload names, and what it shares with others.
struct IslandSources {
  std::function<std::optional<std::string_view>(const std::string& key)> find;
  bool lasting = false;  // what `find` gives lives as long as the island; else only while it is loaded
  HostConstants* constants = nullptr;  // of the program
  HostConstants* state = nullptr;      // of the instance
  // Of a library for CUDA: the GPU, and the same in its memory. Null: a library for the host.
  DeviceRef device;
  DeviceConstants* device_constants = nullptr;
  DeviceConstants* device_state = nullptr;
  std::shared_ptr<Temporaries> temporaries;  // of the instance, on `device`
};

// What a run on a GPU is for.
enum class GpuRunKind : uint8_t {
  kCall,
  kReplayed,  // a capture, or the warm-up of one: host memory may take no part
};

class Island {
 public:
  // Loads the library, makes a container, binds the constants and folds those that are computed from others:
  // runs the library's code. On a GPU it waits for what that enqueued. kProgram, kDelegateUnavailable,
  // kDelegate, kDevice, kOutOfDeviceMemory.
  static Result<std::shared_ptr<Island>> load(const AotiPayload& payload, std::optional<HostSpec> spec,
                                              const IslandSources& sources, const LibraryPlace& place);
  // No work of it may be under way.
  ~Island();
  Island(const Island&) = delete;
  Island& operator=(const Island&) = delete;

  size_t num_inputs() const { return num_inputs_; }
  size_t num_outputs() const { return num_outputs_; }
  const LibraryFacts& facts() const { return library_->facts(); }
  // Memory that calls write and later calls read.
  const std::vector<Access>& state() const { return state_; }
  // Whether it keeps state that state() cannot tell, inside its container.
  bool hides_state() const { return hides_state_; }
  // Whether the sizes of the outputs can be told from those of the inputs.
  bool knows_sizes() const { return spec_.has_value() && spec_->outputs.size() == num_outputs_; }
  // Those sizes. Precondition: knows_sizes(). kInput.
  Result<std::vector<std::vector<int64_t>>> output_sizes(std::span<const TensorView> inputs) const;

  // `place` is told the sizes of each output as the library made it, and says where it goes: a view on dense
  // memory, in the dimension order given.
  struct Target {
    TensorView view;
    const uint8_t* dim_order = nullptr;
    bool fixed = false;  // it has these sizes and this order in every run
  };
  using Place = std::function<Result<Target>(size_t output, const TensorView& made)>;

  // Runs the library on host memory, on the calling thread, to its end. One call at a time. kDelegate: the
  // library failed, or `place` did.
  Status run(std::span<const TensorView> inputs, const Place& place);

  // Of a library for CUDA: enqueues a run on `stream`, whose work is ordered behind that of the run before;
  // does not wait. One call at a time. The memory of an output, `targets`, is where `place` will say it is,
  // or null: the library may then use it while it runs. kDelegate, kDevice, kOutOfDeviceMemory; kCapture
  // where the stream captures.
  Status run_on_gpu(std::span<const TensorView> inputs, std::span<void* const> targets, StreamHandle stream,
                    GpuRunKind kind, const Place& place);
  // Of a library for CUDA, whose inputs always have these sizes: everything that a run does but for what it
  // enqueues, so that the first call finds kernels and memory there. The memory of `inputs` is not looked at.
  // kDelegateUnavailable: the GPU cannot run a kernel. A library that cannot be rehearsed is no failure.
  Status rehearse(std::span<const TensorView> inputs);

  // Allocations of host memory for temporaries since the island was loaded; a steady state makes none.
  int64_t allocations() const;
  // Kernels launched since then.
  int64_t launches() const;

 private:
  Island() = default;
  Status open(const AotiPayload& payload, const IslandSources& sources);
  Status bind(const AotiPayload& payload, const IslandSources& sources);
  Status bind_blob(const AotiPayload& payload, const IslandSources& sources);
  Status check_architecture() const;
  // The library's own words for what it refused to do while `what`, and what to do about it.
  static Status library_failed(const char* what, const std::string& said);
  Status failed(const char* what) const;
  CudaDevice& gpu() const;
  // The library's answer to one run, its outputs in `made`.
  struct RunTensors;
  // Runs the library on `tensors.given`, which borrow() made, and leaves what it made in `tensors.made`.
  Status call(RunTensors& tensors, StreamHandle stream);
  // False where there is no host memory.
  bool borrow(std::span<const TensorView> inputs, RunTensors& tensors) const;

  // Where the library makes its outputs: the request for memory that becomes each, in every run whose inputs
  // have these sizes.
  struct Made {
    std::vector<int64_t> sizes;  // of all inputs
    struct Output {
      int64_t ordinal = -1;  // -1: none does
      size_t nbytes = 0;
      // What the library made, once it was right as it stood: the target's own memory, sizes and order. A
      // target that is fixed need not be asked for again.
      bool settled = false;
      int32_t dtype = 0, device_type = 0;
      int ndim = 0;
      std::array<int64_t, kMaxDims> sizes{}, strides{};
    };
    std::vector<Output> outputs;
  };
  static void settle(Made::Output& output, const shims::View& made);
  static bool as_settled(const shims::View& made, const Made::Output& output);
  void learn(std::span<const TensorView> inputs, std::span<shims::Tensor* const> made);
  // What can lie in `targets` from the start.
  void place_outputs(std::span<const TensorView> inputs, std::span<void* const> targets);

  std::shared_ptr<Library> library_;  // first: it ends last
  DeviceRef device_;                  // null: a library for the host
  std::shared_ptr<Temporaries> temporaries_;
  std::optional<HostSpec> spec_;
  std::vector<std::shared_ptr<void>> constants_;
  std::vector<Access> state_;
  bool hides_state_ = false;
  shims::Arena* arena_ = nullptr;
  void* container_ = nullptr;
  size_t num_inputs_ = 0, num_outputs_ = 0;
  bool folds_ = false;  // some constants are computed from others
  bool kernels_loaded_ = false;
  std::optional<Made> made_;
  std::vector<shims::Placement> placements_;  // of the run that goes on
};

}  // namespace headrace
