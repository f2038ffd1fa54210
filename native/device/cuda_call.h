// Host functions of a CUDA device, and who is told of their failures: the driver carries none from them, and
// runs what is enqueued behind a failed one all the same.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "headrace/device.h"

namespace headrace {

// One function: enqueued once, or held by a graph and enqueued by each launch.
struct CudaCall {
  HostFunction function;
  std::string device;
  std::mutex mutex;
  int64_t pending = 0;  // times it is enqueued and has not run
  bool failed = false;
  Status failure;  // the first that nobody was told of
};
using CudaCallRef = std::shared_ptr<CudaCall>;

// A stream as far as host functions go: the per-thread stream is another one in each thread.
struct CudaStreamKey {
  StreamHandle handle;
  uint64_t thread;
  auto operator<=>(const CudaStreamKey&) const = default;
};
CudaStreamKey stream_key(StreamHandle stream);

// Which calls are behind what. Work is ordered as the seam was asked to order it (streams, events, launches);
// order that others make is not known here. Until a device's first host function everything returns at once.
class CudaCalls {
 public:
  // cuLaunchHostFunc's callback and its argument: run_once owns the argument, run_again borrows it.
  static void run_once(void* call);   // CudaCallRef*
  static void run_again(void* call);  // CudaCall*

  bool any() const { return any_.load(std::memory_order_acquire); }
  // `calls` were enqueued on the stream.
  void enqueued(const CudaStreamKey& stream, std::span<const CudaCallRef> calls);
  // They were not, after all.
  static void withdrawn(std::span<const CudaCallRef> calls);
  void recorded(const CudaStreamKey& stream, std::vector<CudaCallRef>& event);
  void waited(const CudaStreamKey& stream, const std::vector<CudaCallRef>& event);
  void destroyed(const CudaStreamKey& stream);

  // After a wait: the first failure among what ran before it, once.
  Status tell(const CudaStreamKey& stream);
  Status tell(std::vector<CudaCallRef>& event);
  Status tell_all();

  // Functions that have run, to be destroyed by the caller, who holds no lock and is in no host function: the
  // driver's thread must not, since what they own may be memory of the device.
  std::vector<HostFunction> take_done();

 private:
  static Status tell_of(std::vector<CudaCallRef>& calls);
  std::atomic<bool> any_{false};
  std::mutex mutex_;
  std::map<CudaStreamKey, std::vector<CudaCallRef>> behind_;
};

}  // namespace headrace
