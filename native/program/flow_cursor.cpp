#include "program/flow_cursor.h"

#include "program/text.h"

namespace headrace {

FlowCursor::FlowCursor(const MethodPlan& method) : method(method) {
  for (const std::string& name : method.operators) signatures_.push_back(find_signature(name));
}

void FlowCursor::fail(const std::string& text, const char* advice) const {
  throw FlowError{chain, instruction, text, advice};
}

void FlowCursor::fail_argument(size_t argument, const char* expected, int32_t value,
                               const std::string& got) const {
  fail(format("argument %zu: expected %s, got value %d, %s", argument, expected, value, got.c_str()));
}

void FlowCursor::fail_method(const std::string& text, const char* advice) {
  throw FlowError{SIZE_MAX, SIZE_MAX, text, advice};
}

bool FlowCursor::is_view(const Instruction& kernel) const {
  return method.operators[static_cast<size_t>(kernel.target)] == "executorch_prim::et_view.default" &&
         kernel.args.size() == 3;
}

}  // namespace headrace
