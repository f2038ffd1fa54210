#include "program/value_kinds.h"

#include <string>
#include <utility>

#include "program/text.h"

namespace headrace {

namespace {

using Kinds = uint8_t;
constexpr Kinds kInt = 1, kDouble = 2, kBool = 4, kAny = 7;
// Of a tensor: there are paths on which it has no memory yet.
constexpr Kinds kBare = 8;

bool is_floating(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype == DType::kFloat32 ||
         dtype == DType::kFloat64;
}

Kinds declared_kinds(ValueKind kind) {
  switch (kind) {
    case ValueKind::kInt:
      return kInt;
    case ValueKind::kDouble:
      return kDouble;
    case ValueKind::kBool:
      return kBool;
    default:
      return 0;
  }
}

Kinds wanted_kinds(char parameter) {
  switch (parameter) {
    case 'i':
    case 'd':
    case 'm':
      return kInt;
    case 'f':
      return kDouble;
    case 'b':
      return kBool;
    case 's':
      return kAny;
    default:
      return 0;
  }
}

std::string kinds_text(Kinds kinds) {
  std::string out;
  for (auto [bit, name] : {std::pair{kInt, "int"}, {kDouble, "float"}, {kBool, "bool"}}) {
    if ((kinds & bit) != 0) out += (out.empty() ? "" : " or ") + std::string(name);
  }
  return out.empty() ? "no number" : out;
}

ValueKind wanted_kind(char parameter) {
  switch (parameter) {
    case 'T':
    case 'w':
      return ValueKind::kTensor;
    case 'S':
      return ValueKind::kString;
    case 'I':
      return ValueKind::kIntList;
    case 'D':
      return ValueKind::kDoubleList;
    case 'B':
      return ValueKind::kBoolList;
    case 'L':
    case 'W':
      return ValueKind::kTensorList;
    default:
      return ValueKind::kOptionalTensorList;
  }
}

}  // namespace

ValueKinds::ValueKinds(FlowCursor& at) : at_(at), m_(at.method), tracked_(at.method.values.size(), -1) {}

bool ValueKinds::is_number(int32_t index) const { return declared_kinds(at_.value(index).kind) != 0; }

void ValueKinds::check(Parameter p, size_t argument, int32_t index) const {
  const ValuePlan& v = at_.value(index);
  if (p.optional && v.kind == ValueKind::kNone) return;
  bool fits = false;
  if (wanted_kinds(p.kind) != 0) {
    // Which number it is may change while the method runs; settle() looks closer.
    fits = declared_kinds(v.kind) != 0;
  } else {
    fits = v.kind == wanted_kind(p.kind);
  }
  if (!fits) {
    std::string expected = parameter_name(p.kind);
    at_.fail_argument(argument, (expected + (p.optional ? " or None" : "")).c_str(), index,
                      at_.kind_of(index));
  }
}

void ValueKinds::track(size_t argument, int32_t index) {
  if (declared_kinds(at_.value(index).kind) == 0)
    at_.fail_argument(argument, "a number to set", index, at_.kind_of(index));
  int32_t& slot = tracked_[static_cast<size_t>(index)];
  if (slot < 0) {
    slot = static_cast<int32_t>(declared_.size());
    declared_.push_back(declared_kinds(at_.value(index).kind));
  }
}

// Tensors that have memory only once an instruction gave them some: views, and what is moved to.
void ValueKinds::track_bare(const std::vector<int32_t>& moved) {
  std::vector<char> bound(m_.values.size(), 0);
  for (int32_t v : m_.outputs) bound[static_cast<size_t>(v)] = 1;
  for (int32_t v : moved) bound[static_cast<size_t>(v)] = 0;
  for (int32_t v : m_.inputs) bound[static_cast<size_t>(v)] = 1;
  for (size_t i = 0; i < m_.values.size(); ++i) {
    const TensorPlan* t = m_.tensor_of(static_cast<int32_t>(i));
    if (t == nullptr || t->storage != Storage::kNone || t->nbytes == 0 || bound[i] != 0) continue;
    tracked_[i] = static_cast<int32_t>(declared_.size());
    declared_.push_back(kBare);
  }
}

void ValueKinds::check_codes(const Instruction& in) const {
  if (in.kind != InstructionKind::kKernel) return;
  const Signature* s = at_.signature(in);
  if (s == nullptr) return;
  for (size_t a = 0; a < s->parameters.size(); ++a) {
    char kind = s->parameters[a].kind;
    if (kind == 'd' || kind == 'm') check_code(kind, a, in.args[a]);
  }
  if (m_.operators[static_cast<size_t>(in.target)] == "aten::sym_size.int") check_dimension(in);
}

// Numbers that a kernel uses as the codes that they are must be codes.
void ValueKinds::check_code(char kind, size_t argument, int32_t index) const {
  const ValuePlan& v = at_.value(index);
  if (v.kind == ValueKind::kNone) return;
  if (tracked_[static_cast<size_t>(index)] >= 0) {
    at_.fail_argument(argument, parameter_name(kind), index, "a number that is computed");
  }
  bool known = kind == 'm' ? v.int_value >= 0 && v.int_value <= 3
                           : v.int_value >= INT8_MIN && v.int_value <= INT8_MAX &&
                                 itemsize(static_cast<DType>(v.int_value)) != 0;
  if (v.kind != ValueKind::kInt || !known) {
    at_.fail_argument(argument, parameter_name(kind), index,
                      v.kind == ValueKind::kInt ? std::to_string(v.int_value) : at_.kind_of(index));
  }
}

// The engine ends the process where a tensor has no such dimension.
void ValueKinds::check_dimension(const Instruction& in) const {
  const ValuePlan& v = at_.value(in.args[1]);
  size_t rank = m_.tensor_of(in.args[0])->sizes.size();
  if (tracked_[static_cast<size_t>(in.args[1])] >= 0) {
    at_.fail_argument(1, "a dimension", in.args[1], "a number that is computed");
  }
  if (v.kind != ValueKind::kInt || v.int_value < 0 || v.int_value >= static_cast<int64_t>(rank)) {
    at_.fail(format("argument 1: expected a dimension below %zu, got value %d, %s %lld", rank, in.args[1],
                    kind_name(v.kind), static_cast<long long>(v.int_value)));
  }
}

bool ValueKinds::State::merge(const State& other) {
  if (!other.reached) return false;
  if (!reached) {
    *this = other;
    return true;
  }
  bool changed = false;
  for (size_t i = 0; i < kinds.size(); ++i) {
    changed |= (kinds[i] | other.kinds[i]) != kinds[i];
    kinds[i] |= other.kinds[i];
  }
  return changed;
}

ValueKinds::Kinds ValueKinds::kinds(const State& state, int32_t index) const {
  int32_t slot = tracked_[static_cast<size_t>(index)];
  return slot < 0 ? declared_kinds(at_.value(index).kind) : state.kinds[static_cast<size_t>(slot)];
}

void ValueKinds::settle() {
  uint64_t jumps = 0, cost = 1;
  for (const auto& chain : m_.chains) {
    cost += chain.size();
    for (const Instruction& in : chain) jumps += in.kind == InstructionKind::kJumpFalse;
  }
  cost += jumps * (declared_.size() + 1);
  std::vector<std::vector<State>> arriving(m_.chains.size());  // by jump target
  for (size_t c = 0; c < m_.chains.size() && jumps != 0; ++c) arriving[c].resize(m_.chains[c].size() + 1);
  State entry{declared_, true};
  bool changed = true;
  uint64_t spent = 0;
  while (changed) {
    spent += cost;
    if (spent > 50'000'000)
      FlowCursor::fail_method("expected control flow of at most 50,000,000 steps to follow, got more",
                              "export the model with fewer or smaller branches and loops");
    changed = false;
    State now = entry;
    for (at_.chain = 0; at_.chain < m_.chains.size(); ++at_.chain) {
      const auto& chain = m_.chains[at_.chain];
      for (at_.instruction = 0; at_.instruction < chain.size(); ++at_.instruction) {
        if (jumps != 0) now.merge(arriving[at_.chain][at_.instruction]);
        if (!now.reached) continue;
        changed |= step(chain[at_.instruction], now, arriving[at_.chain]);
      }
      if (jumps != 0) now.merge(arriving[at_.chain][chain.size()]);
    }
    changed |= entry.merge(now);
  }
}

bool ValueKinds::step(const Instruction& in, State& now, std::vector<State>& arriving) {
  switch (in.kind) {
    case InstructionKind::kKernel: {
      bool view = at_.is_view(in);
      for (size_t a = 0; a < in.args.size(); ++a) {
        if (!view || a != 2) use(in.args[a], a, now);
      }
      if (int32_t slot = view ? tracked_[static_cast<size_t>(in.args[2])] : -1; slot >= 0) {
        now.kinds[static_cast<size_t>(slot)] = 0;
      }
      if (const Signature* s = at_.signature(in)) step_kernel(in, *s, now);
      return false;
    }
    case InstructionKind::kDelegate:
      for (size_t a = 0; a < in.args.size(); ++a) use(in.args[a], a, now);
      return false;
    case InstructionKind::kMove:
      use(in.target, 0, now);
      if (int32_t slot = tracked_[static_cast<size_t>(in.destination)]; slot >= 0) {
        now.kinds[static_cast<size_t>(slot)] = kinds(now, in.target);
      }
      return false;
    case InstructionKind::kJumpFalse: {
      use(in.target, 0, now);
      if (m_.tensor_of(in.target) == nullptr && kinds(now, in.target) != kBool) {
        at_.fail(format("condition: expected a bool, got value %d, %s", in.target,
                        kinds_text(kinds(now, in.target)).c_str()));
      }
      bool changed = arriving[static_cast<size_t>(in.destination)].merge(now);
      const ValuePlan& v = at_.value(in.target);
      // Always taken: how the exporter leaves the first arm of a branch.
      if (v.kind == ValueKind::kBool && v.int_value == 0 && tracked_[static_cast<size_t>(in.target)] < 0)
        now.reached = false;
      return changed;
    }
    default:
      return false;
  }
}

// A kernel or delegate reads or writes the memory of this value.
void ValueKinds::use(int32_t index, size_t argument, const State& now) const {
  const ValuePlan& v = at_.value(index);
  if (v.kind == ValueKind::kTensorList || v.kind == ValueKind::kOptionalTensorList) {
    for (int32_t item : v.items) {
      if (item >= 0) use(item, argument, now);
    }
  } else if (v.kind == ValueKind::kTensor && (kinds(now, index) & kBare) != 0) {
    at_.fail(
        format(
            "argument %zu: expected a tensor with memory, got value %d, which is neither planned, constant, "
            "external, an input nor an output, nor a view of one by then",
            argument, index),
        "export it with bounds for every dynamic shape, and with planned memory (alloc_graph_output=True) "
        "for "
        "an output that other islands read");
  }
}

void ValueKinds::step_kernel(const Instruction& in, const Signature& s, State& now) {
  for (size_t a = 0; a < s.parameters.size(); ++a) {
    const ValuePlan& v = at_.value(in.args[a]);
    if (v.kind == ValueKind::kNone) continue;
    if (Kinds wanted = wanted_kinds(s.parameters[a].kind); wanted != 0) {
      if (Kinds got = kinds(now, in.args[a]); (got & ~wanted) != 0 || got == 0) {
        at_.fail_argument(a, parameter_name(s.parameters[a].kind), in.args[a], kinds_text(got));
      }
    } else if (s.parameters[a].kind == 'I') {
      for (int32_t item : v.items) {
        if (Kinds got = kinds(now, item); got != kInt) {
          at_.fail_argument(a, "a list whose elements are ints", in.args[a],
                            format("with value %d, %s", item, kinds_text(got).c_str()));
        }
      }
    }
  }
  if (s.result == 0 || s.result == 'w' || s.result == 'W') return;
  auto slot = static_cast<size_t>(tracked_[static_cast<size_t>(in.args.back())]);
  now.kinds[slot] = result_kinds(in, s, now);
}

ValueKinds::Kinds ValueKinds::result_kinds(const Instruction& in, const Signature& s,
                                           const State& now) const {
  if (s.result == 'i') return kInt;
  if (s.result == 'f') return kDouble;
  if (s.result == 'b') return kBool;
  if (const TensorPlan* t = m_.tensor_of(in.args[0])) {
    // aten::_local_scalar_dense: one element of the tensor.
    if (t->dtype == DType::kBool) return kBool;
    return is_floating(t->dtype) ? kDouble : kInt;
  }
  bool ite = m_.operators[static_cast<size_t>(in.target)] == "executorch_prim::sym_ite.Scalar";
  Kinds any = 0, all = kAny;
  for (size_t a = ite ? 1 : 0; a + 1 < in.args.size(); ++a) {
    any |= kinds(now, in.args[a]);
    all &= kinds(now, in.args[a]);
  }
  // Arithmetic gives a float where one operand is one.
  return ite ? any : static_cast<Kinds>((any & (kDouble | kBool)) | (all & kInt));
}

}  // namespace headrace
