// The cpu device: host memory, and everything is done when a call returns. Streams and events exist so that
// code need not branch; they order nothing, since nothing is ever left to order.
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <unordered_set>

#include "device/address_map.h"
#include "device/handle.h"
#include "device/host_function.h"
#include "device/refusal.h"
#include "device/registry.h"
#include "headrace/device.h"

namespace headrace {

namespace {

constexpr size_t kAlignment = 256;

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

class CpuEvent final : public Event {
 public:
  CpuEvent(const Device& device, bool timing) : Event(device), timing(timing) {}
  const bool timing;
  std::atomic<int64_t> at_ns{0};  // 0: never recorded
};

class CpuDevice final : public Device {
 public:
  CpuDevice() : Device("cpu", Backend::kCpu, 0) {}

  ~CpuDevice() override {
    allocations_.each([](const auto& allocation) { std::free(allocation.base); });
  }

 private:
  Result<void*> do_allocate(size_t nbytes, StreamHandle stream) override {
    if (Status status = check("allocate", stream); !status.ok()) return status;
    void* data = nullptr;
    if (nbytes <= PTRDIFF_MAX) data = std::aligned_alloc(kAlignment, (nbytes / kAlignment + 1) * kAlignment);
    if (!data)
      return refusal(ErrorCode::kOutOfDeviceMemory, name(), "allocate", "memory for the request",
                     "none for " + std::to_string(nbytes) + " bytes", "free some, or ask for less");
    std::unique_lock lock(memory_mutex_);
    allocations_.insert(data, nbytes);
    ++counts_.allocations;
    counts_.current_nbytes += nbytes;
    if (counts_.current_nbytes > counts_.peak_nbytes) counts_.peak_nbytes = counts_.current_nbytes;
    return data;
  }

  Status do_free(void* data, StreamHandle stream) override {
    if (Status status = check("free", stream); !status.ok()) return status;
    {
      std::unique_lock lock(memory_mutex_);
      const auto* allocation = allocations_.starting_at(data);
      if (allocation == nullptr)
        return refusal(ErrorCode::kInput, name(), "free", "the start of a live allocation", hex(data),
                       "free what allocate() returned, once");
      ++counts_.frees;
      counts_.current_nbytes -= allocation->nbytes;
      allocations_.erase(data);
    }
    std::free(data);
    return {};
  }

  Status do_copy(void* to, const void* from, size_t nbytes, StreamHandle stream) override {
    if (Status status = check("copy", stream); !status.ok()) return status;
    if (nbytes == 0) return {};
    if (Status status = check_range("copy", to, nbytes); !status.ok()) return status;
    if (Status status = check_range("copy", from, nbytes); !status.ok()) return status;
    std::memmove(to, from, nbytes);
    return {};
  }

  Status do_fill(void* to, uint8_t byte, size_t nbytes, StreamHandle stream) override {
    if (Status status = check("fill", stream); !status.ok()) return status;
    if (nbytes == 0) return {};
    if (Status status = check_range("fill", to, nbytes); !status.ok()) return status;
    std::memset(to, byte, nbytes);
    return {};
  }

  PointerInfo do_where(const void* address) const override {
    std::shared_lock lock(memory_mutex_);
    const auto* allocation = allocations_.holding(address);
    if (allocation == nullptr) return {};
    return {PointerInfo::Kind::kDevice, allocation->base, allocation->nbytes};
  }

  MemoryCounts do_memory() const override {
    std::shared_lock lock(memory_mutex_);
    return counts_;
  }

  Result<StreamHandle> do_create_stream(const StreamOptions& options) override {
    if (options.partition) return absent("create_stream", "partitions");
    std::unique_lock lock(streams_mutex_);
    StreamHandle stream = make_handle(id(), ++made_);
    streams_.insert(stream);
    return stream;
  }

  Status do_destroy_stream(StreamHandle stream) override {
    std::unique_lock lock(streams_mutex_);
    if (streams_.erase(stream) == 0) return not_a_stream(name(), id(), "destroy_stream", stream, made_);
    return {};
  }

  Status do_check_stream(StreamHandle stream) const override { return check("check_stream", stream); }
  Status do_synchronize(StreamHandle stream) override { return check("synchronize_stream", stream); }
  Status do_synchronize() override { return {}; }

  Result<bool> do_query(StreamHandle stream) override {
    if (Status status = check("query_stream", stream); !status.ok()) return status;
    return true;
  }

  Status do_call(StreamHandle stream, HostFunction function, std::vector<Access> accesses) override {
    if (Status status = check("call", stream); !status.ok()) return status;
    for (const Access& access : accesses) {
      if (Status status = check_range("call", access.data, access.nbytes); !status.ok()) return status;
    }
    return run_host_function(function, name());
  }

  Result<EventRef> do_create_event(bool timing) override {
    return EventRef(std::make_shared<CpuEvent>(*this, timing));
  }

  Status do_record(Event& event, StreamHandle stream) override {
    if (Status status = check("record", stream); !status.ok()) return status;
    static_cast<CpuEvent&>(event).at_ns = now_ns();
    return {};
  }

  Status do_wait(StreamHandle stream, Event&) override { return check("wait", stream); }
  Status do_synchronize(Event&) override { return {}; }
  Result<bool> do_query(Event&) override { return true; }

  Result<double> do_elapsed_ms(Event& from, Event& to) override {
    auto& begin = static_cast<CpuEvent&>(from);
    auto& end = static_cast<CpuEvent&>(to);
    if (!begin.timing || !end.timing)
      return refusal(ErrorCode::kInput, name(), "elapsed_ms", "two events made for timing",
                     "one made without", "make them with create_event(true)");
    int64_t from_ns = begin.at_ns, to_ns = end.at_ns;
    if (from_ns == 0 || to_ns == 0)
      return refusal(ErrorCode::kInput, name(), "elapsed_ms", "two recorded events", "one never recorded",
                     "record both before");
    return static_cast<double>(to_ns - from_ns) * 1e-6;
  }

  Status do_begin_capture(StreamHandle, CaptureMode) override { return absent("begin_capture", "capture"); }
  Result<GraphRef> do_end_capture(StreamHandle) override { return absent("end_capture", "capture"); }

  Result<CaptureStatus> do_capture_status(StreamHandle stream) override {
    if (Status status = check("capture_status", stream); !status.ok()) return status;
    return CaptureStatus::kNone;
  }

  CaptureMode do_exchange_capture_mode(CaptureMode mode) override {
    static thread_local CaptureMode current = CaptureMode::kGlobal;
    return std::exchange(current, mode);
  }

  Result<GraphExecRef> do_instantiate(Graph&) override { return absent("instantiate", "graphs"); }
  Status do_upload(GraphExec&, StreamHandle) override { return absent("upload", "graphs"); }
  Status do_launch(GraphExec&, StreamHandle) override { return absent("launch", "graphs"); }
  SmLimits do_sm_limits() const override { return {}; }
  Result<std::vector<PartitionRef>> do_split(std::span<const int>, const PartitionOptions&) override {
    return absent("split", "partitions");
  }
  Result<std::vector<int>> do_sms_seen(StreamHandle, bool) override {
    return absent("sms_seen", "multiprocessors");
  }
  Result<GraphWork> do_work_of(Graph&, const PartitionRef&) override { return absent("work_of", "graphs"); }

  Status absent(const char* operation, const std::string& what) const {
    return refusal(ErrorCode::kDevice, name(), operation, "a device with " + what,
                   "cpu, which has no " + what, "use cuda, or sim where there is no GPU");
  }

  Status check(const char* operation, StreamHandle stream) const {
    if (stream == kLegacyStream || stream == kPerThreadStream) return {};
    std::shared_lock lock(streams_mutex_);
    if (streams_.contains(stream)) return {};
    return not_a_stream(name(), id(), operation, stream, made_);
  }

  // Inside one allocation of this device, or host memory as far as anybody knows.
  Status check_range(const char* operation, const void* data, size_t nbytes) const {
    if (nbytes == 0) return {};
    auto owner = owner_of(data);
    if (!owner) return {};
    if (owner->device_id != id())
      return refusal(ErrorCode::kDevice, name(), operation, "memory of cpu",
                     hex(data) + ", memory of " + owner->device_name,
                     "copy with " + owner->device_name + ", which orders it");
    size_t left = static_cast<char*>(owner->base) + owner->nbytes - static_cast<const char*>(data);
    if (nbytes > left)
      return refusal(ErrorCode::kInput, name(), operation, "a range inside one allocation",
                     std::to_string(nbytes) + " bytes at " + hex(data) + ", of which " +
                         std::to_string(left) + " are inside",
                     "check the size");
    return {};
  }

  mutable std::shared_mutex memory_mutex_;
  AddressMap<> allocations_;
  MemoryCounts counts_;

  mutable std::shared_mutex streams_mutex_;
  std::unordered_set<StreamHandle> streams_;
  uint32_t made_ = 0;
};

}  // namespace

DeviceRef cpu_device() {
  // Never destroyed: buffers may be freed while the process ends.
  static auto* device = new DeviceRef(std::make_shared<CpuDevice>());
  return *device;
}

}  // namespace headrace
