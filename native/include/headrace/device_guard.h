// Binds the calling thread to a device, for users of the engine's own `Module` and `Method`. ExecuTorch knows
// a device by type and index alone and has no stream in any interface; while a guard lives, device memory
// that the engine asks for, copies that it makes and delegates that run on this thread go to this device.
//
//     headrace::Result<headrace::DeviceRef> gpu = headrace::cuda_device(0);
//     if (!gpu.ok()) return gpu.status();
//     headrace::DeviceGuard guard(*gpu, stream);
//     if (!guard.status().ok()) return guard.status();
//     auto outputs = module.forward(inputs);
//
// headrace::Program needs none: its calls bind themselves.
//
// The stream. There is one selection, the thread's (caller_stream.h), and a guard adds none of its own: given
// a stream, it selects it as a CallerStreamGuard of that device would; given none, it leaves the selection as
// it is. Memory, copies and delegates go to the stream that is selected when they ask, the innermost guard's
// of either kind, and with none selected to the per-thread stream. So within a DeviceGuard a
// CallerStreamGuard changes the stream, and a DeviceGuard within a CallerStreamGuard the device. A selection
// that says that it is another device's is refused by whatever would use it.
//
// Waiting. The engine's interface knows synchronous copies only: each waits for its stream. A delegate may
// return with work in flight, whose results the caller waits for by Device::synchronize(stream). With no
// guard at all the engine's index is the GPU's, and the stream is found as above.
//
// Lifetime. Memory is given back to the device that it came from whatever guard lives then, once all work of
// that device is done; so a Module may be destroyed outside its guard. Some delegates want it inside.
//
// Threads. A guard belongs to the thread and scope that made it; guards nest, and end in reverse order.
// Neither copyable nor movable.
#pragma once

#include <memory>
#include <optional>

#include "headrace/caller_stream.h"
#include "headrace/device.h"

namespace headrace {

struct CallContext;
class Mirror;

class HEADRACE_API DeviceGuard {
 public:
  explicit DeviceGuard(DeviceRef device);
  // Handles 0, 1 and 2 are selections too. Does not wait.
  DeviceGuard(DeviceRef device, StreamHandle stream);
  // For headrace's own walk of a method, whose stream was settled: that one, whatever is selected meanwhile.
  DeviceGuard(DeviceRef device, StreamHandle stream, CallContext* call);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  // Whether the guard holds; where not, nothing is selected by it, and what the engine asks of it fails with
  // this. kDevice: no device, or a stream of another one; kInput: no stream; kEngine: as initialize(), or
  // ExecuTorch's own caller stream is in the process in a form in which none can be selected.
  Status status() const { return failure_ ? *failure_ : Status(); }

  // The innermost guard of the calling thread; null if there is none, or it does not hold.
  static const DeviceGuard* current();

  const DeviceRef& device() const { return device_; }
  // Where work goes now.
  StreamHandle stream() const;
  CallContext* call() const { return call_; }

 private:
  Status hold();
  DeviceRef device_;
  std::optional<StreamHandle> given_;
  CallContext* call_ = nullptr;
  std::unique_ptr<const Status> failure_;
  std::optional<CallerStreamGuard> selection_;
  std::unique_ptr<Mirror> mirror_;  // the stream in ExecuTorch's own library, for as long as the guard lives
  const DeviceGuard* outer_;
};

}  // namespace headrace
