#include "program/operators.h"

#include <string>
#include <unordered_map>
#include <utility>

namespace headrace {

namespace {

constexpr std::pair<std::string_view, std::string_view> kOperators[] = {
#define OPERATOR(name, kinds) {name, kinds},
#include "program/operators.def"
#undef OPERATOR
};

Signature parse(std::string_view name, std::string_view text) {
  Signature out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == ' ') continue;
    if (text[i] == '?') {
      out.parameters.back().optional = true;
    } else if (text[i] == '=') {
      out.result = text[++i];
    } else {
      out.parameters.push_back({text[i], false});
    }
  }
  out.in_place = name.back() == '_';
  return out;
}

const std::unordered_map<std::string_view, Signature>& table() {
  static const auto signatures = [] {
    std::unordered_map<std::string_view, Signature> out;
    for (auto [name, kinds] : kOperators) out.emplace(name, parse(name, kinds));
    return out;
  }();
  return signatures;
}

}  // namespace

const Signature* find_signature(std::string_view kernel) {
  auto at = table().find(kernel);
  return at == table().end() ? nullptr : &at->second;
}

const char* parameter_name(char kind) {
  switch (kind) {
    case 'T':
      return "a tensor";
    case 'w':
      return "a tensor to write";
    case 'i':
      return "an int";
    case 'f':
      return "a float";
    case 'b':
      return "a bool";
    case 's':
      return "a number";
    case 'd':
      return "a dtype";
    case 'm':
      return "a memory format";
    case 'S':
      return "a string";
    case 'I':
      return "a list of ints";
    case 'D':
      return "a list of floats";
    case 'B':
      return "a list of bools";
    case 'L':
      return "a list of tensors";
    case 'O':
      return "a list of optional tensors";
    case 'W':
      return "a list of tensors to write";
    default:
      return "nothing";
  }
}

}  // namespace headrace
