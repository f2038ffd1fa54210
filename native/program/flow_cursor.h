// Where a check of a method's flow is: the instruction that it looks at, and errors that name it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "program/flow.h"
#include "program/operators.h"
#include "program/plan.h"

namespace headrace {

// Errors leave by throwing FlowError, which check_flow() catches.
class FlowCursor {
 public:
  explicit FlowCursor(const MethodPlan& method);

  // Goes to every instruction of every chain, in order.
  template <class F>
  void each(F&& check) {
    for (chain = 0; chain < method.chains.size(); ++chain) {
      const auto& instructions = method.chains[chain];
      for (instruction = 0; instruction < instructions.size(); ++instruction)
        check(instructions[instruction]);
    }
  }

  // `text`: what was expected and what came. `advice`: empty where the file is damaged.
  [[noreturn]] void fail(const std::string& text, const char* advice = "") const;
  [[noreturn]] void fail_argument(size_t argument, const char* expected, int32_t value,
                                  const std::string& got) const;
  // Of the method, whatever the instruction.
  [[noreturn]] static void fail_method(const std::string& text, const char* advice = "");

  const ValuePlan& value(int32_t index) const { return method.values[static_cast<size_t>(index)]; }
  std::string kind_of(int32_t index) const { return kind_name(value(index).kind); }
  // Null for a kernel that is not the engine's own.
  const Signature* signature(const Instruction& kernel) const {
    return signatures_[static_cast<size_t>(kernel.target)];
  }
  // Whether the kernel gives its last argument the memory of its first.
  bool is_view(const Instruction& kernel) const;

  const MethodPlan& method;
  size_t chain = 0, instruction = 0;

 private:
  std::vector<const Signature*> signatures_;  // by operator
};

}  // namespace headrace
