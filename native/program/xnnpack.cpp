#include "program/xnnpack.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <unordered_map>
#include <utility>
#include <vector>

#include "program/flatbuffer.h"
#include "program/text.h"

// Formats: ExecuTorch 1.5.1, backends/xnnpack/serialization/schema.fbs (field numbers below) and
// runtime/XNNHeader.h. What XNNPACK itself takes on trust: its src/subgraph and src/operators.

namespace headrace {

namespace {

constexpr uint32_t kNoValue = UINT32_MAX;
constexpr size_t kMaxRank = 6;       // XNN_MAX_TENSOR_DIMS
constexpr uint64_t kMany = 1 << 20;  // channels, groups, places of a window
constexpr uint32_t kInputFlag = 1, kOutputFlag = 2, kTransposeWeights = 1;

struct Malformed {
  std::string text;
};

__attribute__((format(printf, 1, 2))) [[noreturn]] void fail(const char* pattern, ...) {
  char text[512];
  va_list args;
  va_start(args, pattern);
  std::vsnprintf(text, sizeof text, pattern, args);
  va_end(args);
  throw Malformed{text};
}

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

// A product and a sum that stay at the greatest number instead of wrapping around.
uint64_t times(uint64_t a, uint64_t b) {
  uint64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;
}
uint64_t plus(uint64_t a, uint64_t b) {
  uint64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? UINT64_MAX : sum;
}

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

class Graph {
 public:
  Graph(std::string_view payload, const FindBytes& find)
      : payload_(payload), find_(find), buffer_(nullptr, 0) {
    read_header();
    fb::Table root(&buffer_, buffer_.follow(0));
    check_buffer();
    constant_data_ = root.vector(8);
    constant_buffer_ = root.vector(6);
    externs_ = root.scalar<uint32_t>(3);
    if (externs_ > 4096) fail("externals: expected at most 4096, got %u", externs_);
    seen_.resize(externs_);
    fb::Vector values = root.vector(2), nodes = root.vector(1);
    check_buffer();
    for (size_t i = 0; i < values.size(); ++i) read_value(values.table(i), i);
    for (size_t i = 0; i < nodes.size(); ++i) {
      node_ = i;
      read_node(nodes.table(i));
    }
  }

  // Each external value is the argument of that number.
  void check_call(const MethodPlan& m, const Instruction& call) const {
    for (const Tensor& t : externals_) {
      if (t.external >= call.args.size()) {
        fail("expected an argument %u, which the payload names, got %zu arguments", t.external,
             call.args.size());
      }
      int32_t index = call.args[t.external];
      const TensorPlan* arg = m.tensor_of(index);
      if (arg == nullptr) {
        fail("argument %u: expected a tensor, got value %d, %s", t.external, index,
             kind_name(m.values[static_cast<size_t>(index)].kind));
      }
      check_argument(t, *arg, index);
      if (shrinks_to_nothing_ && arg->dynamism != Dynamism::kStatic) {
        fail(
            "node %zu: expected less padding than what a single row and column become, got more, and "
            "argument %u of "
            "a size that changes",
            *shrinks_to_nothing_, t.external);
      }
    }
  }

 private:
  void check_buffer() const {
    if (buffer_.malformed()) fail("expected offsets inside the payload, got one that leaves it");
  }

  void read_header() {
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
             payload_.size(), static_cast<unsigned long long>(offset),
             static_cast<unsigned long long>(nbytes));
      }
      constants_ = payload_.substr(offset, nbytes);
      has_constants_ = true;
    }
    std::string_view magic = size >= 8 ? payload_.substr(tables + 4, 4) : std::string_view();
    if (magic != "XN00" && magic != "XN01") fail("expected an XNNPACK graph ('XN01'), got another payload");
    buffer_ = fb::Buffer(reinterpret_cast<const uint8_t*>(payload_.data()) + tables, size);
  }

  // The bytes of constant number `index`.
  std::optional<std::string_view> constant(uint32_t index) const {
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
      fail("constant %u: expected it inside %zu bytes, got offset %llu and size %llu", index,
           constants_.size(), static_cast<unsigned long long>(offset), static_cast<unsigned long long>(size));
    }
    return constants_.substr(offset, size);
  }

  void read_value(const fb::Table& value, size_t index) {
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

  void check_roles(const Tensor& t, size_t index) {
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

  void check_constant(const Tensor& t, uint32_t buffer, size_t index) const {
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

  void check_quantization(const Tensor& t, const fb::Table& value, size_t index) const {
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

  // ---- nodes

  Tensor* value_of(const fb::Table& node, int field) {
    auto id = node.scalar<uint32_t>(field, 0);
    auto at = values_.find(id);
    if (at == values_.end()) fail("node %zu: expected the id of a value, got %u", node_, id);
    return &at->second;
  }
  const Tensor& input(const fb::Table& node, int field) {
    Tensor* t = value_of(node, field);
    if (!t->defined)
      fail("node %zu: expected a value that an earlier node made, got id %u", node_,
           node.scalar<uint32_t>(field, 0));
    return *t;
  }
  const Tensor* optional_input(const fb::Table& node, int field) {
    return node.scalar<uint32_t>(field, 0) == kNoValue ? nullptr : &input(node, field);
  }
  const Tensor& output(const fb::Table& node, int field) {
    Tensor* t = value_of(node, field);
    if (t->defined) {
      fail("node %zu: expected a value that nothing else makes as its output, got id %u", node_,
           node.scalar<uint32_t>(field, 0));
    }
    t->defined = true;
    return *t;
  }
  // A node's channels lie last; XNNPACK computes addresses from them without comparing.
  void same_channels(const Tensor& t, uint64_t channels, const char* what) const {
    if (t.dims.empty() || t.last() != channels) {
      fail("node %zu: expected %s of %llu channels, got %u", node_, what,
           static_cast<unsigned long long>(channels), t.last());
    }
  }
  void enough(const Tensor* t, uint64_t count, const char* what) const {
    if (t != nullptr && t->numel() < count) {
      fail("node %zu: expected %s of %llu elements, got %llu", node_, what,
           static_cast<unsigned long long>(count), static_cast<unsigned long long>(t->numel()));
    }
  }
  // XNNPACK works sizes out anew from what comes in, whatever the payload says of its values, and asks for
  // that much memory. In a program of the exporter the two agree.
  void at_most(const Tensor& out, uint64_t count) const {
    if (count > out.numel()) {
      fail("node %zu: expected at most the %llu elements of the payload's shape as an output, got %llu",
           node_, static_cast<unsigned long long>(out.numel()), static_cast<unsigned long long>(count));
    }
  }
  // Elements of two tensors broadcast against each other, the last `skipped` dimensions apart.
  static uint64_t broadcast(const Tensor& a, const Tensor& b, size_t skipped = 0) {
    uint64_t count = 1;
    for (size_t d = skipped; d < std::max(a.dims.size(), b.dims.size()); ++d) {
      uint32_t size = a.from_last(d) == 1 ? b.from_last(d) : a.from_last(d);
      count = times(count, size);
    }
    return count;
  }
  // Places of all windows in images [batch, rows, columns, channels], channels apart. Pooling and convolution
  // have the same numbers in the same fields, and round down.
  uint64_t windows(const fb::Table& n, const Tensor& images) const {
    if (images.dims.size() != 4)
      fail("node %zu: expected an input of rank 4, got %zu", node_, images.dims.size());
    uint64_t count = images.dims[0], kernels = 1;
    for (int axis : {0, 1}) {
      uint64_t padding = uint64_t{n.scalar<uint32_t>(axis)} + n.scalar<uint32_t>(axis + 2);
      uint64_t kernel = n.scalar<uint32_t>(axis + 4), stride = n.scalar<uint32_t>(axis + 6);
      // 0 where it means nothing, in average pooling.
      uint64_t dilation = std::max(n.scalar<uint32_t>(axis + 8), 1u);
      kernels = times(kernels, kernel);
      if (kernels == 0 || kernels > kMany || stride == 0) {
        fail("node %zu: expected a window of 1 to %llu places and a stride of 1 or more, got %llu and %llu",
             node_, static_cast<unsigned long long>(kMany), static_cast<unsigned long long>(kernels),
             static_cast<unsigned long long>(stride));
      }
      uint64_t window = (kernel - 1) * dilation,
               padded = images.dims[static_cast<size_t>(axis) + 1] + padding;
      count = times(count, padded <= window ? 1 : (padded - window - 1) / stride + 1);
    }
    return count;
  }
  void same_length(const fb::Vector& list, size_t count, const char* what) const {
    check_buffer();
    if (list.size() != count || count > kMaxRank)
      fail("node %zu: expected %s of length %zu, got %zu", node_, what, count, list.size());
  }

  void read_node(const fb::Table& entry) {
    auto tag = entry.scalar<uint8_t>(0);
    fb::Table n = entry.table(1);
    check_buffer();
    if (!n.present()) fail("node %zu: expected an operator, got none", node_);
    switch (tag) {
      case 1:
      case 8:
      case 12:
      case 15:
      case 16:
      case 26:
      case 31: {  // of two inputs
        const Tensor &a = input(n, 0), &b = input(n, 1), &out = output(n, 2);
        uint32_t last = a.last() == 1 ? b.last() : a.last();
        if (!out.dims.empty()) same_channels(out, last, "an output");
        at_most(out, broadcast(a, b));
        break;
      }
      case 2:
        read_fully_connected(n);
        break;
      case 3:
      case 4:
      case 6:
      case 17:
      case 18:
      case 22:
      case 23:
      case 24:
      case 27:
      case 28:
      case 30:
      case 40:
      case 41:
      case 42:
      case 43:
      case 44:
      case 45:
      case 46:
      case 47: {  // of one input
        const Tensor &a = input(n, 0), &out = output(n, 1);
        if (!out.dims.empty()) same_channels(out, a.last(), "an output");
        at_most(out, a.numel());
        break;
      }
      case 19: {  // the mean of an image
        const Tensor& a = input(n, 0);
        same_channels(output(n, 1), a.last(), "an output");
        break;
      }
      case 25:
      case 29: {  // of one input and a number
        const Tensor &a = input(n, 1), &out = output(n, 2);
        if (!out.dims.empty()) same_channels(out, a.last(), "an output");
        at_most(out, a.numel());
        break;
      }
      case 5: {  // transpose
        const Tensor& a = input(n, 2);
        fb::Vector perm = n.vector(1, 4);
        same_length(perm, n.scalar<uint32_t>(0), "a permutation");
        same_length(perm, a.dims.size(), "a permutation");
        for (size_t d = 0; d < perm.size(); ++d) {
          if (perm.scalar<uint32_t>(d) >= a.dims.size())
            fail("node %zu: expected a permutation, got %u", node_, perm.scalar<uint32_t>(d));
        }
        const Tensor& out = output(n, 3);
        at_most(out, a.numel());
        if (!perm.size()) break;
        same_channels(out, a.dims[perm.scalar<uint32_t>(perm.size() - 1)], "an output");
        break;
      }
      case 7:
      case 13:
      case 39:
        read_convolution(tag, n);
        break;
      case 9: {  // resize
        const Tensor &a = input(n, 2), &out = output(n, 3);
        same_channels(out, a.last(), "an output");
        if (a.dims.size() != 4) fail("node %zu: expected an input of rank 4, got %zu", node_, a.dims.size());
        uint64_t pixels = times(n.scalar<uint32_t>(0), n.scalar<uint32_t>(1));
        at_most(out, times(pixels, uint64_t{a.dims[0]} * a.dims[3]));
        break;
      }
      case 10: {  // pad
        const Tensor& a = input(n, 3);
        fb::Vector before = n.vector(0, 4), after = n.vector(1, 4);
        same_length(before, a.dims.size(), "padding in front");
        same_length(after, a.dims.size(), "padding behind");
        const Tensor& out = output(n, 4);
        if (size_t rank = a.dims.size(); rank != 0) {
          same_channels(
              out, uint64_t{a.last()} + before.scalar<uint32_t>(rank - 1) + after.scalar<uint32_t>(rank - 1),
              "an output");
        }
        uint64_t count = 1;
        for (size_t d = 0; d < a.dims.size(); ++d) {
          count = times(count, uint64_t{a.dims[d]} + before.scalar<uint32_t>(d) + after.scalar<uint32_t>(d));
        }
        at_most(out, count);
        break;
      }
      case 11:
      case 14: {  // pooling
        const Tensor &a = input(n, 10), &out = output(n, 11);
        same_channels(out, a.last(), "an output");
        at_most(out, times(windows(n, a), a.last()));
        break;
      }
      case 20: {  // reshape
        const Tensor& a = input(n, 2);
        fb::Vector shape = n.vector(1, 4);
        same_length(shape, n.scalar<uint32_t>(0), "a new shape");
        const Tensor& out = output(n, 3);
        at_most(out, a.numel());
        // 0 asks for what is left over.
        if (size_t rank = shape.size(); rank != 0 && shape.scalar<uint32_t>(rank - 1) != 0) {
          same_channels(out, shape.scalar<uint32_t>(rank - 1), "an output");
        }
        break;
      }
      case 21: {  // the greatest of windows that do not overlap, and where it was
        const Tensor& a = input(n, 6);
        uint64_t height = n.scalar<uint32_t>(4), width = n.scalar<uint32_t>(5);
        if (a.dims.size() != 4 || height == 0 || width == 0) {
          fail(
              "node %zu: expected an input of rank 4 and windows of 1 or more, got rank %zu and windows of "
              "%llu by %llu",
              node_, a.dims.size(), static_cast<unsigned long long>(height),
              static_cast<unsigned long long>(width));
        }
        uint64_t rows = (uint64_t{a.dims[1]} + n.scalar<uint32_t>(0) + n.scalar<uint32_t>(2)) / height;
        uint64_t columns = (uint64_t{a.dims[2]} + n.scalar<uint32_t>(1) + n.scalar<uint32_t>(3)) / width;
        uint64_t count = times(times(rows, columns), uint64_t{a.dims[0]} * a.dims[3]);
        at_most(output(n, 7), count);
        at_most(output(n, 8), count);
        break;
      }
      case 32:
      case 33:
      case 34:
      case 38:
        read_concatenation(tag, n);
        break;
      case 35: {  // slice
        const Tensor& a = input(n, 3);
        fb::Vector offsets = n.vector(1, 4), sizes = n.vector(2, 4);
        same_length(offsets, n.scalar<uint32_t>(0), "offsets");
        same_length(sizes, n.scalar<uint32_t>(0), "sizes");
        same_length(sizes, a.dims.size(), "sizes");
        const Tensor& out = output(n, 4);
        for (size_t d = 0; d < a.dims.size(); ++d) {
          uint64_t from = offsets.scalar<uint32_t>(d), count = sizes.scalar<uint32_t>(d);
          if (from > a.dims[d] || count > a.dims[d] - from) {
            fail("node %zu: expected a slice inside dimension %zu of size %u, got %llu elements from %llu",
                 node_, d, a.dims[d], static_cast<unsigned long long>(count),
                 static_cast<unsigned long long>(from));
          }
          if (d + 1 == a.dims.size() && count != 0) same_channels(out, count, "an output");
        }
        break;
      }
      case 36: {  // attention: the rows of a query, as wide as a value
        for (int f = 0; f < 5; ++f) input(n, f);
        const Tensor &query = input(n, 0), &value = input(n, 2);
        at_most(output(n, 5), times(query.numel() / std::max(query.last(), 1u), value.last()));
        break;
      }
      case 37: {  // batched matrix product
        const Tensor &a = input(n, 0), &b = input(n, 1);
        auto flags = n.scalar<uint32_t>(3);
        if (a.dims.size() < 2 || b.dims.size() < 2 || (flags & ~kTransposeWeights) != 0) {
          fail("node %zu: expected matrices, got ranks %zu and %zu with flags %u", node_, a.dims.size(),
               b.dims.size(), flags);
        }
        bool transposed = (flags & kTransposeWeights) != 0;
        uint32_t inner = b.dims[b.dims.size() - (transposed ? 1 : 2)],
                 columns = b.dims[b.dims.size() - (transposed ? 2 : 1)];
        same_channels(a, inner, "a left matrix");
        const Tensor& out = output(n, 2);
        same_channels(out, columns, "an output");
        at_most(out, times(broadcast(a, b, 2), times(a.from_last(1), columns)));
        break;
      }
      default:
        fail("node %zu: expected an operator of a kind from 1 to 47, got %u", node_, tag);
    }
  }

  void read_fully_connected(const fb::Table& n) {
    const Tensor &a = input(n, 0), &filter = input(n, 1);
    const Tensor* bias = optional_input(n, 2);
    auto flags = n.scalar<uint32_t>(4);
    if (filter.dims.size() != 2 || (flags & ~kTransposeWeights) != 0) {
      fail("node %zu: expected a filter of rank 2, got rank %zu and flags %u", node_, filter.dims.size(),
           flags);
    }
    bool transposed = (flags & kTransposeWeights) != 0;
    same_channels(a, filter.dims[transposed ? 0 : 1], "an input");
    uint32_t channels = filter.dims[transposed ? 1 : 0];
    enough(bias, channels, "a bias");
    const Tensor& out = output(n, 3);
    same_channels(out, channels, "an output");
    at_most(out, times(a.numel() / std::max(a.last(), 1u), channels));
  }

  void read_convolution(uint8_t tag, const fb::Table& n) {
    uint64_t kernel = uint64_t{n.scalar<uint32_t>(4)} * n.scalar<uint32_t>(5);
    uint64_t in = n.scalar<uint32_t>(10), out = n.scalar<uint32_t>(11), groups = n.scalar<uint32_t>(12);
    const Tensor &a = input(n, 15), &filter = input(n, 16);
    const Tensor* bias = optional_input(n, 17);
    if (kernel == 0 || kernel > kMany || in == 0 || in > kMany || out == 0 || out > kMany || groups == 0 ||
        groups > kMany) {
      fail(
          "node %zu: expected channels, groups and a kernel of sizes from 1 to %llu, got %llu and %llu "
          "channels in %llu "
          "groups and %llu places",
          node_, static_cast<unsigned long long>(kMany), static_cast<unsigned long long>(in),
          static_cast<unsigned long long>(out), static_cast<unsigned long long>(groups),
          static_cast<unsigned long long>(kernel));
    }
    if (a.dims.size() != 4 || filter.dims.size() != 4) {
      fail("node %zu: expected an input and a filter of rank 4, got %zu and %zu", node_, a.dims.size(),
           filter.dims.size());
    }
    same_channels(a, in * groups, "an input");
    uint64_t weights = 0;
    if (__builtin_mul_overflow(kernel * in, out * groups, &weights) || weights > (uint64_t{1} << 40))
      weights = uint64_t{1} << 41;
    enough(&filter, weights, "a filter");
    enough(bias, out * groups, "a bias");
    const Tensor& result = output(n, 18);
    same_channels(result, out * groups, "an output");
    if (tag != 39) {
      at_most(result, times(windows(n, a), out * groups));
      return;
    }
    uint64_t pixels = times(spread(n, a.dims[1], 0), spread(n, a.dims[2], 1));
    // XNNPACK divides by what comes out.
    if (pixels == 0) fail("node %zu: expected padding that leaves rows and columns over, got more", node_);
    if (spread(n, 1, 0) == 0 || spread(n, 1, 1) == 0) shrinks_to_nothing_ = node_;
    at_most(result, times(times(pixels, a.dims[0]), out * groups));
  }

  // Rows, or with `axis` 1 columns, that a transposed convolution makes of `size`.
  uint64_t spread(const fb::Table& n, uint64_t size, int axis) const {
    uint64_t padding = uint64_t{n.scalar<uint32_t>(axis)} + n.scalar<uint32_t>(axis + 2);
    uint64_t kernel = n.scalar<uint32_t>(axis + 4), stride = n.scalar<uint32_t>(axis + 6);
    uint64_t window = times(kernel - 1, n.scalar<uint32_t>(axis + 8)) + 1;
    uint64_t whole = plus(times(size == 0 ? 0 : size - 1, stride), window + n.scalar<uint32_t>(axis + 13));
    return whole > padding ? whole - padding : 0;
  }

  void read_concatenation(uint8_t tag, const fb::Table& n) {
    std::vector<int> fields = {1, 2};
    if (tag != 32) fields.push_back(3);
    if (tag == 34 || tag == 38) fields.push_back(4);
    if (tag == 38) fields.push_back(7);
    auto axis = n.scalar<int32_t>(0);
    uint64_t total = 0;
    size_t rank = input(n, 1).dims.size();
    for (int f : fields) {
      const Tensor& a = input(n, f);
      if (a.dims.size() != rank || rank == 0)
        fail("node %zu: expected inputs of one rank, got %zu", node_, a.dims.size());
      total += a.last();
    }
    if (axis < 0) axis += static_cast<int32_t>(rank);
    if (axis < 0 || static_cast<size_t>(axis) >= rank)
      fail("node %zu: expected an axis below %zu, got %d", node_, rank, axis);
    bool last = static_cast<size_t>(axis) + 1 == rank;
    same_channels(output(n, 5), last ? total : input(n, 1).last(), "an output");
  }

  // ---- arguments

  static bool carries(Type type, DType dtype, bool is_output) {
    switch (type) {
      case Type::kFloat32:
        return dtype == DType::kFloat32;
      case Type::kFloat16:
        return dtype == DType::kFloat16;
      case Type::kBFloat16:
        return dtype == DType::kBFloat16;
      case Type::kQInt8:
      case Type::kQUInt8:
        return dtype == DType::kInt8 || dtype == DType::kUInt8;
      case Type::kInt32:
      case Type::kQInt32:
        return dtype == DType::kInt32 || (is_output && dtype == DType::kInt64);
      default:
        return false;
    }
  }

  void check_argument(const Tensor& t, const TensorPlan& arg, int32_t index) const {
    bool is_output = (t.flags & kOutputFlag) != 0;
    if (!carries(t.type, arg.dtype, is_output)) {
      fail("argument %u: expected a tensor of the payload's datatype %d, got value %d, %s", t.external,
           static_cast<int>(t.type), index, dtype_name(arg.dtype).c_str());
    }
    if (arg.device.kind != DeviceKind::kCpu)
      fail("argument %u: expected a tensor on cpu, got value %d", t.external, index);
    if (is_output && (arg.storage == Storage::kConstant || arg.storage == Storage::kExternal)) {
      fail("argument %u: expected a tensor that may be written, got value %d, a constant", t.external, index);
    }
    // Channels-last tensors have their channels last in the payload too.
    std::vector<int32_t> sizes = arg.sizes;
    if (arg.dim_order == std::vector<uint8_t>{0, 2, 3, 1}) sizes = {sizes[0], sizes[2], sizes[3], sizes[1]};
    if (sizes.empty()) sizes = {1};  // how the exporter writes a tensor without dimensions
    bool same = sizes.size() == t.dims.size();
    for (size_t d = 0; same && d < sizes.size(); ++d) same = static_cast<uint32_t>(sizes[d]) == t.dims[d];
    if (!same) {
      fail(
          "argument %u: expected a tensor of the payload's shape of rank %zu, got value %d of another shape "
          "(rank %zu)",
          t.external, t.dims.size(), index, sizes.size());
    }
  }

  std::string_view payload_, constants_;
  const FindBytes& find_;
  bool has_constants_ = false;
  fb::Buffer buffer_;
  fb::Vector constant_data_, constant_buffer_;
  uint32_t externs_ = 0;
  size_t node_ = 0;
  std::optional<size_t> shrinks_to_nothing_;     // the node that makes no rows or no columns of a single one
  std::unordered_map<uint32_t, Tensor> values_;  // by id
  std::vector<Tensor> externals_;
  std::vector<char> seen_;  // external ids
};

}  // namespace

std::string check_xnnpack(const MethodPlan& method, size_t index, const FindBytes& find) {
  std::string where;
  try {
    Graph graph(method.delegates[index].payload, find);
    for (const auto& chain : method.chains) {
      for (size_t i = 0; i < chain.size(); ++i) {
        if (chain[i].kind != InstructionKind::kDelegate || static_cast<size_t>(chain[i].target) != index)
          continue;
        where = "instruction " + std::to_string(i) + ": ";
        graph.check_call(method, chain[i]);
      }
    }
  } catch (Malformed& e) {
    return where + e.text;
  }
  return {};
}

}  // namespace headrace
