// Ranges of addresses, and what is known of each: which one holds an address, and which one begins there.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <utility>
#include <variant>

namespace headrace {

// Not locked. Ranges do not overlap; an empty one holds its first address.
template <class T = std::monostate>
class AddressMap {
 public:
  struct Range {
    void* base = nullptr;
    size_t nbytes = 0;
    T value{};
  };

  // In place of one that begins there.
  void insert(void* base, size_t nbytes, T value = {}) {
    ranges_[number(base)] = Range{base, nbytes, std::move(value)};
  }
  void erase(const void* base) { ranges_.erase(number(base)); }
  template <class F>
  void erase_if(F&& predicate) {
    std::erase_if(ranges_, [&](const auto& item) { return predicate(item.second); });
  }

  // Null where there is none; valid until that range is erased.
  const Range* starting_at(const void* base) const {
    auto found = ranges_.find(number(base));
    return found == ranges_.end() ? nullptr : &found->second;
  }
  const Range* holding(const void* address) const {
    auto behind = ranges_.upper_bound(number(address));
    if (behind == ranges_.begin()) return nullptr;
    const auto& [base, range] = *std::prev(behind);
    return number(address) - base < std::max<size_t>(range.nbytes, 1) ? &range : nullptr;
  }
  // The first that begins behind the address.
  const Range* behind(const void* address) const {
    auto found = ranges_.upper_bound(number(address));
    return found == ranges_.end() ? nullptr : &found->second;
  }
  template <class F>
  void each(F&& visit) const {
    for (const auto& item : ranges_) visit(item.second);
  }

 private:
  static uintptr_t number(const void* address) { return reinterpret_cast<uintptr_t>(address); }
  std::map<uintptr_t, Range> ranges_;
};

}  // namespace headrace
