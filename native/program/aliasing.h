// Which of a method's tensors share memory, and whether what kernels write may be written: is not constant,
// is large enough, and lies apart from what they read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "program/flow_cursor.h"

namespace headrace {

class Aliasing {
 public:
  explicit Aliasing(FlowCursor& at);
  // What the instructions say, noted one after the other.
  void note_move(int32_t from, int32_t to);
  void note_free(int32_t value) { freed_.push_back(value); }
  // Once all are noted: what every value may share. Throws where a freed value is used.
  void settle();
  // Then: the memory that one kernel writes. Throws FlowError.
  void check_writes(const Instruction& in);
  // Values that take over another value's tensor.
  const std::vector<int32_t>& moved() const { return moved_; }

 private:
  size_t root(int32_t index);
  void check_freed();
  void follow_views(std::vector<uint64_t>& room, std::vector<char>& constant, const std::vector<char>& input);
  void check_device(const Instruction& in, const Signature& s) const;
  void check_apart(const Instruction& in, const Signature& s) const;
  void check_written(int32_t v, size_t argument, bool resized, bool view);

  FlowCursor& at_;
  const MethodPlan& m_;
  std::vector<int32_t> parent_;  // union-find: values that moves may make one tensor
  std::vector<int32_t> freed_, moved_;
  std::vector<char> class_constant_, class_short_;  // by root
  // Of one instruction: roots, and values with the arguments that they are.
  std::vector<size_t> written_;
  std::vector<std::pair<int32_t, size_t>> planned_;
};

}  // namespace headrace
