#include "device/sim.h"

#include <algorithm>
#include <atomic>

#include "device/refusal.h"

namespace headrace {
namespace sim {

namespace {

// Not std::thread::id, which is used again after a thread has ended. Trivial, so that it can be read while
// the thread's other thread-local objects are destroyed.
uint64_t this_thread() {
  static std::atomic<uint64_t> last{0};
  static thread_local uint64_t number = 0;
  if (number == 0) number = ++last;
  return number;
}

SimEvent& own(Event& event) { return static_cast<SimEvent&>(event); }

}  // namespace

Sim::Sim(const SimOptions& options)
    : SimDevice("sim:" + std::to_string(options.ordinal), Backend::kSim, options.ordinal),
      memory_(name(), id(), options.memory_nbytes),
      schedule_(options, name(), memory_),
      streams_(name(), id()),
      captures_(name()),
      calls_(name()),
      sms_(std::make_shared<Sms>(SmLimits{options.sm_count, options.sm_least, options.sm_alignment})) {}

Sim::~Sim() {
  Guard guard(mutex_);
  schedule_.drop(guard);
}

// ---- calls, faults and delays

Status Sim::delay(const std::string& operation, int64_t at) {
  std::lock_guard lock(mutex_);
  return calls_.delay(operation, at);
}

void Sim::clear_faults() {
  Device::clear_faults();
  std::lock_guard lock(mutex_);
  calls_.clear_delays();
}

int64_t Sim::pending() const {
  std::lock_guard lock(mutex_);
  return static_cast<int64_t>(schedule_.pending());
}

std::vector<std::pair<int, std::string>> Sim::submissions() const {
  std::lock_guard lock(mutex_);
  return calls_.submissions();
}

void Sim::note(const char* operation) { calls_.note(operation, this_thread()); }

PartitionRef Sim::current_partition() const { return schedule_.current_partition(); }

void Sim::drop_pending() {
  Guard guard(mutex_);
  schedule_.drop(guard);
}

// ---- enqueueing

Result<Stream*> Sim::stream_for(const char* operation, StreamHandle handle) {
  auto stream = streams_.find(operation, handle, this_thread());
  if (!stream.ok()) return stream;
  if (Status status = captures_.check_legacy(operation, **stream); !status.ok()) return status;
  return stream;
}

OpRef Sim::make(OpKind kind, const Stream& stream, ActionRef action) {
  auto op = std::make_shared<Op>();
  op->kind = kind;
  op->stream = stream.handle;
  op->thread = calls_.thread_number(this_thread());
  op->action = std::move(action);
  return op;
}

void Sim::enqueue(Stream& stream, const OpRef& op) {
  streams_.order(schedule_, *op, stream);
  schedule_.add(op);
  stream.last = op;
}

Status Sim::submit(Guard& guard, const char* operation, Stream& stream, Action action) {
  action.partition = stream.partition;
  OpKind kind = action.kind;
  auto shared = std::make_shared<const Action>(std::move(action));
  if (stream.capture) {
    Status status = captures_.add(operation, stream, shared);
    guard.discard(std::move(shared));  // its function, if it was refused
    return status;
  }
  OpRef op = make(kind, stream, std::move(shared));
  op->held = calls_.delayed(operation);
  enqueue(stream, op);
  schedule_.advance(guard);
  return {};
}

Status Sim::check_accesses(const char* operation, Action& action) const {
  for (const Access& access : action.accesses) {
    auto block = memory_.check(operation, access.data, access.nbytes);
    if (!block.ok()) return block.status();
    if (*block) action.blocks.push_back(std::move(*block));
  }
  return {};
}

// ---- memory

Result<void*> Sim::do_allocate(size_t nbytes, StreamHandle handle) {
  Guard guard(mutex_);
  note("allocate");
  auto stream = stream_for("allocate", handle);
  if (!stream.ok()) return stream.status();
  if (Status status =
          captures_.check_outside("allocate", **stream, "memory of a capture would be its graph's",
                                  "allocate before the capture, or from a cache");
      !status.ok())
    return status;
  if (Status status = captures_.check_unsafe("allocate", this_thread()); !status.ok()) return status;
  auto block = memory_.allocate(nbytes);
  if (!block.ok()) return block.status();
  void* data = (*block)->data;
  // Filled again in stream order: what another stream wrote without being ordered behind this is lost.
  Action action{.kind = OpKind::kAllocate, .to = data, .nbytes = nbytes};
  action.accesses = {{data, nbytes, true}};
  action.blocks = {*block};
  if (Status status = submit(guard, "allocate", **stream, std::move(action)); !status.ok()) return status;
  return data;
}

Status Sim::do_free(void* data, StreamHandle handle) {
  Guard guard(mutex_);
  note("free");
  auto stream = stream_for("free", handle);
  if (!stream.ok()) return stream.status();
  if (Status status = captures_.check_outside(
          "free", **stream,
          "memory allocated outside cannot be freed in it (CUDA_ERROR_INVALID_VALUE, measured)",
          "free it after the capture");
      !status.ok())
    return status;
  if (Status status = captures_.check_unsafe("free", this_thread()); !status.ok()) return status;
  auto block = memory_.begin_free(data);
  if (!block.ok()) return block.status();
  memory_.end(*block);
  Action action{.kind = OpKind::kFree, .to = data, .nbytes = (*block)->nbytes};
  action.accesses = {{data, (*block)->nbytes, true}};
  action.blocks = {std::move(*block)};
  return submit(guard, "free", **stream, std::move(action));
}

Status Sim::do_copy(void* to, const void* from, size_t nbytes, StreamHandle handle) {
  Guard guard(mutex_);
  note("copy");
  auto stream = stream_for("copy", handle);
  if (!stream.ok()) return stream.status();
  Action action{.kind = OpKind::kCopy, .to = to, .from = from, .nbytes = nbytes};
  action.accesses = {{from, nbytes, false}, {to, nbytes, true}};
  auto source = memory_.check("copy", from, nbytes);
  if (!source.ok()) return source.status();
  auto target = memory_.check("copy", to, nbytes);
  if (!target.ok()) return target.status();
  bool to_device = *target && !*source, to_host = *source && !*target;
  if (*source) action.blocks.push_back(std::move(*source));
  if (*target) action.blocks.push_back(std::move(*target));
  Status status = submit(guard, "copy", **stream, std::move(action));
  if (status.ok()) {
    if (to_device) thread_counts().bytes_to_device += static_cast<int64_t>(nbytes);
    if (to_host) thread_counts().bytes_to_host += static_cast<int64_t>(nbytes);
  }
  return status;
}

Status Sim::do_fill(void* to, uint8_t byte, size_t nbytes, StreamHandle handle) {
  Guard guard(mutex_);
  note("fill");
  auto stream = stream_for("fill", handle);
  if (!stream.ok()) return stream.status();
  Action action{.kind = OpKind::kFill, .to = to, .nbytes = nbytes, .byte = byte};
  action.accesses = {{to, nbytes, true}};
  if (Status status = check_accesses("fill", action); !status.ok()) return status;
  return submit(guard, "fill", **stream, std::move(action));
}

PointerInfo Sim::do_where(const void* address) const {
  std::lock_guard lock(mutex_);
  return memory_.where(address);
}

MemoryCounts Sim::do_memory() const {
  std::lock_guard lock(mutex_);
  return memory_.counts();
}

// ---- streams

Result<StreamHandle> Sim::do_create_stream(const StreamOptions& options) {
  Guard guard(mutex_);
  note("create_stream");
  if (options.partition && options.partition->closed())
    return refusal(ErrorCode::kInput, name(), "create_stream", "an open partition", "a closed one",
                   "make the stream before closing it");
  if (options.partition && options.blocking)
    return refusal(ErrorCode::kInput, name(), "create_stream", "a non-blocking stream in a partition",
                   "a blocking one",
                   "leave `blocking` false (CUDA: cuGreenCtxStreamCreate requires "
                   "CU_STREAM_NON_BLOCKING)");
  return streams_.create(options);
}

Status Sim::do_destroy_stream(StreamHandle handle) {
  Guard guard(mutex_);
  note("destroy_stream");
  auto stream = streams_.find("destroy_stream", handle, this_thread());
  if (!stream.ok()) return stream.status();
  if (handle == kLegacyStream || handle == kPerThreadStream)
    return refusal(ErrorCode::kInput, name(), "destroy_stream", "a stream that create_stream() made",
                   stream_name(handle), "leave it alone: it is always there");
  captures_.forget(guard, **stream);
  streams_.destroy(*stream);
  return {};
}

Status Sim::do_check_stream(StreamHandle handle) const {
  std::lock_guard lock(mutex_);
  return streams_.check("check_stream", handle);
}

Result<PartitionRef> Sim::do_partition_of(StreamHandle handle) const {
  std::lock_guard lock(mutex_);
  if (Status status = streams_.check("partition_of", handle); !status.ok()) return status;
  return streams_.partition(handle);
}

Status Sim::do_synchronize(StreamHandle handle) {
  Guard guard(mutex_);
  note("synchronize_stream");
  auto stream = stream_for("synchronize_stream", handle);
  if (!stream.ok()) return stream.status();
  if (Status status = captures_.check_waiting("synchronize_stream", **stream); !status.ok()) return status;
  if (Status status = captures_.check_unsafe("synchronize_stream", this_thread()); !status.ok())
    return status;
  // The lock is released meanwhile, and the stream may be destroyed: only its operations are used.
  std::vector<OpRef> targets = streams_.targets(**stream);
  schedule_.demand(guard, targets);
  return schedule_.tell(targets);
}

Status Sim::do_synchronize() {
  Guard guard(mutex_);
  note("synchronize_device");
  if (Status status = captures_.check_device_wide("synchronize_device"); !status.ok()) return status;
  schedule_.demand(guard, schedule_.everything());
  return schedule_.tell_all();
}

Result<bool> Sim::do_query(StreamHandle handle) {
  Guard guard(mutex_);
  note("query_stream");
  auto stream = stream_for("query_stream", handle);
  if (!stream.ok()) return stream.status();
  if (Status status = captures_.check_waiting("query_stream", **stream); !status.ok()) return status;
  if (Status status = captures_.check_unsafe("query_stream", this_thread()); !status.ok()) return status;
  std::vector<OpRef> targets = streams_.targets(**stream);
  schedule_.advance(guard);
  return std::all_of(targets.begin(), targets.end(), [](const OpRef& op) { return op->done(); });
}

Status Sim::do_call(StreamHandle handle, HostFunction function, std::vector<Access> accesses) {
  Guard guard(mutex_);
  Action action{.kind = OpKind::kCall};
  action.function = std::move(function);
  action.accesses = std::move(accesses);
  auto check = [&]() -> Result<Stream*> {
    note("call");
    auto stream = stream_for("call", handle);
    if (!stream.ok()) return stream;
    if (Status status = check_accesses("call", action); !status.ok()) return status;
    return stream;
  };
  auto stream = check();
  if (!stream.ok()) {
    guard.discard(std::make_shared<const Action>(std::move(action)));
    return stream.status();
  }
  return submit(guard, "call", **stream, std::move(action));
}

// ---- events

Result<EventRef> Sim::do_create_event(bool timing) {
  Guard guard(mutex_);
  note("create_event");
  return EventRef(std::make_shared<SimEvent>(*this, timing));
}

Status Sim::do_record(Event& event, StreamHandle handle) {
  Guard guard(mutex_);
  note("record");
  auto stream = stream_for("record", handle);
  if (!stream.ok()) return stream.status();
  SimEvent& recorded = own(event);
  if ((*stream)->capture) return captures_.record("record", **stream, recorded);
  OpRef op = make(OpKind::kRecord, **stream, nullptr);
  enqueue(**stream, op);
  recorded.op = op;
  guard.discard(std::move(recorded.capture));
  recorded.captured.clear();
  schedule_.advance(guard);
  return {};
}

Status Sim::do_wait(StreamHandle handle, Event& event) {
  Guard guard(mutex_);
  note("wait");
  auto stream = stream_for("wait", handle);
  if (!stream.ok()) return stream.status();
  SimEvent& waited = own(event);
  if ((*stream)->capture || waited.capture) return captures_.wait("wait", **stream, waited);
  if (!waited.op) return {};  // cuStreamWaitEvent: an event never recorded is no wait
  OpRef op = make(OpKind::kWait, **stream, nullptr);
  schedule_.order(*op, waited.op);
  enqueue(**stream, op);
  schedule_.advance(guard);
  return {};
}

Status Sim::do_synchronize(Event& event) {
  Guard guard(mutex_);
  note("synchronize_event");
  if (Status status = captures_.check_waiting("synchronize_event", own(event)); !status.ok()) return status;
  if (Status status = captures_.check_unsafe("synchronize_event", this_thread()); !status.ok()) return status;
  std::vector<OpRef> targets;
  if (own(event).op) targets.push_back(own(event).op);
  schedule_.demand(guard, targets);
  return schedule_.tell(targets);
}

Result<bool> Sim::do_query(Event& event) {
  Guard guard(mutex_);
  note("query_event");
  if (Status status = captures_.check_waiting("query_event", own(event)); !status.ok()) return status;
  if (Status status = captures_.check_unsafe("query_event", this_thread()); !status.ok()) return status;
  OpRef op = own(event).op;
  schedule_.advance(guard);
  return !op || op->done();
}

Result<double> Sim::do_elapsed_ms(Event& from, Event& to) {
  Guard guard(mutex_);
  note("elapsed_ms");
  int64_t at_ns[2];
  SimEvent* events[] = {&own(from), &own(to)};
  for (int i = 0; i < 2; ++i) {
    const SimEvent& event = *events[i];
    if (!event.timing)
      return refusal(ErrorCode::kInput, name(), "elapsed_ms", "two events made for timing",
                     "one made without (CUDA: CUDA_ERROR_INVALID_HANDLE)",
                     "make them with create_event(true)");
    if (!event.op)
      return refusal(ErrorCode::kInput, name(), "elapsed_ms", "two recorded events",
                     event.capture ? "one recorded in a capture" : "one never recorded",
                     "record both on a stream before (CUDA: CUDA_ERROR_INVALID_HANDLE)");
    if (!event.op->done())
      return refusal(ErrorCode::kDevice, name(), "elapsed_ms", "two events that are complete",
                     "one that is not (CUDA: CUDA_ERROR_NOT_READY)", "synchronize() with it before");
    at_ns[i] = event.op->at_ns;
  }
  return static_cast<double>(at_ns[1] - at_ns[0]) * 1e-6;
}

// ---- capture

Status Sim::do_begin_capture(StreamHandle handle, CaptureMode mode) {
  Guard guard(mutex_);
  note("begin_capture");
  auto stream = streams_.find("begin_capture", handle, this_thread());
  if (!stream.ok()) return stream.status();
  return captures_.begin(**stream, mode, this_thread());
}

Result<GraphRef> Sim::do_end_capture(StreamHandle handle) {
  Guard guard(mutex_);
  note("end_capture");
  auto stream = streams_.find("end_capture", handle, this_thread());
  if (!stream.ok()) return stream.status();
  auto nodes = captures_.end(guard, **stream, this_thread());
  if (!nodes.ok()) return nodes.status();
  return GraphRef(std::make_shared<SimGraph>(*this, std::move(*nodes)));
}

Result<CaptureStatus> Sim::do_capture_status(StreamHandle handle) {
  Guard guard(mutex_);
  note("capture_status");
  auto stream = streams_.find("capture_status", handle, this_thread());
  if (!stream.ok()) return stream.status();
  if (Status status = captures_.check_legacy_status(**stream); !status.ok()) return status;
  return Captures::status(**stream);
}

CaptureMode Sim::do_exchange_capture_mode(CaptureMode mode) { return Captures::exchange_mode(mode); }

Result<GraphExecRef> Sim::do_instantiate(Graph& graph) {
  Guard guard(mutex_);
  note("instantiate");
  if (Status status = captures_.check_unsafe("instantiate", this_thread()); !status.ok()) return status;
  return GraphExecRef(std::make_shared<SimGraphExec>(*this, static_cast<SimGraph&>(graph).nodes));
}

Status Sim::do_upload(GraphExec&, StreamHandle handle) {
  Guard guard(mutex_);
  note("upload");
  auto stream = stream_for("upload", handle);
  if (!stream.ok()) return stream.status();
  if (Status status = captures_.check_waiting("upload", **stream); !status.ok()) return status;
  return submit(guard, "upload", **stream, Action{.kind = OpKind::kUpload});
}

Status Sim::do_launch(GraphExec& exec, StreamHandle handle) {
  Guard guard(mutex_);
  note("launch");
  auto found = stream_for("launch", handle);
  if (!found.ok()) return found.status();
  Stream& stream = **found;
  // Measured: refused, though the reference has child graphs.
  if (Status status = captures_.check_waiting("launch", stream); !status.ok()) return status;
  auto& launched = static_cast<SimGraphExec&>(exec);
  for (const Node& node : *launched.nodes) {
    for (const auto& block : node.action->blocks) {
      if (Status status = memory_.check_live("launch", block); !status.ok()) return status;
    }
  }
  // Nodes are operations of their own between a beginning and an end, so that they run in any order that the
  // capture's edges allow.
  uint64_t number = ++launches_;
  OpRef first = make(OpKind::kLaunch, stream, nullptr);
  first->launch = number;
  first->held = calls_.delayed("launch");
  schedule_.order(*first, launched.last);
  enqueue(stream, first);
  std::vector<OpRef> ops;
  OpRef last = make(OpKind::kLaunched, stream, nullptr);
  last->launch = number;
  schedule_.order(*last, first);
  for (const Node& node : *launched.nodes) {
    OpRef op = make(node.action->kind, stream, node.action);
    op->stream = node.stream;
    op->launch = number;
    schedule_.order(*op, first);
    for (size_t before : node.after) schedule_.order(*op, ops[before]);
    schedule_.order(*last, op);
    schedule_.add(op);
    ops.push_back(std::move(op));
  }
  schedule_.add(last);
  stream.last = launched.last = last;
  schedule_.advance(guard);
  return {};
}

// ---- partitions

SmLimits Sim::do_sm_limits() const { return sms_->limits(); }

Result<std::vector<PartitionRef>> Sim::do_split(std::span<const int> counts,
                                                const PartitionOptions& options) {
  Guard guard(mutex_);
  note("split");
  return sim::split(*this, sms_, counts, options);
}

Result<std::vector<int>> Sim::do_sms_seen(StreamHandle stream, bool replayed) {
  auto seen = std::make_shared<std::vector<int>>();
  HostFunction look = [this, seen]() -> Status {
    PartitionRef partition = current_partition();
    if (partition) {
      *seen = static_cast<SimPartition&>(*partition).numbers();
      return {};
    }
    for (int number = 0; number < sms_->limits().total; ++number) seen->push_back(number);
    return {};
  };
  Status status;
  if (!replayed) {
    status = do_call(stream, std::move(look), {});
  } else {
    auto partition = do_partition_of(stream);
    if (!partition.ok()) return partition.status();
    // Of its own: what others enqueue on theirs meanwhile would be taken into the capture.
    auto own = do_create_stream({.priority = 0, .blocking = false, .partition = *partition});
    if (!own.ok()) return own.status();
    status = do_begin_capture(*own, CaptureMode::kRelaxed);
    if (status.ok()) {
      status = do_call(*own, std::move(look), {});
      auto graph = do_end_capture(*own);
      if (status.ok()) status = graph.status();
      if (status.ok()) {
        auto exec = do_instantiate(**graph);
        status = exec.ok() ? do_launch(**exec, stream) : exec.status();
      }
    }
    (void)do_destroy_stream(*own);
  }
  if (status.ok()) status = do_synchronize(stream);
  if (!status.ok()) return status;
  return *seen;
}

Result<GraphWork> Sim::do_work_of(Graph& graph, const PartitionRef& partition) {
  Guard guard(mutex_);
  note("work_of");
  GraphWork found;
  for (const Node& node : *static_cast<SimGraph&>(graph).nodes) {
    const Action& action = *node.action;
    if (!is_work(action.kind)) continue;
    const char* name = action.kind == OpKind::kCall ? "call" : action.kind == OpKind::kCopy ? "copy" : "fill";
    found.pieces.push_back({name, action.partition == partition});
  }
  return found;
}

}  // namespace sim

std::shared_ptr<SimDevice> make_sim_device(const SimOptions& options) {
  return std::make_shared<sim::Sim>(options);
}

}  // namespace headrace
