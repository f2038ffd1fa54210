#include "program/guards.h"

#include <executorch/runtime/kernel/kernel_runtime_context.h>
#include <executorch/runtime/kernel/operator_registry.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

namespace headrace {

namespace et = executorch::runtime;

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

struct Guard {
  const char* kernel;
  Check check;
};

constexpr Guard kGuards[] = {
    {"executorch_prim::floordiv.Scalar", can_divide},
    {"executorch_prim::floordiv.int", can_divide},
    {"executorch_prim::mod.Scalar", can_divide},
    {"executorch_prim::mod.int", can_divide},
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
  } else {
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
