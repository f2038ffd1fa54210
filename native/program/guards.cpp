#include "program/guards.h"

#include <executorch/runtime/core/exec_aten/util/scalar_type_util.h>
#include <executorch/runtime/kernel/kernel_runtime_context.h>
#include <executorch/runtime/kernel/operator_registry.h>
#include <executorch/runtime/platform/log.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <utility>

namespace headrace {

namespace et = executorch::runtime;
using executorch::aten::ScalarType;

namespace {

using Args = et::Span<et::EValue*>;
// Whether the kernel may see these arguments.
using Check = bool (*)(Args args);

// Division of ints: the processor traps on x / 0 and on the one quotient that does not fit
// (kernels/prim_ops/register_prim_ops.cpp of ExecuTorch 1.5.1 divides without looking).
bool can_divide(Args args) {
  if (args.size() < 2 || !args[0]->isInt() || !args[1]->isInt()) return true;
  int64_t divisor = args[1]->toInt();
  return divisor != 0 && !(divisor == -1 && args[0]->toInt() == std::numeric_limits<int64_t>::min());
}

bool is_signed(ScalarType type) { return type == ScalarType::Int || type == ScalarType::Long; }

int width(ScalarType type) {
  return type == ScalarType::Long ? 8 : type == ScalarType::Int ? 4 : type == ScalarType::Short ? 2 : 1;
}

template <class T>
bool contains(const executorch::aten::Tensor& tensor, T value) {
  const T* data = tensor.const_data_ptr<T>();
  return std::find(data, data + tensor.numel(), value) != data + tensor.numel();
}

bool contains(const executorch::aten::Tensor& tensor, bool least) {
  constexpr auto kLeast32 = std::numeric_limits<int32_t>::min();
  constexpr auto kLeast64 = std::numeric_limits<int64_t>::min();
  switch (tensor.scalar_type()) {
    case ScalarType::Long:
      return contains<int64_t>(tensor, least ? kLeast64 : -1);
    case ScalarType::Int:
      return contains<int32_t>(tensor, least ? kLeast32 : -1);
    case ScalarType::Short:
      return !least && contains<int16_t>(tensor, -1);
    case ScalarType::Char:
      return !least && contains<int8_t>(tensor, -1);
    default:
      return false;
  }
}

// Division of tensors of ints. The kernels look for zeros, though not after a divisor was made narrower, and
// not for the quotient that does not fit (kernels/portable/cpu/op_div.cpp, op_remainder.cpp).
bool can_divide_tensors(Args args) {
  if (args.size() < 2 || !args[0]->isTensor()) return true;
  const auto& a = args[0]->toTensor();
  if (!et::isIntegralType(a.scalar_type(), false)) return true;
  if (args[1]->isInt()) {
    int64_t divisor = args[1]->toInt();
    // What is left of it in the type of the tensor.
    int bits = 8 * width(a.scalar_type());
    int64_t narrow = bits == 64
                         ? divisor
                         : static_cast<int64_t>(static_cast<uint64_t>(divisor) << (64 - bits)) >> (64 - bits);
    return narrow != 0 && !(narrow == -1 && is_signed(a.scalar_type()) && contains(a, true));
  }
  if (!args[1]->isTensor()) return true;
  const auto& b = args[1]->toTensor();
  bool here = is_signed(a.scalar_type()) && et::isIntegralType(b.scalar_type(), false) &&
              width(b.scalar_type()) <= width(a.scalar_type());
  return !here || !contains(a, true) || !contains(b, false);
}

// True division gives floats; asked for ints, the kernel divides as ints and traps on a zero.
bool can_divide_truly(Args args) {
  return args.size() < 3 || !args[2]->isTensor() || et::isFloatingType(args[2]->toTensor().scalar_type());
}

// The inverse of a real Fourier transform reads its input as complex numbers, whatever it holds.
bool is_complex_input(Args args) {
  return args.size() < 1 || !args[0]->isTensor() || et::isComplexType(args[0]->toTensor().scalar_type());
}

bool any(Args) { return true; }

// The kernel writes the indices of one element after those of the other, in whatever order its output was
// planned (kernels/portable/cpu/op_nonzero.cpp). Exporters plan it as eager PyTorch has it: index by index.
void put_indices_in_order(et::KernelRuntimeContext& context, Args args) {
  if (args.size() < 2 || !args[1]->isTensor()) return;
  auto& out = args[1]->toTensor();
  if (out.dim() != 2 || out.dim_order()[0] == 0 || out.scalar_type() != ScalarType::Long) return;
  auto rows = static_cast<size_t>(out.size(0)), columns = static_cast<size_t>(out.size(1));
  if (rows * columns == 0) return;
  std::unique_ptr<int64_t[]> copy(new (std::nothrow) int64_t[rows * columns]);
  if (copy == nullptr) return context.fail(et::Error::MemoryAllocationFailed);
  auto* data = out.mutable_data_ptr<int64_t>();
  std::copy(data, data + rows * columns, copy.get());
  for (size_t r = 0; r < rows; ++r) {
    for (size_t c = 0; c < columns; ++c) data[c * rows + r] = copy[r * columns + c];
  }
}

struct Guard {
  const char* kernel;
  Check check;
  const char* expected;
  // What the kernel leaves undone.
  void (*after)(et::KernelRuntimeContext& context, Args args) = nullptr;
};

constexpr const char* kQuotient = "integers that can be divided, got a division by zero or out of range";

constexpr Guard kGuards[] = {
    {"aten::_fft_c2r.out", is_complex_input, "an input of complex numbers, got one of real ones"},
    {"executorch_prim::floordiv.Scalar", can_divide, kQuotient},
    {"executorch_prim::floordiv.int", can_divide, kQuotient},
    {"executorch_prim::mod.Scalar", can_divide, kQuotient},
    {"executorch_prim::mod.int", can_divide, kQuotient},
    {"aten::nonzero.out", any, "", put_indices_in_order},
    {"aten::div.out", can_divide_truly, "an output of floats, got one of ints"},
    {"aten::div.out_mode", can_divide_tensors, kQuotient},
    {"aten::div.Scalar_mode_out", can_divide_tensors, kQuotient},
    {"aten::floor_divide.out", can_divide_tensors, kQuotient},
    {"aten::remainder.Tensor_out", can_divide_tensors, kQuotient},
    {"aten::remainder.Scalar_out", can_divide_tensors, kQuotient},
    {"aten::fmod.Tensor_out", can_divide_tensors, kQuotient},
    {"aten::fmod.Scalar_out", can_divide_tensors, kQuotient},
};
constexpr size_t kCount = std::size(kGuards);

std::array<et::OpFunction, kCount>& originals() {
  static std::array<et::OpFunction, kCount> functions{};
  return functions;
}

template <size_t I>
void guarded(et::KernelRuntimeContext& context, Args args) {
  if (kGuards[I].check(args)) {
    originals()[I](context, args);
    if (kGuards[I].after != nullptr && context.failure_state() == et::Error::Ok)
      kGuards[I].after(context, args);
  } else {
    ET_LOG(Error, "%s: expected %s", kGuards[I].kernel, kGuards[I].expected);
    context.fail(et::Error::InvalidArgument);
  }
}

template <size_t... I>
constexpr std::array<et::OpFunction, kCount> make_guarded(std::index_sequence<I...>) {
  return {&guarded<I>...};
}

}  // namespace

void guard_kernels() {
  static constexpr auto kFunctions = make_guarded(std::make_index_sequence<kCount>());
  for (const et::Kernel& kernel : et::get_registered_kernels()) {
    for (size_t i = 0; i < kCount; ++i) {
      if (std::strcmp(kernel.name_, kGuards[i].kernel) != 0 || kernel.op_ == kFunctions[i]) continue;
      originals()[i] = kernel.op_;
      // The registry is an array that the engine fills at run time; there is no call to replace an entry.
      const_cast<et::Kernel&>(kernel).op_ = kFunctions[i];
    }
  }
}

}  // namespace headrace
