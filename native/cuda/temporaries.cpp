#include "cuda/temporaries.h"

#include <algorithm>
#include <new>

namespace headrace {

Temporaries::Temporaries(DeviceRef device)
    : device_(std::move(device)), ring_(std::make_shared<Ring>(device_)) {
  ring_->close();  // what waits, waits here
}

void Temporaries::begin(StreamHandle stream, bool keep) {
  stream_ = stream;
  keep_ = keep;
  failure_ = {};
}

void* Temporaries::take(size_t nbytes) try {
  std::lock_guard lock(mutex_);
  size_t best = waiting_.size(), largest = waiting_.size();
  for (size_t i = 0; i < waiting_.size(); ++i) {
    size_t capacity = waiting_[i]->capacity();
    if (largest == waiting_.size() || capacity > waiting_[largest]->capacity()) largest = i;
    if (capacity >= nbytes && (best == waiting_.size() || capacity < waiting_[best]->capacity())) best = i;
  }
  auto pop = [&](size_t i) {
    BlockRef block = std::move(waiting_[i]);
    waiting_[i] = std::move(waiting_.back());
    waiting_.pop_back();
    return block;
  };
  taken_.reserve(taken_.size() + 1);
  waiting_.reserve(waiting_.size() + taken_.size() + 1);  // give() must not fail
  if (best != waiting_.size()) {
    taken_.push_back(pop(best));
    return taken_.back()->data();
  }
  if (largest != waiting_.size() && !keep_ && *pins_ == 0) {
    BlockRef block = pop(largest);
    // Work of this stream may use it still; it is freed on another.
    auto event = device_->create_event();
    Status status = event.ok() ? device_->record(**event, stream_) : event.status();
    if (!status.ok()) status = drain(*device_, stream_);
    if (event.ok()) block->used(*event, true);
  }
  auto block = ring_->take(nbytes, stream_);
  if (!block.ok()) {
    failure_ = block.status();
    return nullptr;
  }
  taken_.push_back(std::move(*block));
  return taken_.back()->data();
} catch (const std::bad_alloc&) {
  failure_ = Status(ErrorCode::kOutOfDeviceMemory, "expected host memory, got none; free memory");
  return nullptr;
}

void Temporaries::give(void* data) {
  std::lock_guard lock(mutex_);
  auto found =
      std::find_if(taken_.rbegin(), taken_.rend(), [&](const BlockRef& b) { return b->data() == data; });
  if (found == taken_.rend()) return;
  waiting_.push_back(std::move(*found));
  *found = std::move(taken_.back());
  taken_.pop_back();
}

std::shared_ptr<void> Temporaries::pin() {
  ++*pins_;
  return {pins_.get(), [pins = pins_](void*) { --*pins; }};
}

}  // namespace headrace
