// Device memory for the temporaries of AOTInductor islands: taken and given back by libraries as they go,
// kept in between, so that a steady state allocates nothing.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "headrace/block.h"
#include "headrace/device.h"

namespace headrace {

// The islands of one instance of a method share one: their calls follow each other in stream order, so memory
// that one has done with serves the next, on whichever stream, at once. One run at a time; what an island
// holds for good may be given back meanwhile, on any thread.
//
// A block serves requests up to its size. Where none that waits is large enough, a new one takes the place of
// the largest that waits; but not while a graph uses them, or is about to.
class Temporaries {
 public:
  explicit Temporaries(DeviceRef device);
  Temporaries(const Temporaries&) = delete;
  Temporaries& operator=(const Temporaries&) = delete;

  const DeviceRef& device() const { return device_; }
  // What is taken from now on is for work on `stream`. `keep`: no block is let go of.
  void begin(StreamHandle stream, bool keep);
  // Null: it could not be had, and failure() says why.
  void* take(size_t nbytes);
  void give(void* data);
  // Why the last take() since begin() failed.
  const Status& failure() const { return failure_; }
  // No block goes while it lives.
  std::shared_ptr<void> pin();
  // Bytes of all blocks.
  size_t nbytes() const { return ring_->nbytes(); }

 private:
  const DeviceRef device_;
  const std::shared_ptr<Ring> ring_;
  std::mutex mutex_;  // of the two below
  std::vector<BlockRef> waiting_, taken_;
  std::shared_ptr<std::atomic<int>> pins_ = std::make_shared<std::atomic<int>>(0);
  StreamHandle stream_ = kPerThreadStream;
  bool keep_ = false;
  Status failure_;
};

}  // namespace headrace
