// What a delegate has to do with graphs. A method is captured as one graph over all its islands
// (headrace/program.h, MethodGraph): it runs once as a warm-up, then it is walked while the stream of the
// call captures. A native delegate takes part by one object for each delegate that it loads:
//
//     headrace::take_part("CudaBackend", payload->data(), std::make_shared<MyCapture>(state));  // in init()
//
// Whoever does not is not captured, by name.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "headrace/block.h"
#include "headrace/device.h"

namespace headrace {

// What the calling thread's walk of a method is for.
enum class CaptureStage : uint8_t {
  kNone,     // a call
  kWarmUp,   // a run before a capture: caches are filled, everything that may be allocated or waited for is
  kCapture,  // the stream of the call captures: what is enqueued runs at replays, each time
};
HEADRACE_API CaptureStage capture_stage();

// One loaded delegate, asked by captures. Its functions are called while no call of its instance runs, on any
// thread, none while a stream of that thread captures. They do not wait for the device and do not throw.
class HEADRACE_API IslandCapture {
 public:
  virtual ~IslandCapture();
  // Empty, or why work of this island cannot be recorded and replayed: asked before anything is done.
  virtual std::string refusal() = 0;
  // Device memory that runs change and keep from call to call. A capture that fails puts its content back,
  // and a warm-up that has to be repeated starts from it. Other addresses at a later replay: a new capture.
  virtual std::vector<Access> state() { return {}; }
  // What a graph captured just now uses of the delegate's: kept until the graph is gone and its last launch
  // is done. Null: nothing that would not live as long as the delegate.
  virtual std::shared_ptr<void> pin() { return nullptr; }
};

// In init() of a backend, once for each delegate handle; false where no method of a Program is being loaded
// (the engine's own Module, say), which captures nothing. `payload` is where the bytes lie that init() was
// given.
HEADRACE_API bool take_part(const std::string& delegate, const void* payload,
                            std::shared_ptr<IslandCapture> part);

// In execute(), around a run: tells a warm-up which island allocated at the driver, so that a capture is
// refused by name.
class HEADRACE_API AllocationWatch {
 public:
  explicit AllocationWatch(int32_t instruction);
  ~AllocationWatch();
  AllocationWatch(const AllocationWatch&) = delete;
  AllocationWatch& operator=(const AllocationWatch&) = delete;

 private:
  int32_t instruction_;
  int64_t before_;
};

// Memory with a life of its own that recorded work uses: ordered before every replay, kept and marked by it.
// An event recorded in a capture could not say when. A warm-up keeps it until its end, so that there is as
// much as a graph will keep; in a call this does nothing.
HEADRACE_API void captured_use(BlockRef block, bool write);

}  // namespace headrace
