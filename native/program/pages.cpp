#include "program/pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace headrace {

Pages::Pages(size_t nbytes) {
  auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  if (nbytes > SIZE_MAX / 2) return;
  size_t used = (std::max<size_t>(nbytes, 1) + page - 1) / page * page;
#ifdef HEADRACE_GUARD
  mapped_ = used + page;
#else
  mapped_ = used;
#endif
  base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base_ == MAP_FAILED) {
    base_ = nullptr;
    return;
  }
  data_ = static_cast<uint8_t*>(base_);
#ifdef HEADRACE_GUARD
  mprotect(data_ + used, page, PROT_NONE);
  data_ += used - (nbytes + kAlignment - 1) / kAlignment * kAlignment;
#endif
}

Pages::~Pages() {
  if (base_ != nullptr) munmap(base_, mapped_);
}

Pages::Pages(Pages&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)),
      mapped_(other.mapped_),
      data_(std::exchange(other.data_, nullptr)) {}

}  // namespace headrace
