// The constants of AOTInductor islands: held once for a program, whatever number of islands, methods and
// instances uses them; except state, which each instance of a method has of its own.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "headrace/block.h"
#include "headrace/status.h"

namespace headrace {

// Host memory of a constant. The bytes of the file where they can be used as they lie, else a copy of them.
class HostConstant {
 public:
  // `bytes` outlive this. kOutOfDeviceMemory.
  static Result<std::shared_ptr<HostConstant>> make(std::string_view bytes, bool copy);
  ~HostConstant();
  HostConstant(const HostConstant&) = delete;
  HostConstant& operator=(const HostConstant&) = delete;
  void* data() const { return data_; }
  size_t nbytes() const { return nbytes_; }

 private:
  HostConstant() = default;
  void* data_ = nullptr;
  size_t nbytes_ = 0;
  void* owned_ = nullptr;
};

// By the key of the named data. Threads: any.
class HostConstants {
 public:
  // The constant under `key`, made from `bytes` if it is not there yet; `copy`: from a copy
  // of them, because they do not last, or will be written.
  Result<std::shared_ptr<HostConstant>> get(const std::string& key, std::string_view bytes, bool copy);

 private:
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<HostConstant>> constants_;
};

// A constant in a GPU's memory.
class DeviceConstant {
 public:
  // Copies `bytes`, and waits until they are there, so that any stream may read them. kDevice,
  // kOutOfDeviceMemory.
  static Result<std::shared_ptr<DeviceConstant>> make(const DeviceRef& device, std::string_view bytes);
  void* data() const { return block_->data(); }
  size_t nbytes() const { return nbytes_; }

 private:
  DeviceConstant() = default;
  BlockRef block_;
  size_t nbytes_ = 0;
};

// As HostConstants, of the one device that a program is on.
class DeviceConstants {
 public:
  Result<std::shared_ptr<DeviceConstant>> get(const DeviceRef& device, const std::string& key,
                                              std::string_view bytes);

 private:
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<DeviceConstant>> constants_;
};

}  // namespace headrace
