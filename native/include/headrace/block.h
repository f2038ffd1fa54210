// Memory that outlives the call that filled it: outputs, staging, whatever a Buffer shows. A block knows the
// work that still uses it, so it may be dropped and taken again with that work in flight.
//
// Threads: everything here may be used from any thread, except that a scope belongs to the thread and the
// block of code that made it. Waiting: Block::wait() and drain() wait on the host, and nothing else does.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "headrace/device.h"

namespace headrace {

class Ring;

// Host functions may not call a device, and a thread that captures may not free, yet a language run time may
// drop its objects there, since a collector runs where it likes. `work` runs at once, or, from inside a host
// function or a PutOffScope, at the next run_put_off() outside, which every call of a method and every
// binding begins with.
HEADRACE_API void put_off(std::function<void()> work);
HEADRACE_API void run_put_off();

// What put_off() is given by the calling thread waits for as long as it lives: around a capture.
class HEADRACE_API PutOffScope {
 public:
  PutOffScope();
  ~PutOffScope();
  PutOffScope(const PutOffScope&) = delete;
  PutOffScope& operator=(const PutOffScope&) = delete;
  // Whether the calling thread is in one.
  static bool active();
};

// The calling thread's captures, whoever began them, do not forbid calls while it lives: not even on objects
// that have nothing to do with them would it be allowed to wait, allocate or free otherwise (measured).
class HEADRACE_API RelaxedScope {
 public:
  explicit RelaxedScope(Device& device);
  ~RelaxedScope();
  RelaxedScope(const RelaxedScope&) = delete;
  RelaxedScope& operator=(const RelaxedScope&) = delete;

 private:
  Device* device_;  // null: there is nothing to relax
  CaptureMode former_ = CaptureMode::kGlobal;
};

// Waits until nothing on the stream is under way any more, also where a wait fails, so that memory may go.
// What failed there is returned.
HEADRACE_API Status drain(Device& device, StreamHandle stream);

// Memory lent by a graph is right until the next replay writes there.
struct Lease {
  std::shared_ptr<const std::atomic<uint64_t>> replays;  // null: not lent
  uint64_t number = 0;                                   // of the replay that wrote it
  bool ended() const { return replays != nullptr && *replays != number; }
};

// Thread-safe. Ownership: a shared_ptr<Block> keeps the memory; the last one gives it back to its ring.
class HEADRACE_API Block {
 public:
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  void* data() const { return data_; }
  size_t capacity() const { return capacity_; }
  // Null for host memory that no device knows.
  const DeviceRef& device() const { return device_; }

  // `event` comes after work that writes (or only reads) the block. It stands for `behind` too, which that
  // work was ordered behind.
  void used(EventRef event, bool write, const EventRef& behind = {});
  // Orders `stream` behind the writer; behind the readers too if the work to come writes. It is behind
  // `behind` already.
  Status order(StreamHandle stream, bool write, const EventRef& behind = {});
  // Waits on the host for the writer (and the readers, if the host is going to write). Host blocks: at once.
  Status wait(bool write);
  // The block's content failed to be written, and who waited for it could tell nobody: the next wait() says
  // so.
  void lost(const Status& status);

 private:
  friend class Ring;
  Block(DeviceRef device, void* data, size_t capacity);
  std::vector<EventRef> events(bool write) const;
  DeviceRef device_;
  void* data_;
  size_t capacity_;
  mutable std::mutex mutex_;
  EventRef writer_;
  Status lost_;
  std::vector<EventRef> readers_;
};
using BlockRef = std::shared_ptr<Block>;

// A cache of blocks on one device (null: host memory). A block that was dropped waits here for the next
// taker; the ring itself lives until its last block is gone.
class HEADRACE_API Ring : public std::enable_shared_from_this<Ring> {
 public:
  explicit Ring(DeviceRef device) : device_(std::move(device)) {}
  ~Ring();
  // At least `nbytes`, 64-byte aligned, ordered on `stream` behind whatever used the memory before. The ring
  // allocates when none waits. kOutOfDeviceMemory.
  Result<BlockRef> take(size_t nbytes, StreamHandle stream, const EventRef& behind = {});
  // Bytes of all blocks, in use or waiting.
  size_t nbytes() const;
  // Gives back the blocks that wait.
  void trim();
  // And keeps none from now on.
  void close();

 private:
  void give(Block* block);
  static void release(Block* block);
  static constexpr size_t kMaxWaiting = 16;  // a caller who keeps 1,000 outputs and drops them gets most back
  DeviceRef device_;
  mutable std::mutex mutex_;
  std::vector<Block*> waiting_;
  size_t nbytes_ = 0;
  bool closed_ = false;
};

// Events that can be recorded again once nobody looks at them: a steady-state call creates none.
class HEADRACE_API EventPool {
 public:
  Result<EventRef> take(Device& device);

 private:
  std::mutex mutex_;
  std::vector<EventRef> events_;
  size_t next_ = 0;
};

}  // namespace headrace
