#include "device/sim_memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "device/refusal.h"
#include "device/registry.h"

namespace headrace::sim {

namespace {
constexpr size_t kAlignment = 256;  // what cuMemAlloc promises at least
constexpr int kPoison = 0xFF;       // NaN in every floating format, -1 in every integer
constexpr size_t kMaxKept = 256;
constexpr size_t kMaxKeptBytes = size_t{64} << 20;
}  // namespace

Block::~Block() { std::free(data); }

Memory::Memory(std::string device, int32_t device_id, size_t limit_nbytes)
    : device_(std::move(device)), device_id_(device_id), limit_nbytes_(limit_nbytes) {}

Memory::~Memory() {
  blocks_.each([](const auto& range) { forget_ended(range.base); });
}

Result<BlockRef> Memory::allocate(size_t nbytes) {
  size_t left = limit_nbytes_ - std::min(limit_nbytes_, counts_.current_nbytes);
  void* data = nullptr;
  if (nbytes <= left && nbytes <= PTRDIFF_MAX)
    data = std::aligned_alloc(kAlignment, (nbytes / kAlignment + 1) * kAlignment);
  if (!data)
    return refusal(ErrorCode::kOutOfDeviceMemory, device_, "allocate",
                   "at most " + std::to_string(left) + " bytes (of " + std::to_string(limit_nbytes_) + ", " +
                       std::to_string(counts_.current_nbytes) + " are in use)",
                   std::to_string(nbytes), "free memory, or give the device more");
  std::memset(data, kPoison, nbytes);
  auto block = std::make_shared<Block>(data, nbytes);
  blocks_.insert(data, nbytes, block);
  ++counts_.allocations;
  counts_.current_nbytes += nbytes;
  counts_.peak_nbytes = std::max(counts_.peak_nbytes, counts_.current_nbytes);
  return block;
}

Result<BlockRef> Memory::begin_free(void* data) {
  const auto* range = blocks_.starting_at(data);
  if (range != nullptr && !range->value->freed) return range->value;
  std::string got = hex(data);
  if (range != nullptr) {
    got += ", which was freed before";
  } else if (const BlockRef* inside = find(data)) {
    got += ", inside the allocation at " + hex((*inside)->data);
  } else if (auto owner = owner_of(data); owner && owner->device_id != device_id_) {
    got += ", memory of " + owner->device_name;
  }
  return refusal(ErrorCode::kInput, device_, "free", "the start of a live allocation of " + device_, got,
                 "free what allocate() returned, once, with its device");
}

void Memory::end(const BlockRef& block) {
  block->freed = true;
  ++counts_.frees;
  counts_.current_nbytes -= block->nbytes;
  remember_ended(block->data, block->nbytes, device_id_);
}

void Memory::release(const BlockRef& block) {
  std::memset(block->data, kPoison, block->nbytes);
  kept_.push_back(block);
  kept_nbytes_ += block->nbytes;
  for (auto oldest = kept_.begin();
       oldest != kept_.end() && (kept_.size() > kMaxKept || kept_nbytes_ > kMaxKeptBytes);) {
    // One reference here, one in blocks_; more: a graph or an operation that has not run still holds it.
    if (oldest->use_count() > 2) {
      ++oldest;
      continue;
    }
    kept_nbytes_ -= (*oldest)->nbytes;
    forget_ended((*oldest)->data);
    blocks_.erase((*oldest)->data);
    oldest = kept_.erase(oldest);
  }
}

const BlockRef* Memory::find(const void* address) const {
  const auto* range = blocks_.holding(address);
  return range == nullptr ? nullptr : &range->value;
}

Status Memory::ended(const char* operation, const void* data, const std::string& device) const {
  return refusal(ErrorCode::kInput, device_, operation, "memory that is allocated",
                 hex(data) + ", memory of " + device + " touched after its end: its free was enqueued before",
                 "free it behind its last use (CUDA: cuMemFreeAsync: once it returned, access by later work "
                 "is undefined)");
}

Status Memory::check_live(const char* operation, const BlockRef& block) const {
  return block->freed ? ended(operation, block->data, device_) : Status();
}

Result<BlockRef> Memory::check(const char* operation, const void* data, size_t nbytes) const {
  if (nbytes == 0) return BlockRef();
  if (data == nullptr)
    return refusal(ErrorCode::kInput, device_, operation, "an address",
                   "null for " + std::to_string(nbytes) + " bytes", "pass the memory's address");
  if (const BlockRef* block = find(data)) {
    if (Status status = check_live(operation, *block); !status.ok()) return status;
    size_t left = static_cast<char*>((*block)->data) + (*block)->nbytes - static_cast<const char*>(data);
    if (nbytes > left)
      return refusal(ErrorCode::kInput, device_, operation, "a range inside one allocation",
                     std::to_string(nbytes) + " bytes at " + hex(data) + ", of which " +
                         std::to_string(left) + " are inside the allocation of " +
                         std::to_string((*block)->nbytes) + " at " + hex((*block)->data),
                     "check the size (CUDA: CUDA_ERROR_INVALID_VALUE)");
    return *block;
  }
  // Memory of the cpu device is the host's.
  if (auto owner = owner_of(data); owner && owner->backend != Backend::kCpu) {
    if (owner->ended) return ended(operation, data, owner->device_name);
    return refusal(ErrorCode::kDevice, device_, operation, "memory of " + device_ + ", or of the host",
                   hex(data) + ", memory of " + owner->device_name,
                   "work on one device with that device; go through host memory between two");
  }
  const auto* next = blocks_.behind(data);
  if (next != nullptr && reinterpret_cast<uintptr_t>(next->base) - reinterpret_cast<uintptr_t>(data) < nbytes)
    return refusal(ErrorCode::kInput, device_, operation, "a range inside one allocation, or outside all",
                   std::to_string(nbytes) + " bytes at " + hex(data) + ", which run into the allocation at " +
                       hex(next->base),
                   "check the address and the size");
  return BlockRef();
}

PointerInfo Memory::where(const void* address) const {
  const BlockRef* block = find(address);
  if (!block) return {};
  auto kind = (*block)->freed ? PointerInfo::Kind::kFreed : PointerInfo::Kind::kDevice;
  return {kind, (*block)->data, (*block)->nbytes};
}

void Memory::run(const Action& action) {
  if (action.kind == OpKind::kCopy && action.nbytes) std::memmove(action.to, action.from, action.nbytes);
  if (action.kind == OpKind::kFill && action.nbytes) std::memset(action.to, action.byte, action.nbytes);
  if (action.kind == OpKind::kAllocate) std::memset(action.to, kPoison, action.nbytes);
}

}  // namespace headrace::sim
