// GPU code inside a library, as bytes: for which architectures it is, and whether a GPU runs it.
//
// AOTInductor embeds each kernel as one fat binary (SASS for one architecture, PTX beside it) or as one plain
// cubin. NVIDIA documents neither container; what is relied on here is what src/headrace's reader of fat
// binaries relies on, and was compared with what nvcc 13.0 and ptxas 13.0 wrote.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "headrace/status.h"

namespace headrace {

struct GpuCode {
  bool ptx = false;  // compiled by the driver for GPUs that came later; else SASS
  int arch = 0;      // 90 for compute capability 9.0
  char suffix = 0;   // 'a': for this very architecture alone; 'f': for its family; else 0
  bool operator==(const GpuCode&) const = default;
  auto operator<=>(const GpuCode&) const = default;
  // "sm_90a", "compute_90".
  HEADRACE_API std::string name() const;
  // By NVIDIA's rules: SASS runs on GPUs of its major version whose minor version is no less, PTX on those
  // whose version is no less (CUDA C++ Programming Guide, "Binary Compatibility", "PTX Compatibility";
  // suffixes in "Family-Specific Features"). A PTX that a driver is too old for is not told here.
  HEADRACE_API bool runs_on(int major, int minor) const;
};

// One kernel's code: alternatives, of which the driver takes one.
using GpuKernel = std::vector<GpuCode>;

// Every fat binary and cubin in the bytes, any bytes. What only looks like one is left out.
std::vector<GpuKernel> find_gpu_code(std::span<const uint8_t> bytes);

// The names of all architectures in it, each once: "compute_90a, sm_90a". Empty: no GPU code.
HEADRACE_API std::string gpu_code_names(std::span<const GpuKernel> kernels);

}  // namespace headrace
