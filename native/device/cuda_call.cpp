#include "device/cuda_call.h"

#include <algorithm>
#include <utility>

#include "device/host_function.h"

namespace headrace {

namespace {

// Functions that the driver's threads are done with.
struct Done {
  std::mutex mutex;
  std::vector<HostFunction> functions;
};
Done& done() {
  static auto* d = new Done();  // the driver's threads outlive static objects
  return *d;
}

void run(CudaCall& call) {
  Status status = run_host_function(call.function, call.device);
  std::lock_guard lock(call.mutex);
  --call.pending;
  if (status.ok() || call.failed) return;
  call.failed = true;
  call.failure = std::move(status);
}

void add(std::vector<CudaCallRef>& to, std::span<const CudaCallRef> calls) {
  for (const CudaCallRef& call : calls) {
    if (std::find(to.begin(), to.end(), call) == to.end()) to.push_back(call);
  }
}

}  // namespace

CudaStreamKey stream_key(StreamHandle stream) {
  static std::atomic<uint64_t> last{0};
  static thread_local uint64_t number = 0;  // not std::thread::id, which is used again
  if (stream != kPerThreadStream) return {stream, 0};
  if (number == 0) number = ++last;
  return {stream, number};
}

// What a function leaves behind, the exception of its failure for one, may go in here too, and take memory or
// events with it: the whole of it is inside.
void CudaCalls::run_once(void* call) {
  HostFunctionScope scope;
  std::unique_ptr<CudaCallRef> owner(static_cast<CudaCallRef*>(call));
  run(**owner);
  std::lock_guard lock(done().mutex);
  done().functions.push_back(std::exchange((*owner)->function, nullptr));
}

void CudaCalls::run_again(void* call) {
  HostFunctionScope scope;
  run(*static_cast<CudaCall*>(call));
}

std::vector<HostFunction> CudaCalls::take_done() {
  if (!any()) return {};
  std::lock_guard lock(done().mutex);
  return std::exchange(done().functions, {});
}

void CudaCalls::enqueued(const CudaStreamKey& stream, std::span<const CudaCallRef> calls) {
  if (calls.empty()) return;
  any_.store(true, std::memory_order_release);
  for (const CudaCallRef& call : calls) {
    std::lock_guard lock(call->mutex);
    ++call->pending;
  }
  std::lock_guard lock(mutex_);
  add(behind_[stream], calls);
}

void CudaCalls::withdrawn(std::span<const CudaCallRef> calls) {
  for (const CudaCallRef& call : calls) {
    std::lock_guard lock(call->mutex);
    --call->pending;
  }
}

void CudaCalls::recorded(const CudaStreamKey& stream, std::vector<CudaCallRef>& event) {
  if (!any()) return;
  std::lock_guard lock(mutex_);
  event.clear();
  if (auto there = behind_.find(stream); there != behind_.end()) event = there->second;
}

void CudaCalls::waited(const CudaStreamKey& stream, const std::vector<CudaCallRef>& event) {
  if (!any()) return;
  std::lock_guard lock(mutex_);
  if (!event.empty()) add(behind_[stream], event);
}

void CudaCalls::destroyed(const CudaStreamKey& stream) {
  if (!any()) return;
  std::lock_guard lock(mutex_);
  behind_.erase(stream);
}

// Under mutex_. Forgets the calls that have run and failed nowhere, or were told of.
Status CudaCalls::tell_of(std::vector<CudaCallRef>& calls) {
  Status told;
  std::erase_if(calls, [&](const CudaCallRef& call) {
    std::lock_guard lock(call->mutex);
    if (call->pending != 0) return false;
    if (!call->failed) return true;
    if (!told.ok()) return false;
    told = std::exchange(call->failure, Status());
    call->failed = false;
    return true;
  });
  return told;
}

Status CudaCalls::tell(const CudaStreamKey& stream) {
  // The legacy stream is behind, and before, every blocking one; which those are only the driver knows.
  if (stream.handle == kLegacyStream) return tell_all();
  if (!any()) return {};
  std::lock_guard lock(mutex_);
  for (const CudaStreamKey& key : {stream, CudaStreamKey{kLegacyStream, 0}}) {
    auto there = behind_.find(key);
    if (there == behind_.end()) continue;
    if (Status status = tell_of(there->second); !status.ok()) return status;
    if (there->second.empty()) behind_.erase(there);
  }
  return {};
}

Status CudaCalls::tell(std::vector<CudaCallRef>& event) {
  if (!any()) return {};
  std::lock_guard lock(mutex_);
  return tell_of(event);
}

Status CudaCalls::tell_all() {
  if (!any()) return {};
  std::lock_guard lock(mutex_);
  for (auto there = behind_.begin(); there != behind_.end();) {
    if (Status status = tell_of(there->second); !status.ok()) return status;
    there = there->second.empty() ? behind_.erase(there) : std::next(there);
  }
  return {};
}

}  // namespace headrace
