#include "program/xnnpack_nodes.h"

#include <algorithm>
#include <vector>

// Field numbers: ExecuTorch 1.5.1, backends/xnnpack/serialization/schema.fbs. What XNNPACK itself takes on
// trust: its src/subgraph and src/operators.

namespace headrace::xnnpack {

namespace {

constexpr uint64_t kMany = 1 << 20;  // channels, groups, places of a window
constexpr uint32_t kTransposeWeights = 1;

// A product and a sum that stay at the greatest number instead of wrapping around.
uint64_t times(uint64_t a, uint64_t b) {
  uint64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;
}
uint64_t plus(uint64_t a, uint64_t b) {
  uint64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? UINT64_MAX : sum;
}

}  // namespace

Nodes::Nodes(Payload& payload) : payload_(payload) {
  const fb::Vector& nodes = payload.nodes();
  for (; node_ < nodes.size(); ++node_) read_node(nodes.table(node_));
}

Tensor* Nodes::value_of(const fb::Table& node, int field) {
  auto id = node.scalar<uint32_t>(field, 0);
  Tensor* value = payload_.value(id);
  if (value == nullptr) fail("node %zu: expected the id of a value, got %u", node_, id);
  return value;
}
const Tensor& Nodes::input(const fb::Table& node, int field) {
  Tensor* t = value_of(node, field);
  if (!t->defined)
    fail("node %zu: expected a value that an earlier node made, got id %u", node_,
         node.scalar<uint32_t>(field, 0));
  return *t;
}
const Tensor* Nodes::optional_input(const fb::Table& node, int field) {
  return node.scalar<uint32_t>(field, 0) == kNoValue ? nullptr : &input(node, field);
}
const Tensor& Nodes::output(const fb::Table& node, int field) {
  Tensor* t = value_of(node, field);
  if (t->defined) {
    fail("node %zu: expected a value that nothing else makes as its output, got id %u", node_,
         node.scalar<uint32_t>(field, 0));
  }
  t->defined = true;
  return *t;
}
// A node's channels lie last; XNNPACK computes addresses from them without comparing.
void Nodes::same_channels(const Tensor& t, uint64_t channels, const char* what) const {
  if (t.dims.empty() || t.last() != channels) {
    fail("node %zu: expected %s of %llu channels, got %u", node_, what,
         static_cast<unsigned long long>(channels), t.last());
  }
}
void Nodes::enough(const Tensor* t, uint64_t count, const char* what) const {
  if (t != nullptr && t->numel() < count) {
    fail("node %zu: expected %s of %llu elements, got %llu", node_, what,
         static_cast<unsigned long long>(count), static_cast<unsigned long long>(t->numel()));
  }
}
// XNNPACK works sizes out anew from what comes in, whatever the payload says of its values, and asks for
// that much memory. In a program of the exporter the two agree.
void Nodes::at_most(const Tensor& out, uint64_t count) const {
  if (count > out.numel()) {
    fail("node %zu: expected at most the %llu elements of the payload's shape as an output, got %llu", node_,
         static_cast<unsigned long long>(out.numel()), static_cast<unsigned long long>(count));
  }
}
// Elements of two tensors broadcast against each other, the last `skipped` dimensions apart.
uint64_t Nodes::broadcast(const Tensor& a, const Tensor& b, size_t skipped) {
  uint64_t count = 1;
  for (size_t d = skipped; d < std::max(a.dims.size(), b.dims.size()); ++d) {
    uint32_t size = a.from_last(d) == 1 ? b.from_last(d) : a.from_last(d);
    count = times(count, size);
  }
  return count;
}
// Places of all windows in images [batch, rows, columns, channels], channels apart. Pooling and convolution
// have the same numbers in the same fields, and round down.
uint64_t Nodes::windows(const fb::Table& n, const Tensor& images) const {
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
    uint64_t window = (kernel - 1) * dilation, padded = images.dims[static_cast<size_t>(axis) + 1] + padding;
    count = times(count, padded <= window ? 1 : (padded - window - 1) / stride + 1);
  }
  return count;
}
void Nodes::same_length(const fb::Vector& list, size_t count, const char* what) const {
  payload_.check_buffer();
  if (list.size() != count || count > kMaxRank)
    fail("node %zu: expected %s of length %zu, got %zu", node_, what, count, list.size());
}

void Nodes::read_node(const fb::Table& entry) {
  auto tag = entry.scalar<uint8_t>(0);
  fb::Table n = entry.table(1);
  payload_.check_buffer();
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

void Nodes::read_fully_connected(const fb::Table& n) {
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

void Nodes::read_convolution(uint8_t tag, const fb::Table& n) {
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
uint64_t Nodes::spread(const fb::Table& n, uint64_t size, int axis) const {
  uint64_t padding = uint64_t{n.scalar<uint32_t>(axis)} + n.scalar<uint32_t>(axis + 2);
  uint64_t kernel = n.scalar<uint32_t>(axis + 4), stride = n.scalar<uint32_t>(axis + 6);
  uint64_t window = times(kernel - 1, n.scalar<uint32_t>(axis + 8)) + 1;
  uint64_t whole = plus(times(size == 0 ? 0 : size - 1, stride), window + n.scalar<uint32_t>(axis + 13));
  return whole > padding ? whole - padding : 0;
}

void Nodes::read_concatenation(uint8_t tag, const fb::Table& n) {
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

}  // namespace headrace::xnnpack
