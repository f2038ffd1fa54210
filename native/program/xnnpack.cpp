#include "program/xnnpack.h"

#include <vector>

#include "program/text.h"
#include "program/xnnpack_nodes.h"
#include "program/xnnpack_payload.h"

namespace headrace {

namespace xnnpack {

namespace {

bool carries(Type type, DType dtype, bool is_output) {
  switch (type) {
    case Type::kFloat32:
      return dtype == DType::kFloat32;
    case Type::kFloat16:
      return dtype == DType::kFloat16;
    case Type::kBFloat16:
      return dtype == DType::kBFloat16;
    case Type::kQInt8:
    case Type::kQUInt8:
      return dtype == DType::kInt8 || dtype == DType::kUInt8;
    case Type::kInt32:
    case Type::kQInt32:
      return dtype == DType::kInt32 || (is_output && dtype == DType::kInt64);
    default:
      return false;
  }
}

void check_argument(const Tensor& t, const TensorPlan& arg, int32_t index) {
  bool is_output = (t.flags & kOutputFlag) != 0;
  if (!carries(t.type, arg.dtype, is_output)) {
    fail("argument %u: expected a tensor of the payload's datatype %d, got value %d, %s", t.external,
         static_cast<int>(t.type), index, dtype_name(arg.dtype).c_str());
  }
  if (arg.device.kind != DeviceKind::kCpu)
    fail("argument %u: expected a tensor on cpu, got value %d", t.external, index);
  if (is_output && (arg.storage == Storage::kConstant || arg.storage == Storage::kExternal)) {
    fail("argument %u: expected a tensor that may be written, got value %d, a constant", t.external, index);
  }
  // Channels-last tensors have their channels last in the payload too.
  std::vector<int32_t> sizes = arg.sizes;
  if (arg.dim_order == std::vector<uint8_t>{0, 2, 3, 1}) sizes = {sizes[0], sizes[2], sizes[3], sizes[1]};
  if (sizes.empty()) sizes = {1};  // how the exporter writes a tensor without dimensions
  bool same = sizes.size() == t.dims.size();
  for (size_t d = 0; same && d < sizes.size(); ++d) same = static_cast<uint32_t>(sizes[d]) == t.dims[d];
  if (!same) {
    fail(
        "argument %u: expected a tensor of the payload's shape of rank %zu, got value %d of another shape "
        "(rank %zu)",
        t.external, t.dims.size(), index, sizes.size());
  }
}

// Each external value is the argument of that number.
void check_call(const Payload& payload, const Nodes& nodes, const MethodPlan& m, const Instruction& call) {
  for (const Tensor& t : payload.externals()) {
    if (t.external >= call.args.size()) {
      fail("expected an argument %u, which the payload names, got %zu arguments", t.external,
           call.args.size());
    }
    int32_t index = call.args[t.external];
    const TensorPlan* arg = m.tensor_of(index);
    if (arg == nullptr) {
      fail("argument %u: expected a tensor, got value %d, %s", t.external, index,
           kind_name(m.values[static_cast<size_t>(index)].kind));
    }
    check_argument(t, *arg, index);
    if (nodes.shrinks_to_nothing() && arg->dynamism != Dynamism::kStatic) {
      fail(
          "node %zu: expected less padding than what a single row and column become, got more, and "
          "argument %u of a size that changes",
          *nodes.shrinks_to_nothing(), t.external);
    }
  }
}

}  // namespace

}  // namespace xnnpack

std::string check_xnnpack(const MethodPlan& method, size_t index, const FindBytes& find) {
  std::string where;
  try {
    xnnpack::Payload payload(method.delegates[index].payload, find);
    xnnpack::Nodes nodes(payload);
    for (const auto& chain : method.chains) {
      for (size_t i = 0; i < chain.size(); ++i) {
        if (chain[i].kind != InstructionKind::kDelegate || static_cast<size_t>(chain[i].target) != index)
          continue;
        where = "instruction " + std::to_string(i) + ": ";
        xnnpack::check_call(payload, nodes, method, chain[i]);
      }
    }
  } catch (xnnpack::Malformed& e) {
    return where + e.text + "; " + kDamaged;
  }
  return {};
}

}  // namespace headrace
