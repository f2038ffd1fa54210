#include "program/text.h"

#include <cstdarg>
#include <cstdint>
#include <cstdio>

namespace headrace {

std::string format(const char* pattern, ...) {
  char text[512];
  va_list args;
  va_start(args, pattern);
  std::vsnprintf(text, sizeof text, pattern, args);
  va_end(args);
  return text;
}

std::string quoted(std::string_view name) {
  std::string out = "'";
  for (char c : name.substr(0, 80)) out += (c >= 0x20 && c < 0x7f) ? c : '?';
  if (name.size() > 80) out += "…";
  return out + "'";
}

bool is_text(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    auto lead = static_cast<uint8_t>(text[i++]);
    if (lead < 0x20 || lead == 0x7f) return false;
    if (lead < 0x80) continue;
    int more = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : 1;
    if (lead < 0xc2 || lead > 0xf4) return false;
    uint32_t code = lead & (0x3fu >> more);
    for (int k = 0; k < more; ++k, ++i) {
      if (i >= text.size() || (static_cast<uint8_t>(text[i]) & 0xc0) != 0x80) return false;
      code = code << 6 | (static_cast<uint8_t>(text[i]) & 0x3fu);
    }
    constexpr uint32_t kLeast[] = {0, 0x80, 0x800, 0x10000};
    if (code < kLeast[more] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) return false;
  }
  return true;
}

}  // namespace headrace
