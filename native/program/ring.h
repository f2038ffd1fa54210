// Memory for outputs: blocks that go back to their method when the last owner drops them.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "headrace/status.h"

namespace headrace {

class Ring;

class Block {
 public:
  void* data() const { return data_; }
  size_t capacity() const { return capacity_; }

 private:
  friend class Ring;
  void* data_ = nullptr;
  size_t capacity_ = 0;
};

class HEADRACE_API Ring : public std::enable_shared_from_this<Ring> {
 public:
  ~Ring();
  // A block of at least `nbytes`, 64-byte aligned; null when there is no memory.
  std::shared_ptr<Block> take(size_t nbytes);
  // Bytes of all blocks, in use or waiting.
  size_t nbytes() const;

 private:
  void give(Block* block);
  static constexpr size_t kMaxWaiting = 16;  // a caller who keeps 1,000 outputs and drops them gets most back
  mutable std::mutex mutex_;
  std::vector<Block*> waiting_;
  size_t nbytes_ = 0;
};

}  // namespace headrace
