#include "program/ring.h"

#include <cstdlib>
#include <new>

namespace headrace {

Ring::~Ring() {
  for (Block* block : waiting_) {
    std::free(block->data_);
    delete block;
  }
}

std::shared_ptr<Block> Ring::take(size_t nbytes) {
  size_t capacity = nbytes ? (nbytes + 63) / 64 * 64 : 64;
  if (capacity < nbytes) return nullptr;
  Block* block = nullptr;
  {
    std::lock_guard lock(mutex_);
    for (size_t i = waiting_.size(); i-- > 0;) {
      // Not one far too large: it would be missing where it is needed.
      if (waiting_[i]->capacity_ >= capacity && waiting_[i]->capacity_ <= 2 * capacity) {
        block = waiting_[i];
        waiting_[i] = waiting_.back();
        waiting_.pop_back();
        break;
      }
    }
    if (block == nullptr) nbytes_ += capacity;
  }
  if (block == nullptr) {
    block = new Block();
    block->data_ = std::aligned_alloc(64, capacity);
    block->capacity_ = capacity;
    if (block->data_ == nullptr) {
      delete block;
      std::lock_guard lock(mutex_);
      nbytes_ -= capacity;
      return nullptr;
    }
  }
  return {block, [ring = shared_from_this()](Block* b) { ring->give(b); }};
}

void Ring::give(Block* block) {
  {
    std::lock_guard lock(mutex_);
    if (waiting_.size() < kMaxWaiting) {
      waiting_.push_back(block);
      return;
    }
    nbytes_ -= block->capacity_;
  }
  std::free(block->data_);
  delete block;
}

size_t Ring::nbytes() const {
  std::lock_guard lock(mutex_);
  return nbytes_;
}

}  // namespace headrace
