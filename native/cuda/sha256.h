// SHA-256 (FIPS 180-4): the name that a program gives its library.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace headrace {

// 64 lower-case hexadecimal digits.
std::string sha256_hex(std::span<const uint8_t> bytes);

}  // namespace headrace
