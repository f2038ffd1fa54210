// What surrounds one run of the engine: the calling thread bound to the device and the stream, for the
// engine's allocator, for delegates that read the thread's selection, and for the record.
#pragma once

#include <headrace/caller_stream.h>

#include <optional>

#include "device/record.h"
#include "headrace/device_guard.h"
#include "program/allocator.h"
#include "program/instance.h"

namespace headrace {

class Instance::Scope {
 public:
  // `ordered`: the work goes to a stream of a device. `named`: delegates are told the stream.
  Scope(Instance& self, StreamHandle stream, CallContext& context, bool ordered, bool named);
  Status begin();

 private:
  Instance& self_;
  StreamHandle stream_;
  bool ordered_, named_;
  DeviceGuard guard_;
  // Delegates of others read the thread's selection: for the length of the call it is the stream of the call.
  std::optional<CallerStreamGuard> selection_;
  Mirror mirror_;
  std::optional<record::CallScope> recorded_;
};

}  // namespace headrace
