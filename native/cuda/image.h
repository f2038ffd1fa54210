// The library inside a program, as bytes: what it asks of the process, and the copy of it that is loaded.
//
// An AOTInductor library calls libtorch's C functions (aoti_torch_…), and on a GPU the CUDA run time and the
// driver. Ours answer instead. That nothing can confuse the two, whatever else the process holds, the copy
// asks for other names of the same length, which only our libheadrace_shims.so has:
//
//     aoti_torch_X        -> aoti_hrace_X
//     cudaX, cuX          -> hrceX, hrX         (CUDA libraries; libcuda.so.1 is then no longer needed)
//     __cxa_thread_atexit -> __hra_thread_atexit  (glibc keeps a library mapped for as long as a thread lives
//     that
//                                                once called it; ours lets go when the library is closed)
//
//     GOMP_parallel, GOMP_barrier -> HRMP_…     (libraries with checks of their own: no exception can leave a
//                                                parallel region, and a check that returned would let the bad
//                                                index through)
//     GOMP_parallel -> HRMQ_parallel            (all other libraries: in a forked process a thread whose team
//                                                stayed behind works alone)
//
// Further, in the copy alone: symbols that the loader would share with every later library (STB_GNU_UNIQUE)
// become ordinary weak ones, and the library does not ask for executable stacks, which nothing in it uses and
// which glibc refuses from 2.41 on.
//
// Undefined names are in no hash table, so a name can change where it stands. Linkers let strings share
// bytes; where a byte that changes belongs to another string too, the edit is refused.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/gpu_code.h"
#include "headrace/status.h"

namespace headrace {

struct VersionNeed {
  std::string library;  // "libc.so.6"
  std::string version;  // "GLIBC_2.34"
};

// What a library asks for, read from its dynamic section; section headers are not looked at.
struct LibraryFacts {
  std::vector<std::string> needed;  // without what the copy drops
  std::vector<VersionNeed> versions;
  std::vector<std::string> shims;  // names that ours answer, as the library calls them
  std::vector<std::string>
      unknown;                      // undefined, strong, of no version: nothing in `needed` is asked for them
  bool cuda = false;                // calls the CUDA run time or the driver
  std::vector<GpuKernel> gpu_code;  // of a library for CUDA, in no order
  bool executable_stack = false;
  int unique_symbols = 0;
};

// The name that the copy asks for instead; empty: the name stays.
std::string renamed(std::string_view name);

// Reads a library, any bytes. kProgram: what is wrong, or what is not understood, by name.
HEADRACE_API Result<LibraryFacts> read_library(std::span<const uint8_t> image);

// Turns a copy of the library into what is loaded. kProgram, as read_library(); the bytes are then half
// changed and good for nothing.
HEADRACE_API Result<LibraryFacts> adapt_library(std::span<uint8_t> image);

}  // namespace headrace
