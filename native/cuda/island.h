// One AOTInductor island of one instance of a method: a library's container with its constants, and how a
// call of it is put on a stream.
#pragma once

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
#include "headrace/device.h"
#include "headrace/tensor.h"
#include "program/cuda_payload.h"

namespace headrace {

namespace shims {
struct Arena;
}

// Where an island finds what its payload names.
struct IslandSources {
  std::function<std::optional<std::string_view>(const std::string& key)> find;
  bool lasting = false;  // what `find` gives lives as long as the island; else only while it is loaded
  HostConstants* constants = nullptr;  // of the program
  HostConstants* state = nullptr;      // of the instance
};

class Island {
 public:
  // Loads the library, makes a container, binds the constants and folds those that are computed from others:
  // runs the library's code. kProgram, kDelegateUnavailable, kDelegate, kOutOfDeviceMemory.
  static Result<std::shared_ptr<Island>> load(const CudaPayload& payload, std::optional<HostSpec> spec,
                                              const IslandSources& sources, const LibraryPlace& place);
  // No work of it may be under way.
  ~Island();
  Island(const Island&) = delete;
  Island& operator=(const Island&) = delete;

  size_t num_inputs() const { return num_inputs_; }
  size_t num_outputs() const { return num_outputs_; }
  // Memory that calls write and later calls read.
  const std::vector<std::shared_ptr<HostConstant>>& state() const { return state_; }
  // Whether the sizes of the outputs can be told from those of the inputs.
  bool knows_sizes() const { return spec_.has_value() && spec_->outputs.size() == num_outputs_; }
  // Those sizes. Precondition: knows_sizes(). kInput.
  Result<std::vector<std::vector<int64_t>>> output_sizes(std::span<const TensorView> inputs) const;

  // Runs the library on host memory, on the calling thread, to its end. One call at a time.
  //
  // `place` is told the sizes of each output as the library made it, and says where it goes: a view on dense
  // memory, in the dimension order given. kDelegate: the library failed, or `place` did.
  struct Target {
    TensorView view;
    const uint8_t* dim_order = nullptr;
  };
  using Place = std::function<Result<Target>(size_t output, const TensorView& made)>;
  Status run(std::span<const TensorView> inputs, const Place& place);

  // Allocations of host memory for temporaries since the island was loaded; a steady state makes none.
  int64_t allocations() const;

 private:
  Island() = default;
  Status bind(const CudaPayload& payload, const IslandSources& sources);
  Status failed(const char* what) const;

  std::shared_ptr<Library> library_;  // first: it ends last
  std::optional<HostSpec> spec_;
  std::vector<std::shared_ptr<HostConstant>> constants_, state_;
  shims::Arena* arena_ = nullptr;
  void* container_ = nullptr;
  size_t num_inputs_ = 0, num_outputs_ = 0;
  bool folds_ = false;  // some constants are computed from others
};

}  // namespace headrace
