// Host memory in pages of its own: zero, aligned for any tensor, taken from the system as it is touched and
// given back when it is dropped.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headrace {

class Pages {
 public:
  // Null data when the system has no room. In a build with HEADRACE_GUARD (CMake: HEADRACE_SANITIZE) the last
  // byte, rounded up to `kAlignment`, is followed by a page that nobody may touch.
  explicit Pages(size_t nbytes);
  ~Pages();
  Pages(Pages&& other) noexcept;
  Pages& operator=(Pages&&) = delete;
  uint8_t* data() const { return data_; }

  static constexpr size_t kAlignment = 64;

 private:
  void* base_ = nullptr;
  size_t mapped_ = 0;
  uint8_t* data_ = nullptr;
};

}  // namespace headrace
