#include "program/aliasing.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "program/text.h"

namespace headrace {

namespace {

// Whether two tensors are planned into the same bytes.
bool meet(const TensorPlan& a, const TensorPlan& b) {
  return a.storage == Storage::kPlanned && b.storage == Storage::kPlanned && a.memory_id == b.memory_id &&
         a.nbytes != 0 && b.nbytes != 0 && a.memory_offset < b.memory_offset + b.nbytes &&
         b.memory_offset < a.memory_offset + a.nbytes;
}

}  // namespace

Aliasing::Aliasing(FlowCursor& at) : at_(at), m_(at.method), parent_(at.method.values.size()) {
  std::iota(parent_.begin(), parent_.end(), 0);
}

void Aliasing::note_move(int32_t from, int32_t to) {
  parent_[root(from)] = static_cast<int32_t>(root(to));
  moved_.push_back(to);
}

size_t Aliasing::root(int32_t index) {
  auto i = static_cast<size_t>(index);
  while (parent_[i] != static_cast<int32_t>(i)) {
    parent_[i] = parent_[static_cast<size_t>(parent_[i])];
    i = static_cast<size_t>(parent_[i]);
  }
  return i;
}

void Aliasing::check_freed() {
  // A method's second call starts with what the first left: a freed value has no memory then.
  std::sort(freed_.begin(), freed_.end());
  auto unused = [&](int32_t v) {
    if (std::binary_search(freed_.begin(), freed_.end(), v)) {
      FlowCursor::fail_method(format("expected freed values that nothing uses, got value %d", v),
                              "export it with bounds for every dynamic shape");
    }
  };
  if (freed_.empty()) return;
  for (const ValuePlan& v : m_.values) {
    if (v.kind == ValueKind::kTensorList || v.kind == ValueKind::kOptionalTensorList) {
      for (int32_t item : v.items) unused(item);
    }
  }
  for (int32_t v : m_.inputs) unused(v);
  for (int32_t v : m_.outputs) unused(v);
  for (const auto& chain : m_.chains) {
    for (const Instruction& in : chain) {
      for (int32_t v : in.args) unused(v);
      if (in.kind == InstructionKind::kJumpFalse || in.kind == InstructionKind::kMove) unused(in.target);
      if (in.kind == InstructionKind::kMove) unused(in.destination);
    }
  }
}

// A view has the memory of what it shows, whatever size its own bounds allow. In rounds: a loop may make
// a view of a view that a later instruction makes.
void Aliasing::follow_views(std::vector<uint64_t>& room, std::vector<char>& constant,
                            const std::vector<char>& input) {
  bool changed = true;
  size_t rounds = 0;
  while (changed) {
    changed = false;
    if (++rounds > 64) FlowCursor::fail_method("expected views of tensors, got views of each other");
    for (const auto& chain : m_.chains) {
      for (const Instruction& in : chain) {
        if (in.kind != InstructionKind::kKernel || !at_.is_view(in)) continue;
        auto from = static_cast<size_t>(in.args[0]), to = static_cast<size_t>(in.args[2]);
        const TensorPlan *a = m_.tensor_of(in.args[0]), *b = m_.tensor_of(in.args[2]);
        if (a == nullptr || b == nullptr) continue;
        if (input[to] != 0)
          FlowCursor::fail_method(format(
              "expected inputs with memory of their own, got value %d, which becomes a view", in.args[2]));
        uint64_t behind = std::min(room[from], a->nbytes);
        if (behind < std::min(room[to], b->nbytes)) room[to] = behind, changed = true;
        if (constant[from] && !constant[to]) constant[to] = 1, changed = true;
      }
    }
  }
}

void Aliasing::settle() {
  check_freed();
  constexpr uint64_t kAll = UINT64_MAX;
  std::vector<uint64_t> room(m_.values.size(), kAll);  // bytes behind a value; kAll: as many as it says
  std::vector<char> constant(m_.values.size(), 0);
  for (size_t i = 0; i < m_.values.size(); ++i) {
    const TensorPlan* t = m_.tensor_of(static_cast<int32_t>(i));
    if (t == nullptr) continue;
    constant[i] = t->storage == Storage::kConstant || t->storage == Storage::kExternal;
  }
  std::vector<char> input(m_.values.size(), 0);
  for (int32_t i : m_.inputs) {
    input[static_cast<size_t>(i)] = 1;
    const TensorPlan* t = m_.tensor_of(i);
    // The caller's array, of a size that only the call tells.
    if (t != nullptr && t->storage == Storage::kNone && t->dynamism != Dynamism::kStatic)
      room[static_cast<size_t>(i)] = 0;
  }
  follow_views(room, constant, input);
  class_constant_.assign(m_.values.size(), 0);
  class_short_.assign(m_.values.size(), 0);
  for (size_t i = 0; i < m_.values.size(); ++i) {
    const TensorPlan* t = m_.tensor_of(static_cast<int32_t>(i));
    if (t == nullptr) continue;
    size_t r = root(static_cast<int32_t>(i));
    class_constant_[r] |= constant[i];
    class_short_[r] |= t->nbytes > room[i];
  }
}

void Aliasing::check_writes(const Instruction& in) {
  if (in.kind != InstructionKind::kKernel) return;
  const Signature* s = at_.signature(in);
  if (s == nullptr) return;
  check_device(in, *s);
  written_.clear();
  planned_.clear();
  for (size_t a = 0; a < s->parameters.size(); ++a) {
    char kind = s->parameters[a].kind;
    if (kind == 'w') check_written(in.args[a], a, !s->in_place, at_.is_view(in));
    if (kind == 'W') {
      for (int32_t item : at_.value(in.args[a]).items) check_written(item, a, true, false);
    }
  }
  if (written_.empty()) return;
  check_apart(in, *s);
  if (s->in_place) return;
  // A kernel that writes to what it reads may find its sizes changed in its middle.
  std::sort(written_.begin(), written_.end());
  if (std::adjacent_find(written_.begin(), written_.end()) != written_.end()) {
    at_.fail("expected different tensors to write, got one of them twice");
  }
  auto read = [&](int32_t v, size_t a) {
    if (std::binary_search(written_.begin(), written_.end(), root(v))) {
      at_.fail_argument(a, "a tensor that the kernel does not write as well", v, "one that it does");
    }
  };
  for (size_t a = 0; a < s->parameters.size(); ++a) {
    const ValuePlan& v = at_.value(in.args[a]);
    if (s->parameters[a].kind == 'T' && v.kind == ValueKind::kTensor) read(in.args[a], a);
    if (s->parameters[a].kind == 'L' || s->parameters[a].kind == 'O') {
      for (int32_t item : v.items) {
        if (item >= 0) read(item, a);
      }
    }
  }
}

// The engine's kernels run on the host; only the two that copy between devices may see another's memory.
void Aliasing::check_device(const Instruction& in, const Signature& s) const {
  const std::string& name = m_.operators[static_cast<size_t>(in.target)];
  if (name.starts_with("et_copy::") || name.starts_with("aten::sym_") || at_.is_view(in)) return;
  auto on_host = [&](int32_t v, size_t a) {
    const TensorPlan* t = m_.tensor_of(v);
    if (t == nullptr) return;
    DeviceId device = t->storage == Storage::kPlanned ? m_.buffers[t->memory_id].device
                      : t->storage == Storage::kNone  ? t->device
                                                      : DeviceId{};
    if (device.kind != DeviceKind::kCpu)
      at_.fail_argument(a, "a tensor on cpu", v, "one on " + device_name(device));
  };
  for (size_t a = 0; a < s.parameters.size(); ++a) {
    on_host(in.args[a], a);
    const ValuePlan& v = at_.value(in.args[a]);
    if (v.kind != ValueKind::kTensorList && v.kind != ValueKind::kOptionalTensorList) continue;
    for (int32_t item : v.items) {
      if (item >= 0) on_host(item, a);
    }
  }
}

// What a kernel writes lies apart from everything else that it is given: it would copy memory over itself.
void Aliasing::check_apart(const Instruction& in, const Signature& s) const {
  for (auto [v, argument] : planned_) {
    auto apart = [&](int32_t other, size_t a) {
      const TensorPlan* t = other < 0 || other == v ? nullptr : m_.tensor_of(other);
      if (t != nullptr && meet(*m_.tensor_of(v), *t))
        at_.fail_argument(a, "planned memory that the kernel does not write as well", other,
                          "that of argument " + std::to_string(argument));
    };
    for (size_t a = 0; a < s.parameters.size(); ++a) {
      const ValuePlan& other = at_.value(in.args[a]);
      if (other.kind == ValueKind::kTensor) apart(in.args[a], a);
      if (other.kind != ValueKind::kTensorList && other.kind != ValueKind::kOptionalTensorList) continue;
      for (int32_t item : other.items) apart(item, a);
    }
  }
}

void Aliasing::check_written(int32_t v, size_t argument, bool resized, bool view) {
  if (m_.tensor_of(v) == nullptr) return;  // an absent optional
  size_t r = root(v);
  written_.push_back(r);
  if (view) return;  // takes over another tensor's memory, writes nothing
  planned_.emplace_back(v, argument);
  if (class_constant_[r] != 0) at_.fail_argument(argument, "a tensor that may be written", v, "a constant");
  if (resized && class_short_[r] != 0) {
    at_.fail_argument(argument, "a tensor with memory for the largest shape that it may take", v,
                      "a view of a smaller one or an input without memory of its own");
  }
}

}  // namespace headrace
