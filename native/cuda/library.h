// One AOTInductor library, loaded from memory: checked, changed (image.h), mapped, and let go of.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "cuda/image.h"
#include "headrace/status.h"

namespace headrace {

namespace shims {
struct Tensor;
}

// The functions of a library, as torch 2.13's torch/csrc/inductor/aoti_runtime/interface.h declares them.
// They return 0, or 1 with a text in last_error(), which is the calling thread's.
struct LibraryCalls {
  struct Constant {
    const char* name;
    shims::Tensor* tensor;
  };
  int (*create)(void** container, size_t models, const char* device, const char* cubins);
  int (*destroy)(void* container);
  int (*num_inputs)(void* container, size_t* count);
  int (*num_outputs)(void* container, size_t* count);
  int (*num_constants)(void* container, size_t* count);
  int (*constant_name)(void* container, size_t i, const char** name);
  int (*constant_fqn)(void* container, size_t i, const char** name);
  int (*constant_folded)(void* container, size_t i, bool* folded);
  int (*constant_type)(void* container, size_t i, int32_t* type);
  int (*constant_dtype)(void* container, size_t i, int32_t* dtype);
  int (*constant_nbytes)(void* container, size_t i, size_t* nbytes);
  int (*bind)(void* container, const Constant* constants, size_t count, bool inactive, bool complete);
  int (*fold)(void* container, bool inactive, void* stream, void* proxy);
  // The inputs are taken over; the outputs are the caller's.
  int (*run)(void* container, shims::Tensor** inputs, size_t num_inputs, shims::Tensor** outputs,
             size_t num_outputs, void* stream, void* proxy);
  int (*last_error)(const char** text);
  // Null in libraries that have none: from one piece of host memory, which is read before they return.
  int (*blob_size)(void* container, uint64_t* nbytes);
  int (*bind_blob)(void* container, const uint8_t* bytes);
};

struct LibraryPlace {
  // Where the library's copy goes if the system forbids executable memory files: a folder of the user's, else
  // one of those that a system has.
  std::string directory;
  // For tests: as if the system forbade them.
  bool memory_file = true;
};

class HEADRACE_API Library {
 public:
  // Loads the library whose bytes these are, or finds it: one that is loaded already, and has the same
  // SHA-256, is shared. `key` is what the program calls it, "<SHA-256>_so_blob"; or, not `hashed`, another
  // name.
  //
  // Checked first, without running anything of it: the SHA-256, what the copy needs changed, every function
  // that is ours to give, the libraries that it needs, and the versions that it asks of them. kProgram: it is
  // damaged or not understood. kDelegateUnavailable: this process or system lacks something.
  static Result<std::shared_ptr<Library>> load(std::span<const uint8_t> image, const std::string& key,
                                               const LibraryPlace& place, bool hashed = true);
  // Unloads it. No thread may be inside.
  ~Library();
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  const LibraryCalls& calls() const { return calls_; }
  const LibraryFacts& facts() const { return facts_; }
  // Held by a container's first run, in which the library loads its kernels.
  std::mutex& first_run() const { return first_run_; }

 private:
  struct Mapping;
  Library() = default;
  LibraryFacts facts_;
  LibraryCalls calls_{};
  std::unique_ptr<Mapping> mapping_;
  mutable std::mutex first_run_;
};

// Those of `names` that libheadrace_shims.so does not have. Names as a library calls them.
HEADRACE_API Result<std::vector<std::string>> missing_shims(std::span<const std::string> names);

}  // namespace headrace
