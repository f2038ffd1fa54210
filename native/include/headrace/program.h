// Programs and methods: load an ExecuTorch program, bind memory, run a method. Python's headrace.load() is
// this class; nothing here needs Python.
//
//     auto file = headrace::Bytes::read("model.pte");
//     if (!file.ok()) return file.status();
//     auto program = headrace::Program::load(*file, {});
//     if (!program.ok()) return program.status();
//     headrace::Value input;  // float32[2, 80], C order, on the host
//     input.kind = headrace::Value::Kind::kTensor;
//     input.tensor.data = x;
//     input.tensor.ndim = 2;
//     input.tensor.sizes = {2, 80};
//     headrace::set_dense_strides(input.tensor);
//     std::vector<headrace::Value> outputs;
//     return (*program)->method("forward")->run({&input, 1}, {}, {}, outputs);
//
// Ownership: a Program owns its methods' memory; a Method keeps what it needs of the program alive, and
// answers kProgram once that was closed. Inputs are borrowed until run() returns, on a device until the work
// of the call is done, for which `block` or `keep` hold them. Outputs are held by their block.
//
// Waiting: run() says when it waits; loading waits for the device; nothing else does unless it says so.
//
// Threads: every function may be called from any thread. Calls of one method share its planned memory and
// therefore run one after the other, unless the program was opened with several instances.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "headrace/block.h"
#include "headrace/device.h"
#include "headrace/status.h"
#include "headrace/tensor.h"

namespace headrace {

// A file's bytes, owned. `name` is what messages call it.
class HEADRACE_API Bytes {
 public:
  // Reads the whole file into memory of our own. A mapping would change under us, after it was checked,
  // when the file is overwritten in place, and end the process when it is truncated.
  // kProgram: the file cannot be read.
  static Result<std::shared_ptr<const Bytes>> read(const std::string& path);
  // Copies `size` bytes.
  static Result<std::shared_ptr<const Bytes>> copy(const void* data, size_t size, std::string name);

  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  ~Bytes();
  const uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  const std::string& name() const { return name_; }

 private:
  Bytes(uint8_t* data, size_t size, std::string name, std::shared_ptr<void> owner)
      : data_(data), size_(size), name_(std::move(name)), owner_(std::move(owner)) {}
  static Result<std::shared_ptr<Bytes>> allocate(size_t size, std::string name);
  uint8_t* data_;
  size_t size_;
  std::string name_;
  std::shared_ptr<void> owner_;
};

using OptionValue = std::variant<bool, int, std::string>;

struct LoadOptions {
  // Where the program's device memory lies and its delegates run. Null: cpu for a program without device
  // memory, else cuda_device(0). Never a simulated device.
  DeviceRef device;
  std::vector<std::shared_ptr<const Bytes>> data;  // data files (.ptd), in the order of the search
  int instances = 1;                               // copies of the planned memory and of delegate state
  bool allow_native_code = true;                   // false refuses delegates whose payload is machine code
  // Instructions that one call of a method with loops may take; more is kDelegate. About a minute of the
  // cheapest ones. A method without loops takes each of its instructions once at most and is not limited.
  int64_t max_steps = 1'000'000'000;
  // Where calls run for which nobody chose a stream: on a stream of the program's own in this partition. They
  // wait, as they would elsewhere. kDevice: it is of another device; kInput: it is closed; kOption: the
  // program has no work for a device.
  PartitionRef lane;
  // Options for delegates, by delegate name, then key (at most 63 bytes each).
  std::map<std::string, std::map<std::string, OptionValue>> options;
};

// An input or an output. Tensors are views; an output's view is kept alive by `block`.
struct Value {
  enum class Kind : uint8_t { kNone, kTensor, kInt, kDouble, kBool, kString };
  Kind kind = Kind::kNone;
  TensorView tensor;
  int64_t int_value = 0;
  double double_value = 0;
  bool bool_value = false;
  std::string string_value;
  BlockRef block;
  // Where the tensor lies: null for host memory. A tensor without a block must be complete, or be ordered
  // before the stream of the call by whoever passes it.
  DeviceRef device;
  // Owner of foreign memory; held until the work of the call is done.
  std::shared_ptr<void> keep;
  Lease lease;  // of memory that a graph lends
};

// What a method takes or returns at one position.
struct ValueInfo {
  Value::Kind kind = Value::Kind::kNone;
  std::string name;  // the file's own name where it has one, else empty
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;  // upper bounds where the shape is dynamic
  bool dynamic = false;
  DeviceId device;
  bool planned = false;   // the method owns memory for it; the caller's is copied, never aliased
  int64_t int_value = 0;  // of an int or bool input: the only value that the program accepts
  double double_value = 0;
};

// One delegate call of a method, in the order of its instructions.
struct IslandInfo {
  int instruction = 0;  // its position in the instruction list
  std::string delegate;
  size_t payload_nbytes = 0;
  int num_args = 0;
};

struct MemoryUse {
  std::string what;  // "program", "data", "planned", "outputs", "graphs"
  std::string method;
  int instance = -1;
  std::string device;  // the name of the device it lies on, whatever the program was planned for
  size_t nbytes = 0;
};

// Where a call runs, settled once and used for every copy, launch, wait and event of it.
struct Settled {
  StreamHandle stream = kPerThreadStream;
  bool chosen = false;  // by the caller, by argument or selection: only then may the call return early
};

struct CallStream {
  // The stream of this call, as if selected for it (caller_stream.h), and the Device::id() it belongs to (-1:
  // not said). Without it: the thread's selection, else the thread's own per-thread stream.
  std::optional<StreamHandle> stream;
  int32_t stream_device = -1;
  // What Method::settle() made of them. Given, nothing is read again: for callers whose arguments run code of
  // their own before the call does.
  std::optional<Settled> settled;
};

struct CallOptions : CallStream {
  bool strict = false;  // kInput instead of staging an input between host and device
};

// What calls did, as the calling thread saw it.
struct CallStats {
  int64_t bytes_to_device = 0;
  int64_t bytes_to_host = 0;
  int64_t synchronizations = 0;
  int64_t driver_allocations = 0;
  int64_t driver_frees = 0;
  int64_t repacked_bytes = 0;  // host inputs whose layout was not the program's and had to be rewritten
};

// The graph is captured in the lane (partition) of the stream.
struct CaptureOptions : CallStream {
  // Graphs kept at most, for the most recently used shapes and lanes.
  int keep = 4;
};

struct ReplayOptions : CallStream {
  // Outputs on the device are the graph's own memory: no copy, and right until the next replay only.
  bool borrow = false;
};

// What became of a graph's captures and replays.
struct GraphStats {
  int64_t captures = 0;
  int64_t replays = 0;
  int64_t eager = 0;                          // runs as ordinary calls, since a capture had failed
  std::map<std::string, int64_t> recaptures;  // by what differed: "shapes", "partition", "delegates", "state"
  int64_t evicted = 0;                        // graphs given up, for others or for good
  int64_t kept = 0;                           // graphs now
  size_t memory_nbytes = 0;                   // of their inputs and outputs, on the device
  CallStats last, total;                      // as Method::stats(), over replays and captures
};

class ProgramCore;
class MethodPool;
class GraphSet;

// A method captured as one CUDA graph over all its islands, whatever their delegates. Thread-safe: replays
// run one after the other, and one after the other with calls of the same instance of the method.
class HEADRACE_API MethodGraph {
 public:
  explicit MethodGraph(std::shared_ptr<GraphSet> set);
  ~MethodGraph();
  // As Method::run(): the same checks, the same outputs, the same rule about waiting; inputs may lie on the
  // host or on the device whatever the capture saw. Inputs are copied to the graph's own memory in order on
  // the stream of the call, the graph is launched there, outputs are copied from its memory. Shapes or a lane
  // that no graph was captured for are captured now: that run counts as this replay.
  //
  // After a capture that failed all replays are ordinary calls. kProgram: the program was closed; kCapture:
  // this graph was, a capture failed, or the stream captures (`step` says where).
  Status replay(std::span<const Value> inputs, std::span<const Value> out, const ReplayOptions& options,
                std::vector<Value>& outputs);
  GraphStats stats() const;
  // Where the work of the graph that was captured or replayed last runs, beside its lane's:
  // Device::work_of(). Waits for its turn. kCapture: there is no graph any more; kInput: it was captured in
  // no lane.
  Result<GraphWork> work() const;
  // Gives its memory back behind the work in flight. kInput: from inside a call of the method.
  Status close();

 private:
  std::shared_ptr<GraphSet> set_;
};

class HEADRACE_API Method {
 public:
  explicit Method(std::shared_ptr<MethodPool> pool);
  ~Method();
  const std::string& name() const;
  const std::vector<ValueInfo>& inputs() const;
  const std::vector<ValueInfo>& outputs() const;
  const std::vector<IslandInfo>& islands() const;
  const DeviceRef& device() const;
  // The stream that a call with these options would run on now. kDevice: one of another device; kInput: no
  // stream; kCapture: one that captures.
  Result<Settled> settle(const CallStream& options) const;
  // Whether work there takes SMs that lanes have: it is in none, and there are some on the device. True once
  // for a method, so that whoever calls it may warn.
  bool outside_lanes(const Settled& settled) const;
  // Of the last call that ended, and the sum over all; returns how many there were.
  int64_t stats(CallStats* last, CallStats* total) const;

  // Runs the method once. Host inputs are borrowed until it returns. `out`, if not empty, has one value for
  // each output to write to (Kind::kNone: allocate); otherwise outputs come from the method's ring and stay
  // right for as long as their block is held. Blocks until it is this call's turn.
  //
  // Waits for the device before it returns if an input was staged from the host, or an output is staged to
  // the host, or no stream was given or selected. Otherwise it returns with the work in flight, ordered on
  // that stream; what fails then is returned by the next wait. kInput, kDelegate, kDevice, kProgram (closed).
  Status run(std::span<const Value> inputs, std::span<const Value> out, const CallOptions& options,
             std::vector<Value>& outputs);

  // Runs the method once on `inputs` and captures it as one graph. `outputs` are those of that one step; what
  // the method keeps between calls has advanced by one step. Waits for the device. Works as the very first
  // call.
  //
  // kCapture, with `step`: it cannot be captured (nothing was run then: a kernel or delegate on the CPU, host
  // memory in its middle, a branch, a delegate that says no, an allocation that no cache serves), or a step
  // failed. After the latter everything is as it was before, and graphs are off for this method: its calls
  // and the replays of its graphs run as ordinary calls. kInput, kDevice, kProgram as run(). What had failed
  // on the stream before is returned as it is; nothing was captured then.
  Result<std::shared_ptr<MethodGraph>> capture(std::span<const Value> inputs, const CaptureOptions& options,
                                               std::vector<Value>& outputs);

 private:
  std::shared_ptr<MethodPool> pool_;
};

class HEADRACE_API Program {
 public:
  // Checks the file's structure, then that every delegate, kernel and data key that it needs is there,
  // then loads all its methods. Native payloads run their code here (see LoadOptions).
  // kProgram, kDelegateUnavailable, kDelegate, kOption, kOutOfDeviceMemory.
  static Result<std::shared_ptr<Program>> load(std::shared_ptr<const Bytes> file, LoadOptions options);
  // Checks the structure of the file, of its data files and of the payloads whose format is known, as load()
  // does first; runs and keeps nothing. The engine's own check of the tables is load()'s alone. kProgram.
  static Status verify(std::shared_ptr<const Bytes> file, std::vector<std::shared_ptr<const Bytes>> data);
  ~Program();

  std::vector<std::string> method_names() const;
  // Null when there is no method of that name, or the program was closed.
  std::shared_ptr<Method> method(const std::string& name) const;
  std::vector<MemoryUse> memory() const;
  // Waits for running calls, then gives everything back. Later calls of its methods are kProgram. What failed
  // in work that nobody waited for is returned, and everything is closed. kInput: from inside a running call;
  // kDevice: from inside a host function. Then nothing is closed.
  Status close();

 private:
  Program() = default;
  std::shared_ptr<ProgramCore> core() const;
  mutable std::mutex mutex_;
  std::shared_ptr<ProgramCore> core_;  // null once closed
  std::vector<std::shared_ptr<MethodPool>> pools_;
};

// Threads that the engine's CPU kernels and XNNPACK share, in this process.
HEADRACE_API int num_threads();
// kOption: outside 1 to 1024, or a program is loaded (its delegates hold on to the pool).
HEADRACE_API Status set_num_threads(int count);

// Prepares the engine once per process: collects its log, registers our device allocator. Program::load() and
// DeviceGuard do it by themselves.
// kEngine: another library already owns a slot that is ours.
HEADRACE_API Status initialize();

HEADRACE_API std::vector<std::string> registered_delegates();
HEADRACE_API std::vector<std::string> registered_kernels();

}  // namespace headrace
