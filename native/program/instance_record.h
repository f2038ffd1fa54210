// A recorded call walks the method instruction by instruction, so that each delegate call and CPU kernel is
// in the record with the memory that it reads and writes.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include "device/record.h"
#include "program/instance.h"

namespace headrace {

// One walk through an instance's method, from its first instruction.
class Instance::Walk {
 public:
  Walk(Instance& self, const Settled& settled);

  // As the engine's step(): EndOfMethod behind the last instruction.
  executorch::runtime::Error step();

 private:
  // Where a value that moves may have made comes from.
  int32_t source(int32_t value) const;
  // The engine does not say where it goes from a jump. Delegates that tell the record themselves still do.
  void lose();
  void take(int32_t value, bool write, std::vector<record::Touch>& out) const;
  void announce(const Instruction& in, std::optional<record::IslandScope>& island);

  Instance& self_;
  const Settled& settled_;
  size_t chain_ = 0, at_ = 0;
  int32_t instruction_ = 0;  // counted over all chains
  bool known_ = true;        // which instruction is next
  std::map<int32_t, int32_t> moved_;
};

}  // namespace headrace
