// What a library asks of the system and of NVIDIA's packages, looked at before it is loaded.
//
// The CUDA run time and the driver are answered by ours. What a library needs beside them, such as
// libcublas.so.13, is looked for where every library is (also: in the process already), then in the folders
// that were named for it. Two majors of one of NVIDIA's libraries in a process would answer each other's
// calls, so the second is refused.
//
// Threads: any.
#pragma once

#include <string>
#include <vector>

#include "cuda/image.h"
#include "headrace/status.h"

namespace headrace {

// Where NVIDIA's libraries may lie that the system's search does not find, instead of those named before. In
// Python they are the folders of pip's packages.
HEADRACE_API void set_library_folders(std::vector<std::string> folders);

// What this process or system lacks of what the library asks for: empty, or one line for each. What it finds
// is loaded, for good.
HEADRACE_API std::vector<std::string> missing_needs(const LibraryFacts& facts);

}  // namespace headrace
