// The kinds that a method's values have where instructions use them: which number an argument is, along every
// path, and whether a tensor has memory by then.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "program/flow_cursor.h"

namespace headrace {

class ValueKinds {
 public:
  explicit ValueKinds(FlowCursor& at);
  // Whether a value's declared kind fits a parameter. Throws FlowError, as all of these do.
  void check(Parameter p, size_t argument, int32_t index) const;
  bool is_number(int32_t index) const;
  // Notes a value that an instruction sets to a number.
  void track(size_t argument, int32_t index);
  // Notes the tensors that have memory only once an instruction gave them some. `moved`: what is moved to.
  void track_bare(const std::vector<int32_t>& moved);
  // Once all are noted: that what a kernel uses as a code or a dimension is one.
  void check_codes(const Instruction& in) const;
  // Then: follows the kinds along every path until nothing changes, the second call of the method included.
  void settle();

 private:
  // Sets of kinds that a number may have, as bits.
  using Kinds = uint8_t;
  struct State {
    std::vector<Kinds> kinds;
    bool reached = false;
    bool merge(const State& other);
  };
  void check_code(char kind, size_t argument, int32_t index) const;
  void check_dimension(const Instruction& in) const;
  Kinds kinds(const State& state, int32_t index) const;
  bool step(const Instruction& in, State& now, std::vector<State>& arriving);
  void use(int32_t index, size_t argument, const State& now) const;
  void step_kernel(const Instruction& in, const Signature& s, State& now);
  Kinds result_kinds(const Instruction& in, const Signature& s, const State& now) const;

  FlowCursor& at_;
  const MethodPlan& m_;
  std::vector<int32_t> tracked_;  // by value: its place in a State, or -1
  std::vector<Kinds> declared_;   // by place
};

}  // namespace headrace
