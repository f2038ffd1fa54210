// The data files of a program as the engine asks for them: by key. Built from checked entries, so the
// engine's own reader of .ptd files never sees untrusted bytes.
#pragma once

#include <executorch/runtime/core/named_data_map.h>

#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "program/plan.h"

namespace headrace {

class DataMap final : public executorch::runtime::NamedDataMap {
 public:
  // kProgram: a key is in two files.
  Status add(const std::string& file, std::vector<DataEntry> entries);
  const DataEntry* find(std::string_view key) const;
  bool empty() const { return entries_.empty(); }
  // Keys that were asked for and not found since the last call: a delegate's own names are known to
  // nobody else.
  std::vector<std::string> take_missing() const;

  executorch::runtime::Result<const executorch::runtime::TensorLayout> get_tensor_layout(
      std::string_view key) const override;
  executorch::runtime::Result<executorch::runtime::FreeableBuffer> get_data(
      std::string_view key) const override;
  executorch::runtime::Error load_data_into(std::string_view key, void* buffer, size_t size) const override;
  executorch::runtime::Result<uint32_t> get_num_keys() const override;
  executorch::runtime::Result<const char*> get_key(uint32_t index) const override;

 private:
  const DataEntry* look_up(std::string_view key) const;
  struct Item {
    DataEntry entry;
    std::string file;
  };
  std::vector<Item> entries_;
  std::unordered_map<std::string_view, size_t> index_;  // keys point into entries_
  mutable std::mutex mutex_;
  mutable std::vector<std::string> missing_;
};

}  // namespace headrace
