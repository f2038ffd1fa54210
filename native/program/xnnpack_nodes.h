// The nodes of XNNPACK's graph: whether the shapes and constants of each fit together, and what comes out of
// it fits where the payload puts it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "program/xnnpack_payload.h"

namespace headrace::xnnpack {

class Nodes {
 public:
  // Checks all of them, in order: values come from earlier ones. Throws Malformed.
  explicit Nodes(Payload& payload);
  // The node that makes no rows or no columns of a single one.
  std::optional<size_t> shrinks_to_nothing() const { return shrinks_to_nothing_; }

 private:
  Tensor* value_of(const fb::Table& node, int field);
  const Tensor& input(const fb::Table& node, int field);
  const Tensor* optional_input(const fb::Table& node, int field);
  const Tensor& output(const fb::Table& node, int field);
  void same_channels(const Tensor& t, uint64_t channels, const char* what) const;
  void enough(const Tensor* t, uint64_t count, const char* what) const;
  void at_most(const Tensor& out, uint64_t count) const;
  static uint64_t broadcast(const Tensor& a, const Tensor& b, size_t skipped = 0);
  uint64_t windows(const fb::Table& n, const Tensor& images) const;
  void same_length(const fb::Vector& list, size_t count, const char* what) const;
  void read_node(const fb::Table& entry);
  void read_fully_connected(const fb::Table& n);
  void read_convolution(uint8_t tag, const fb::Table& n);
  uint64_t spread(const fb::Table& n, uint64_t size, int axis) const;
  void read_concatenation(uint8_t tag, const fb::Table& n);

  Payload& payload_;
  size_t node_ = 0;
  std::optional<size_t> shrinks_to_nothing_;
};

}  // namespace headrace::xnnpack
