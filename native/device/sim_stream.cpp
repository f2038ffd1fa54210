#include "device/sim_stream.h"

#include "device/handle.h"
#include "device/refusal.h"

namespace headrace::sim {

Streams::Streams(std::string device, int32_t device_id) : device_(std::move(device)), device_id_(device_id) {
  legacy_.handle = kLegacyStream;
}

StreamHandle Streams::create(const StreamOptions& options) {
  auto stream = std::make_unique<Stream>();
  StreamHandle handle = stream->handle = make_handle(device_id_, ++made_);
  stream->priority = options.priority;
  stream->blocking = options.blocking;
  stream->partition = options.partition;
  streams_[handle] = std::move(stream);
  return handle;
}

Status Streams::check(const char* operation, StreamHandle handle) const {
  if (handle == kLegacyStream || handle == kPerThreadStream || streams_.contains(handle)) return {};
  return not_a_stream(device_, device_id_, operation, handle, made_);
}

Result<Stream*> Streams::find(const char* operation, StreamHandle handle, uint64_t thread) {
  if (Status status = check(operation, handle); !status.ok()) return status;
  if (handle == kLegacyStream) return &legacy_;
  if (handle != kPerThreadStream) return streams_.at(handle).get();
  if (auto found = per_thread_.find(thread); found != per_thread_.end()) return found->second.get();
  // Nobody says when a thread has ended; an idle stream is as good as one not made yet.
  std::erase_if(per_thread_, [](const auto& item) {
    const Stream& stream = *item.second;
    return !stream.capture && (!stream.last || stream.last->settled());
  });
  auto made = std::make_unique<Stream>();
  made->handle = kPerThreadStream;
  made->blocking = true;  // CUDA: the per-thread stream is a blocking one
  return (per_thread_[thread] = std::move(made)).get();
}

PartitionRef Streams::partition(StreamHandle handle) const {
  auto found = streams_.find(handle);
  return found == streams_.end() ? nullptr : found->second->partition;
}

void Streams::destroy(Stream* stream) {
  if (stream->blocking && stream->last && !stream->last->settled()) orphans_.push_back(stream->last);
  streams_.erase(stream->handle);
}

std::vector<OpRef> Streams::blocking_work() {
  std::erase_if(orphans_, [](const OpRef& op) { return op->settled(); });
  std::vector<OpRef> work = orphans_;
  for (const auto& [handle, stream] : streams_) {
    if (stream->blocking && stream->last) work.push_back(stream->last);
  }
  for (const auto& [thread, stream] : per_thread_) {
    if (stream->last) work.push_back(stream->last);
  }
  return work;
}

// CUDA Runtime API, "Stream synchronization behavior": the legacy stream waits for the work of all blocking
// streams, and their later work waits for its.
void Streams::order(Schedule& schedule, Op& op, const Stream& stream) {
  schedule.order(op, stream.last);
  if (stream.legacy()) {
    for (const OpRef& work : blocking_work()) schedule.order(op, work);
  } else if (stream.blocking) {
    schedule.order(op, legacy_.last);
  }
}

std::vector<OpRef> Streams::targets(const Stream& stream) {
  std::vector<OpRef> targets;
  if (stream.legacy()) targets = blocking_work();
  if (stream.last) targets.push_back(stream.last);
  return targets;
}

}  // namespace headrace::sim
