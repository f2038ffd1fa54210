#include "program/xnnpack_payload.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <utility>

// Formats: ExecuTorch 1.5.1, backends/xnnpack/serialization/schema.fbs (field numbers below) and
// runtime/XNNHeader.h.

namespace headrace::xnnpack {

void fail(const char* pattern, ...) {
  char text[512];
  va_list args;
  va_start(args, pattern);
  std::vsnprintf(text, sizeof text, pattern, args);
  va_end(args);
  throw Malformed{text};
}

namespace {

// Bits of one element; 0 for a type that no file may name.
int bits_of(Type type) {
  switch (type) {
    case Type::kFloat32:
    case Type::kQInt32:
    case Type::kQCInt32:
    case Type::kInt32:
    case Type::kPFloat32:
      return 32;
    case Type::kFloat16:
    case Type::kBFloat16:
      return 16;
    case Type::kQInt8:
    case Type::kQUInt8:
    case Type::kQCInt8:
    case Type::kQDInt8:
    case Type::kQPInt8:
      return 8;
    case Type::kQCInt4:
    case Type::kQBInt4:
      return 4;
  }
  return 0;
}

}  // namespace

Payload::Payload(std::string_view bytes, const FindBytes& find)
    : payload_(bytes), find_(find), buffer_(nullptr, 0) {
  read_header();
  fb::Table root(&buffer_, buffer_.follow(0));
  check_buffer();
  constant_data_ = root.vector(8);
  constant_buffer_ = root.vector(6);
  externs_ = root.scalar<uint32_t>(3);
  if (externs_ > 4096) fail("externals: expected at most 4096, got %u", externs_);
  seen_.resize(externs_);
  fb::Vector values = root.vector(2);
  nodes_ = root.vector(1);
  check_buffer();
  for (size_t i = 0; i < values.size(); ++i) read_value(values.table(i), i);
}

Tensor* Payload::value(uint32_t id) {
  auto at = values_.find(id);
  return at == values_.end() ? nullptr : &at->second;
}

void Payload::check_buffer() const {
  if (buffer_.malformed()) fail("expected offsets inside the payload, got one that leaves it");
}

void Payload::read_header() {
  auto raw = [&](size_t at, auto value) {
    std::memcpy(&value, payload_.data() + at, sizeof value);
    return value;
  };
  uint64_t tables = 0, size = payload_.size();
  if (payload_.size() >= 30 && payload_.substr(4, 4) == "XH00") {
    tables = raw(10, uint32_t{});
    size = raw(14, uint32_t{});
    uint64_t offset = raw(18, uint32_t{}), nbytes = raw(22, uint64_t{});
    if (tables > payload_.size() || size > payload_.size() - tables) {
      fail("expected tables inside the payload of %zu bytes, got them at %llu with %llu bytes",
           payload_.size(), static_cast<unsigned long long>(tables), static_cast<unsigned long long>(size));
    }
    if (offset > payload_.size() || nbytes > payload_.size() - offset) {
      fail("expected constants inside the payload of %zu bytes, got them at %llu with %llu bytes",
           payload_.size(), static_cast<unsigned long long>(offset), static_cast<unsigned long long>(nbytes));
    }
    constants_ = payload_.substr(offset, nbytes);
    has_constants_ = true;
  }
  std::string_view magic = size >= 8 ? payload_.substr(tables + 4, 4) : std::string_view();
  if (magic != "XN00" && magic != "XN01") fail("expected an XNNPACK graph ('XN01'), got another payload");
  buffer_ = fb::Buffer(reinterpret_cast<const uint8_t*>(payload_.data()) + tables, size);
}

// The bytes of constant number `index`.
std::optional<std::string_view> Payload::constant(uint32_t index) const {
  if (!has_constants_) {
    if (index >= constant_buffer_.size())
      fail("constant: expected an index below %zu, got %u", constant_buffer_.size(), index);
    fb::Vector bytes = constant_buffer_.table(index).vector(0, 1);
    check_buffer();
    return std::string_view(reinterpret_cast<const char*>(bytes.bytes()), bytes.size());
  }
  if (index >= constant_data_.size())
    fail("constant: expected an index below %zu, got %u", constant_data_.size(), index);
  fb::Table entry = constant_data_.table(index);
  std::string_view key = entry.string(2);
  auto offset = entry.scalar<uint64_t>(0), size = entry.scalar<uint64_t>(1);
  check_buffer();
  // A key that no file has is reported by the delegate, which asks for it and reads nothing.
  if (!key.empty()) return find_(key);
  if (offset > constants_.size() || size > constants_.size() - offset) {
    fail("constant %u: expected it inside %zu bytes, got offset %llu and size %llu", index, constants_.size(),
         static_cast<unsigned long long>(offset), static_cast<unsigned long long>(size));
  }
  return constants_.substr(offset, size);
}

void Payload::read_value(const fb::Table& value, size_t index) {
  auto tag = value.scalar<uint8_t>(0);
  fb::Table body = value.table(1);
  check_buffer();
  if ((tag != 1 && tag != 2) || !body.present())
    fail("value %zu: expected a tensor, got kind %u", index, tag);
  fb::Table tensor = tag == 2 ? body.table(0) : body;
  fb::Vector dims = tensor.vector(2, 4);
  check_buffer();
  if (!tensor.present()) fail("value %zu: expected a tensor, got none", index);
  Tensor t;
  t.type = static_cast<Type>(tensor.scalar<int16_t>(0));
  if (bits_of(t.type) == 0)
    fail("value %zu: expected a known datatype, got %d", index, static_cast<int>(t.type));
  auto rank = tensor.scalar<uint32_t>(1);
  if (rank > kMaxRank || rank != dims.size()) {
    fail("value %zu: expected a size for each of at most %zu dimensions, got %u dimensions and %zu sizes",
         index, kMaxRank, rank, dims.size());
  }
  uint64_t numel = 1;
  for (size_t d = 0; d < rank; ++d) {
    t.dims.push_back(dims.scalar<uint32_t>(d));
    if (t.dims.back() != 0 && numel > (uint64_t{1} << 40) / t.dims.back()) {
      fail("value %zu: expected a shape of at most 2^40 elements, got more", index);
    }
    numel *= std::max(t.dims.back(), 1u);
  }
  auto buffer = tensor.scalar<uint32_t>(3);
  t.external = tensor.scalar<uint32_t>(4);
  t.flags = tensor.scalar<uint32_t>(5);
  auto id = tensor.scalar<uint32_t>(6);
  t.constant = buffer != 0;
  check_roles(t, index);
  if (t.constant) check_constant(t, buffer, index);
  if (tag == 2) check_quantization(t, body, index);
  t.defined = t.constant || (t.flags & kInputFlag) != 0;
  if (t.external != kNoValue) externals_.push_back(t);
  if (id == kNoValue || !values_.emplace(id, std::move(t)).second) {
    fail("value %zu: expected an id of its own, got %u", index, id);
  }
}

void Payload::check_roles(const Tensor& t, size_t index) {
  bool external = t.external != kNoValue;
  uint32_t role = t.flags & (kInputFlag | kOutputFlag);
  if (t.flags != role) fail("value %zu: expected flags of an input or an output, got %u", index, t.flags);
  if (external && (t.external >= externs_ || role == 0 || role == 3 || t.constant)) {
    fail("value %zu: expected an external id below %u on an input or an output, got id %u with flags %u",
         index, externs_, t.external, t.flags);
  }
  if (!external && role != 0)
    fail("value %zu: expected an external id on an input or output, got none", index);
  if (external && std::exchange(seen_[t.external], 1) != 0) {
    fail("value %zu: expected an external id of its own, got %u twice", index, t.external);
  }
}

void Payload::check_constant(const Tensor& t, uint32_t buffer, size_t index) const {
  auto bytes = constant(buffer);
  if (!bytes) return;
  uint64_t rows = t.dims.empty() ? 1 : t.numel() / std::max(t.last(), 1u);
  // Elements of 4 bits fill whole bytes in each row.
  uint64_t needed = bits_of(t.type) == 4 ? rows * ((t.last() + 1) / 2)
                                         : t.numel() * static_cast<uint64_t>(bits_of(t.type)) / 8;
  if (needed > bytes->size()) {
    fail("value %zu: expected %llu bytes for its shape, got a constant of %zu", index,
         static_cast<unsigned long long>(needed), bytes->size());
  }
  auto width = static_cast<uintptr_t>(std::max(bits_of(t.type) / 8, 1));
  if (reinterpret_cast<uintptr_t>(bytes->data()) % width != 0) {
    fail("value %zu: expected a constant at a multiple of %zu bytes, got one between", index,
         static_cast<size_t>(width));
  }
}

void Payload::check_quantization(const Tensor& t, const fb::Table& value, size_t index) const {
  auto tag = value.scalar<uint8_t>(1);
  fb::Table quant = value.table(2);
  check_buffer();
  if (tag < 1 || tag > 4 || !quant.present())
    fail("value %zu: expected quantization of a kind from 1 to 4, got %u", index, tag);
  if (tag == 2) return;  // one scale for all
  if (tag == 3) {
    auto dims = quant.scalar<int32_t>(0);
    if (dims < 0 || static_cast<size_t>(dims) > t.dims.size()) {
      fail("value %zu: expected at most %zu dimensions in a token, got %d", index, t.dims.size(), dims);
    }
    return;
  }
  bool groups = tag == 4;
  auto channel = quant.scalar<int32_t>(1);
  if (channel < 0 || static_cast<size_t>(channel) >= t.dims.size()) {
    fail("value %zu: expected a channel dimension below %zu, got %d", index, t.dims.size(), channel);
  }
  uint64_t needed = t.dims[static_cast<size_t>(channel)];
  if (groups) {
    auto size = quant.scalar<int32_t>(2);
    if (t.dims.size() < 2 || size < 1)
      fail("value %zu: expected rows in groups of 1 or more, got %d", index, size);
    needed = static_cast<uint64_t>(t.dims[0]) *
             ((t.dims[1] + static_cast<uint64_t>(size) - 1) / static_cast<uint64_t>(size));
  }
  // Scales: in the tables, or a constant of floats (bfloat16 for groups).
  auto buffer = quant.scalar<uint32_t>(groups ? 4 : 2);
  uint64_t have = quant.vector(0, 4).size();
  if (groups) have = std::max<uint64_t>(have, quant.vector(3, 2).size());
  check_buffer();
  if (buffer != 0) {
    auto bytes = constant(buffer);
    auto count = quant.scalar<uint32_t>(groups ? 5 : 3);
    if (!bytes) return;
    have = std::min<uint64_t>(count, bytes->size() / (groups ? 2 : 4));
  }
  if (have < needed) {
    fail("value %zu: expected %llu scales, got %llu", index, static_cast<unsigned long long>(needed),
         static_cast<unsigned long long>(have));
  }
}

}  // namespace headrace::xnnpack
