// Inside libheadrace_shims.so: what a handle of a library is, and the memory behind it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "cuda/shims.h"

namespace headrace::shims {

struct Block {
  Block* next;
  size_t capacity;
  // The memory follows at the alignment.
};

struct Storage {
  std::atomic<int64_t> references{1};
  void* base = nullptr;
  size_t nbytes = 0;
  int32_t device_type = kCpu, device_index = 0;
  Arena* arena = nullptr;  // whose memory it is; null: borrowed
  int64_t ordinal = -1;    // of the request for device memory that made it, counted within a run
};

struct Tensor {
  Tensor* next;
  Tensor** previous;  // what points here
  Arena* arena;
  Storage* storage;
  int64_t offset;
  int32_t dtype;
  int ndim;
  bool borrowed;
  int64_t sizes[kMaxDims], strides[kMaxDims];

  char* data() const;
  int64_t numel() const {
    int64_t n = 1;
    for (int d = 0; d < ndim; ++d) n *= sizes[d];
    return n;
  }
};

// What objects of one kind lay in, for the next ones: a run makes and ends the same few each time. Under a
// sanitizer nothing is kept, so that it sees what is used after its end.
template <class T>
class Spare {
 public:
  // Memory for a T; null where there is none.
  void* take() {
    if (first_ == nullptr) return std::malloc(sizeof(T));
    void* cell = first_;
    first_ = *static_cast<void**>(cell);
    return cell;
  }
  void give(void* cell) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    std::free(cell);
#else
    static_assert(sizeof(T) >= sizeof(void*));
    *static_cast<void**>(cell) = first_;
    first_ = cell;
#endif
  }
  void clear() {
    while (first_ != nullptr) std::free(take());
  }

 private:
  void* first_ = nullptr;  // each cell holds the address of the next
};

// The streams that a library's guards will put back, innermost last.
constexpr int kMaxGuards = 8;

struct Arena {
  Tensor* tensors = nullptr;
  Block* waiting = nullptr;
  Spare<Tensor> tensor_cells;
  Spare<Storage> storage_cells;
  ArenaCounts counts;
  Gpu gpu;  // of a library for CUDA; else its driver is null
  GpuRun run;
  int64_t requests = 0;  // for device memory, in this run
  void* guarded[kMaxGuards] = {};
  int guards = 0;

  void* take(size_t nbytes);
  void give(void* data);
};

// The calling thread's; null outside a run, and in libraries' code that nobody of ours called.
Arena* current_arena();

// Keeps the text for take_error() and returns 1.
__attribute__((format(printf, 1, 2))) int32_t fail(const char* pattern, ...);

// Keeps the first failure of the driver in the current run, and returns the code.
int32_t driver_failed(int32_t code);

// In the order of the run's stream; waits only where host memory is written. `to` and `from` are dense
// stretches, in host or device memory. 0, or 1 and a text.
int32_t copy_bytes(Arena& arena, void* to, bool to_host, const void* from, bool from_host, size_t nbytes);

}  // namespace headrace::shims
