// The seam between headrace and a device: streams, events, stream-ordered memory, copies, host functions,
// capture, partitions. Three makers stand behind it: `cpu` (host memory, synchronous), `sim` (a deterministic
// simulation of a CUDA device that follows CUDA's rules and is stricter) and `cuda` (the driver API).
//
// Rules that are CUDA's are cited where they are checked; the driver API's reference is meant
// (https://docs.nvidia.com/cuda/cuda-driver-api/), and measurements where it is silent.
//
//     auto sim = headrace::make_sim_device({});
//     auto stream = sim->create_stream({});
//     if (!stream.ok()) return stream.status();
//     auto data = sim->allocate(1024, *stream);
//     if (!data.ok()) return data.status();
//     if (auto status = sim->fill(*data, 0, 1024, *stream); !status.ok()) return status;
//     return sim->synchronize(*stream);
//
// Threads: a device may be used from any thread. No function holds a lock while a host function runs.
// No function changes the calling thread's current context or device; a ContextScope does, for as long as it
// lives. Waiting: functions wait for the device only where they say so. Errors: kDevice with `device` set,
// kOutOfDeviceMemory, kInput for handles and addresses that cannot be. Every maker refuses, before anything
// else, a call from inside a host function and an event, graph or partition of another device.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "headrace/status.h"

namespace headrace {

// A stream as CUDA hands it around: 0 and 1 are the legacy stream, 2 is the calling thread's per-thread
// stream, anything else the address of a stream object. Functions treat 0 as 1.
using StreamHandle = uintptr_t;
constexpr StreamHandle kLegacyStream = 1;
constexpr StreamHandle kPerThreadStream = 2;

// A stretch of memory that an operation reads or writes.
struct Access {
  const void* data = nullptr;
  size_t nbytes = 0;
  bool write = false;
};

// What an address is, as far as the device itself confirms it.
struct PointerInfo {
  enum class Kind : uint8_t {
    kHost,    // not an allocation of this device: ordinary or pinned host memory, as far as it can tell
    kDevice,  // inside a live allocation of this device (managed memory counts as device memory)
    kFreed,   // inside an allocation whose free was already enqueued (sim only: a driver cannot tell)
    kOther,   // inside an allocation of another GPU (cuda only)
  };
  Kind kind = Kind::kHost;
  void* base = nullptr;
  size_t nbytes = 0;
  int32_t device_id = -1;  // kOther: whose, as Device::id() counts
};

// Bytes and calls since the device was opened. Every allocate() and free() counts: caches lie above the seam.
// Memory is in use until its free() is called, whatever of the work before it has run.
struct MemoryCounts {
  size_t current_nbytes = 0;
  size_t peak_nbytes = 0;
  int64_t allocations = 0;
  int64_t frees = 0;
};

// Runs on a thread of the device's choosing, in stream order. It must not call into a device (CUDA forbids it
// for cuLaunchHostFunc): that returns kDevice. A failed Status, or an exception, is kept; work behind it is
// skipped; the next wait that has the failure, or work skipped for it, behind it returns the Status, once. A
// later wait for other skipped work, which nobody was told of yet, returns it again. Work enqueued after the
// telling runs. The function is destroyed with no lock held, soon after it ran (a graph keeps those
// captured).
//
// On cuda, where the driver knows no failure of a host function, work behind it runs all the same, "behind"
// is what streams, events and launches of this seam order (the legacy stream: everything), and the function
// is destroyed by a later call. In a capture that was not begun here, call() is kCapture.
using HostFunction = std::function<Status()>;

class Device;

// What belongs to one device. Whoever holds a reference may use it; it must not be used after the device's
// last reference is gone, though it may be dropped then. Destroying an event, graph or partition never waits,
// and what is in flight is not disturbed.
class HEADRACE_API DeviceObject {
 public:
  virtual ~DeviceObject();
  DeviceObject(const DeviceObject&) = delete;
  DeviceObject& operator=(const DeviceObject&) = delete;
  const std::string& device_name() const { return device_name_; }
  int32_t device_id() const { return device_id_; }
  // Unique in the process, and never used again, as an address is.
  uint64_t number() const { return number_; }

 protected:
  explicit DeviceObject(const Device& device);

 private:
  std::string device_name_;
  int32_t device_id_;
  uint64_t number_;
};

class HEADRACE_API Event : public DeviceObject {
  using DeviceObject::DeviceObject;
};
using EventRef = std::shared_ptr<Event>;

class HEADRACE_API Graph : public DeviceObject {  // what a capture recorded
  using DeviceObject::DeviceObject;
};
using GraphRef = std::shared_ptr<Graph>;

// A graph made ready to launch; launches of one run one after the other.
class HEADRACE_API GraphExec : public DeviceObject {
  using DeviceObject::DeviceObject;
};
using GraphExecRef = std::shared_ptr<GraphExec>;

// A part of the device's streaming multiprocessors (a green context). Work of its streams stays on them. They
// go back to the device when the last reference is gone, those of streams made in it included.
class HEADRACE_API Partition : public DeviceObject {
 public:
  explicit Partition(const Device& device);
  ~Partition() override;
  // As granted, read back from the device: requests are rounded up.
  virtual int sm_count() const = 0;
  // PartitionOptions::workqueue_concurrency_limit as granted, read back from the device; none: none was asked
  // for, and its streams share the device's workqueues with everybody's.
  virtual std::optional<int> workqueue_concurrency_limit() const = 0;
  // Refuses new streams from now on. Streams that exist go on.
  virtual Status close() = 0;
  virtual bool closed() const = 0;

 private:
  std::shared_ptr<std::atomic<int>> live_;
};
using PartitionRef = std::shared_ptr<Partition>;

// What a captured graph does at each launch, as far as multiprocessors run it; child graphs included.
struct GraphWork {
  struct Piece {
    std::string name;     // of the kernel, where the driver tells it; on sim of the operation, such as "call"
    bool inside = false;  // it runs in the partition that was asked about, wherever the graph is launched
  };
  std::vector<Piece> pieces;
  // Kernels of which the driver does not tell where they run.
  int64_t untold_kernels = 0;
  // What may run on multiprocessors too, and of which the driver does not tell where (copies, fills).
  int64_t untold = 0;
};

struct StreamOptions {
  int priority = 0;       // lower numbers are more urgent, as in CUDA
  bool blocking = false;  // whether the legacy stream and this one order each other
  PartitionRef partition = nullptr;
};

// What a partition is given beside multiprocessors. A workqueue is what hands the kernels of a stream to the
// multiprocessors; streams that share one may wait for each other, in lanes or not ("false dependencies").
struct PartitionOptions {
  // How many streams of each partition are expected to have work at once, 1 or more. The partition then gets
  // a CU_DEV_RESOURCE_TYPE_WORKQUEUE_CONFIG of the scope CU_WORKQUEUE_SCOPE_GREEN_CTX_BALANCED: the driver
  // uses, "when possible, non-overlapping workqueue resources with other balanced green contexts". It is an
  // expectation and not a cap: more streams may be made. What a device has in all depends on the environment
  // variable CUDA_DEVICE_MAX_CONNECTIONS; of limits beyond it "the driver will not guarantee that work
  // submission remains non-overlapping".
  //
  // Source: cuda.h of CUDA 13.5, "Green Contexts: Workqueues", and the CUDA programming guide, "Green
  // contexts". They do not say whether the driver changes a limit; hence what the partition tells is read
  // back. Of CUDA 13.1 (driver 590) and later; never run on such a driver so far.
  std::optional<int> workqueue_concurrency_limit = std::nullopt;
};

struct SmLimits {
  int total = 0;
  int least = 0;      // the smallest partition
  int alignment = 0;  // partitions are multiples of it
};

enum class CaptureMode : uint8_t { kGlobal, kThreadLocal, kRelaxed };
enum class CaptureStatus : uint8_t { kNone, kActive, kInvalidated };

enum class Backend : uint8_t { kCpu, kSim, kCuda };

// A fault at a named operation. Operations are the seam's functions by name: "allocate", "free", "copy",
// "fill", "create_stream", "destroy_stream", "synchronize_stream", "synchronize_device", "query_stream",
// "call", "create_event", "record", "wait", "synchronize_event", "query_event", "elapsed_ms",
// "begin_capture", "end_capture", "capture_status", "instantiate", "upload", "launch", "split", "sms_seen",
// "work_of".
struct Fault {
  std::string operation;  // empty: any
  int64_t at = 0;         // the how-manieth such call from now on fails, from 0
  ErrorCode code = ErrorCode::kDevice;
};

class Faults;

class HEADRACE_API Device : public std::enable_shared_from_this<Device> {
 public:
  virtual ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // "cpu", "sim:0", "cuda:1".
  const std::string& name() const { return name_; }
  Backend backend() const { return backend_; }
  int ordinal() const { return ordinal_; }
  // The number that stands for this device in caller_stream.h: the ordinal for cuda, else unique in the
  // process.
  int32_t id() const { return id_; }

  // ---- memory
  // Memory for work enqueued on `stream` from now on, at least 256-byte aligned. Other streams may use it
  // once they are ordered behind `stream`. nbytes 0 gives a valid address. Does not wait. kOutOfDeviceMemory.
  // While `stream` captures: kCapture (only a cache may serve an allocation then).
  Result<void*> allocate(size_t nbytes, StreamHandle stream);
  // Gives memory back behind the work that is on `stream` now. Does not wait.
  // kInput: not the start of a live allocation of this device. kCapture: `stream` captures (CUDA: the free of
  // memory allocated before is an invalid value there, measured).
  Status free(void* data, StreamHandle stream);
  // Copies in stream order, in any direction; which side is the device's is told by the addresses. Host
  // memory is read or written when the copy runs, so it must stay until then. Does not wait, except on cuda,
  // where the driver stages host memory that is not pinned and waits for a copy into it. kInput: a device
  // address outside a live allocation, or a range that leaves one.
  Status copy(void* to, const void* from, size_t nbytes, StreamHandle stream);
  Status fill(void* to, uint8_t byte, size_t nbytes, StreamHandle stream);
  PointerInfo where(const void* address) const;
  MemoryCounts memory() const;
  // Gives memory that was freed, and is kept to be allocated again, back to the system.
  Status trim();

  // ---- streams
  // kDevice; kInput: the partition is closed or of another device.
  Result<StreamHandle> create_stream(const StreamOptions& options);
  // The handle is invalid from now on; work on it goes on. kInput: not a live stream that create_stream()
  // made.
  Status destroy_stream(StreamHandle stream);
  // Whether work may be enqueued on the handle: a special handle, a live stream of this device, or (cuda) a
  // foreign stream of this device. kInput: it was destroyed or never was; kDevice: it is another device's.
  Status check_stream(StreamHandle stream) const;
  // The partition that work on the stream stays in; null: none. kNotSupported (cuda): a green context of
  // somebody else's, in which no stream can be made here.
  Result<PartitionRef> partition_of(StreamHandle stream) const;
  // Waits for the work that is on the stream now. Returns what failed in it.
  Status synchronize(StreamHandle stream);
  // Waits for all work of the device. kCapture while any stream of it captures, in every mode: that capture
  // is invalidated (measured).
  Status synchronize();
  // Whether the stream's work is done. Does not wait.
  Result<bool> query(StreamHandle stream);
  // Runs `function` in stream order. `accesses` are what it reads and writes, for whoever checks the order.
  Status call(StreamHandle stream, HostFunction function, std::vector<Access> accesses);

  // ---- events
  Result<EventRef> create_event(bool timing = false);
  Status record(Event& event, StreamHandle stream);
  // Work enqueued on `stream` from now on runs behind the event's latest record, as it is at this moment; an
  // event that was never recorded is no wait. Does not wait on the host.
  Status wait(StreamHandle stream, Event& event);
  // Waits on the host. An event that was never recorded is complete. Returns what failed before it.
  Status synchronize(Event& event);
  Result<bool> query(Event& event);
  // Milliseconds between two recorded timing events, both complete.
  Result<double> elapsed_ms(Event& from, Event& to);

  // ---- capture
  // kCapture: the legacy stream (CAPTURE_UNSUPPORTED), or it captures already.
  Status begin_capture(StreamHandle stream, CaptureMode mode);
  // Ends it in every case. kCapture: it was invalidated, with the first reason, or a forked stream was not
  // joined.
  Result<GraphRef> end_capture(StreamHandle stream);
  Result<CaptureStatus> capture_status(StreamHandle stream);
  // The calling thread's mode for calls that captures forbid; returns the former one.
  CaptureMode exchange_capture_mode(CaptureMode mode);
  Result<GraphExecRef> instantiate(Graph& graph);
  Status upload(GraphExec& exec, StreamHandle stream);
  Status launch(GraphExec& exec, StreamHandle stream);

  // ---- partitions
  SmLimits sm_limits() const;
  // Partitions that hold SMs now: those that somebody keeps, and those whose streams somebody keeps.
  int partitions() const { return *partitions_; }
  // Disjoint partitions of the given sizes, in one split. Each size is rounded up to what the device grants.
  // `options` hold for each of them. kInput: a size or a limit below 1; kDevice: more than there is, with
  // what is left; the device has no partitions, or its driver none with workqueues. Nothing falls back.
  Result<std::vector<PartitionRef>> split(std::span<const int> sms, const PartitionOptions& options = {});

  // The multiprocessors, by their numbers, on which work of `stream` runs: blocks of a kernel, many enough
  // for all of them, say where they are. `replayed`: that kernel is captured on a stream of its own in the
  // partition of `stream` first, as a graph that is launched on `stream`. Ascending. Waits for the stream,
  // allocates a few kilobytes and gives everything back. kDevice: the device has no multiprocessors, or the
  // driver cannot compile or run the kernel; kCapture: the stream captures.
  Result<std::vector<int>> sms_seen(StreamHandle stream, bool replayed = false);
  // Where the work of a captured graph runs, beside work of the partition. On cuda: whether each kernel's
  // context is the one that a kernel captured in the partition has, which is looked up by capturing one;
  // waits for that. kInput: no partition; kNotSupported: the driver does not tell, and what it lacks.
  Result<GraphWork> work_of(Graph& graph, const PartitionRef& partition);

  // ---- for tests, on every maker
  // The next matching call fails once, before it does anything; end_capture fails but ends the capture.
  // Several may be pending. kInput: no such operation, a negative place, or kOk.
  Status inject(const Fault& fault);
  virtual void clear_faults();
  // Calls so far, by operation; the empty name counts all. Those refused before they reached the device (from
  // a host function, with another device's object) are not counted. -1: no such operation. Counting costs, so
  // on cpu and cuda it begins with the first inject() or calls().
  int64_t calls(const std::string& operation);

 protected:
  Device(std::string name, Backend backend, int ordinal);

  // Behind the front: stream 0 has become 1, the caller is in no host function, objects are of this device.
  virtual Result<void*> do_allocate(size_t nbytes, StreamHandle stream) = 0;
  virtual Status do_free(void* data, StreamHandle stream) = 0;
  virtual Status do_copy(void* to, const void* from, size_t nbytes, StreamHandle stream) = 0;
  virtual Status do_fill(void* to, uint8_t byte, size_t nbytes, StreamHandle stream) = 0;
  virtual PointerInfo do_where(const void* address) const = 0;
  virtual MemoryCounts do_memory() const = 0;
  virtual Status do_trim() { return {}; }  // a maker that keeps none
  virtual Result<StreamHandle> do_create_stream(const StreamOptions& options) = 0;
  virtual Status do_destroy_stream(StreamHandle stream) = 0;
  virtual Status do_check_stream(StreamHandle stream) const = 0;
  virtual Result<PartitionRef> do_partition_of(StreamHandle) const { return PartitionRef(); }
  virtual Status do_synchronize(StreamHandle stream) = 0;
  virtual Status do_synchronize() = 0;
  virtual Result<bool> do_query(StreamHandle stream) = 0;
  virtual Status do_call(StreamHandle stream, HostFunction function, std::vector<Access> accesses) = 0;
  virtual Result<EventRef> do_create_event(bool timing) = 0;
  virtual Status do_record(Event& event, StreamHandle stream) = 0;
  virtual Status do_wait(StreamHandle stream, Event& event) = 0;
  virtual Status do_synchronize(Event& event) = 0;
  virtual Result<bool> do_query(Event& event) = 0;
  virtual Result<double> do_elapsed_ms(Event& from, Event& to) = 0;
  virtual Status do_begin_capture(StreamHandle stream, CaptureMode mode) = 0;
  virtual Result<GraphRef> do_end_capture(StreamHandle stream) = 0;
  virtual Result<CaptureStatus> do_capture_status(StreamHandle stream) = 0;
  virtual CaptureMode do_exchange_capture_mode(CaptureMode mode) = 0;
  virtual Result<GraphExecRef> do_instantiate(Graph& graph) = 0;
  virtual Status do_upload(GraphExec& exec, StreamHandle stream) = 0;
  virtual Status do_launch(GraphExec& exec, StreamHandle stream) = 0;
  virtual SmLimits do_sm_limits() const = 0;
  virtual Result<std::vector<PartitionRef>> do_split(std::span<const int> sms,
                                                     const PartitionOptions& options) = 0;
  // Not on a stream that captures; not on the cpu.
  virtual Result<std::vector<int>> do_sms_seen(StreamHandle stream, bool replayed) = 0;
  virtual Result<GraphWork> do_work_of(Graph& graph, const PartitionRef& partition) = 0;
  // Whether there is something to leave again.
  virtual bool do_enter_context() { return false; }
  virtual void do_leave_context() {}

 private:
  friend class ContextScope;
  friend class Partition;
  Status outside(const char* operation) const;
  Status enter(const char* operation);
  Status enter(const char* operation, const char* noun, const DeviceObject& object);
  Faults& faults();
  std::atomic<Faults*> faults_{nullptr};
  const std::shared_ptr<std::atomic<int>> partitions_ = std::make_shared<std::atomic<int>>(0);
  std::string name_;
  Backend backend_;
  int ordinal_;
  int32_t id_;
};
using DeviceRef = std::shared_ptr<Device>;

// While it lives, a GPU's primary context is the calling thread's current one, so that libraries in it find
// the device selected; the former one is back afterwards, whatever they selected meanwhile. Calls of the
// device need none, and cost less in one. Nothing on cpu, on sim, and in a host function. Does not wait.
class HEADRACE_API ContextScope {
 public:
  explicit ContextScope(Device& device);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  Device* entered_;
};

// ---- makers

// Plain host memory; everything is done when the call returns. One for the process.
HEADRACE_API DeviceRef cpu_device();

// A GPU, by its CUDA ordinal; one for the process, never closed: it holds the GPU's primary context, as the
// CUDA runtime, CuPy and PyTorch do, and a memory pool of its own. The driver is opened at the first call.
//
// Handles of streams made by others may be used wherever a stream is asked for. A handle that is no stream at
// all is refused as far as that can be told: the driver does not check.
//
// kDevice: there is no driver, it is too old, there is no such GPU, or it cannot be used; the message says
// what is missing and what to do. kOutOfDeviceMemory: there is no room for a context.
HEADRACE_API Result<DeviceRef> cuda_device(int ordinal);

// What the driver says, without a context on any GPU. kDevice: as cuda_device().
struct CudaInfo {
  struct Gpu {
    int ordinal = 0;
    std::string name;
    int capability_major = 0;
    int capability_minor = 0;
    int sm_count = 0;
    size_t memory_nbytes = 0;
    std::string problem;  // why cuda_device() would refuse it; empty: nothing is known
    // Why this process cannot split it, and what to do, in the words of Device::split()'s refusal; empty: the
    // driver lends its multiprocessors, as far as that can be told without a context.
    std::string no_partitions;
    bool mps = false;  // this process is a client of an MPS server there
    bool mig = false;  // it is an instance of a GPU that MIG divides
  };
  int driver_version = 0;     // 13000 for CUDA 13.0
  std::string no_partitions;  // why not; empty: the driver has green contexts
  std::string no_workqueues;  // why PartitionOptions ask for too much; empty: the driver is new enough
  std::vector<Gpu> gpus;
};
HEADRACE_API Result<CudaInfo> cuda_info();

// A simulated device follows the rules of the driver API, and is stricter: fresh memory holds 0xFF bytes, and
// again when the allocation is reached in stream order, so that what was written too early is lost; freed
// memory is filled with 0xFF when its free is reached, and stays known for a while, so that touching it is
// kInput; the device works one operation at a time on a logical clock (1 us for work, 1 ns for each 100 bytes
// moved), so event times are the same in every run. Host functions run on the threads that enqueue or wait.
// Its last reference gone, pending work is skipped, its functions are destroyed and all memory is released.
//
// How a simulated device orders work that CUDA leaves open:
struct SimOptions {
  enum class Schedule : uint8_t {
    kEager,   // at once
    kLate,    // only when a wait demands it, and then no more than it demands; query() is no wait
    kRandom,  // a random legal interleaving, reproducible by `seed` for one order of submission
  };
  Schedule schedule = Schedule::kEager;
  uint64_t seed = 0;
  int ordinal = 0;
  int sm_count = 132;
  int sm_least = 8;
  int sm_alignment = 8;
  size_t memory_nbytes = size_t{1} << 30;  // allocating beyond it is kOutOfDeviceMemory
};

class HEADRACE_API SimDevice : public Device {
 public:
  using Device::Device;
  // Work enqueued by the `at`-th such call from now on ("copy", "fill", "call", "launch") is held back until
  // a wait demands it, whatever the schedule, and so is what comes behind it. What a capture takes is not
  // counted. kInput: another operation, a negative place.
  virtual Status delay(const std::string& operation, int64_t at) = 0;
  // Operations that were enqueued and have not run: allocations, frees, records and waits are operations too,
  // a launch is one for each node and two more.
  virtual int64_t pending() const = 0;
  // The order in which threads called: (number of the thread by first use, operation).
  virtual std::vector<std::pair<int, std::string>> submissions() const = 0;
  // The partition on which the host function that the calling thread runs now would have run; null outside
  // one, or on the whole device. A graph keeps the partition it was captured in.
  virtual PartitionRef current_partition() const = 0;
  // Skips all pending work, which counts as failed; frees are done. For owners whose functions, not yet run,
  // own the device: nothing else would ever end that circle.
  virtual void drop_pending() = 0;
};

// A new device at each call, with memory, streams and a clock of its own.
HEADRACE_API std::shared_ptr<SimDevice> make_sim_device(const SimOptions& options);

// Whether the calling thread is inside a host function of a device.
HEADRACE_API bool in_host_function();

// The device that a live allocation belongs to, whichever it is; null for host memory.
HEADRACE_API DeviceRef device_of(const void* address);

// Called around every wait on the host, on the waiting thread; `after` gets what `before` returned. A
// language run time gives up its lock here: host functions of the device may need it. Set once, before any
// wait.
struct WaitHooks {
  void* (*before)() = nullptr;
  void (*after)(void*) = nullptr;
};
HEADRACE_API void set_wait_hooks(WaitHooks hooks);

// The name of the device that has, or had, this Device::id(); "device N" where there was none.
HEADRACE_API std::string device_name_of(int32_t id);
// The same in a message beside another device's name: simulated devices may share one.
HEADRACE_API std::string device_name_of(int32_t id, const std::string& beside);

// Counts of the calling thread, so that a call can say what it did. Monotonic. The bytes are counted by
// copy() of a device whose memory the host does not share, once for each copy; copies on the cpu are none.
struct ThreadCounts {
  int64_t synchronizations = 0;
  int64_t driver_allocations = 0;
  int64_t driver_frees = 0;
  int64_t bytes_to_device = 0;
  int64_t bytes_to_host = 0;
};
HEADRACE_API ThreadCounts& thread_counts();

}  // namespace headrace
