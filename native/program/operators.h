// What each kernel of the engine takes. A kernel unpacks its arguments without looking, and ends the
// process at a wrong kind, so every call is compared with its kernel's signature before it is loaded.
#pragma once

#include <string_view>
#include <vector>

namespace headrace {

// One argument of a kernel: a letter of operators.py, and whether None will do.
struct Parameter {
  char kind = 0;
  bool optional = false;
};

struct Signature {
  std::vector<Parameter> parameters;
  char result = 0;        // what follows the parameters: w, W, i, f, b, s, or 0 for nothing
  bool in_place = false;  // writes its first argument without changing its shape
};

// Null for a kernel that is not the engine's own (one from a library that the user loaded).
const Signature* find_signature(std::string_view kernel);

// "a tensor", "an int or None".
const char* parameter_name(char kind);

}  // namespace headrace
