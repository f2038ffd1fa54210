// What a program file says, read once and checked: every index, kind, size and offset in it may be used
// as it stands afterwards. The engine's own consistency check (flatbuffer offsets, element counts) does
// not cover these; facts about the file format are those of ExecuTorch 1.5.1's schema/program.fbs.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "headrace/status.h"
#include "headrace/tensor.h"

namespace headrace {

// A file's bytes and the name by which messages call it.
struct FileView {
  const uint8_t* data = nullptr;
  size_t size = 0;
  std::string name;
};

enum class ValueKind : uint8_t {  // the tags of the KernelTypes union
  kNone = 1,
  kInt = 2,
  kBool = 3,
  kDouble = 4,
  kTensor = 5,
  kString = 6,
  kIntList = 7,
  kDoubleList = 8,
  kBoolList = 9,
  kTensorList = 10,
  kOptionalTensorList = 11,
};
const char* kind_name(ValueKind kind);

enum class Dynamism : uint8_t { kStatic = 0, kBounded = 1, kUnbounded = 2 };

// Where a tensor's bytes come from.
enum class Storage : uint8_t {
  kNone,      // bound by the caller (an unplanned input or output) or set by an instruction
  kPlanned,   // inside a planned buffer
  kConstant,  // in the program file
  kExternal,  // in a data file, under its fully qualified name
};

struct TensorPlan {
  DType dtype = DType::kFloat32;
  std::vector<int32_t> sizes;  // upper bounds where the shape is dynamic
  std::vector<uint8_t> dim_order;
  Dynamism dynamism = Dynamism::kStatic;
  Storage storage = Storage::kNone;
  bool mutable_state = false;  // planned memory that the program initialises and keeps between calls
  uint32_t memory_id = 0;
  uint64_t memory_offset = 0;
  uint64_t nbytes = 0;
  DeviceId device;
  std::string name;  // fully qualified, often empty
};

struct ValuePlan {
  ValueKind kind = ValueKind::kNone;
  int64_t int_value = 0;  // of an int or a bool
  double double_value = 0;
  int32_t tensor = -1;         // index into MethodPlan::tensors
  std::vector<int32_t> items;  // value indices of a list of ints or tensors; -1 is an absent tensor
};

enum class InstructionKind : uint8_t { kKernel = 1, kDelegate = 2, kMove = 3, kJumpFalse = 4, kFree = 5 };

struct Instruction {
  InstructionKind kind = InstructionKind::kKernel;
  int32_t target = 0;         // operator, delegate, source value, condition value, freed value
  int32_t destination = 0;    // of a move (value) or a jump (instruction)
  std::vector<int32_t> args;  // value indices of a kernel or delegate call
};

struct CompileSpec {
  std::string key;
  std::string_view value;
};

struct DelegatePlan {
  std::string id;
  std::string_view payload;
  std::vector<CompileSpec> specs;
};

struct BufferPlan {
  uint64_t nbytes = 0;
  DeviceId device;
};

struct MethodPlan {
  std::string name;
  std::vector<ValuePlan> values;
  std::vector<TensorPlan> tensors;
  std::vector<int32_t> inputs, outputs;
  std::vector<std::string> operators;  // "aten::add.out"
  std::vector<DelegatePlan> delegates;
  std::vector<std::vector<Instruction>> chains;
  std::vector<BufferPlan> buffers;  // [0] is reserved and empty, as in the file
  bool loops = false;               // some jump goes backwards
  std::vector<int32_t> moved;       // values that take over another value's tensor while the method runs

  const TensorPlan* tensor_of(int32_t value) const {
    const ValuePlan& v = values[static_cast<size_t>(value)];
    return v.tensor < 0 ? nullptr : &tensors[static_cast<size_t>(v.tensor)];
  }
};

struct NamedBlob {
  std::string key;
  std::string_view bytes;
};

struct ProgramPlan {
  std::vector<MethodPlan> methods;
  std::vector<NamedBlob> named_data;
};

// Reads and checks a program file. The views in the result point into `file`.
// kProgram: what is wrong, naming method, instruction and value.
Result<ProgramPlan> read_program(const FileView& file);

struct DataEntry {
  std::string key;
  std::string_view bytes;
  bool is_tensor = false;
  DType dtype = DType::kUInt8;
  std::vector<int32_t> sizes;
  std::vector<uint8_t> dim_order;
};

// Reads and checks a data file (`.ptd`, schema/flat_tensor.fbs). The views point into `file`.
Result<std::vector<DataEntry>> read_data_file(const FileView& file);

}  // namespace headrace
