#include "headrace/block.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <optional>
#include <utility>

namespace headrace {

namespace {

struct PutOff {
  std::mutex mutex;
  std::vector<std::function<void()>> work;
  std::atomic<bool> any{false};
};
PutOff& put_off_work() {
  static auto* p = new PutOff();  // used by destructors at the end of the process
  return *p;
}

}  // namespace

thread_local int put_off_scopes = 0;

PutOffScope::PutOffScope() { ++put_off_scopes; }
PutOffScope::~PutOffScope() { --put_off_scopes; }
bool PutOffScope::active() { return put_off_scopes != 0; }

RelaxedScope::RelaxedScope(Device& device)
    : device_(device.backend() == Backend::kCpu || in_host_function() ? nullptr : &device) {
  if (device_ != nullptr) former_ = device_->exchange_capture_mode(CaptureMode::kRelaxed);
}
RelaxedScope::~RelaxedScope() {
  if (device_ != nullptr) (void)device_->exchange_capture_mode(former_);
}

void put_off(std::function<void()> work) {
  if (!in_host_function() && !PutOffScope::active()) return work();
  std::lock_guard lock(put_off_work().mutex);
  put_off_work().work.push_back(std::move(work));
  put_off_work().any = true;
}

void run_put_off() {
  if (!put_off_work().any || in_host_function() || PutOffScope::active()) return;
  std::vector<std::function<void()>> work;
  {
    std::lock_guard lock(put_off_work().mutex);
    work.swap(put_off_work().work);
    put_off_work().any = false;
  }
  for (auto& one : work) one();
}

Status drain(Device& device, StreamHandle stream) {
  Status first = device.synchronize(stream);
  // A wait that failed and one that returned what failed before it look alike; a second one after the latter
  // finds nothing.
  if (!first.ok() && !device.synchronize(stream).ok()) (void)device.synchronize();
  return first;
}

Block::Block(DeviceRef device, void* data, size_t capacity)
    : device_(std::move(device)), data_(data), capacity_(capacity) {}

Block::~Block() {
  if (device_ == nullptr) {
    std::free(data_);
    return;
  }
  // On the freeing thread's own stream, behind everything that used the memory: the streams that did may be
  // gone. A failure has nobody to be told to; the device keeps the memory then.
  RelaxedScope relaxed(*device_);
  Status ordered = order(kPerThreadStream, true);
  if (!ordered.ok()) ordered = drain(*device_, kPerThreadStream);
  if (!ordered.ok()) ordered = device_->synchronize();
  if (ordered.ok() && !device_->free(data_, kPerThreadStream).ok())
    (void)device_->free(data_, kPerThreadStream);
}

void Block::used(EventRef event, bool write, const EventRef& behind) {
  std::lock_guard lock(mutex_);
  // A buffer that call after call reads would otherwise carry an event of each that may still run.
  if (behind) std::erase(readers_, behind);
  if (write) {
    lost_ = {};
    writer_ = std::move(event);
    readers_.clear();  // the writer was ordered behind them
  } else if (std::find(readers_.begin(), readers_.end(), event) == readers_.end()) {
    // Many readers of one block: keep only those that may still run. A thread that captures may not ask.
    if (readers_.size() >= 8 && !PutOffScope::active()) {
      std::erase_if(readers_, [&](const EventRef& e) {
        auto done = device_->query(*e);
        return done.ok() && *done;
      });
    }
    readers_.push_back(std::move(event));
  }
}

std::vector<EventRef> Block::events(bool write) const {
  std::lock_guard lock(mutex_);
  std::vector<EventRef> out;
  if (write) out = readers_;
  if (writer_) out.push_back(writer_);
  return out;
}

void Block::lost(const Status& status) {
  std::lock_guard lock(mutex_);
  lost_ = status;
}

Status Block::order(StreamHandle stream, bool write, const EventRef& behind) {
  if (device_ == nullptr) return {};
  if (PutOffScope::active()) {
    // An event from outside would break the capture (CAPTURE_ISOLATION); the host may wait for it.
    RelaxedScope relaxed(*device_);
    for (const EventRef& event : events(write)) {
      if (Status status = device_->synchronize(*event); !status.ok()) return status;
    }
    return {};
  }
  for (const EventRef& event : events(write)) {
    if (event == behind) continue;
    if (Status status = device_->wait(stream, *event); !status.ok()) return status;
  }
  return {};
}

Status Block::wait(bool write) {
  if (device_ == nullptr) return {};
  {
    std::lock_guard lock(mutex_);
    if (!lost_.ok()) return std::exchange(lost_, {});
  }
  for (const EventRef& event : events(write)) {
    if (Status status = device_->synchronize(*event); !status.ok()) return status;
  }
  return {};
}

namespace {

// Frees happen on the per-thread stream; while that one captures, the caller's doing, they wait.
bool captures(Device& device) {
  auto status = device.capture_status(kPerThreadStream);
  return status.ok() && *status != CaptureStatus::kNone;
}

}  // namespace

void Ring::release(Block* block) {
  put_off([block] {
    if (block->device_ != nullptr && block->device_->backend() != Backend::kCpu &&
        captures(*block->device_)) {
      std::lock_guard lock(put_off_work().mutex);
      put_off_work().work.push_back([block] { release(block); });
      put_off_work().any = true;
      return;
    }
    delete block;
  });
}

Ring::~Ring() { trim(); }

void Ring::trim() {
  std::vector<Block*> doomed;
  {
    std::lock_guard lock(mutex_);
    doomed.swap(waiting_);
    for (Block* block : doomed) nbytes_ -= block->capacity_;
  }
  for (Block* block : doomed) release(block);
}

void Ring::close() {
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
  }
  trim();
}

Result<BlockRef> Ring::take(size_t nbytes, StreamHandle stream, const EventRef& behind) {
  size_t capacity = nbytes ? (nbytes + 63) / 64 * 64 : 64;
  if (capacity < nbytes)
    return Status(ErrorCode::kOutOfDeviceMemory,
                  "expected a size that 64 bits can count, got more; ask for less");
  Block* block = nullptr;
  {
    std::lock_guard lock(mutex_);
    for (size_t i = waiting_.size(); i-- > 0;) {
      // Not one far too large: it would be missing where it is needed.
      if (waiting_[i]->capacity_ < capacity || waiting_[i]->capacity_ > 2 * capacity) continue;
      block = waiting_[i];
      waiting_[i] = waiting_.back();
      waiting_.pop_back();
      break;
    }
  }
  if (block != nullptr) {
    if (Status status = block->order(stream, true, behind); !status.ok()) {
      give(block);
      return status;
    }
  } else {
    void* data = nullptr;
    if (device_ != nullptr) {
      // Not in a capture of ours, which has to find everything there.
      std::optional<RelaxedScope> relaxed;
      if (!PutOffScope::active()) relaxed.emplace(*device_);
      auto allocated = device_->allocate(capacity, stream);
      if (!allocated.ok()) return allocated.status();
      data = *allocated;
    } else if (data = std::aligned_alloc(64, capacity); data == nullptr) {
      Status status(ErrorCode::kOutOfDeviceMemory,
                    "expected " + std::to_string(nbytes) + " bytes on cpu, got none; free memory");
      status->device = "cpu";
      return status;
    }
    block = new Block(device_, data, capacity);
    std::lock_guard lock(mutex_);
    nbytes_ += capacity;
  }
  return BlockRef(block, [ring = shared_from_this()](Block* b) { ring->give(b); });
}

void Ring::give(Block* block) {
  {
    std::lock_guard lock(mutex_);
    if (!closed_ && waiting_.size() < kMaxWaiting) {
      waiting_.push_back(block);
      return;
    }
    nbytes_ -= block->capacity_;
  }
  release(block);
}

size_t Ring::nbytes() const {
  std::lock_guard lock(mutex_);
  return nbytes_;
}

Result<EventRef> EventPool::take(Device& device) {
  {
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < events_.size(); ++i) {
      EventRef& event = events_[(next_ + i) % events_.size()];
      if (event.use_count() != 1) continue;
      next_ = (next_ + i + 1) % events_.size();
      return event;
    }
  }
  auto event = device.create_event();
  if (!event.ok()) return event.status();
  std::lock_guard lock(mutex_);
  events_.push_back(*event);
  return *event;
}

}  // namespace headrace
