// Memory of the simulated device: host memory whose every address is known, filled with 0xFF when fresh and
// when freed, and kept for a while after its end so that a stale address is found rather than used again.
// Not locked: the device's lock is held around every call.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "device/address_map.h"
#include "device/sim_op.h"
#include "headrace/device.h"

namespace headrace::sim {

struct Block {
  Block(void* data, size_t nbytes) : data(data), nbytes(nbytes) {}
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block();
  void* const data;
  const size_t nbytes;
  bool freed = false;  // its free was enqueued
};
using BlockRef = std::shared_ptr<Block>;

class Memory {
 public:
  Memory(std::string device, int32_t device_id, size_t limit_nbytes);
  ~Memory();

  Result<BlockRef> allocate(size_t nbytes);
  // The live allocation that begins there; kInput otherwise.
  Result<BlockRef> begin_free(void* data);
  // Marks it: from now on touching it is an error.
  void end(const BlockRef& block);
  // The free has run.
  void release(const BlockRef& block);
  // The block that the range lies in; null: host memory, or nothing. kInput, kDevice.
  Result<BlockRef> check(const char* operation, const void* data, size_t nbytes) const;
  Status check_live(const char* operation, const BlockRef& block) const;
  PointerInfo where(const void* address) const;
  const MemoryCounts& counts() const { return counts_; }

  static void run(const Action& action);

 private:
  const BlockRef* find(const void* address) const;
  Status ended(const char* operation, const void* data, const std::string& device) const;

  std::string device_;
  int32_t device_id_;
  size_t limit_nbytes_;
  MemoryCounts counts_;
  AddressMap<BlockRef> blocks_;  // live, freed, and released but kept
  std::deque<BlockRef> kept_;
  size_t kept_nbytes_ = 0;
};

}  // namespace headrace::sim
