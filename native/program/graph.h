// What a capture of a method leaves behind, and the set of those that one Graph keeps.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "headrace/block.h"
#include "headrace/capture.h"
#include "headrace/device.h"
#include "headrace/program.h"
#include "program/allocator.h"
#include "program/pages.h"

namespace headrace {

class Instance;

// What one capture or replay was asked for.
struct Replay {
  Settled settled;
  PartitionRef partition;  // of the settled stream; null: none
  bool borrow = false;     // outputs are the graph's own memory
};

// What launches in flight use after their graph is gone, each with the event behind the latest. Thread-safe.
class Retired {
 public:
  void add(EventRef event, std::vector<std::shared_ptr<void>> keeps);
  // Lets go of what is done. Does not wait.
  void reap(Device& device);
  // Lets go of everything. Precondition: the work is done.
  void clear();

 private:
  std::mutex mutex_;
  std::vector<std::pair<EventRef, std::vector<std::shared_ptr<void>>>> kept_;
};

// What a capture bakes in (GR2): a graph is replayed for the very same alone.
struct GraphKey {
  std::vector<std::vector<int64_t>> shapes;  // of the inputs; empty for numbers
  uint64_t partition = 0;                    // DeviceObject::number(); 0: none
  uint64_t loads = 0;                        // of the method: its delegates are others after each
  std::vector<std::pair<const void*, size_t>> state;

  bool operator==(const GraphKey&) const = default;
  // What differs, for the counts of re-captures: "shapes", "partition", "delegates" or "state".
  const char* differs(const GraphKey& other) const;
};

// Memory of a graph's own for all that comes in and goes out, at addresses that never change. A method is
// walked over it: the engine reads and writes device values there, and its copies between host and device at
// the method's ends are turned into copies on the device.
class GraphMemory final : public GraphStaging {
 public:
  struct Input {
    BlockRef block;                      // null: no tensor
    std::unique_ptr<Pages> host;         // what the engine is shown of a host input; never read by the device
    const void* host_address = nullptr;  // where the engine's copy to the device starts from
    Value shown;                         // what a walk binds
  };
  struct Output {
    BlockRef block;
    std::unique_ptr<Pages> host;
    void* host_address = nullptr;  // where the engine's copy to the host ends
    size_t copied = 0;             // bytes that such a copy wrote to the block
    Value told;                    // kind, shape and dtype, or the number itself
  };
  std::vector<Input> inputs;
  std::vector<Output> outputs;

  Status to_device(void* to, const void* from, size_t nbytes, StreamHandle stream) override;
  Status to_host(void* to, const void* from, size_t nbytes, StreamHandle stream) override;
  size_t nbytes() const;

  DeviceRef device;
  std::string method;
};

// What one walk noticed.
struct WalkNotes {
  int64_t allocations = 0;                      // at the driver, while the engine ran
  std::vector<int32_t> allocating;              // islands that are known to have made them
  std::vector<std::pair<BlockRef, bool>> uses;  // captured_use()
};

// Tells the calling thread's delegates what a walk is for, and hears from them.
class StageScope {
 public:
  StageScope(CaptureStage stage, WalkNotes& notes);
  ~StageScope();
  StageScope(const StageScope&) = delete;
  StageScope& operator=(const StageScope&) = delete;
  static StageScope* current();
  CaptureStage stage() const { return stage_; }
  WalkNotes& notes() { return notes_; }

 private:
  CaptureStage stage_;
  WalkNotes& notes_;
  StageScope* outer_;
};

struct CapturedGraph {
  GraphKey key;
  PartitionRef partition;
  std::shared_ptr<Ring> ring;  // for the memory
  GraphMemory memory;
  std::vector<std::pair<BlockRef, bool>> uses;
  std::vector<std::shared_ptr<void>> pins;
  std::shared_ptr<std::atomic<uint64_t>> replays = std::make_shared<std::atomic<uint64_t>>(0);
  EventRef last;  // behind the latest launch
  GraphRef graph;
  GraphExecRef exec;  // the last member: executables go before graphs (LT4)
};

// The graphs of one method's instance behind one Graph object, most recently used first. Its functions take
// the instance's turn, so calls and replays of the instance run one after the other.
class GraphSet : public std::enable_shared_from_this<GraphSet> {
 public:
  GraphSet(std::shared_ptr<MethodPool> pool, size_t instance, int keep);
  ~GraphSet();
  GraphSet(const GraphSet&) = delete;
  GraphSet& operator=(const GraphSet&) = delete;

  // `must_capture`: the first one, where an error is the whole answer. Otherwise a replay.
  Status run(std::span<const Value> inputs, std::span<const Value> out, const ReplayOptions& options,
             bool must_capture, std::vector<Value>& outputs);
  GraphStats stats() const;
  Result<GraphWork> work();
  Status close();
  // For the pool that closes: the instance is idle and stays so.
  void drop();

 private:
  Status run_in_turn(Instance& instance, std::span<const Value> inputs, std::span<const Value> out,
                     const Replay& how, bool must_capture, std::vector<Value>& outputs);
  void retire(CapturedGraph& graph);
  void count_memory();

  const std::shared_ptr<MethodPool> pool_;
  const size_t instance_;
  const size_t keep_;
  std::shared_ptr<Ring> ring_;
  std::list<std::unique_ptr<CapturedGraph>> graphs_;
  GraphKey latest_;
  bool closed_ = false;
  mutable std::mutex mutex_;  // of the counts
  GraphStats stats_;
};

}  // namespace headrace
