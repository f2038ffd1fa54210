// What the programs of the native tests say when something is not so: the place, and exit status 1 at once,
// whatever other threads do.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

#define CHECK(...)                                                                   \
  do {                                                                               \
    if (!(__VA_ARGS__)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #__VA_ARGS__); \
      std::_Exit(1);                                                                 \
    }                                                                                \
  } while (false)

#define CHECK_HAS(text, part)                                                                    \
  do {                                                                                           \
    if ((text).find(part) == std::string::npos) {                                                \
      std::fprintf(stderr, "%s:%d: no '%s' in: %s\n", __FILE__, __LINE__, part, (text).c_str()); \
      std::_Exit(1);                                                                             \
    }                                                                                            \
  } while (false)
