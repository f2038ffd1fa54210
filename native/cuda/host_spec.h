// What an exporter says of a host library beside it: the instruction set that it was compiled for, and the
// sizes of its outputs, which have to be known when its work is enqueued, before it runs. The compile spec
// "headrace_host":
//
//     {"version": 1, "march": "x86-64-v3", "symbols": {"s0": [0, 1]}, "outputs": [["2*s0", 32], …]}
//
// A symbol is a size of an input: [input, dimension]. A size of an output is an integer or an expression over
// the symbols with integers, + - * // %, min(a, b), max(a, b) and parentheses; // and % round as Python's do.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "headrace/status.h"

namespace headrace {

// One size of an output.
class SizeExpression {
 public:
  struct Step {
    enum class Kind : uint8_t {
      kNumber,
      kSymbol,
      kAdd,
      kSubtract,
      kMultiply,
      kDivide,
      kRemainder,
      kMin,
      kMax,
      kNegate
    };
    Kind kind = Kind::kNumber;
    int64_t number = 0;  // or the symbol's place
  };
  explicit SizeExpression(std::vector<Step> steps) : steps_(std::move(steps)) {}
  // kInput: an overflow, a division by zero, a negative size.
  Result<int64_t> value(std::span<const int64_t> symbols) const;

 private:
  std::vector<Step> steps_;  // in the order of a stack machine
};

struct HostSpec {
  std::string march;  // "x86-64-v3"; empty: not said
  std::vector<std::string> symbol_names;
  std::vector<std::pair<int, int>> symbols;  // (input, dimension), by place
  std::vector<std::vector<SizeExpression>> outputs;
};

// Any bytes. kProgram.
HEADRACE_API Result<HostSpec> read_host_spec(std::string_view json);

// Whether this processor runs code for `march`. kDelegateUnavailable: it does not, or the name is not known.
HEADRACE_API Status check_march(const std::string& march);

}  // namespace headrace
