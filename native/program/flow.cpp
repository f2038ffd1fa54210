#include "program/flow.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "program/operators.h"
#include "program/text.h"

namespace headrace {

namespace {

// Sets of kinds that a number may have, as bits.
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
  return out;
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

class Flow {
 public:
  explicit Flow(MethodPlan& method)
      : m_(method), parent_(method.values.size()), tracked_(method.values.size(), -1) {
    std::iota(parent_.begin(), parent_.end(), 0);
  }

  std::optional<FlowError> run() {
    try {
      for (const std::string& name : m_.operators) signatures_.push_back(find_signature(name));
      each(&Flow::check_instruction);
      check_loops();
      find_storage();
      each(&Flow::check_writes);
      settle_kinds();
    } catch (FlowError& e) {
      return std::move(e);
    }
    return {};
  }

 private:
  [[noreturn]] void fail(const std::string& text) const { throw FlowError{chain_, instruction_, text}; }
  [[noreturn]] void fail_argument(size_t argument, const char* expected, int32_t value,
                                  const std::string& got) const {
    fail(format("argument %zu: expected %s, got value %d, %s; the file is damaged, export it again", argument,
                expected, value, got.c_str()));
  }
  const ValuePlan& value(int32_t index) const { return m_.values[static_cast<size_t>(index)]; }
  std::string kind_of(int32_t index) const { return kind_name(value(index).kind); }
  const Signature* signature(const Instruction& in) const {
    return signatures_[static_cast<size_t>(in.target)];
  }

  void each(void (Flow::*check)(const Instruction&)) {
    for (chain_ = 0; chain_ < m_.chains.size(); ++chain_) {
      const auto& chain = m_.chains[chain_];
      for (instruction_ = 0; instruction_ < chain.size(); ++instruction_) (this->*check)(chain[instruction_]);
    }
  }

  // ---- one instruction by itself

  void check_instruction(const Instruction& in) {
    if (in.kind == InstructionKind::kKernel) {
      if (const Signature* s = signature(in)) check_kernel(in, *s);
    } else if (in.kind == InstructionKind::kMove) {
      check_move(in.target, in.destination);
    } else if (in.kind == InstructionKind::kFree) {
      freed_.push_back(in.target);
    }
  }

  void check_kernel(const Instruction& in, const Signature& s) {
    size_t expected = s.parameters.size() + (s.result != 0);
    if (in.args.size() != expected)
      fail(format("expected %zu arguments, got %zu; export it again", expected, in.args.size()));
    for (size_t a = 0; a < s.parameters.size(); ++a) check_kind(s.parameters[a], a, in.args[a]);
    if (s.result == 0) return;
    size_t last = s.parameters.size();
    int32_t result = in.args[last];
    if (s.result == 'W') {
      check_kind({'W', false}, last, result);
    } else if (s.result == 'w') {
      check_kind({'w', false}, last, result);
      // The kernel returns what it wrote, and the engine may store that in the last value.
      bool written = false;
      for (size_t a = 0; a < last; ++a) written |= s.parameters[a].kind == 'w' && in.args[a] == result;
      if (!written && s.in_place) {
        check_move(in.args[0], result);
      } else if (!written) {
        fail_argument(last, "the tensor that the kernel writes", result, "another one");
      }
    } else {
      track(last, result);
    }
  }

  void check_kind(Parameter p, size_t argument, int32_t index) {
    const ValuePlan& v = value(index);
    if (p.optional && v.kind == ValueKind::kNone) return;
    bool fits = false;
    if (wanted_kinds(p.kind) != 0) {
      // Which number it is may change while the method runs; settle_kinds() looks closer.
      fits = declared_kinds(v.kind) != 0;
    } else {
      fits = v.kind == wanted_kind(p.kind);
    }
    if (!fits) {
      std::string expected = parameter_name(p.kind);
      fail_argument(argument, (expected + (p.optional ? " or None" : "")).c_str(), index, kind_of(index));
    }
  }

  // A value that an instruction sets to a number.
  void track(size_t argument, int32_t index) {
    if (declared_kinds(value(index).kind) == 0)
      fail_argument(argument, "a number to set", index, kind_of(index));
    int32_t& slot = tracked_[static_cast<size_t>(index)];
    if (slot < 0) {
      slot = static_cast<int32_t>(declared_.size());
      declared_.push_back(declared_kinds(value(index).kind));
    }
  }

  void check_move(int32_t from, int32_t to) {
    const TensorPlan *a = m_.tensor_of(from), *b = m_.tensor_of(to);
    if (declared_kinds(value(from).kind) != 0 && declared_kinds(value(to).kind) != 0) {
      track(0, to);
      return;
    }
    if (a == nullptr || b == nullptr) {
      fail("expected a move between tensors or between numbers, got " + kind_of(from) + " to " + kind_of(to));
    }
    if (a->dtype != b->dtype || a->sizes.size() != b->sizes.size()) {
      fail(format(
          "expected a move between tensors of one dtype and rank, got %s of rank %zu to %s of rank %zu",
          dtype_name(a->dtype).c_str(), a->sizes.size(), dtype_name(b->dtype).c_str(), b->sizes.size()));
    }
    if (std::find(m_.inputs.begin(), m_.inputs.end(), to) != m_.inputs.end()) {
      fail(format("expected a move that leaves the inputs as they are, got one to value %d", to));
    }
    parent_[root(from)] = static_cast<int32_t>(root(to));
    moved_.push_back(to);
  }

  // A loop that leaves its own condition as it is would never end.
  void check_loops() {
    std::vector<int64_t> last(m_.values.size(), -1);  // where a value was last an argument or moved to
    for (chain_ = 0; chain_ < m_.chains.size(); ++chain_) {
      std::fill(last.begin(), last.end(), -1);
      const auto& chain = m_.chains[chain_];
      for (instruction_ = 0; instruction_ < chain.size(); ++instruction_) {
        const Instruction& in = chain[instruction_];
        auto at = static_cast<int64_t>(instruction_);
        for (int32_t v : in.args) last[static_cast<size_t>(v)] = at;
        if (in.kind == InstructionKind::kMove) last[static_cast<size_t>(in.destination)] = at;
        if (in.kind != InstructionKind::kJumpFalse || in.destination > at) continue;
        m_.loops = true;
        if (last[static_cast<size_t>(in.target)] < in.destination) {
          fail(
              format("expected a loop that writes its own condition, got one that leaves value %d as it is "
                     "and would "
                     "never end",
                     in.target));
        }
      }
    }
  }

  // ---- what shares memory

  size_t root(int32_t index) {
    auto i = static_cast<size_t>(index);
    while (parent_[i] != static_cast<int32_t>(i)) {
      parent_[i] = parent_[static_cast<size_t>(parent_[i])];
      i = static_cast<size_t>(parent_[i]);
    }
    return i;
  }

  void find_storage() {
    // A method's second call starts with what the first left: a freed value has no memory then.
    std::sort(freed_.begin(), freed_.end());
    auto unused = [&](int32_t v) {
      if (std::binary_search(freed_.begin(), freed_.end(), v)) {
        throw FlowError{
            0, 0,
            format("expected freed values that nothing uses, got value %d; export it with bounds for "
                   "every dynamic shape",
                   v)};
      }
    };
    if (!freed_.empty()) {
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
    // A view has the memory of what it shows, whatever size its own bounds allow. In rounds: a loop may make
    // a view of a view that a later instruction makes.
    bool changed = true;
    size_t rounds = 0;
    while (changed) {
      changed = false;
      if (++rounds > 64) throw FlowError{0, 0, "expected views of tensors, got views of each other"};
      for (const auto& chain : m_.chains) {
        for (const Instruction& in : chain) {
          if (in.kind != InstructionKind::kKernel || !is_view(in)) continue;
          auto from = static_cast<size_t>(in.args[0]), to = static_cast<size_t>(in.args[2]);
          const TensorPlan *a = m_.tensor_of(in.args[0]), *b = m_.tensor_of(in.args[2]);
          if (a == nullptr || b == nullptr) continue;
          if (input[to] != 0)
            throw FlowError{
                0, 0,
                format("expected inputs with memory of their own, got value %d, which becomes a view",
                       in.args[2])};
          uint64_t behind = std::min(room[from], a->nbytes);
          if (behind < std::min(room[to], b->nbytes)) room[to] = behind, changed = true;
          if (constant[from] && !constant[to]) constant[to] = 1, changed = true;
        }
      }
    }
    class_constant_.assign(m_.values.size(), 0);
    class_short_.assign(m_.values.size(), 0);
    for (size_t i = 0; i < m_.values.size(); ++i) {
      const TensorPlan* t = m_.tensor_of(static_cast<int32_t>(i));
      if (t == nullptr) continue;
      size_t r = root(static_cast<int32_t>(i));
      class_constant_[r] |= constant[i];
      class_short_[r] |= t->nbytes > room[i];
    }
    m_.moved = moved_;
    find_bare();
  }

  // Tensors that have memory only once an instruction gave them some: views, and what is moved to.
  void find_bare() {
    std::vector<char> bound(m_.values.size(), 0);
    for (int32_t v : m_.outputs) bound[static_cast<size_t>(v)] = 1;
    for (int32_t v : moved_) bound[static_cast<size_t>(v)] = 0;
    for (int32_t v : m_.inputs) bound[static_cast<size_t>(v)] = 1;
    for (size_t i = 0; i < m_.values.size(); ++i) {
      const TensorPlan* t = m_.tensor_of(static_cast<int32_t>(i));
      if (t == nullptr || t->storage != Storage::kNone || t->nbytes == 0 || bound[i] != 0) continue;
      tracked_[i] = static_cast<int32_t>(declared_.size());
      declared_.push_back(kBare);
    }
  }

  bool is_view(const Instruction& in) const {
    return m_.operators[static_cast<size_t>(in.target)] == "executorch_prim::et_view.default" &&
           in.args.size() == 3;
  }

  // ---- what is written

  void check_writes(const Instruction& in) {
    if (in.kind != InstructionKind::kKernel) return;
    const Signature* s = signature(in);
    if (s == nullptr) return;
    const std::string& name = m_.operators[static_cast<size_t>(in.target)];
    check_device(in, *s);
    written_.clear();
    planned_.clear();
    for (size_t a = 0; a < s->parameters.size(); ++a) {
      char kind = s->parameters[a].kind;
      if (kind == 'w') check_written(in.args[a], a, !s->in_place, is_view(in));
      if (kind == 'W') {
        for (int32_t item : value(in.args[a]).items) check_written(item, a, true, false);
      }
      if (kind == 'd' || kind == 'm') check_code(kind, a, in.args[a]);
    }
    if (name == "aten::sym_size.int") check_dimension(in);
    if (written_.empty()) return;
    check_apart(in, *s);
    if (s->in_place) return;
    // A kernel that writes to what it reads may find its sizes changed in its middle.
    std::sort(written_.begin(), written_.end());
    if (std::adjacent_find(written_.begin(), written_.end()) != written_.end()) {
      fail("expected different tensors to write, got one of them twice");
    }
    auto read = [&](int32_t v, size_t a) {
      if (std::binary_search(written_.begin(), written_.end(), root(v))) {
        fail_argument(a, "a tensor that the kernel does not write as well", v, "one that it does");
      }
    };
    for (size_t a = 0; a < s->parameters.size(); ++a) {
      const ValuePlan& v = value(in.args[a]);
      if (s->parameters[a].kind == 'T' && v.kind == ValueKind::kTensor) read(in.args[a], a);
      if (s->parameters[a].kind == 'L' || s->parameters[a].kind == 'O') {
        for (int32_t item : v.items) {
          if (item >= 0) read(item, a);
        }
      }
    }
  }

  // The engine's kernels run on the host; only the two that copy between devices may see another's memory.
  void check_device(const Instruction& in, const Signature& s) {
    const std::string& name = m_.operators[static_cast<size_t>(in.target)];
    if (name.starts_with("et_copy::") || name.starts_with("aten::sym_") || is_view(in)) return;
    auto on_host = [&](int32_t v, size_t a) {
      const TensorPlan* t = m_.tensor_of(v);
      if (t == nullptr) return;
      DeviceId device = t->storage == Storage::kPlanned ? m_.buffers[t->memory_id].device
                        : t->storage == Storage::kNone  ? t->device
                                                        : DeviceId{};
      if (device.kind != DeviceKind::kCpu)
        fail_argument(a, "a tensor on cpu", v, "one on " + device_name(device));
    };
    for (size_t a = 0; a < s.parameters.size(); ++a) {
      on_host(in.args[a], a);
      const ValuePlan& v = value(in.args[a]);
      if (v.kind != ValueKind::kTensorList && v.kind != ValueKind::kOptionalTensorList) continue;
      for (int32_t item : v.items) {
        if (item >= 0) on_host(item, a);
      }
    }
  }

  // Whether two tensors are planned into the same bytes.
  static bool meet(const TensorPlan& a, const TensorPlan& b) {
    return a.storage == Storage::kPlanned && b.storage == Storage::kPlanned && a.memory_id == b.memory_id &&
           a.nbytes != 0 && b.nbytes != 0 && a.memory_offset < b.memory_offset + b.nbytes &&
           b.memory_offset < a.memory_offset + a.nbytes;
  }

  // What a kernel writes lies apart from everything else that it is given: it would copy memory over itself.
  void check_apart(const Instruction& in, const Signature& s) {
    for (auto [v, argument] : planned_) {
      auto apart = [&](int32_t other, size_t a) {
        const TensorPlan* t = other < 0 || other == v ? nullptr : m_.tensor_of(other);
        if (t != nullptr && meet(*m_.tensor_of(v), *t))
          fail_argument(a, "planned memory that the kernel does not write as well", other,
                        "that of argument " + std::to_string(argument));
      };
      for (size_t a = 0; a < s.parameters.size(); ++a) {
        const ValuePlan& other = value(in.args[a]);
        if (other.kind == ValueKind::kTensor) apart(in.args[a], a);
        if (other.kind != ValueKind::kTensorList && other.kind != ValueKind::kOptionalTensorList) continue;
        for (int32_t item : other.items) apart(item, a);
      }
    }
  }

  void check_written(int32_t v, size_t argument, bool resized, bool view) {
    if (m_.tensor_of(v) == nullptr) return;  // an absent optional
    size_t r = root(v);
    written_.push_back(r);
    if (view) return;  // takes over another tensor's memory, writes nothing
    planned_.emplace_back(v, argument);
    if (class_constant_[r] != 0) fail_argument(argument, "a tensor that may be written", v, "a constant");
    if (resized && class_short_[r] != 0) {
      fail_argument(argument, "a tensor with memory for the largest shape that it may take", v,
                    "a view of a smaller one or an input without memory of its own");
    }
  }

  // Numbers that a kernel uses as the codes that they are must be codes.
  void check_code(char kind, size_t argument, int32_t index) {
    const ValuePlan& v = value(index);
    if (v.kind == ValueKind::kNone) return;
    if (tracked_[static_cast<size_t>(index)] >= 0) {
      fail_argument(argument, parameter_name(kind), index, "a number that is computed");
    }
    bool known = kind == 'm' ? v.int_value >= 0 && v.int_value <= 3
                             : v.int_value >= INT8_MIN && v.int_value <= INT8_MAX &&
                                   itemsize(static_cast<DType>(v.int_value)) != 0;
    if (v.kind != ValueKind::kInt || !known) {
      fail_argument(argument, parameter_name(kind), index,
                    v.kind == ValueKind::kInt ? std::to_string(v.int_value) : kind_of(index));
    }
  }

  // The engine ends the process where a tensor has no such dimension.
  void check_dimension(const Instruction& in) {
    const ValuePlan& v = value(in.args[1]);
    size_t rank = m_.tensor_of(in.args[0])->sizes.size();
    if (tracked_[static_cast<size_t>(in.args[1])] >= 0) {
      fail_argument(1, "a dimension", in.args[1], "a number that is computed");
    }
    if (v.kind != ValueKind::kInt || v.int_value < 0 || v.int_value >= static_cast<int64_t>(rank)) {
      fail(format("argument 1: expected a dimension below %zu, got value %d, %s %lld", rank, in.args[1],
                  kind_name(v.kind), static_cast<long long>(v.int_value)));
    }
  }

  // ---- kinds of numbers, which instructions change

  struct State {
    std::vector<Kinds> kinds;
    bool reached = false;
    bool merge(const State& other) {
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
  };

  Kinds kinds(const State& state, int32_t index) const {
    int32_t slot = tracked_[static_cast<size_t>(index)];
    return slot < 0 ? declared_kinds(value(index).kind) : state.kinds[static_cast<size_t>(slot)];
  }

  // Follows the kinds along every path until nothing changes, the second call of the method included.
  void settle_kinds() {
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
        throw FlowError{0, 0, "expected control flow of a sensible size, got one that cannot be followed"};
      changed = false;
      State now = entry;
      for (chain_ = 0; chain_ < m_.chains.size(); ++chain_) {
        const auto& chain = m_.chains[chain_];
        for (instruction_ = 0; instruction_ < chain.size(); ++instruction_) {
          if (jumps != 0) now.merge(arriving[chain_][instruction_]);
          if (!now.reached) continue;
          changed |= step(chain[instruction_], now, arriving[chain_]);
        }
        if (jumps != 0) now.merge(arriving[chain_][chain.size()]);
      }
      changed |= entry.merge(now);
    }
  }

  bool step(const Instruction& in, State& now, std::vector<State>& arriving) {
    switch (in.kind) {
      case InstructionKind::kKernel: {
        bool view = is_view(in);
        for (size_t a = 0; a < in.args.size(); ++a) {
          if (!view || a != 2) use(in.args[a], a, now);
        }
        if (int32_t slot = view ? tracked_[static_cast<size_t>(in.args[2])] : -1; slot >= 0) {
          now.kinds[static_cast<size_t>(slot)] = 0;
        }
        if (const Signature* s = signature(in)) step_kernel(in, *s, now);
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
          fail(format("condition: expected a bool, got value %d, %s", in.target,
                      kinds_text(kinds(now, in.target)).c_str()));
        }
        bool changed = arriving[static_cast<size_t>(in.destination)].merge(now);
        const ValuePlan& v = value(in.target);
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
  void use(int32_t index, size_t argument, const State& now) const {
    const ValuePlan& v = value(index);
    if (v.kind == ValueKind::kTensorList || v.kind == ValueKind::kOptionalTensorList) {
      for (int32_t item : v.items) {
        if (item >= 0) use(item, argument, now);
      }
    } else if (v.kind == ValueKind::kTensor && (kinds(now, index) & kBare) != 0) {
      fail(format(
          "argument %zu: expected a tensor with memory, got value %d, which is neither planned, constant, "
          "external, an input nor an output, nor a view of one by then; export it with bounds for every "
          "dynamic "
          "shape, and with planned memory (alloc_graph_output=True) for an output that other islands read",
          argument, index));
    }
  }

  void step_kernel(const Instruction& in, const Signature& s, State& now) {
    for (size_t a = 0; a < s.parameters.size(); ++a) {
      const ValuePlan& v = value(in.args[a]);
      if (v.kind == ValueKind::kNone) continue;
      if (Kinds wanted = wanted_kinds(s.parameters[a].kind); wanted != 0) {
        if (Kinds got = kinds(now, in.args[a]); (got & ~wanted) != 0 || got == 0) {
          fail_argument(a, parameter_name(s.parameters[a].kind), in.args[a], kinds_text(got));
        }
      } else if (s.parameters[a].kind == 'I') {
        for (int32_t item : v.items) {
          if (Kinds got = kinds(now, item); got != kInt) {
            fail_argument(a, "a list whose elements are ints", in.args[a],
                          format("with value %d, %s", item, kinds_text(got).c_str()));
          }
        }
      }
    }
    if (s.result == 0 || s.result == 'w' || s.result == 'W') return;
    auto slot = static_cast<size_t>(tracked_[static_cast<size_t>(in.args.back())]);
    now.kinds[slot] = result_kinds(in, s, now);
  }

  Kinds result_kinds(const Instruction& in, const Signature& s, const State& now) const {
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

  MethodPlan& m_;
  size_t chain_ = 0, instruction_ = 0;
  std::vector<const Signature*> signatures_;
  std::vector<int32_t> parent_;   // union-find: values that moves may make one tensor
  std::vector<int32_t> tracked_;  // by value: its place in a State, or -1
  std::vector<Kinds> declared_;   // by place
  std::vector<int32_t> freed_, moved_;
  std::vector<size_t> written_;  // of one instruction: roots
  std::vector<std::pair<int32_t, size_t>>
      planned_;  // of one instruction: values, and the arguments that they are
  std::vector<char> class_constant_, class_short_;  // by root
};

}  // namespace

std::optional<FlowError> check_flow(MethodPlan& method) { return Flow(method).run(); }

}  // namespace headrace
