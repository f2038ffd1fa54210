#include "program/instance_record.h"

#include <algorithm>

namespace headrace {

namespace et = executorch::runtime;

// The engine marks its instruction-wise interface as experimental; the version is pinned.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

Instance::Walk::Walk(Instance& self, const Settled& settled) : self_(self), settled_(settled) {
  if (self.islands_.empty()) self.islands_ = islands_of(self.plan_);
}

et::Error Instance::Walk::step() {
  const auto& chains = self_.plan_.chains;
  const Instruction* in = nullptr;
  if (known_ && chain_ < chains.size() && at_ < chains[chain_].size()) in = &chains[chain_][at_];
  std::optional<record::IslandScope> island;
  if (in != nullptr) announce(*in, island);
  et::Error error = self_.method_->step();
  if (error != et::Error::Ok || !known_ || chain_ == chains.size()) return error;
  if (in != nullptr) {
    if (in->kind == InstructionKind::kMove) moved_[in->destination] = source(in->target);
    if (in->kind == InstructionKind::kJumpFalse) lose();
    ++at_;
    ++instruction_;
  }
  if (at_ >= chains[chain_].size()) {
    ++chain_;
    at_ = 0;
  }
  return error;
}

int32_t Instance::Walk::source(int32_t value) const {
  auto found = moved_.find(value);
  return found == moved_.end() ? value : found->second;
}

void Instance::Walk::lose() {
  known_ = false;
  std::string what = self_.plan_.name + ": CPU kernels and native delegates behind the jump at instruction " +
                     std::to_string(instruction_);
  (void)record::add(nullptr, record::Kind::kUnseen, 0, 0, {}, 0, what.c_str());
}

void Instance::Walk::take(int32_t value, bool write, std::vector<record::Touch>& out) const {
  const ValuePlan& plan = self_.plan_.values[static_cast<size_t>(value)];
  if (plan.kind == ValueKind::kTensorList || plan.kind == ValueKind::kOptionalTensorList) {
    for (int32_t item : plan.items) {
      if (item >= 0) take(item, write, out);
    }
    return;
  }
  int32_t where = source(value);
  const TensorPlan* t = self_.plan_.tensor_of(where);
  if (t == nullptr || t->storage == Storage::kConstant || t->storage == Storage::kExternal) return;
  const void* data = self_.planned_address(*t);
  size_t nbytes = t->nbytes;
  if (data == nullptr) {
    auto among = [&](const std::vector<int32_t>& values) {
      return static_cast<size_t>(std::find(values.begin(), values.end(), where) - values.begin());
    };
    size_t input = among(self_.plan_.inputs), output = among(self_.plan_.outputs);
    const et::EValue* bound = input < self_.plan_.inputs.size()     ? &self_.method_->get_input(input)
                              : output < self_.plan_.outputs.size() ? &self_.method_->get_output(output)
                                                                    : nullptr;
    if (bound == nullptr || !bound->isTensor()) return;
    data = bound->toTensor().const_data_ptr();
    nbytes = std::min<size_t>(nbytes, bound->toTensor().nbytes());
  }
  out.push_back(record::touch(data, nbytes, write, value));
}

void Instance::Walk::announce(const Instruction& in, std::optional<record::IslandScope>& island) {
  std::vector<record::Touch> touches;
  if (in.kind == InstructionKind::kDelegate) {
    auto found = std::find_if(self_.islands_.begin(), self_.islands_.end(),
                              [&](const IslandPlan& plan) { return plan.instruction == instruction_; });
    // Where nothing says which arguments are results, the last is.
    auto inputs = static_cast<size_t>(found->num_inputs < 0 ? in.args.size() - 1 : found->num_inputs);
    bool on_device = false;
    for (size_t i = 0; i < in.args.size(); ++i) {
      take(in.args[i], i >= inputs, touches);
      const TensorPlan* t = self_.plan_.tensor_of(in.args[i]);
      on_device |= t != nullptr && self_.apart(*t);
    }
    const Device& device = on_device ? *self_.device_ : *cpu_device();
    island.emplace(device, on_device ? settled_.stream : kPerThreadStream,
                   self_.plan_.delegates[static_cast<size_t>(in.target)].id, instruction_, touches);
    return;
  }
  if (in.kind != InstructionKind::kKernel || !self_.uses_device_) return;
  const std::string& name = self_.plan_.operators[static_cast<size_t>(in.target)];
  // Copies between host and device are written down where the device is asked for them; a view touches
  // nothing.
  if (name.starts_with("et_copy::") || name == "executorch_prim::et_view.default") return;
  for (size_t i = 0; i < in.args.size(); ++i) {
    bool result = i + 1 == in.args.size() || std::count(in.args.begin(), in.args.end(), in.args[i]) > 1;
    take(in.args[i], result, touches);
  }
  if (touches.empty()) return;
  (void)record::add(nullptr, record::Kind::kTouch, 0, 0, touches, 0, name.c_str());
}
#pragma GCC diagnostic pop

std::vector<std::string> Instance::value_labels() const {
  std::vector<std::string> out;
  for (size_t v = 0; v < plan_.values.size(); ++v) {
    auto value = static_cast<int32_t>(v);
    const TensorPlan* t = plan_.tensor_of(value);
    std::string label = t != nullptr && !t->name.empty() ? "'" + t->name + "'" : "value " + std::to_string(v);
    auto position = [&](const char* what, const std::vector<int32_t>& values) {
      auto found = std::find(values.begin(), values.end(), value);
      if (found != values.end())
        label += std::string(", ") + what + " " + std::to_string(found - values.begin());
    };
    position("input", plan_.inputs);
    position("output", plan_.outputs);
    if (t != nullptr && t->storage == Storage::kPlanned) {
      label += ", planned buffer " + std::to_string(t->memory_id) + " at " + std::to_string(t->memory_offset);
    }
    out.push_back(std::move(label));
  }
  return out;
}

}  // namespace headrace
