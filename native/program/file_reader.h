// What the readers of programs and of data files have in common: a file of untrusted bytes, its header, its
// segments, names and shapes.
#pragma once

#include <cinttypes>
#include <cstring>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "program/flatbuffer.h"
#include "program/plan.h"
#include "program/text.h"

namespace headrace {

constexpr const char* kCutOff = "the file is truncated or damaged, copy it or export it again";

// Leaves read_program() or read_data_file() early; never crosses them (guarded(), below).
struct Malformed {
  ErrorCode code;
  std::string message;
};

// Where an aligned extended header puts things; formats: schema/extended_header.h, flat_tensor_header.h.
struct Header {
  uint64_t tables_offset = 0, tables_size = 0;
  uint64_t segments_offset = 0, segments_size = 0;
};

class FileReader {
 protected:
  explicit FileReader(const FileView& file) : file_(file) {}

  // `what`: what was expected and what came; `advice`: what to do.
  [[noreturn]] void fail(const std::string& what, const char* advice = kDamaged) const {
    throw Malformed{ErrorCode::kProgram, file_.name + where_ + ": " + what + "; " + advice};
  }
  // Elements that the file may still make us read: a sound file holds each of them once.
  void spend(uint64_t elements) {
    if (elements > budget_) {
      fail("expected vectors that do not share their bytes, got more elements than the file has bytes");
    }
    budget_ -= elements;
  }
  void check_buffer(const fb::Buffer& buffer) const {
    if (buffer.malformed()) fail("expected offsets inside the file, got one that leaves it");
  }
  template <class T>
  T raw(uint64_t at) const {
    T value{};
    std::memcpy(&value, file_.data + at, sizeof value);
    return value;
  }
  bool has_magic(uint64_t at, const char* magic) const {
    return file_.size >= at + 4 && std::memcmp(file_.data + at, magic, 4) == 0;
  }
  std::string magic_text(uint64_t at) const {
    return file_.size >= at + 4 ? quoted({reinterpret_cast<const char*>(file_.data) + at, 4})
                                : format("%zu bytes", file_.size);
  }
  void check_header(const Header& h) const {
    auto inside = [&](uint64_t offset, uint64_t size) {
      return offset <= file_.size && size <= file_.size - offset;
    };
    if (!inside(h.tables_offset, h.tables_size) || h.tables_size < 8) {
      fail(format("expected the file's tables at %" PRIu64 " with %" PRIu64
                  " bytes inside it, got a file of %zu bytes",
                  h.tables_offset, h.tables_size, file_.size),
           kCutOff);
    }
    if (!inside(h.segments_offset, h.segments_size)) {
      fail(format("expected segments at %" PRIu64 " with %" PRIu64
                  " bytes inside the file, got a file of %zu bytes",
                  h.segments_offset, h.segments_size, file_.size),
           kCutOff);
    }
  }
  // The segments listed in `list` (offset u64, size u64), as views.
  std::vector<std::string_view> read_segments(const fb::Buffer& buffer, const fb::Vector& list,
                                              const Header& h) {
    std::vector<std::string_view> out;
    spend(list.size());
    for (size_t i = 0; i < list.size(); ++i) {
      fb::Table segment = list.table(i);
      auto offset = segment.scalar<uint64_t>(0), size = segment.scalar<uint64_t>(1);
      check_buffer(buffer);
      uint64_t room = file_.size - h.segments_offset;
      if (offset > room || size > room - offset) {
        fail(format("segment %zu: expected offset %" PRIu64 " and size %" PRIu64
                    " inside the file, got a file of %zu bytes",
                    i, offset, size, file_.size),
             kCutOff);
      }
      out.emplace_back(reinterpret_cast<const char*>(file_.data) + h.segments_offset + offset, size);
    }
    return out;
  }
  // A name: UTF-8 without control characters. The engine takes names up to the first zero byte, so one with a
  // zero inside would be another name to it than to us.
  std::string_view read_text(const fb::Buffer& buffer, const fb::Table& table, int field, const char* what) {
    std::string_view text = table.string(field);
    check_buffer(buffer);
    spend(text.size());
    if (!is_text(text))
      fail(format("%s: expected UTF-8 without control characters, got %s", what, quoted(text).c_str()));
    return text;
  }
  // Kernels read whole elements, and may use instructions that need them aligned.
  void check_aligned(const void* data, DType dtype, const char* what) const {
    if (reinterpret_cast<uintptr_t>(data) % itemsize(dtype) != 0) {
      fail(format("%s: expected it at a multiple of %zu bytes, got it between two", what, itemsize(dtype)));
    }
  }
  DType read_dtype(int8_t code) const {
    auto dtype = static_cast<DType>(code);
    if (itemsize(dtype) == 0) {
      fail(format("dtype: expected a plain integer, float or bool type, got ScalarType %d, which headrace "
                  "does not carry",
                  code),
           "cast it in the model");
    }
    return dtype;
  }
  // Sizes, the order of the dimensions and the number of bytes that they come to.
  uint64_t read_shape(const fb::Vector& sizes, const fb::Vector& order, DType dtype,
                      std::vector<int32_t>& sizes_out, std::vector<uint8_t>& order_out) {
    if (sizes.size() > kMaxDims) {
      fail(format("shape: expected at most %zu dimensions, got %zu", kMaxDims, sizes.size()),
           "reshape it in the model");
    }
    if (order.size() != sizes.size()) {
      fail(format("dim_order: expected %zu entries, one for each dimension, got %zu", sizes.size(),
                  order.size()));
    }
    spend(sizes.size() + order.size());
    // The engine multiplies bounds into a signed size before it multiplies by the width of an element.
    uint64_t nbytes = itemsize(dtype);
    uint32_t seen = 0;
    sizes_out.reserve(sizes.size());
    order_out.reserve(sizes.size());
    bool empty = false;
    for (size_t d = 0; d < sizes.size(); ++d) {
      auto size = sizes.scalar<int32_t>(d);
      auto dim = order.scalar<uint8_t>(d);
      if (size < 0) fail(format("shape: dimension %zu: expected a size of 0 or more, got %d", d, size));
      if (dim >= sizes.size() || ((seen >> dim) & 1u) != 0) {
        fail(
            format("dim_order: expected a permutation of 0 to %zu, got %u at %zu", sizes.size() - 1, dim, d));
      }
      seen |= 1u << dim;
      if (size == 0) empty = true;
      if (size != 0 && __builtin_mul_overflow(nbytes, static_cast<uint64_t>(size), &nbytes))
        nbytes = UINT64_MAX;
      if (nbytes > static_cast<uint64_t>(INT64_MAX))
        fail("shape: expected a size that 64 bits can count, got more");
      sizes_out.push_back(size);
      order_out.push_back(dim);
    }
    return empty ? 0 : nbytes;
  }

  FileView file_;
  std::string where_;
  uint64_t budget_ = 0;
};

// The result of `read`, or the status of what it threw.
template <class T, class F>
Result<T> guarded(const FileView& file, F&& read) {
  try {
    return read();
  } catch (Malformed& e) {
    return Status(e.code, std::move(e.message));
  } catch (const std::bad_alloc&) {
    return Status(
        ErrorCode::kProgram,
        file.name +
            ": expected a file whose structure fits into host memory, got one that does not; free memory, "
            "or load it on a machine with more");
  }
}

}  // namespace headrace
