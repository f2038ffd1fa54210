// What is loaded into this process, read from memory: which objects export a function.
//
// Not through dlsym(): on a handle it also finds what an object merely depends on, and on RTLD_DEFAULT it
// does not see what was loaded RTLD_LOCAL. The dynamic symbol table of each object says what that object
// defines.
#pragma once

#include <link.h>
#include <stddef.h>
#include <stdint.h>

namespace headrace::stream {

// One loaded object, as dl_iterate_phdr() describes it; valid inside its callback. Nothing that the object
// says about itself is believed before it was found to lie inside its own segments.
class Image {
 public:
  explicit Image(const dl_phdr_info& info) : info_(info) {}

  // Whether all of [address, address + nbytes) is inside one loaded segment.
  bool contains(uintptr_t address, size_t nbytes) const;

  // The function of this name that the object itself defines and exports, whatever its version; 0 if none.
  // Only functions: a program may hold a copy of a library's variable as its own (a copy relocation).
  uintptr_t exported(const char* name) const;

  uintptr_t base() const { return info_.dlpi_addr; }

  // The file's name, zero-terminated and cut to `nbytes`. As the loader was given it, which may be relative.
  void file(char* to, size_t nbytes) const;

  // The name by which dlopen() knows the object; empty for the program itself.
  const char* loader_name() const { return info_.dlpi_name != nullptr ? info_.dlpi_name : ""; }

 private:
  const dl_phdr_info& info_;
};

}  // namespace headrace::stream
