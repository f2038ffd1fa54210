// The CUDA device, put together: memory, streams, events, capture and partitions are in files of their own
// (cuda_memory.cpp and so on), host functions in cuda_call.h.
//
// A device retains its primary context when it is opened and keeps it, as it keeps its pool, until the
// process ends: contexts are the driver's, made once for the process, and a destructor that runs at exit
// would meet a driver that is gone. Everything else is given back.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "device/address_map.h"
#include "device/cuda_call.h"
#include "device/driver.h"
#include "headrace/device.h"

namespace headrace {

inline cu::Stream raw(StreamHandle stream) { return reinterpret_cast<cu::Stream>(stream); }

// What must not end before work in flight does.
using Keep = std::vector<std::shared_ptr<void>>;

class CudaDevice;

// Puts the device's primary context in place on the calling thread, and what was there back at its end. A
// green context is replaced too: while one is current the per-thread handle is invalid (measured).
class HEADRACE_API Current {
 public:
  explicit Current(const CudaDevice& device);
  ~Current();
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  bool ok() const { return code_ == cu::kSuccess; }
  cu::Code code() const { return code_; }

 private:
  const cu::Driver& driver_;
  cu::Code code_;
  bool pushed_ = false;
};

// Lets the calling thread make calls that its captures forbid, for our own bookkeeping. The driver is right
// to forbid them for work that belongs to a capture; what this is used for never does. Needs a Current.
class Relaxed {
 public:
  explicit Relaxed(const cu::Driver& driver);
  ~Relaxed();
  Relaxed(const Relaxed&) = delete;
  Relaxed& operator=(const Relaxed&) = delete;

 private:
  const cu::Driver& driver_;
  int mode_ = cu::kCaptureRelaxed;
};

class CudaEvent final : public Event {
 public:
  CudaEvent(const CudaDevice& device, cu::Event event, bool timing);
  ~CudaEvent() override;
  const cu::Event event;
  const bool timing;
  std::atomic<bool> recorded{false};
  std::atomic<bool> captured{false};  // the latest record belongs to a capture
  std::vector<CudaCallRef> calls;     // guarded by the device's CudaCalls

 private:
  const CudaDevice& device_;
};

class CudaGraph final : public Graph {
 public:
  CudaGraph(const CudaDevice& device, cu::Graph graph, Keep keep, std::vector<CudaCallRef> calls);
  ~CudaGraph() override;
  const cu::Graph graph;
  const Keep keep;
  const std::vector<CudaCallRef> calls;

 private:
  const CudaDevice& device_;
};

class CudaGraphExec final : public GraphExec {
 public:
  CudaGraphExec(CudaDevice& device, cu::GraphExec exec, Keep keep, std::vector<CudaCallRef> calls);
  ~CudaGraphExec() override;
  const cu::GraphExec exec;
  const Keep keep;
  const std::vector<CudaCallRef> calls;
  std::mutex mutex;                 // CUDA: graph objects are not thread-safe
  std::shared_ptr<CudaEvent> last;  // behind the latest launch, where there is something to keep

 private:
  CudaDevice& device_;
};

// The SMs of a device in the smallest groups that the driver makes, from one split for the process. Groups of
// one split may be put together in one context, and no group is given twice.
class CudaSms {
 public:
  struct Groups {
    std::vector<size_t> indices;  // the last index stands for what the split left over
    int sm_count = 0;
  };
  explicit CudaSms(const CudaDevice& device) : device_(device) {}
  // What the driver says of the whole device.
  SmLimits limits() const;
  // Takes groups for all the sizes, or for none of them: `left` SMs are free then.
  Result<std::vector<Groups>> take(std::span<const int> sms, int* left);
  void give(const Groups& groups);
  std::vector<cu::Resource> resources(const Groups& groups) const;

 private:
  Status split();
  const CudaDevice& device_;
  mutable std::mutex mutex_;
  std::vector<cu::Resource> groups_;  // immutable once split
  std::vector<bool> used_;
};

// A stream that was destroyed by its owner and waits for the next one.
struct RestingStream {
  cu::Stream stream = nullptr;
  bool blocking = false;
  int priority = 0;
};

class CudaPartition final : public Partition {
 public:
  CudaPartition(CudaDevice& device, CudaSms::Groups sms, const PartitionOptions& options);
  ~CudaPartition() override;
  int sm_count() const override { return sm_count_; }
  std::optional<int> workqueue_concurrency_limit() const override { return workqueue_limit_; }
  Status close() override;
  bool closed() const override { return closed_; }
  // Makes the context. Nothing is left behind by a failure.
  Status open();
  cu::GreenContext context() const { return context_; }
  // Under the device's lock of streams. They end with the partition.
  std::vector<RestingStream> resting;

 private:
  // Why there is no context of what was asked for.
  Status cannot_open(const char* entry, cu::Code code) const;
  // After the context was made: what it has.
  Status read_back();

  CudaDevice& device_;
  const CudaSms::Groups groups_;
  const PartitionOptions options_;
  cu::GreenContext context_ = nullptr;
  int sm_count_ = 0;
  std::optional<int> workqueue_limit_;
  std::atomic<bool> closed_{false};
};

// Who else uses a GPU, as far as green contexts depend on it.
struct GpuSharing {
  std::string gpu;  // its name
  bool mps = false;
  bool mig = false;
};
GpuSharing gpu_sharing(const cu::Driver& driver, cu::Device device);

// Why a GPU is not split into green contexts, after that entry point of the driver refused: "got; what to do"
// in two parts.
struct CannotSplit {
  std::string got;
  const char* advice;
};
CannotSplit cannot_split(const cu::Driver& driver, cu::Device device, const char* entry, cu::Code code);
// Why the driver's version has no workqueues for green contexts; empty: it should.
std::string missing_for_workqueues(const cu::Driver& driver);

class CudaDevice final : public Device {
 public:
  static Result<DeviceRef> open(int ordinal);
  ~CudaDevice() override;

  const cu::Driver& driver() const { return driver_; }
  cu::Device device() const { return device_; }
  cu::Context primary() const { return primary_; }
  CudaSms& sms() { return sms_; }

  // What went wrong, typed: out of memory, a capture's rule, a handle that is none, the device itself.
  HEADRACE_API Status failed(const char* operation, cu::Code code) const;
  // Why there are no partitions, after that entry point of the driver said so.
  Status cannot_split(const char* entry, cu::Code code) const;
  // The same where workqueues were asked for with the SMs.
  Status cannot_give_workqueues(const char* entry, cu::Code code) const;
  Status no_workqueues(const std::string& got) const;
  // Keeps `keep` until the work behind `event` is done. Never waits.
  void retire(std::shared_ptr<CudaEvent> event, Keep keep);
  // Destroys them for good; from now on their handles may be somebody else's.
  void end(std::vector<RestingStream>& streams);

 private:
  CudaDevice(const cu::Driver& driver, int ordinal, cu::Device device);
  Status start();

  Result<void*> do_allocate(size_t nbytes, StreamHandle stream) override;
  Status do_free(void* data, StreamHandle stream) override;
  Status do_copy(void* to, const void* from, size_t nbytes, StreamHandle stream) override;
  Status do_fill(void* to, uint8_t byte, size_t nbytes, StreamHandle stream) override;
  PointerInfo do_where(const void* address) const override;
  MemoryCounts do_memory() const override;
  Status do_trim() override;
  Result<StreamHandle> do_create_stream(const StreamOptions& options) override;
  Status do_destroy_stream(StreamHandle stream) override;
  Status do_check_stream(StreamHandle stream) const override;
  Result<PartitionRef> do_partition_of(StreamHandle stream) const override;
  Status do_synchronize(StreamHandle stream) override;
  Status do_synchronize() override;
  Result<bool> do_query(StreamHandle stream) override;
  Status do_call(StreamHandle stream, HostFunction function, std::vector<Access> accesses) override;
  Result<EventRef> do_create_event(bool timing) override;
  Status do_record(Event& event, StreamHandle stream) override;
  Status do_wait(StreamHandle stream, Event& event) override;
  Status do_synchronize(Event& event) override;
  Result<bool> do_query(Event& event) override;
  Result<double> do_elapsed_ms(Event& from, Event& to) override;
  Status do_begin_capture(StreamHandle stream, CaptureMode mode) override;
  Result<GraphRef> do_end_capture(StreamHandle stream) override;
  Result<CaptureStatus> do_capture_status(StreamHandle stream) override;
  CaptureMode do_exchange_capture_mode(CaptureMode mode) override;
  Result<GraphExecRef> do_instantiate(Graph& graph) override;
  Status do_upload(GraphExec& exec, StreamHandle stream) override;
  Status do_launch(GraphExec& exec, StreamHandle stream) override;
  bool do_enter_context() override;
  void do_leave_context() override;
  SmLimits do_sm_limits() const override;
  Result<std::vector<PartitionRef>> do_split(std::span<const int> sms,
                                             const PartitionOptions& options) override;
  Result<std::vector<int>> do_sms_seen(StreamHandle stream, bool replayed) override;
  Result<GraphWork> do_work_of(Graph& graph, const PartitionRef& partition) override;

  // A live allocation of ours that the address is in.
  struct Block {
    void* base = nullptr;
    size_t nbytes = 0;
  };
  Block find(const void* address) const;
  // Whether the range is the device's; kInput and kDevice as copy() says.
  Result<bool> on_device(const char* operation, const void* data, size_t nbytes) const;

  struct OwnStream {
    bool blocking = false;
    int priority = 0;
    std::shared_ptr<CudaPartition> partition;
  };
  // A stream of the driver for these options, one that rests or a new one.
  Result<StreamHandle> stream_for(const OwnStream& options);
  // kInput: a stream of ours that was destroyed.
  Status check_ended(const char* operation, StreamHandle stream) const;
  Status check_foreign(const char* operation, StreamHandle stream) const;
  std::shared_ptr<CudaPartition> partition_of(StreamHandle stream) const;
  Result<bool> capturing(const char* operation, StreamHandle stream) const;
  Result<std::shared_ptr<CudaEvent>> make_event(bool timing);

  // A kernel that notes where its blocks run (cuda_probe.cpp).
  class Probe;
  // The contexts that nodes of kernels tell: of functions, which belong to one, and of kernels of libraries,
  // which have the stream's. Equal where the driver does not tell a partition's from others.
  struct NodeContexts {
    cu::Context inside[2] = {}, outside[2] = {};  // by whether it is a function
    bool tells(bool function) const { return inside[function] != outside[function]; }
  };
  // Adds what the graph holds to `found`.
  Status read_nodes(cu::Graph graph, const NodeContexts& contexts, GraphWork& found) const;

  // A capture that begin_capture() began, by the stream where it began.
  struct Capture {
    unsigned long long id = 0;
    Keep keep;
    std::vector<CudaCallRef> calls;
  };

  // Lets go of what work that has ended kept.
  void reap();
  // Waits for it. For split(), when SMs are missing.
  void reap_all();

  const cu::Driver& driver_;
  const cu::Device device_;
  cu::Context primary_ = nullptr;
  cu::Pool pool_ = nullptr;
  int least_priority_ = 0, greatest_priority_ = 0;
  CudaSms sms_;
  CudaCalls calls_;

  mutable std::shared_mutex memory_mutex_;
  AddressMap<> allocations_;
  MemoryCounts counts_;

  mutable std::shared_mutex streams_mutex_;
  std::unordered_map<StreamHandle, OwnStream> streams_;
  // Destroyed streams are kept and given out again: the driver reads a handle without asking, and a kept one
  // is known to be no stream, and never the address of somebody else's.
  std::vector<RestingStream> resting_;
  std::unordered_set<StreamHandle> ended_;  // and those that rest in a partition
  std::atomic<bool> any_ended_{false};

  std::mutex captures_mutex_;
  std::map<CudaStreamKey, Capture> captures_;
  std::atomic<int> capturing_{0};  // captures_.size(), so that calls outside any capture take no lock

  std::mutex retired_mutex_;
  std::vector<std::pair<std::shared_ptr<CudaEvent>, Keep>> retired_;
  std::atomic<bool> any_retired_{false};
};

}  // namespace headrace
