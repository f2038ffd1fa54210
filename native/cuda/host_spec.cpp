#include "cuda/host_spec.h"

#include <algorithm>
#include <charconv>
#include <map>

#include "program/text.h"

namespace headrace {

namespace {

struct Refusal {
  std::string text;
};

constexpr size_t kMaxOutputs = 4096, kMaxDepth = 64, kMaxText = 4096;

bool letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
bool digit(char c) { return c >= '0' && c <= '9'; }
bool space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

// A place in a text.
class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}
  [[noreturn]] void fail(const std::string& expected) const {
    std::string_view rest = text_.substr(std::min(at_, text_.size()));
    throw Refusal{"expected " + expected + " at byte " + std::to_string(at_) + ", got " +
                  (rest.empty() ? std::string("the end") : quoted(rest.substr(0, 16)))};
  }
  void skip() {
    while (at_ < text_.size() && space(text_[at_])) ++at_;
  }
  bool take(std::string_view what) {
    skip();
    if (!text_.substr(at_).starts_with(what)) return false;
    at_ += what.size();
    return true;
  }
  void want(std::string_view what) {
    if (!take(what)) fail(quoted(what));
  }
  char peek() {
    skip();
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  int64_t number() {
    skip();
    int64_t value = 0;
    auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), value);
    if (error != std::errc()) fail("an integer");
    at_ = static_cast<size_t>(end - text_.data());
    return value;
  }
  std::string word() {
    skip();
    size_t begin = at_;
    while (at_ < text_.size() && (letter(text_[at_]) || (at_ > begin && digit(text_[at_])))) ++at_;
    if (at_ == begin) fail("a name");
    return std::string(text_.substr(begin, at_ - begin));
  }
  // A JSON string; escapes are not used by the format.
  std::string string() {
    want("\"");
    size_t end = text_.find('"', at_);
    if (end == std::string_view::npos || end - at_ > kMaxText) fail("a string with an end");
    std::string out(text_.substr(at_, end - at_));
    if (out.find('\\') != std::string::npos || !is_text(out)) fail("a string without escapes");
    at_ = end + 1;
    return out;
  }
  void end() {
    skip();
    if (at_ != text_.size()) fail("the end");
  }

 private:
  std::string_view text_;
  size_t at_ = 0;
};

// What stands between brackets, with commas.
template <class Item>
void list(Reader& in, std::string_view open, std::string_view close, Item item) {
  in.want(open);
  if (in.take(close)) return;
  do {
    item();
  } while (in.take(","));
  in.want(close);
}

class Expression {
 public:
  Expression(std::string_view text, const std::map<std::string, int64_t>& symbols)
      : in_(text), symbols_(symbols) {}
  SizeExpression read() {
    sum(0);
    in_.end();
    return SizeExpression(std::move(steps_));
  }

 private:
  using Kind = SizeExpression::Step::Kind;
  void add(Kind kind, int64_t number = 0) { steps_.push_back({kind, number}); }

  void sum(size_t depth) {
    product(depth);
    for (;;) {
      if (in_.take("+")) {
        product(depth);
        add(Kind::kAdd);
      } else if (in_.take("-")) {
        product(depth);
        add(Kind::kSubtract);
      } else {
        return;
      }
    }
  }
  void product(size_t depth) {
    factor(depth);
    for (;;) {
      Kind kind;
      if (in_.take("//")) {
        kind = Kind::kDivide;
      } else if (in_.take("*")) {
        kind = Kind::kMultiply;
      } else if (in_.take("%")) {
        kind = Kind::kRemainder;
      } else {
        return;
      }
      factor(depth);
      add(kind);
    }
  }
  void factor(size_t depth) {
    if (depth > kMaxDepth) in_.fail("fewer nested parentheses");
    char next = in_.peek();
    if (in_.take("(")) {
      sum(depth + 1);
      in_.want(")");
    } else if (in_.take("-")) {
      factor(depth + 1);
      add(Kind::kNegate);
    } else if (digit(next)) {
      add(Kind::kNumber, in_.number());
    } else {
      std::string name = in_.word();
      if (name == "min" || name == "max") {
        in_.want("(");
        sum(depth + 1);
        in_.want(",");
        sum(depth + 1);
        in_.want(")");
        add(name == "min" ? Kind::kMin : Kind::kMax);
        return;
      }
      auto found = symbols_.find(name);
      if (found == symbols_.end()) throw Refusal{"expected a symbol that is defined, got " + quoted(name)};
      add(Kind::kSymbol, found->second);
    }
  }

  Reader in_;
  const std::map<std::string, int64_t>& symbols_;
  std::vector<SizeExpression::Step> steps_;
};

HostSpec read(std::string_view json) {
  Reader in(json);
  HostSpec spec;
  std::map<std::string, int64_t> places;
  // Expressions are read when all symbols are known, in whatever order the keys come.
  std::vector<std::vector<std::string>> outputs;
  int64_t version = -1;
  list(in, "{", "}", [&] {
    std::string key = in.string();
    in.want(":");
    if (key == "version") {
      version = in.number();
    } else if (key == "march") {
      spec.march = in.string();
    } else if (key == "symbols") {
      list(in, "{", "}", [&] {
        std::string name = in.string();
        in.want(":");
        in.want("[");
        int64_t input = in.number();
        in.want(",");
        int64_t dim = in.number();
        in.want("]");
        if (input < 0 || dim < 0 || input > 4096 || dim > 64) in.fail("an input and a dimension before here");
        if (!places.emplace(name, spec.symbols.size()).second) in.fail("a symbol defined once");
        spec.symbols.emplace_back(static_cast<int>(input), static_cast<int>(dim));
        spec.symbol_names.push_back(std::move(name));
      });
    } else if (key == "outputs") {
      list(in, "[", "]", [&] {
        if (outputs.size() >= kMaxOutputs) in.fail("fewer outputs");
        auto& dims = outputs.emplace_back();
        list(in, "[", "]", [&] {
          dims.push_back(in.peek() == '"' ? in.string() : std::to_string(in.number()));
          if (dims.size() > 64) in.fail("fewer dimensions");
        });
      });
    } else {
      throw Refusal{"expected the keys version, march, symbols and outputs, got " + quoted(key)};
    }
  });
  in.end();
  if (version != 1) {
    throw Refusal{"expected version 1, got " + (version < 0 ? std::string("none") : std::to_string(version))};
  }
  for (const auto& dims : outputs) {
    auto& out = spec.outputs.emplace_back();
    for (const std::string& text : dims) out.push_back(Expression(text, places).read());
  }
  return spec;
}

}  // namespace

Result<int64_t> SizeExpression::value(std::span<const int64_t> symbols) const {
  std::vector<int64_t> stack;
  auto wrong = [](const char* what) {
    return Status(ErrorCode::kInput,
                  std::string("expected a size that can be computed from the inputs', got ") + what +
                      "; call it with inputs of other sizes");
  };
  for (const Step& step : steps_) {
    if (step.kind == Step::Kind::kNumber) {
      stack.push_back(step.number);
      continue;
    }
    if (step.kind == Step::Kind::kSymbol) {
      stack.push_back(symbols[static_cast<size_t>(step.number)]);
      continue;
    }
    int64_t b = stack.back(), result = 0;
    if (step.kind == Step::Kind::kNegate) {
      if (__builtin_sub_overflow(int64_t{0}, b, &stack.back())) return wrong("an overflow");
      continue;
    }
    stack.pop_back();
    int64_t a = stack.back();
    bool overflow = false;
    switch (step.kind) {
      case Step::Kind::kAdd:
        overflow = __builtin_add_overflow(a, b, &result);
        break;
      case Step::Kind::kSubtract:
        overflow = __builtin_sub_overflow(a, b, &result);
        break;
      case Step::Kind::kMultiply:
        overflow = __builtin_mul_overflow(a, b, &result);
        break;
      case Step::Kind::kDivide:
      case Step::Kind::kRemainder: {
        if (b == 0) return wrong("a division by zero");
        if (a == INT64_MIN && b == -1) return wrong("an overflow");
        int64_t quotient = a / b, rest = a % b;
        if (rest != 0 && (rest < 0) != (b < 0)) {
          --quotient;
          rest += b;
        }
        result = step.kind == Step::Kind::kDivide ? quotient : rest;
        break;
      }
      case Step::Kind::kMin:
        result = std::min(a, b);
        break;
      default:
        result = std::max(a, b);
    }
    if (overflow) return wrong("an overflow");
    stack.back() = result;
  }
  if (stack.back() < 0) return wrong("a negative size");
  return stack.back();
}

Result<HostSpec> read_host_spec(std::string_view json) {
  try {
    return read(json);
  } catch (const Refusal& refusal) {
    return Status(ErrorCode::kProgram, "compile spec 'headrace_host': " + refusal.text);
  }
}

Status check_march(const std::string& march) {
  __builtin_cpu_init();
  bool known = true, runs = false;
  if (march.empty() || march == "x86-64") {
    runs = true;
  } else if (march == "x86-64-v2") {
    runs = __builtin_cpu_supports("x86-64-v2");
  } else if (march == "x86-64-v3") {
    runs = __builtin_cpu_supports("x86-64-v3");
  } else if (march == "x86-64-v4") {
    runs = __builtin_cpu_supports("x86-64-v4");
  } else {
    known = false;
  }
  if (runs) return {};
  return Status(
      ErrorCode::kDelegateUnavailable,
      known ? "expected a processor that runs code for '" + march +
                  "', got one that lacks instructions of it; export for an older one, or run it elsewhere"
            : "expected code for x86-64, x86-64-v2, x86-64-v3 or x86-64-v4, which can be checked, got "
              "code for " +
                  quoted(march) + "; export it for one of these");
}

}  // namespace headrace
