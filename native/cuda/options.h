// The options of `CudaBackend` at load: stock ExecuTorch 1.5's names, and one of ours.
#pragma once

#include <string>
#include <variant>

#include "headrace/status.h"

namespace headrace {

struct CudaOptions {
  std::string library_directory;  // see LibraryPlace

  // Takes one option. `value` is a bool, an int or a text.
  // kOption: unknown, with the nearest name that is known, or of another type. kNotSupported: a value that
  // would not be honoured.
  Status set(const std::string& key, const std::variant<bool, int, std::string>& value);
};

}  // namespace headrace
