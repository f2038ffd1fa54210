// The tensors that AOTInductor libraries work on, and the functions by which they do: libheadrace_shims.so, a
// library of its own, because its names have to be visible to every library that is loaded later (RTLD_GLOBAL
// makes those of a library's own needs visible with it, and ExecuTorch's must not be). It needs the C library
// alone.
//
// The functions themselves, aoti_hrace_X for PyTorch's aoti_torch_X, follow torch 2.13's
// torch/csrc/inductor/aoti_torch/c/shim.h: they return 0, or 1 and keep a text for last_error().
#pragma once

#include <cstddef>
#include <cstdint>

#include "headrace/status.h"  // HEADRACE_API
#include "headrace/tensor.h"

namespace headrace::shims {

// Memory and tensors of one container. One thread at a time.
//
// Freed blocks wait to be taken again, so that a steady state allocates nothing: a block serves requests up
// to its size; where none that waits is large enough, a new one takes the place of the largest of them.
struct Arena;
// A handle that a library holds: AtenTensorHandle.
struct Tensor;

// kCpu and kCuda as PyTorch numbers them (c10/core/DeviceType.h).
constexpr int32_t kCpu = 0, kCuda = 1;

struct View {
  void* data = nullptr;  // of the first element
  int32_t dtype = 0;
  int32_t device_type = kCpu;
  int ndim = 0;
  const int64_t* sizes = nullptr;
  const int64_t* strides = nullptr;  // in elements
};

struct ArenaCounts {
  int64_t allocations = 0;  // of host memory, since the arena was made
  int64_t tensors = 0;      // alive
  size_t nbytes = 0;        // of all blocks, in use or waiting
};

// Null: no memory.
HEADRACE_API Arena* make_arena();
// With every tensor that is still alive; the library must not use them any more.
HEADRACE_API void destroy_arena(Arena* arena);
HEADRACE_API ArenaCounts counts(const Arena* arena);

// The calling thread's arena, from which libraries that run on it allocate. Returns the former.
HEADRACE_API Arena* exchange_arena(Arena* arena);

// A tensor over memory of the caller's, `storage_nbytes` from `storage`; `offset` and `strides` in elements.
// The library's own deleting leaves it alone: libraries take their inputs over, but not always where a run
// fails. Null: no memory, or a rank above kMaxDims.
HEADRACE_API Tensor* borrow(Arena* arena, void* storage, size_t storage_nbytes, int32_t dtype, int ndim,
                            const int64_t* sizes, const int64_t* strides, int64_t offset, int32_t device_type,
                            int32_t device_index);
// Ends a borrowed tensor.
HEADRACE_API void end_borrow(Tensor* tensor);
// Ends a tensor that a library gave away, as the library itself would.
HEADRACE_API void release(Tensor* tensor);
HEADRACE_API View view(const Tensor* tensor);

// What the calling thread's last failed function says, and forgets; "" if none failed.
HEADRACE_API const char* take_error();

// Called where a check inside a library's code fails ("index out of bounds"), on whichever thread it runs. It
// may throw through the library, which turns exceptions of its serial code into errors. Set once.
// `may_throw`: whether an exception would reach a frame that expects one.
HEADRACE_API void set_on_check_failed(void (*function)(const char* message, bool may_throw));
// A run of a library begins on the calling thread. Once a team of threads has failed in it, it starts no
// others.
HEADRACE_API void begin_run();

// Ends, for every thread, the objects that the library in this stretch of memory registered for the end of a
// thread. No thread may be inside the library.
HEADRACE_API void end_thread_objects(const void* begin, const void* end);

}  // namespace headrace::shims
