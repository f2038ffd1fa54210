#include "program/islands.h"

#include <charconv>

namespace headrace {

namespace {

// Values whose content exists before instruction 0.
std::vector<char> known_at_start(const MethodPlan& method) {
  std::vector<char> known(method.values.size(), 0);
  for (size_t i = 0; i < method.values.size(); ++i) {
    const TensorPlan* t = method.tensor_of(static_cast<int32_t>(i));
    known[i] = t == nullptr || t->storage == Storage::kConstant || t->storage == Storage::kExternal ||
               t->mutable_state;
  }
  for (int32_t i : method.inputs) known[static_cast<size_t>(i)] = 1;
  return known;
}

int32_t inputs_by_spec(const DelegatePlan& delegate, size_t num_args) {
  for (const CompileSpec& spec : delegate.specs) {
    if (spec.key != "headrace.inputs") continue;
    size_t count = 0;
    const char* end = spec.value.data() + spec.value.size();
    auto [at, error] = std::from_chars(spec.value.data(), end, count);
    if (error == std::errc() && at == end && count <= num_args) return static_cast<int32_t>(count);
  }
  return -1;
}

// Inputs come first, so the first argument that nothing has written starts the outputs; an argument behind it
// that was written before belongs to neither side.
int32_t inputs_by_plan(const std::vector<int32_t>& args, const std::vector<char>& known) {
  size_t count = 0;
  while (count < args.size() && known[static_cast<size_t>(args[count])]) ++count;
  for (size_t i = count; i < args.size(); ++i) {
    if (known[static_cast<size_t>(args[i])]) return -1;
  }
  return static_cast<int32_t>(count);
}

}  // namespace

std::vector<IslandPlan> islands_of(const MethodPlan& method) {
  std::vector<IslandPlan> out;
  std::vector<char> known = known_at_start(method);
  int32_t at = 0;
  for (const auto& chain : method.chains) {
    for (const Instruction& in : chain) {
      if (in.kind == InstructionKind::kDelegate) {
        const DelegatePlan& delegate = method.delegates[static_cast<size_t>(in.target)];
        IslandPlan island{at, in.target, in.args, inputs_by_spec(delegate, in.args.size())};
        if (island.num_inputs < 0) island.num_inputs = inputs_by_plan(in.args, known);
        out.push_back(std::move(island));
      }
      for (int32_t value : in.args) known[static_cast<size_t>(value)] = 1;
      if (in.kind == InstructionKind::kMove) known[static_cast<size_t>(in.destination)] = 1;
      ++at;
    }
  }
  return out;
}

namespace {
thread_local LoadScope* loading = nullptr;
}

LoadScope::LoadScope(const MethodPlan& method, const std::vector<IslandPlan>& islands, LoadOwners owners,
                     std::vector<std::shared_ptr<IslandCapture>>& parts)
    : method_(method),
      islands_(islands),
      claimed_(islands.size(), 0),
      owners_(owners),
      parts_(parts),
      outer_(loading) {
  parts_.assign(method.delegates.size(), nullptr);
  loading = this;
}
LoadScope::~LoadScope() { loading = outer_; }

const IslandPlan* claim_island(const std::string& delegate, const void* payload) {
  if (loading == nullptr) return nullptr;
  for (size_t i = 0; i < loading->islands_.size(); ++i) {
    const IslandPlan& island = loading->islands_[i];
    const DelegatePlan& plan = loading->method_.delegates[static_cast<size_t>(island.delegate)];
    if (loading->claimed_[i] != 0 || plan.id != delegate || plan.payload.data() != payload) continue;
    loading->claimed_[i] = 1;
    return &island;
  }
  return nullptr;
}

LoadOwners load_owners() { return loading == nullptr ? LoadOwners() : loading->owners_; }
const MethodPlan* loading_method() { return loading == nullptr ? nullptr : &loading->method_; }
// The engine loads each delegate of the method once, however many islands call it.
bool take_part(const std::string& delegate, const void* payload, std::shared_ptr<IslandCapture> part) {
  if (loading == nullptr) return false;
  for (size_t i = 0; i < loading->parts_.size(); ++i) {
    const DelegatePlan& plan = loading->method_.delegates[i];
    if (loading->parts_[i] || plan.id != delegate || plan.payload.data() != payload) continue;
    loading->parts_[i] = std::move(part);
    return true;
  }
  return false;
}

bool uses_device(const MethodPlan& method) {
  for (const BufferPlan& buffer : method.buffers) {
    if (buffer.device.kind != DeviceKind::kCpu) return true;
  }
  for (const TensorPlan& tensor : method.tensors) {
    if (tensor.device.kind != DeviceKind::kCpu) return true;
  }
  return false;
}

Status check_placement(const MethodPlan& method, const std::string& where) {
  auto on_device = [&](int32_t value) {
    const TensorPlan* t = method.tensor_of(value);
    return t != nullptr && t->device.kind != DeviceKind::kCpu;
  };
  for (size_t i = 0; i < method.inputs.size(); ++i) {
    const TensorPlan* t = method.tensor_of(method.inputs[i]);
    if (!on_device(method.inputs[i]) || t->storage == Storage::kNone) continue;
    return Status(ErrorCode::kProgram,
                  where + ", input " + std::to_string(i) +
                      ": expected device memory that the caller brings, got an input planned on " +
                      device_name(t->device) +
                      "; export it with MemoryPlanningPass(alloc_graph_input=False)");
  }
  for (const TensorPlan& t : method.tensors) {
    if (t.device.kind == DeviceKind::kCpu || (!t.mutable_state && t.storage != Storage::kConstant)) continue;
    return Status(ErrorCode::kProgram, where + ": expected constants and initial state on cpu, got '" +
                                           t.name + "' on " + device_name(t.device) +
                                           ", where the engine cannot write them; let a delegate own them");
  }
  int at = 0;
  for (const auto& chain : method.chains) {
    for (const Instruction& in : chain) {
      if (in.kind == InstructionKind::kKernel) {
        const std::string& op = method.operators[static_cast<size_t>(in.target)];
        bool copies = op.starts_with("et_copy::") || op == "executorch_prim::et_view.default";
        for (int32_t value : in.args) {
          if (copies || !on_device(value)) continue;
          return Status(ErrorCode::kProgram, where + ", instruction " + std::to_string(at) + " (kernel '" +
                                                 op + "'): expected tensors on cpu, got one on " +
                                                 device_name(method.tensor_of(value)->device) +
                                                 "; let a delegate take this operator, or export it again");
        }
      }
      ++at;
    }
  }
  return {};
}

}  // namespace headrace
