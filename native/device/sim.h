// The simulated device, put together. Each noun has a file of its own: sim_memory, sim_stream, sim_schedule,
// sim_capture, sim_partition, sim_calls.
#pragma once

#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "device/sim_calls.h"
#include "device/sim_capture.h"
#include "device/sim_memory.h"
#include "device/sim_op.h"
#include "device/sim_partition.h"
#include "device/sim_schedule.h"
#include "device/sim_stream.h"
#include "headrace/device.h"

namespace headrace::sim {

class Sim final : public SimDevice {
 public:
  explicit Sim(const SimOptions& options);
  ~Sim() override;

  Status delay(const std::string& operation, int64_t at) override;
  void clear_faults() override;
  int64_t pending() const override;
  std::vector<std::pair<int, std::string>> submissions() const override;
  PartitionRef current_partition() const override;
  void drop_pending() override;

 private:
  Result<void*> do_allocate(size_t nbytes, StreamHandle stream) override;
  Status do_free(void* data, StreamHandle stream) override;
  Status do_copy(void* to, const void* from, size_t nbytes, StreamHandle stream) override;
  Status do_fill(void* to, uint8_t byte, size_t nbytes, StreamHandle stream) override;
  PointerInfo do_where(const void* address) const override;
  MemoryCounts do_memory() const override;
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
  SmLimits do_sm_limits() const override;
  Result<std::vector<PartitionRef>> do_split(std::span<const int> sms,
                                             const PartitionOptions& options) override;
  Result<std::vector<int>> do_sms_seen(StreamHandle stream, bool replayed) override;
  Result<GraphWork> do_work_of(Graph& graph, const PartitionRef& partition) override;

  void note(const char* operation);
  // The stream for new work, if it may have any now.
  Result<Stream*> stream_for(const char* operation, StreamHandle handle);
  // The action becomes a node of the stream's capture, or an operation on it.
  Status submit(Guard& guard, const char* operation, Stream& stream, Action action);
  OpRef make(OpKind kind, const Stream& stream, ActionRef action);
  // Takes the operation in behind the stream's work; it is the stream's latest.
  void enqueue(Stream& stream, const OpRef& op);
  Status check_accesses(const char* operation, Action& action) const;

  mutable std::mutex mutex_;
  Memory memory_;
  Schedule schedule_;
  Streams streams_;
  Captures captures_;
  Calls calls_;
  const std::shared_ptr<Sms> sms_;
  uint64_t launches_ = 0;
};

}  // namespace headrace::sim
