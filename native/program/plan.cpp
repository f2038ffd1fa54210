#include "program/plan.h"

#include <algorithm>
#include <cinttypes>
#include <unordered_set>

#include "program/file_reader.h"
#include "program/flow.h"

namespace headrace {

const char* kind_name(ValueKind kind) {
  switch (kind) {
    case ValueKind::kNone:
      return "none";
    case ValueKind::kInt:
      return "int";
    case ValueKind::kBool:
      return "bool";
    case ValueKind::kDouble:
      return "float";
    case ValueKind::kTensor:
      return "tensor";
    case ValueKind::kString:
      return "string";
    case ValueKind::kIntList:
      return "list of ints";
    case ValueKind::kDoubleList:
      return "list of floats";
    case ValueKind::kBoolList:
      return "list of bools";
    case ValueKind::kTensorList:
      return "list of tensors";
    case ValueKind::kOptionalTensorList:
      return "list of optional tensors";
  }
  return "unknown kind";
}

namespace {

class ProgramReader : FileReader {
 public:
  explicit ProgramReader(const FileView& file) : FileReader(file), buffer_(nullptr, 0) {}

  ProgramPlan read() {
    Header h = read_header();
    buffer_ = fb::Buffer(file_.data, h.tables_size);
    budget_ = 8 * h.tables_size + 64;
    fb::Table program(&buffer_, buffer_.follow(0));
    check_buffer(buffer_);
    if (auto version = program.scalar<uint32_t>(0); version != 0) {
      fail(format("expected schema version 0, got %u", version), "export it with ExecuTorch 1.5");
    }
    segments_ = read_segments(buffer_, program.vector(4), h);
    constants_ = program.vector(2);
    delegate_data_ = program.vector(3);
    constant_segment_ = program.table(5);
    mutable_segments_ = program.vector(6);

    ProgramPlan out;
    read_named_data(program.vector(7), out);
    fb::Vector plans = program.vector(1);
    check_buffer(buffer_);
    if (plans.size() == 0) fail("expected at least one method, got none");
    spend(plans.size());
    std::unordered_set<std::string> names;
    for (size_t i = 0; i < plans.size(); ++i) {
      out.methods.push_back(read_method(plans.table(i), i));
      if (!names.insert(out.methods.back().name).second) {
        fail("expected a name that no other method has, got one twice");
      }
      where_.clear();
    }
    return out;
  }

 private:
  Header read_header() {
    if (!has_magic(4, "ET12")) {
      fail("expected an ExecuTorch program ('ET12' at byte 4), got " + magic_text(4),
           "give the file that to_executorch() wrote as .pte");
    }
    Header h;
    h.tables_size = file_.size;
    if (!has_magic(8, "eh00")) return h;  // an old file without segments
    if (file_.size < 40)
      fail(format("expected a header of at least 32 bytes, got a file of %zu", file_.size), kCutOff);
    auto length = raw<uint32_t>(12);
    if (length < 24) fail(format("expected a header of at least 24 bytes, got one of %u", length));
    h.tables_size = raw<uint64_t>(16);
    h.segments_offset = raw<uint64_t>(24);
    if (h.segments_offset != 0 && h.segments_offset < h.tables_size) {
      fail(format("expected segments behind the tables (%" PRIu64 " bytes), got them at %" PRIu64,
                  h.tables_size, h.segments_offset));
    }
    if (length >= 32) h.segments_size = raw<uint64_t>(32);
    check_header(h);
    return h;
  }

  void read_named_data(const fb::Vector& list, ProgramPlan& out) {
    spend(list.size());
    for (size_t i = 0; i < list.size(); ++i) {
      fb::Table entry = list.table(i);
      std::string_view key = read_text(buffer_, entry, 0, "key of named data");
      auto segment = entry.scalar<uint32_t>(1);
      if (segment >= segments_.size()) {
        fail(format("named data %s: expected a segment index below %zu, got %u", quoted(key).c_str(),
                    segments_.size(), segment));
      }
      out.named_data.push_back({std::string(key), segments_[segment]});
    }
  }

  MethodPlan read_method(const fb::Table& plan, size_t index) {
    MethodPlan m;
    where_ = format(", method %zu", index);
    m.name = read_text(buffer_, plan, 0, "method name");
    if (m.name.empty()) fail("expected a method name, got none");
    where_ = ", method " + quoted(m.name);
    read_buffers(plan, m);
    read_values(plan.vector(2), m);
    read_operators(plan.vector(6), m);
    read_delegates(plan.vector(7), m);
    m.inputs = read_indices(plan.vector(3), m, "input");
    m.outputs = read_indices(plan.vector(4), m, "output");
    read_chains(plan.vector(5), m);
    check_buffer(buffer_);
    if (auto wrong = check_flow(m)) {
      const Instruction* in = nullptr;
      if (wrong->chain < m.chains.size() && wrong->instruction < m.chains[wrong->chain].size()) {
        in = &m.chains[wrong->chain][wrong->instruction];
        where_ += instruction_text(wrong->chain, wrong->instruction);
      }
      if (in != nullptr && in->kind == InstructionKind::kKernel)
        where_ += called("kernel", m.operators, in->target);
      fail(wrong->text, wrong->advice.empty() ? kDamaged : wrong->advice.c_str());
    }
    return m;
  }

  void read_buffers(const fb::Table& plan, MethodPlan& m) {
    fb::Vector sizes = plan.vector(8, 8);
    spend(sizes.size());
    for (size_t i = 0; i < sizes.size(); ++i) {
      auto nbytes = sizes.scalar<int64_t>(i);
      if (nbytes < 0)
        fail(format("planned buffer %zu: expected a size of 0 or more, got %" PRId64, i, nbytes));
      m.buffers.push_back({static_cast<uint64_t>(nbytes), {}});
    }
    fb::Vector devices = plan.vector(9);
    spend(devices.size());
    for (size_t i = 0; i < devices.size(); ++i) {
      fb::Table entry = devices.table(i);
      auto buffer = entry.scalar<int32_t>(0);
      if (buffer < 0 || static_cast<size_t>(buffer) >= m.buffers.size()) {
        fail(format("device of a planned buffer: expected a buffer index below %zu, got %d", m.buffers.size(),
                    buffer));
      }
      m.buffers[static_cast<size_t>(buffer)].device =
          read_device(entry.scalar<int8_t>(1), entry.scalar<int8_t>(2));
    }
    check_buffer(buffer_);
  }

  DeviceId read_device(int8_t kind, int8_t index) const {
    if (kind != 0 && kind != 1) fail(format("device: expected CPU (0) or CUDA (1), got type %d", kind));
    if (index < 0) fail(format("device: expected an index of 0 or more, got %d", index));
    return {static_cast<DeviceKind>(kind), kind == 0 ? int8_t{0} : index};
  }

  void read_values(const fb::Vector& values, MethodPlan& m) {
    spend(values.size());
    m.values.resize(values.size());
    std::string method = where_;
    for (size_t i = 0; i < values.size(); ++i) {
      where_ = method + format(", value %zu", i);
      read_value(values.table(i), i, m);
      check_buffer(buffer_);
    }
    where_ = method;
    // Elements of a list of ints are looked up when a kernel asks, so they may come after the list.
    for (size_t i = 0; i < m.values.size(); ++i) {
      if (m.values[i].kind != ValueKind::kIntList) continue;
      for (int32_t item : m.values[i].items) {
        if (m.values[static_cast<size_t>(item)].kind != ValueKind::kInt) {
          fail(format("value %zu: expected a list whose elements are ints, got value %d, %s", i, item,
                      kind_name(m.values[static_cast<size_t>(item)].kind)));
        }
      }
    }
  }

  void read_value(const fb::Table& value, size_t index, MethodPlan& m) {
    ValuePlan& out = m.values[index];
    auto tag = value.scalar<uint8_t>(0);
    fb::Table body = value.table(1);
    check_buffer(buffer_);
    if (tag < 1 || tag > 11) fail(format("expected a kind between 1 and 11, got %u", tag));
    out.kind = static_cast<ValueKind>(tag);
    if (!body.present() && out.kind != ValueKind::kNone) fail("expected a value, got an empty one");
    switch (out.kind) {
      case ValueKind::kNone:
        break;
      case ValueKind::kInt:
        out.int_value = body.scalar<int64_t>(0);
        break;
      case ValueKind::kBool:
        out.int_value = body.scalar<uint8_t>(0);
        break;
      case ValueKind::kDouble:
        out.double_value = body.scalar<double>(0);
        break;
      case ValueKind::kString:
        spend(body.vector(0, 1).size());
        break;
      case ValueKind::kDoubleList:
        spend(body.vector(0, 8).size());
        break;
      case ValueKind::kBoolList:
        spend(body.vector(0, 1).size());
        break;
      case ValueKind::kTensor:
        out.tensor = static_cast<int32_t>(m.tensors.size());
        m.tensors.push_back(read_tensor(body, m));
        break;
      case ValueKind::kIntList: {
        fb::Vector items = body.vector(0, 8);
        spend(items.size());
        for (size_t i = 0; i < items.size(); ++i) {
          auto item = items.scalar<int64_t>(i);
          check_index(item, m.values.size(), "an element");
          out.items.push_back(static_cast<int32_t>(item));
        }
        break;
      }
      case ValueKind::kTensorList:
      case ValueKind::kOptionalTensorList: {
        fb::Vector items = body.vector(0, 4);
        spend(items.size());
        bool optional = out.kind == ValueKind::kOptionalTensorList;
        for (size_t i = 0; i < items.size(); ++i) {
          auto item = items.scalar<int32_t>(i);
          out.items.push_back(item);
          if (optional && item == -1) continue;
          // The engine copies the elements while it reads the list: they must have been read before.
          check_index(item, index, "an element (before the list)");
          ValueKind kind = m.values[static_cast<size_t>(item)].kind;
          if (kind != ValueKind::kTensor && !(optional && kind == ValueKind::kNone)) {
            fail(format("expected a list whose elements are tensors, got value %d, %s", item,
                        kind_name(kind)));
          }
        }
        break;
      }
    }
  }

  void check_index(int64_t index, size_t count, const char* what) const {
    if (index < 0 || static_cast<uint64_t>(index) >= count) {
      fail(format("%s: expected an index below %zu, got %" PRId64, what, count, index));
    }
  }

  TensorPlan read_tensor(const fb::Table& t, const MethodPlan& m) {
    TensorPlan out;
    out.dtype = read_dtype(t.scalar<int8_t>(0));
    if (auto offset = t.scalar<int32_t>(1); offset != 0) {
      fail(format("storage_offset: expected 0, the only one that the engine knows, got %d", offset));
    }
    auto dynamism = t.scalar<int8_t>(8);
    if (dynamism < 0 || dynamism > 2) fail(format("shape_dynamism: expected 0, 1 or 2, got %d", dynamism));
    out.dynamism = static_cast<Dynamism>(dynamism);
    out.nbytes = read_shape(t.vector(2, 4), t.vector(3, 1), out.dtype, out.sizes, out.dim_order);

    fb::Table extra = t.table(9), allocation = t.table(6);
    auto buffer = t.scalar<uint32_t>(5);
    bool external = false;
    if (extra.present()) {
      out.name = read_text(buffer_, extra, 1, "fully qualified name");
      auto location = extra.scalar<int8_t>(2);
      if (location != 0 && location != 1) fail(format("location: expected 0 or 1, got %d", location));
      external = location == 1;
      out.device = read_device(extra.scalar<int8_t>(3), extra.scalar<int8_t>(4));
    }
    check_buffer(buffer_);
    if (external && out.name.empty()) fail("external data: expected a fully qualified name, got none");
    if (allocation.present()) {
      out.storage = Storage::kPlanned;
      check_allocation(allocation, m, out);
      out.mutable_state = external || buffer > 0;
      if (!external && buffer > 0) check_initial_state(extra, buffer, out);
    } else if (external) {
      out.storage = Storage::kExternal;
    } else if (buffer > 0) {
      out.storage = Storage::kConstant;
      check_constant(buffer, out);
    }
    return out;
  }

  void check_allocation(const fb::Table& allocation, const MethodPlan& m, TensorPlan& out) {
    out.memory_id = allocation.scalar<uint32_t>(0);
    out.memory_offset = allocation.scalar<uint32_t>(1) | static_cast<uint64_t>(allocation.scalar<uint32_t>(2))
                                                             << 32;
    if (out.memory_id == 0 || out.memory_id >= m.buffers.size()) {
      fail(format("planned memory: expected a buffer between 1 and %zu, got %u",
                  m.buffers.size() ? m.buffers.size() - 1 : 0, out.memory_id));
    }
    const BufferPlan& planned = m.buffers[out.memory_id];
    if (out.memory_offset > planned.nbytes || out.nbytes > planned.nbytes - out.memory_offset) {
      fail(format("planned memory: expected %" PRIu64 " bytes at offset %" PRIu64
                  " inside buffer %u, got a buffer of %" PRIu64,
                  out.nbytes, out.memory_offset, out.memory_id, planned.nbytes));
    }
    if (out.memory_offset % itemsize(out.dtype) != 0) {
      fail(format("planned memory: expected an offset that is a multiple of %zu, got %" PRIu64,
                  itemsize(out.dtype), out.memory_offset));
    }
    // Older exports tag a tensor for a device and plan it on the host; the other way round is a wild pointer.
    if (planned.device.kind != DeviceKind::kCpu && planned.device != out.device) {
      fail("planned memory: expected a tensor and its buffer on one device, got " + device_name(out.device) +
           " and " + device_name(planned.device));
    }
  }

  const void* check_subsegment(const fb::Table& list, uint64_t index, uint64_t nbytes,
                               const char* what) const {
    fb::Vector offsets = list.vector(1, 8);
    auto segment = list.scalar<uint32_t>(0);
    check_buffer(buffer_);
    check_index(static_cast<int64_t>(std::min<uint64_t>(index, INT64_MAX)), offsets.size(), what);
    check_index(segment, segments_.size(), what);
    auto offset = offsets.scalar<uint64_t>(index);
    uint64_t size = segments_[segment].size();
    if (offset > size || nbytes > size - offset) {
      fail(format("%s: expected %" PRIu64 " bytes at offset %" PRIu64 ", got a segment of %" PRIu64, what,
                  nbytes, offset, size));
    }
    return segments_[segment].data() + offset;
  }

  void check_constant(uint32_t buffer, const TensorPlan& t) {
    if (constant_segment_.present() && constant_segment_.vector(1, 8).size() > 0) {
      check_aligned(check_subsegment(constant_segment_, buffer, t.nbytes, "constant data"), t.dtype,
                    "constant data");
      return;
    }
    check_index(buffer, constants_.size(), "constant data");
    fb::Vector bytes = constants_.table(buffer).vector(0, 1);
    if (t.nbytes > bytes.size()) {
      fail(format("constant data: expected %" PRIu64 " bytes, got %zu", t.nbytes, bytes.size()));
    }
    check_aligned(bytes.bytes(), t.dtype, "constant data");
  }

  void check_initial_state(const fb::Table& extra, uint32_t buffer, const TensorPlan& t) {
    uint64_t list = extra.present() ? extra.scalar<uint64_t>(0) : 0;
    check_index(static_cast<int64_t>(std::min<uint64_t>(list, INT64_MAX)), mutable_segments_.size(),
                "initial state");
    check_subsegment(mutable_segments_.table(list), buffer, t.nbytes, "initial state");
  }

  void read_operators(const fb::Vector& operators, MethodPlan& m) {
    spend(operators.size());
    for (size_t i = 0; i < operators.size(); ++i) {
      fb::Table op = operators.table(i);
      std::string_view name = read_text(buffer_, op, 0, "operator name");
      std::string_view overload = read_text(buffer_, op, 1, "operator overload");
      // The engine joins name and overload in a buffer of 256 bytes.
      if (name.empty() || name.size() + overload.size() > 250) {
        fail(format("operator %zu: expected a name of 1 to 250 characters, got %zu", i, name.size()));
      }
      m.operators.emplace_back(std::string(name) + (overload.empty() ? "" : ".") + std::string(overload));
    }
  }

  void read_delegates(const fb::Vector& delegates, MethodPlan& m) {
    spend(delegates.size());
    for (size_t i = 0; i < delegates.size(); ++i) {
      fb::Table entry = delegates.table(i);
      DelegatePlan d;
      d.id = read_text(buffer_, entry, 0, "delegate name");
      fb::Table processed = entry.table(1);
      check_buffer(buffer_);
      if (d.id.empty()) fail(format("delegate %zu: expected a name, got none", i));
      if (!processed.present())
        fail(format("delegate %zu (%s): expected a payload, got none", i, quoted(d.id).c_str()));
      auto location = processed.scalar<int8_t>(0);
      auto index = processed.scalar<uint32_t>(1);
      std::string what = format("payload of delegate %zu (%s)", i, quoted(d.id).c_str());
      if (location == 1) {
        check_index(index, segments_.size(), what.c_str());
        d.payload = segments_[index];
      } else if (location == 0) {
        check_index(index, delegate_data_.size(), what.c_str());
        fb::Vector data = delegate_data_.table(index).vector(0, 1);
        d.payload = {reinterpret_cast<const char*>(data.bytes()), data.size()};
      } else {
        fail(format("%s: expected location 0 or 1, got %d", what.c_str(), location));
      }
      // Every delegate is a graph to build: a file is not to ask for more of them than it could hold itself.
      payload_bytes_ += d.payload.size();
      if (payload_bytes_ > 64 * static_cast<uint64_t>(file_.size)) {
        fail("expected payloads that delegates do not share without end, got more than 64 times the file");
      }
      fb::Vector specs = entry.vector(2);
      spend(specs.size());
      for (size_t s = 0; s < specs.size(); ++s) {
        fb::Table spec = specs.table(s);
        fb::Vector value = spec.vector(1, 1);
        std::string_view key = read_text(buffer_, spec, 0, "key of a compile spec");
        // The engine reads both without looking. An empty key is none, an empty value may be one.
        if (key.empty()) fail(format("delegate %zu, compile spec %zu: expected a key, got none", i, s));
        if (!value.present())
          fail(format("delegate %zu, compile spec %zu (%s): expected a value, got none", i, s,
                      quoted(key).c_str()));
        d.specs.push_back({std::string(key), {reinterpret_cast<const char*>(value.bytes()), value.size()}});
      }
      check_buffer(buffer_);
      m.delegates.push_back(std::move(d));
    }
  }

  std::vector<int32_t> read_indices(const fb::Vector& list, const MethodPlan& m, const char* what) {
    std::vector<int32_t> out;
    spend(list.size());
    out.reserve(list.size());
    for (size_t i = 0; i < list.size(); ++i) {
      auto value = list.scalar<int32_t>(i);
      if (value < 0 || static_cast<size_t>(value) >= m.values.size()) {
        fail(format("%s %zu: expected a value index below %zu, got %d", what, i, m.values.size(), value));
      }
      out.push_back(value);
    }
    return out;
  }

  void read_chains(const fb::Vector& chains, MethodPlan& m) {
    std::string method = where_;
    spend(chains.size());
    for (size_t c = 0; c < chains.size(); ++c) {
      fb::Vector instructions = chains.table(c).vector(2);
      check_buffer(buffer_);
      spend(instructions.size());
      auto& chain = m.chains.emplace_back();
      chain.reserve(instructions.size());
      for (size_t i = 0; i < instructions.size(); ++i) {
        where_ = method + instruction_text(c, i);
        chain.push_back(read_instruction(instructions.table(i), instructions.size(), m));
        check_buffer(buffer_);
      }
      where_ = method;
    }
  }

  static std::string instruction_text(size_t chain, size_t i) {
    return (chain ? format(", chain %zu", chain) : std::string()) + format(", instruction %zu", i);
  }
  static std::string called(const char* what, const std::vector<std::string>& names, int32_t index) {
    return std::string(" (") + what + " " + quoted(names[static_cast<size_t>(index)]) + ")";
  }

  Instruction read_instruction(const fb::Table& instruction, size_t count, MethodPlan& m) {
    auto tag = instruction.scalar<uint8_t>(0);
    fb::Table body = instruction.table(1);
    check_buffer(buffer_);
    if (tag < 1 || tag > 5 || !body.present()) fail(format("expected a kind between 1 and 5, got %u", tag));
    Instruction out;
    out.kind = static_cast<InstructionKind>(tag);
    out.target = body.scalar<int32_t>(0);
    switch (out.kind) {
      case InstructionKind::kKernel: {
        check_index(out.target, m.operators.size(), "operator");
        where_ += called("kernel", m.operators, out.target);
        out.args = read_indices(body.vector(1, 4), m, "argument");
        break;
      }
      case InstructionKind::kDelegate:
        check_index(out.target, m.delegates.size(), "delegate");
        where_ += " (delegate " + quoted(m.delegates[static_cast<size_t>(out.target)].id) + ")";
        out.args = read_indices(body.vector(1, 4), m, "argument");
        break;
      case InstructionKind::kMove:
        out.destination = body.scalar<int32_t>(1);
        check_index(out.target, m.values.size(), "move from");
        check_index(out.destination, m.values.size(), "move to");
        break;
      case InstructionKind::kJumpFalse: {
        out.destination = body.scalar<int32_t>(1);
        check_index(out.target, m.values.size(), "condition");
        // A branch at the end of a method jumps behind its last instruction.
        check_index(out.destination, count + 1, "jump target");
        const ValuePlan& condition = m.values[static_cast<size_t>(out.target)];
        const TensorPlan* tensor = m.tensor_of(out.target);
        bool number = condition.kind == ValueKind::kBool || condition.kind == ValueKind::kInt ||
                      condition.kind == ValueKind::kDouble;
        if (!number && !(tensor != nullptr && tensor->dtype == DType::kBool)) {
          fail(format("condition: expected a bool or a bool tensor, got value %d, %s", out.target,
                      kind_name(condition.kind)));
        }
        break;
      }
      case InstructionKind::kFree:
        check_index(out.target, m.values.size(), "freed value");
        if (m.tensor_of(out.target) == nullptr) {
          fail(format("freed value: expected a tensor, got value %d, %s", out.target,
                      kind_name(m.values[static_cast<size_t>(out.target)].kind)));
        }
        break;
    }
    return out;
  }

  fb::Buffer buffer_;
  uint64_t payload_bytes_ = 0;
  std::vector<std::string_view> segments_;
  fb::Vector constants_, delegate_data_, mutable_segments_;
  fb::Table constant_segment_;
};

}  // namespace

Result<ProgramPlan> read_program(const FileView& file) {
  return guarded<ProgramPlan>(file, [&] { return ProgramReader(file).read(); });
}

}  // namespace headrace
