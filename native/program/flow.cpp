#include "program/flow.h"

#include <algorithm>
#include <vector>

#include "program/aliasing.h"
#include "program/flow_cursor.h"
#include "program/operators.h"
#include "program/text.h"
#include "program/value_kinds.h"

namespace headrace {

namespace {

class Flow {
 public:
  explicit Flow(MethodPlan& method) : m_(method), at_(method), aliasing_(at_), kinds_(at_) {}

  std::optional<FlowError> run() {
    try {
      at_.each([&](const Instruction& in) { check_instruction(in); });
      check_loops();
      aliasing_.settle();
      m_.moved = aliasing_.moved();
      kinds_.track_bare(m_.moved);
      at_.each([&](const Instruction& in) {
        aliasing_.check_writes(in);
        kinds_.check_codes(in);
      });
      kinds_.settle();
    } catch (FlowError& e) {
      return std::move(e);
    }
    return {};
  }

 private:
  void check_instruction(const Instruction& in) {
    if (in.kind == InstructionKind::kKernel) {
      if (const Signature* s = at_.signature(in)) check_kernel(in, *s);
    } else if (in.kind == InstructionKind::kMove) {
      check_move(in.target, in.destination);
    } else if (in.kind == InstructionKind::kFree) {
      aliasing_.note_free(in.target);
    }
  }

  void check_kernel(const Instruction& in, const Signature& s) {
    size_t expected = s.parameters.size() + (s.result != 0);
    if (in.args.size() != expected)
      at_.fail(format("expected %zu arguments, got %zu", expected, in.args.size()));
    for (size_t a = 0; a < s.parameters.size(); ++a) kinds_.check(s.parameters[a], a, in.args[a]);
    if (s.result == 0) return;
    size_t last = s.parameters.size();
    int32_t result = in.args[last];
    if (s.result == 'W') {
      kinds_.check({'W', false}, last, result);
    } else if (s.result == 'w') {
      kinds_.check({'w', false}, last, result);
      // The kernel returns what it wrote, and the engine may store that in the last value.
      bool written = false;
      for (size_t a = 0; a < last; ++a) written |= s.parameters[a].kind == 'w' && in.args[a] == result;
      if (!written && s.in_place) {
        check_move(in.args[0], result);
      } else if (!written) {
        at_.fail_argument(last, "the tensor that the kernel writes", result, "another one");
      }
    } else {
      kinds_.track(last, result);
    }
  }

  void check_move(int32_t from, int32_t to) {
    const TensorPlan *a = m_.tensor_of(from), *b = m_.tensor_of(to);
    if (kinds_.is_number(from) && kinds_.is_number(to)) {
      kinds_.track(0, to);
      return;
    }
    if (a == nullptr || b == nullptr) {
      at_.fail("expected a move between tensors or between numbers, got " + at_.kind_of(from) + " to " +
               at_.kind_of(to));
    }
    if (a->dtype != b->dtype || a->sizes.size() != b->sizes.size()) {
      at_.fail(format(
          "expected a move between tensors of one dtype and rank, got %s of rank %zu to %s of rank %zu",
          dtype_name(a->dtype).c_str(), a->sizes.size(), dtype_name(b->dtype).c_str(), b->sizes.size()));
    }
    if (std::find(m_.inputs.begin(), m_.inputs.end(), to) != m_.inputs.end()) {
      at_.fail(format("expected a move that leaves the inputs as they are, got one to value %d", to));
    }
    aliasing_.note_move(from, to);
  }

  // A loop that leaves its own condition as it is would never end.
  void check_loops() {
    std::vector<int64_t> last(m_.values.size(), -1);  // where a value was last an argument or moved to
    for (at_.chain = 0; at_.chain < m_.chains.size(); ++at_.chain) {
      std::fill(last.begin(), last.end(), -1);
      const auto& chain = m_.chains[at_.chain];
      for (at_.instruction = 0; at_.instruction < chain.size(); ++at_.instruction) {
        const Instruction& in = chain[at_.instruction];
        auto at = static_cast<int64_t>(at_.instruction);
        for (int32_t v : in.args) last[static_cast<size_t>(v)] = at;
        if (in.kind == InstructionKind::kMove) last[static_cast<size_t>(in.destination)] = at;
        if (in.kind != InstructionKind::kJumpFalse || in.destination > at) continue;
        m_.loops = true;
        if (last[static_cast<size_t>(in.target)] < in.destination) {
          at_.fail(
              format("expected a loop that writes its own condition, got one that leaves value %d as it is "
                     "and would never end",
                     in.target));
        }
      }
    }
  }

  MethodPlan& m_;
  FlowCursor at_;
  Aliasing aliasing_;
  ValueKinds kinds_;
};

}  // namespace

std::optional<FlowError> check_flow(MethodPlan& method) { return Flow(method).run(); }

}  // namespace headrace
