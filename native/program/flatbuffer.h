// A reader of FlatBuffers tables that checks every access against the buffer (format:
// https://flatbuffers.dev/internals/). A wild offset never reads outside: it yields "absent", and the
// buffer remembers that it was malformed, so a caller may read a whole object and ask once.
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

namespace headrace::fb {

class Buffer {
 public:
  Buffer(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  template <class T>
  T read(uint64_t at) const {
    T value{};
    if (at > size_ || size_ - at < sizeof(T)) {
      malformed_ = true;
      return value;
    }
    std::memcpy(&value, data_ + at, sizeof(T));
    return value;
  }
  // `count` elements of `width` bytes at `at`, or null.
  const uint8_t* span(uint64_t at, uint64_t count, uint64_t width) const {
    if (at > size_ || (width != 0 && count > (size_ - at) / width)) {
      malformed_ = true;
      return nullptr;
    }
    return data_ + at;
  }
  uint64_t follow(uint64_t at) const {
    auto offset = read<uint32_t>(at);
    if (offset == 0) malformed_ = true;
    return at + offset;
  }
  bool malformed() const { return malformed_; }
  void set_malformed() const { malformed_ = true; }
  size_t size() const { return size_; }

 private:
  const uint8_t* data_;
  size_t size_;
  mutable bool malformed_ = false;
};

class Table;

// A vector of scalars, tables or strings; empty when absent.
class Vector {
 public:
  Vector() = default;
  Vector(const Buffer* buffer, uint64_t at, size_t width) : buffer_(buffer) {
    auto count = buffer->read<uint32_t>(at);
    if (buffer->span(at + 4, count, width) == nullptr) return;
    begin_ = at + 4;
    count_ = count;
  }
  bool present() const { return buffer_ != nullptr; }
  size_t size() const { return count_; }
  template <class T>
  T scalar(size_t i) const {
    return buffer_->read<T>(begin_ + i * sizeof(T));
  }
  inline Table table(size_t i) const;
  const uint8_t* bytes() const { return count_ ? buffer_->span(begin_, count_, 1) : nullptr; }

 private:
  const Buffer* buffer_ = nullptr;
  uint64_t begin_ = 0;
  size_t count_ = 0;
};

class Table {
 public:
  Table() = default;
  Table(const Buffer* buffer, uint64_t at) : buffer_(buffer), at_(at) {
    // The first field is the signed distance back to the vtable.
    int64_t vtable = static_cast<int64_t>(at) - buffer->read<int32_t>(at);
    if (vtable < 0 || static_cast<uint64_t>(vtable) + 4 > buffer->size()) {
      buffer->set_malformed();
      return;
    }
    vtable_ = static_cast<uint64_t>(vtable);
    vtable_bytes_ = buffer->read<uint16_t>(vtable_);
    if (buffer->span(vtable_, vtable_bytes_, 1) == nullptr) vtable_bytes_ = 0;
  }
  bool present() const { return buffer_ != nullptr; }

  template <class T>
  T scalar(int field, T otherwise = T{}) const {
    uint64_t at = position(field);
    return at ? buffer_->read<T>(at) : otherwise;
  }
  Table table(int field) const {
    uint64_t at = position(field);
    return at ? Table(buffer_, buffer_->follow(at)) : Table();
  }
  // Vectors of tables and strings hold 4-byte offsets.
  Vector vector(int field, size_t width = 4) const {
    uint64_t at = position(field);
    return at ? Vector(buffer_, buffer_->follow(at), width) : Vector();
  }
  std::string_view string(int field) const {
    Vector v = vector(field, 1);
    return {reinterpret_cast<const char*>(v.bytes()), v.size()};
  }
  bool has(int field) const { return position(field) != 0; }

 private:
  uint64_t position(int field) const {
    if (buffer_ == nullptr) return 0;
    uint64_t slot = 4 + 2 * static_cast<uint64_t>(field);
    if (slot + 2 > vtable_bytes_) return 0;
    uint16_t offset = buffer_->read<uint16_t>(vtable_ + slot);
    return offset ? at_ + offset : 0;
  }
  const Buffer* buffer_ = nullptr;
  uint64_t at_ = 0, vtable_ = 0;
  uint16_t vtable_bytes_ = 0;
};

inline Table Vector::table(size_t i) const {
  uint64_t at = begin_ + 4 * i;
  return Table(buffer_, buffer_->follow(at));
}

}  // namespace headrace::fb
