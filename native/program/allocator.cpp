#include "program/allocator.h"

#include <executorch/runtime/core/device_allocator.h>

#include <algorithm>
#include <array>

#include "headrace/program.h"
#include "program/backend.h"

namespace headrace {

namespace et = executorch::runtime;

namespace {

thread_local const DeviceGuard* innermost = nullptr;

bool holds(const std::vector<const void*>& list, const void* address) {
  return std::find(list.begin(), list.end(), address) != list.end();
}

// Where work of the calling thread goes that no call has a stream for: never to the legacy stream unless that
// was selected (SY2, OR1).
StreamHandle selected_for(const Device& device) {
  headrace_selection now = headrace_get_selection();
  if (device.backend() == Backend::kCpu || now.selected == 0) return kPerThreadStream;
  return reinterpret_cast<StreamHandle>(now.stream);
}

class Allocator final : public et::DeviceAllocator {
 public:
  et::Result<void*> allocate(size_t nbytes, et::etensor::DeviceIndex index, size_t) override {
    auto bound = resolve(nullptr, index);
    if (!bound.ok()) return tell(bound.status(), et::Error::NotFound);
    auto data = (*bound).device->allocate(nbytes, (*bound).stream);
    if (!data.ok()) return tell(data.status(), et::Error::MemoryAllocationFailed);
    return *data;
  }

  void deallocate(void* data, et::etensor::DeviceIndex) override {
    // Whichever thread frees, and whatever it is bound to: the address tells the device. Nothing tells which
    // work still uses the memory.
    DeviceRef device = device_of(data);
    if (device == nullptr || !device->synchronize().ok()) return;
    (void)device->free(data, kPerThreadStream);
  }

  et::Error copy_host_to_device(void* to, const void* from, size_t nbytes,
                                et::etensor::DeviceIndex index) override {
    auto bound = resolve(to, index);
    if (!bound.ok()) return tell(bound.status(), et::Error::NotFound);
    auto& [device, stream, call] = *bound;
    if (call != nullptr && call->staging != nullptr) {
      Status status = call->staging->to_device(to, from, nbytes, stream);
      return status.ok() ? et::Error::Ok : tell(std::move(status), et::Error::Internal);
    }
    if (Status status = device->copy(to, from, nbytes, stream); !status.ok())
      return tell(std::move(status), et::Error::Internal);
    if (call == nullptr) return finish(*device, stream);
    (holds(call->host_inputs, from) ? call->staged_in : call->host_reads) = true;
    // The host writes there next, in this very call.
    if (call->overwritten != nullptr && holds(*call->overwritten, from)) return finish(*device, stream);
    return et::Error::Ok;
  }

  et::Error copy_device_to_host(void* to, const void* from, size_t nbytes,
                                et::etensor::DeviceIndex index) override {
    auto bound = resolve(from, index);
    if (!bound.ok()) return tell(bound.status(), et::Error::NotFound);
    auto& [device, stream, call] = *bound;
    if (call != nullptr && call->staging != nullptr) {
      Status status = call->staging->to_host(to, from, nbytes, stream);
      return status.ok() ? et::Error::Ok : tell(std::move(status), et::Error::Internal);
    }
    if (Status status = device->copy(to, from, nbytes, stream); !status.ok())
      return tell(std::move(status), et::Error::Internal);
    // An output is waited for once, at the end of the call. Anything else is read by the host next.
    if (call != nullptr && holds(call->host_outputs, to)) {
      call->staged_out = true;
      return et::Error::Ok;
    }
    return finish(*device, stream);
  }

  et::etensor::DeviceType device_type() const override { return et::etensor::DeviceType::CUDA; }

 private:
  struct Bound {
    DeviceRef device;
    StreamHandle stream = kPerThreadStream;
    CallContext* call = nullptr;
  };

  Result<Bound> resolve(const void* address, et::etensor::DeviceIndex index) {
    Bound bound;
    if (innermost != nullptr) {
      if (Status status = innermost->status(); !status.ok()) return status;
      bound = {innermost->device(), innermost->stream(), innermost->call()};
      if (bound.call != nullptr) return bound;
    } else if (DeviceRef device = address ? device_of(address) : nullptr) {
      bound = {device, selected_for(*device), nullptr};
    } else {
      auto gpu = cuda_device(index);
      if (!gpu.ok()) return gpu.status();
      bound = {*gpu, selected_for(**gpu), nullptr};
    }
    headrace_selection now = headrace_get_selection();
    bool said = bound.device->backend() != Backend::kCpu && now.selected != 0 && now.device != -1;
    if (!said || now.device == bound.device->id()) return bound;
    Status status(ErrorCode::kDevice,
                  "memory of " + bound.device->name() + ": expected a stream of it, got one of " +
                      device_name_of(now.device, bound.device->name()) +
                      " selected; select a stream of the device that the thread is bound to");
    status->device = bound.device->name();
    return status;
  }

  et::Error finish(Device& device, StreamHandle stream) {
    Status status = device.synchronize(stream);
    return status.ok() ? et::Error::Ok : tell(std::move(status), et::Error::Internal);
  }
};

}  // namespace

Mirror::~Mirror() { headrace_mirror_end(&mirror_); }

Status Mirror::begin(const Device& device, StreamHandle stream) {
  const headrace_selection selection{reinterpret_cast<cudaStream_t>(stream), device.id(), 1};
  if (headrace_mirror_begin(&mirror_, selection) >= 0) return {};
  std::array<char, 4096> file{};
  (void)headrace_find_unmirrored(file.data(), file.size());
  return Status(
      ErrorCode::kEngine,
      std::string(file.data()) +
          ": expected ExecuTorch's caller stream as its releases 1.4 and 1.5 have it, got one "
          "in which no stream can be selected from outside; delegates that read it would run elsewhere: "
          "remove that library, or use its version for executorch 1.5.1");
}

DeviceGuard::DeviceGuard(DeviceRef device) : device_(std::move(device)), outer_(innermost) {
  if (Status status = hold(); !status.ok()) failure_ = std::make_unique<const Status>(std::move(status));
  innermost = this;
}

DeviceGuard::DeviceGuard(DeviceRef device, StreamHandle stream)
    : device_(std::move(device)), outer_(innermost) {
  given_ = stream;
  if (Status status = hold(); !status.ok()) failure_ = std::make_unique<const Status>(std::move(status));
  // From here on the selection says which: a guard within this one may select another.
  given_.reset();
  innermost = this;
}

DeviceGuard::DeviceGuard(DeviceRef device, StreamHandle stream, CallContext* call)
    : device_(std::move(device)), given_(stream), call_(call), outer_(innermost) {
  innermost = this;
}

DeviceGuard::~DeviceGuard() { innermost = outer_; }

Status DeviceGuard::hold() {
  if (Status status = initialize(); !status.ok()) return status;
  if (device_ == nullptr) {
    return Status(
        ErrorCode::kDevice,
        "DeviceGuard: expected a device, got none; look at the Result of cuda_device() before using it");
  }
  if (!given_) return {};
  if (Status status = device_->check_stream(*given_); !status.ok()) return status;
  if (device_->backend() == Backend::kCuda) {
    mirror_ = std::make_unique<Mirror>();
    if (Status status = mirror_->begin(*device_, *given_); !status.ok()) return status;
  }
  selection_.emplace(reinterpret_cast<cudaStream_t>(*given_), device_->id());
  return {};
}

StreamHandle DeviceGuard::stream() const {
  if (given_) return *given_;
  return device_ == nullptr ? kPerThreadStream : selected_for(*device_);
}

const DeviceGuard* DeviceGuard::current() {
  return innermost != nullptr && innermost->failure_ == nullptr ? innermost : nullptr;
}

Status register_allocator() {
  static Allocator* ours = nullptr;
  et::DeviceAllocator* there = et::get_device_allocator(et::etensor::DeviceType::CUDA);
  if (there != nullptr && there != ours) {
    return Status(
        ErrorCode::kEngine,
        "expected no allocator for CUDA memory in the engine, got another library's; a build of ExecuTorch "
        "with its own CUDA backend is loaded in this process: use the stock wheel of the package index");
  }
  if (there == nullptr) {
    ours = new Allocator();  // the registry keeps it for the life of the process
    et::register_device_allocator(ours);
  }
  return {};
}

}  // namespace headrace
