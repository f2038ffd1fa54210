#include "cuda/constants.h"

#include <cstdlib>
#include <cstring>

namespace headrace {

namespace {
// As AOTInductor aligns constants that it keeps itself (AOTI_CONST_ALIGNMENT, torch 2.13).
constexpr size_t kAlignment = 64;
}  // namespace

Result<std::shared_ptr<HostConstant>> HostConstant::make(std::string_view bytes, bool copy) {
  std::shared_ptr<HostConstant> self(new HostConstant());
  self->nbytes_ = bytes.size();
  self->data_ = const_cast<char*>(bytes.data());
  if (!copy && reinterpret_cast<uintptr_t>(bytes.data()) % kAlignment == 0) return self;
  size_t capacity = (bytes.size() / kAlignment + 1) * kAlignment;
  self->owned_ = std::aligned_alloc(kAlignment, capacity);
  if (self->owned_ == nullptr) {
    return Status(ErrorCode::kOutOfDeviceMemory,
                  "expected " + std::to_string(bytes.size()) +
                      " bytes of host memory for a constant, got none; free memory");
  }
  self->data_ = self->owned_;
  if (!bytes.empty()) std::memcpy(self->data_, bytes.data(), bytes.size());
  return self;
}

HostConstant::~HostConstant() { std::free(owned_); }

Result<std::shared_ptr<HostConstant>> HostConstants::get(const std::string& key, std::string_view bytes,
                                                         bool copy) {
  std::lock_guard lock(mutex_);
  auto found = constants_.find(key);
  if (found != constants_.end() && found->second->nbytes() == bytes.size()) return found->second;
  auto made = HostConstant::make(bytes, copy);
  if (made.ok()) constants_[key] = *made;
  return made;
}

}  // namespace headrace
