// XNNPACK's payload: a graph of known operators with its constants. The stock delegate checks that its
// tables are sound; it does not compare ids, shapes and constants with each other, or with the arguments
// that it is called with, and reads and writes beyond them where they disagree.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "program/plan.h"

namespace headrace {

constexpr std::string_view kXnnpack = "XnnpackBackend";

// The bytes under a key of the named data, or nothing where no file has it.
using FindBytes = std::function<std::optional<std::string_view>(std::string_view key)>;

// Checks the payload of delegate `index` of `method`, and every call of it. Empty when all is well, else
// what was expected, what came and what to do.
std::string check_xnnpack(const MethodPlan& method, size_t index, const FindBytes& find);

}  // namespace headrace
