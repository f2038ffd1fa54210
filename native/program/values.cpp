#include "program/values.h"

#include <cstdio>

namespace headrace {

namespace {

const char* name_of(Value::Kind kind) {
  switch (kind) {
    case Value::Kind::kNone:
      return "None";
    case Value::Kind::kTensor:
      return "a tensor";
    case Value::Kind::kInt:
      return "an int";
    case Value::Kind::kDouble:
      return "a float";
    case Value::Kind::kBool:
      return "a bool";
    case Value::Kind::kString:
      return "a string";
  }
  return "?";
}

bool bool_of(const ValueInfo& info) { return info.int_value != 0; }
bool bool_of(const Value& value) { return value.bool_value; }

template <class T>
std::string number_of(const T& value) {
  char digits[32];
  switch (value.kind) {
    case Value::Kind::kInt:
      return std::to_string(value.int_value);
    case Value::Kind::kBool:
      return bool_of(value) ? "True" : "False";
    case Value::Kind::kDouble:
      std::snprintf(digits, sizeof digits, "%.17g", value.double_value);
      return digits;
    default:
      return "";
  }
}

}  // namespace

ValueInfo describe_value(const MethodPlan& plan, int32_t value) {
  const ValuePlan& v = plan.values[static_cast<size_t>(value)];
  ValueInfo info;
  switch (v.kind) {
    case ValueKind::kInt:
      info.kind = Value::Kind::kInt;
      info.int_value = v.int_value;
      break;
    case ValueKind::kBool:
      info.kind = Value::Kind::kBool;
      info.int_value = v.int_value;
      break;
    case ValueKind::kDouble:
      info.kind = Value::Kind::kDouble;
      info.double_value = v.double_value;
      break;
    case ValueKind::kString:
      info.kind = Value::Kind::kString;
      break;
    case ValueKind::kTensor: {
      const TensorPlan& t = *plan.tensor_of(value);
      info.kind = Value::Kind::kTensor;
      info.name = t.name;
      info.dtype = t.dtype;
      info.shape.assign(t.sizes.begin(), t.sizes.end());
      info.dynamic = t.dynamism != Dynamism::kStatic;
      info.device = t.device;
      info.planned = t.storage != Storage::kNone;
      break;
    }
    default:
      break;
  }
  return info;
}

std::string describe(const ValueInfo& info) {
  if (info.kind != Value::Kind::kTensor) return name_of(info.kind);
  std::string out = dtype_name(info.dtype) + "[";
  for (size_t d = 0; d < info.shape.size(); ++d) {
    out += (d ? ", " : "") + std::string(info.dynamic ? "≤" : "") + std::to_string(info.shape[d]);
  }
  return out + "] on " + device_name(info.device);
}

std::string describe(const Value& value) {
  if (value.kind != Value::Kind::kTensor) return name_of(value.kind);
  return describe(value.tensor) + " on " + (value.device ? value.device->name() : "cpu");
}

std::string number(const ValueInfo& info) { return number_of(info); }
std::string number(const Value& value) { return number_of(value); }

}  // namespace headrace
