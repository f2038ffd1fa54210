#include "device/address_map.h"

#include <cstdint>

#include "check.h"

namespace {

using headrace::AddressMap;

void* at(uintptr_t number) { return reinterpret_cast<void*>(number); }

TEST(an_address_belongs_to_the_range_that_holds_it) {
  AddressMap<int> map;
  CHECK(map.holding(at(0)) == nullptr);
  map.insert(at(100), 10, 1);
  map.insert(at(110), 5, 2);
  CHECK(map.holding(at(99)) == nullptr);
  CHECK_EQ(map.holding(at(100))->value, 1);
  CHECK_EQ(map.holding(at(109))->value, 1);
  CHECK_EQ(map.holding(at(110))->value, 2);
  CHECK(map.holding(at(110))->base == at(110));
  CHECK_EQ(map.holding(at(114))->nbytes, 5u);
  CHECK(map.holding(at(115)) == nullptr);
  // The last address of all is not taken for the first.
  map.insert(at(UINTPTR_MAX - 7), 8, 3);
  CHECK_EQ(map.holding(at(UINTPTR_MAX))->value, 3);
}

TEST(an_empty_range_holds_its_first_address) {
  AddressMap<> map;
  map.insert(at(64), 0);
  CHECK(map.holding(at(64)) != nullptr);
  CHECK(map.holding(at(65)) == nullptr);
  CHECK_EQ(map.starting_at(at(64))->nbytes, 0u);
}

TEST(ranges_are_found_by_their_start_and_by_what_lies_before_them) {
  AddressMap<int> map;
  map.insert(at(100), 10, 1);
  CHECK(map.starting_at(at(101)) == nullptr);
  CHECK_EQ(map.starting_at(at(100))->value, 1);
  CHECK_EQ(map.behind(at(99))->value, 1);
  CHECK(map.behind(at(100)) == nullptr);
  map.insert(at(100), 20, 2);  // in place of the first
  CHECK_EQ(map.holding(at(119))->value, 2);
  map.insert(at(200), 1, 3);
  map.erase_if([](const auto& range) { return range.value == 2; });
  CHECK(map.starting_at(at(100)) == nullptr);
  map.erase(at(200));
  int left = 0;
  map.each([&](const auto&) { ++left; });
  CHECK_EQ(left, 0);
}

}  // namespace
