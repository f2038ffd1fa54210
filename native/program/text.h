// The text of messages, and names that untrusted files bring.
#pragma once

#include <string>
#include <string_view>

namespace headrace {

// printf into a string, cut at 511 bytes.
__attribute__((format(printf, 1, 2))) std::string format(const char* pattern, ...);

// A name of an untrusted file as a message shows it: quoted, short and printable.
std::string quoted(std::string_view name);

// What to do about a file whose parts contradict each other; behind what was expected and what came.
constexpr const char* kDamaged = "the file is damaged, export it again";

// Whether `text` is well-formed UTF-8 (RFC 3629) without control characters.
bool is_text(std::string_view text);

}  // namespace headrace
