#include "program/copies.h"

#include <algorithm>
#include <string_view>

namespace headrace {

namespace {

// The engine's kernels that copy; the result is the last argument.
constexpr std::string_view kToHost = "et_copy::_d2h_copy.out";
constexpr std::string_view kToDevice = "et_copy::_h2d_copy.out";

}  // namespace

bool place_is_shared(const MethodPlan& plan, int32_t value) {
  const TensorPlan* own = plan.tensor_of(value);
  if (own == nullptr || own->storage != Storage::kPlanned) return false;
  for (const auto& chain : plan.chains) {
    for (const Instruction& in : chain) {
      if (in.kind != InstructionKind::kKernel || in.args.empty() || in.args.back() == value) continue;
      if (plan.operators[static_cast<size_t>(in.target)] != kToHost) continue;
      const TensorPlan* other = plan.tensor_of(in.args.back());
      if (other != nullptr && other->storage == Storage::kPlanned && other->memory_id == own->memory_id &&
          other->memory_offset == own->memory_offset) {
        return true;
      }
    }
  }
  return false;
}

std::vector<const TensorPlan*> overwritten_sources(const MethodPlan& plan) {
  struct Copy {
    size_t chain, instruction;
    const TensorPlan* from;
    int32_t value;
  };
  auto host = [&](int32_t value) -> const TensorPlan* {
    const TensorPlan* t = plan.tensor_of(value);
    return t != nullptr && t->storage == Storage::kPlanned && t->device.kind == DeviceKind::kCpu ? t
                                                                                                 : nullptr;
  };
  std::vector<Copy> copies;
  for (size_t c = 0; c < plan.chains.size(); ++c) {
    for (size_t i = 0; i < plan.chains[c].size(); ++i) {
      const Instruction& in = plan.chains[c][i];
      if (in.kind != InstructionKind::kKernel || in.args.empty()) continue;
      if (plan.operators[static_cast<size_t>(in.target)] != kToDevice) continue;
      const TensorPlan* from = host(in.args.front());
      if (from != nullptr) copies.push_back({c, i, from, in.args.front()});
    }
  }
  auto operator_of = [&](const Instruction& in) -> std::string_view {
    return in.kind == InstructionKind::kKernel && !in.args.empty()
               ? plan.operators[static_cast<size_t>(in.target)]
               : std::string_view();
  };
  bool straight = !plan.loops;  // no instruction is left out, none comes twice
  for (const auto& chain : plan.chains) {
    for (const Instruction& in : chain) straight &= in.kind != InstructionKind::kJumpFalse;
  }
  auto is_written = [&](const Copy& copy) {
    for (size_t c = plan.loops ? 0 : copy.chain; c < plan.chains.size(); ++c) {
      size_t first = !plan.loops && c == copy.chain ? copy.instruction + 1 : 0;
      for (size_t i = first; i < plan.chains[c].size(); ++i) {
        const Instruction& in = plan.chains[c][i];
        std::string_view op = operator_of(in);
        bool comes_back = op == kToHost;
        bool in_place = !op.empty() && !comes_back &&
                        (in.args.back() == copy.value ||
                         (in.args.front() == copy.value && op.find("_copy") == std::string_view::npos &&
                          op.ends_with("_")));
        if (in_place) return true;
        for (int32_t value : in.args) {
          // A copy from the device is behind this one on the stream; it is the host that would not wait.
          if (comes_back && value == in.args.back()) continue;
          const TensorPlan* other = value == copy.value ? nullptr : host(value);
          if (other != nullptr && other->memory_id == copy.from->memory_id &&
              other->memory_offset < copy.from->memory_offset + copy.from->nbytes &&
              copy.from->memory_offset < other->memory_offset + other->nbytes)
            return true;
        }
        // What comes back for the host to read is waited for, and everything before it on the stream.
        bool goes_out = comes_back && std::find(plan.outputs.begin(), plan.outputs.end(), in.args.back()) !=
                                          plan.outputs.end();
        if (straight && comes_back && !goes_out) return false;
      }
    }
    return false;
  };
  std::vector<const TensorPlan*> found;
  for (const Copy& copy : copies) {
    if (is_written(copy)) found.push_back(copy.from);
  }
  return found;
}

}  // namespace headrace
