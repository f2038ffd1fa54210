// The engine's one allocator for its CUDA slot, ours: memory and copies go to the device that the thread is
// bound to, on the stream of the call.
#pragma once

#include <span>
#include <vector>

#include "headrace/caller_stream.h"
#include "headrace/device_guard.h"

namespace headrace {

// Where copies between the host and the device go while a method is walked for a graph, which has memory of
// its own on the device for everything that comes in and goes out.
class GraphStaging {
 public:
  virtual ~GraphStaging() = default;
  virtual Status to_device(void* to, const void* from, size_t nbytes, StreamHandle stream) = 0;
  virtual Status to_host(void* to, const void* from, size_t nbytes, StreamHandle stream) = 0;
};

// What one execute tells the allocator and the delegates, and what they tell it back.
struct CallContext {
  std::vector<const void*> host_inputs;   // memory of inputs that lie on the host
  std::vector<const void*> host_outputs;  // memory of outputs on the host that no later instruction reads
  const std::vector<const void*>* overwritten = nullptr;  // host memory that the host writes after the copy
  bool staged_in = false;                                 // an input went from the host to the device
  bool staged_out = false;                                // an output comes from the device to the host
  bool host_reads = false;          // device work reads planned host memory, and may still run afterwards
  GraphStaging* staging = nullptr;  // of a walk for a graph
  Status failure;                   // why a copy or a delegate failed, in full
};

// The stream of a call in ExecuTorch's own caller-stream libraries, for delegates that read those (CS3).
class Mirror {
 public:
  Mirror() = default;
  ~Mirror();
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;
  Status begin(const Device& device, StreamHandle stream);

 private:
  headrace_mirror mirror_{};
};

// Registers the allocator with the engine. kEngine: somebody else's is there.
Status register_allocator();

}  // namespace headrace
