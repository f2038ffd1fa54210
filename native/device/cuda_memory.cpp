// The CUDA device's memory: blocks of its stream-ordered pool, what lies where, copies and fills.
#include "device/cuda.h"

#include <algorithm>

#include "device/cuda_operation.h"
#include "device/refusal.h"
#include "device/registry.h"

namespace headrace {

namespace {

cu::Address address_of(const void* data) { return reinterpret_cast<uintptr_t>(data); }

}  // namespace

CudaDevice::Block CudaDevice::find(const void* address) const {
  std::shared_lock lock(memory_mutex_);
  const auto* allocation = allocations_.holding(address);
  return allocation == nullptr ? Block() : Block{allocation->base, allocation->nbytes};
}

Result<void*> CudaDevice::do_allocate(size_t nbytes, StreamHandle stream) {
  HEADRACE_CURRENT("allocate");
  HEADRACE_USABLE("allocate", stream);
  auto busy = capturing("allocate", stream);
  if (!busy.ok()) return busy.status();
  if (*busy)
    return refusal(ErrorCode::kCapture, name(), "allocate", "a stream that does not capture",
                   stream_name(stream) + ", which does: memory of a capture would be its graph's",
                   "allocate before the capture, or from a cache");
  cu::Address address = 0;
  cu::Code code = driver_.MemAllocFromPoolAsync(&address, nbytes ? nbytes : 1, pool_, raw(stream));
  if (code == cu::kOutOfMemory) {
    size_t free = 0, total = 0;
    (void)driver_.MemGetInfo(&free, &total);
    return refusal(ErrorCode::kOutOfDeviceMemory, name(), "allocate",
                   "memory for " + std::to_string(nbytes) + " bytes",
                   driver_.text(code) + ": " + std::to_string(free) + " of " + std::to_string(total) +
                       " bytes are free, " + std::to_string(do_memory().current_nbytes) + " are in use here",
                   advice_for(code));
  }
  if (code != cu::kSuccess) return failed("allocate", code);
  std::unique_lock lock(memory_mutex_);
  auto* data = reinterpret_cast<void*>(address);
  allocations_.insert(data, nbytes);
  ++counts_.allocations;
  counts_.current_nbytes += nbytes;
  counts_.peak_nbytes = std::max(counts_.peak_nbytes, counts_.current_nbytes);
  return data;
}

Status CudaDevice::do_free(void* data, StreamHandle stream) {
  HEADRACE_CURRENT("free");
  HEADRACE_USABLE("free", stream);
  auto busy = capturing("free", stream);
  if (!busy.ok()) return busy.status();
  if (*busy)
    return refusal(ErrorCode::kCapture, name(), "free", "a stream that does not capture",
                   stream_name(stream) +
                       ", which does: memory allocated outside cannot be freed in it "
                       "(CUDA_ERROR_INVALID_VALUE, measured)",
                   "free it after the capture");
  size_t nbytes = 0;
  {
    // Forgotten first: another thread may be given the address as soon as the driver has it back.
    std::unique_lock lock(memory_mutex_);
    const auto* allocation = allocations_.starting_at(data);
    if (allocation == nullptr)
      return refusal(ErrorCode::kInput, name(), "free", "the start of a live allocation of " + name(),
                     hex(data), "free what allocate() returned, once, with its device");
    nbytes = allocation->nbytes;
    allocations_.erase(data);
  }
  cu::Code code = driver_.MemFreeAsync(address_of(data), raw(stream));
  std::unique_lock lock(memory_mutex_);
  if (code != cu::kSuccess) {
    allocations_.insert(data, nbytes);
    return failed("free", code);
  }
  ++counts_.frees;
  counts_.current_nbytes -= nbytes;
  return {};
}

PointerInfo CudaDevice::do_where(const void* address) const {
  if (Block block = find(address); block.base != nullptr)
    return {PointerInfo::Kind::kDevice, block.base, block.nbytes, id()};
  Current current(*this);
  if (!current.ok() || address == nullptr) return {};
  unsigned type = 0, managed = 0;
  int ordinal = -1;
  cu::Address start = 0;
  size_t nbytes = 0;
  int attributes[] = {cu::kPointerMemoryType, cu::kPointerIsManaged, cu::kPointerDeviceOrdinal,
                      cu::kPointerRangeStart, cu::kPointerRangeSize};
  void* values[] = {&type, &managed, &ordinal, &start, &nbytes};
  // For memory that CUDA does not know it says success and zeros.
  if (driver_.PointerGetAttributes(5, attributes, values, address_of(address)) != cu::kSuccess) return {};
  if (type != cu::kMemoryDevice && managed == 0) return {};
  PointerInfo info{PointerInfo::Kind::kDevice, reinterpret_cast<void*>(start), nbytes, id()};
  if (managed == 0 && ordinal != this->ordinal()) {
    info.kind = PointerInfo::Kind::kOther;
    info.device_id = ordinal;  // a GPU's Device::id() is its ordinal
  }
  return info;
}

Result<bool> CudaDevice::on_device(const char* operation, const void* data, size_t nbytes) const {
  if (nbytes == 0) return false;
  if (data == nullptr)
    return refusal(ErrorCode::kInput, name(), operation, "an address",
                   "null for " + std::to_string(nbytes) + " bytes", "pass the memory's address");
  auto foreign = [&](const std::string& whose) {
    return refusal(ErrorCode::kDevice, name(), operation, "memory of " + name() + ", or of the host",
                   hex(data) + ", memory of " + whose,
                   "work on one device with that device; go through host memory between two");
  };
  PointerInfo info;
  if (Block block = find(data); block.base != nullptr) {
    info = {PointerInfo::Kind::kDevice, block.base, block.nbytes, id()};
  } else {
    // A simulated device's memory is host memory that only that device may touch.
    auto owner = owner_of(data);
    if (owner && owner->device_id != id() && owner->device_id != cpu_device()->id())
      return foreign(owner->device_name);
    info = do_where(data);
  }
  if (info.kind == PointerInfo::Kind::kHost) return false;
  if (info.kind == PointerInfo::Kind::kOther) return foreign("cuda:" + std::to_string(info.device_id));
  size_t left = static_cast<char*>(info.base) + info.nbytes - static_cast<const char*>(data);
  if (nbytes > left)
    return refusal(ErrorCode::kInput, name(), operation, "a range inside one allocation",
                   std::to_string(nbytes) + " bytes at " + hex(data) + ", of which " + std::to_string(left) +
                       " are inside the allocation of " + std::to_string(info.nbytes) + " at " +
                       hex(info.base),
                   "check the size");
  return true;
}

Status CudaDevice::do_copy(void* to, const void* from, size_t nbytes, StreamHandle stream) {
  HEADRACE_CURRENT("copy");
  HEADRACE_USABLE("copy", stream);
  auto source = on_device("copy", from, nbytes);
  if (!source.ok()) return source.status();
  auto target = on_device("copy", to, nbytes);
  if (!target.ok()) return target.status();
  if (nbytes == 0) return {};
  HEADRACE_DRIVER("copy", MemcpyAsync(address_of(to), address_of(from), nbytes, raw(stream)));
  if (*target && !*source) thread_counts().bytes_to_device += static_cast<int64_t>(nbytes);
  if (*source && !*target) thread_counts().bytes_to_host += static_cast<int64_t>(nbytes);
  return {};
}

Status CudaDevice::do_fill(void* to, uint8_t byte, size_t nbytes, StreamHandle stream) {
  HEADRACE_CURRENT("fill");
  HEADRACE_USABLE("fill", stream);
  if (auto target = on_device("fill", to, nbytes); !target.ok()) return target.status();
  if (nbytes == 0) return {};
  HEADRACE_DRIVER("fill", MemsetD8Async(address_of(to), byte, nbytes, raw(stream)));
  return {};
}

MemoryCounts CudaDevice::do_memory() const {
  std::shared_lock lock(memory_mutex_);
  return counts_;
}

Status CudaDevice::do_trim() {
  HEADRACE_CURRENT("trim");
  Relaxed relaxed(driver_);
  reap();
  std::vector<RestingStream> resting;
  {
    std::unique_lock lock(streams_mutex_);
    resting.swap(resting_);
  }
  end(resting);
  HEADRACE_DRIVER("trim", MemPoolTrimTo(pool_, 0));
  return {};
}

}  // namespace headrace
