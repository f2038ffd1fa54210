#include "program/allocator.h"

#include <executorch/runtime/core/device_allocator.h>

#include <algorithm>

#include "program/backend.h"

namespace headrace {

namespace et = executorch::runtime;

namespace {

thread_local const DeviceGuard* innermost = nullptr;

bool holds(const std::vector<const void*>& list, const void* address) {
  return std::find(list.begin(), list.end(), address) != list.end();
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
    StreamHandle stream;
    CallContext* call;
  };

  Result<Bound> resolve(const void* address, et::etensor::DeviceIndex index) {
    if (innermost != nullptr) return Bound{innermost->device(), innermost->stream(), innermost->call()};
    if (DeviceRef device = address ? device_of(address) : nullptr)
      return Bound{device, kLegacyStream, nullptr};
    return Status(ErrorCode::kDevice,
                  "cuda:" + std::to_string(index) +
                      ": expected a thread bound to a device (headrace::DeviceGuard), got none");
  }

  et::Error finish(Device& device, StreamHandle stream) {
    Status status = device.synchronize(stream);
    return status.ok() ? et::Error::Ok : tell(std::move(status), et::Error::Internal);
  }
};

}  // namespace

DeviceGuard::DeviceGuard(DeviceRef device, StreamHandle stream, CallContext* call)
    : device_(std::move(device)), stream_(stream), call_(call), outer_(innermost) {
  innermost = this;
}
DeviceGuard::~DeviceGuard() { innermost = outer_; }
const DeviceGuard* DeviceGuard::current() { return innermost; }

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
