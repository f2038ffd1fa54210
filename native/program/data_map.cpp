#include "program/data_map.h"

#include <cstring>
#include <utility>

namespace headrace {

namespace et = executorch::runtime;

Status DataMap::add(const std::string& file, std::vector<DataEntry> entries) {
  for (auto& entry : entries) entries_.push_back({std::move(entry), file});
  index_.clear();
  for (size_t i = 0; i < entries_.size(); ++i) {
    auto [at, fresh] = index_.emplace(entries_[i].entry.key, i);
    if (!fresh) {
      return Status(ErrorCode::kProgram, file + ": expected keys that no other data file has, got '" +
                                             entries_[i].entry.key + "', which " + entries_[at->second].file +
                                             " has too; give one file for each key");
    }
  }
  return {};
}

const DataEntry* DataMap::find(std::string_view key) const {
  auto at = index_.find(key);
  return at == index_.end() ? nullptr : &entries_[at->second].entry;
}

const DataEntry* DataMap::look_up(std::string_view key) const {
  const DataEntry* entry = find(key);
  if (entry == nullptr) {
    std::lock_guard lock(mutex_);
    missing_.emplace_back(key);
  }
  return entry;
}

std::vector<std::string> DataMap::take_missing() const {
  std::lock_guard lock(mutex_);
  return std::exchange(missing_, {});
}

et::Result<const et::TensorLayout> DataMap::get_tensor_layout(std::string_view key) const {
  const DataEntry* entry = look_up(key);
  if (entry == nullptr || !entry->is_tensor) return et::Error::NotFound;
  return et::TensorLayout::create(et::Span<const int32_t>(entry->sizes.data(), entry->sizes.size()),
                                  et::Span<const uint8_t>(entry->dim_order.data(), entry->dim_order.size()),
                                  static_cast<executorch::aten::ScalarType>(entry->dtype));
}

et::Result<et::FreeableBuffer> DataMap::get_data(std::string_view key) const {
  const DataEntry* entry = look_up(key);
  if (entry == nullptr) return et::Error::NotFound;
  return et::FreeableBuffer(entry->bytes.data(), entry->bytes.size(), nullptr);
}

et::Error DataMap::load_data_into(std::string_view key, void* buffer, size_t size) const {
  const DataEntry* entry = look_up(key);
  if (entry == nullptr) return et::Error::NotFound;
  if (size > entry->bytes.size()) return et::Error::InvalidArgument;
  std::memcpy(buffer, entry->bytes.data(), size);
  return et::Error::Ok;
}

et::Result<uint32_t> DataMap::get_num_keys() const { return static_cast<uint32_t>(entries_.size()); }

et::Result<const char*> DataMap::get_key(uint32_t index) const {
  if (index >= entries_.size()) return et::Error::InvalidArgument;
  return entries_[index].entry.key.c_str();
}

}  // namespace headrace
