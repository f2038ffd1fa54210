// The sections of XNNPACK's payload: its header, its constants, and the values that its nodes take and make.
// Each value is checked by itself, with the constants that it names.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "program/flatbuffer.h"
#include "program/xnnpack.h"

namespace headrace::xnnpack {

constexpr uint32_t kNoValue = UINT32_MAX;
constexpr size_t kMaxRank = 6;  // XNN_MAX_TENSOR_DIMS
constexpr uint32_t kInputFlag = 1, kOutputFlag = 2;

// Leaves a check early; never crosses check_xnnpack().
struct Malformed {
  std::string text;
};
__attribute__((format(printf, 1, 2))) [[noreturn]] void fail(const char* pattern, ...);

// XNNDatatype of the schema.
enum class Type : int16_t {
  kFloat32 = 1,
  kFloat16 = 2,
  kQInt8 = 3,
  kQUInt8 = 4,
  kQInt32 = 5,
  kQCInt8 = 6,
  kQCInt32 = 7,
  kQCInt4 = 8,
  kQDInt8 = 9,
  kQBInt4 = 10,
  kQPInt8 = 11,
  kInt32 = 12,
  kPFloat32 = 13,
  kBFloat16 = 14,
};

struct Tensor {
  Type type = Type::kFloat32;
  std::vector<uint32_t> dims;
  uint32_t external = kNoValue;
  uint32_t flags = 0;
  bool constant = false;
  bool defined = false;  // holds data by now: a constant, an input, or the result of an earlier node

  uint64_t numel() const {
    uint64_t n = 1;
    for (uint32_t d : dims) n *= d;
    return n;
  }
  uint32_t last() const { return dims.empty() ? 1 : dims.back(); }
  // The size of dimension `d`, counted from the last; 1 beyond the first.
  uint32_t from_last(size_t d) const { return d < dims.size() ? dims[dims.size() - 1 - d] : 1; }
};

class Payload {
 public:
  // Reads everything but the nodes. `find` must stay. Throws Malformed.
  Payload(std::string_view bytes, const FindBytes& find);
  Payload(const Payload&) = delete;  // tables point into it
  Payload& operator=(const Payload&) = delete;

  // Throws where something was read that lies outside the tables.
  void check_buffer() const;
  const fb::Vector& nodes() const { return nodes_; }
  // Null where no value has that id.
  Tensor* value(uint32_t id);
  // The values that are arguments of the delegate.
  const std::vector<Tensor>& externals() const { return externals_; }

 private:
  void read_header();
  std::optional<std::string_view> constant(uint32_t index) const;
  void read_value(const fb::Table& value, size_t index);
  void check_roles(const Tensor& t, size_t index);
  void check_constant(const Tensor& t, uint32_t buffer, size_t index) const;
  void check_quantization(const Tensor& t, const fb::Table& value, size_t index) const;

  std::string_view payload_, constants_;
  const FindBytes& find_;
  bool has_constants_ = false;
  fb::Buffer buffer_;
  fb::Vector constant_data_, constant_buffer_, nodes_;
  uint32_t externs_ = 0;
  std::unordered_map<uint32_t, Tensor> values_;  // by id
  std::vector<Tensor> externals_;
  std::vector<char> seen_;  // external ids
};

}  // namespace headrace::xnnpack
