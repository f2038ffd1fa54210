// Binds the calling thread to a device and a stream for as long as the guard lives. ExecuTorch knows a device
// by type and index alone and has no stream in any interface; while a guard lives, device memory that the
// engine asks for, and copies that it makes, go to this device, on this stream. For users of the engine's own
// `Module`:
//
//     headrace::DeviceGuard guard(headrace::cuda_device(0), stream);
//     auto result = module.forward(inputs);
//
// Guards nest. Not copyable or movable, for one thread.
#pragma once

#include "headrace/device.h"

namespace headrace {

struct CallContext;

class HEADRACE_API DeviceGuard {
 public:
  DeviceGuard(DeviceRef device, StreamHandle stream, CallContext* call = nullptr);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  // The innermost guard of the calling thread, or null.
  static const DeviceGuard* current();

  const DeviceRef& device() const { return device_; }
  StreamHandle stream() const { return stream_; }
  CallContext* call() const { return call_; }

 private:
  DeviceRef device_;
  StreamHandle stream_;
  CallContext* call_;
  const DeviceGuard* outer_;
};

}  // namespace headrace
