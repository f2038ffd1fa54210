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

namespace headrace::cu {
struct Driver;
}

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
  // Of the request for device memory that made its storage, counted from 0 within a run; -1: no request did.
  int64_t ordinal = -1;
  bool whole = false;  // it begins where its storage begins
  size_t storage_nbytes = 0;
};

// What the arena of a library for CUDA needs of its device.
struct Gpu {
  const cu::Driver* driver = nullptr;
  int32_t ordinal = 0;
  void* owner = nullptr;  // first argument of the functions below
  // Memory for the stream of the run. Null: there is none, and the owner knows why.
  void* (*take)(void* owner, size_t nbytes) = nullptr;
  void (*give)(void* owner, void* data) = nullptr;
  // A library copied between host and device, or waited for its stream.
  void (*copied)(void* owner, size_t to_device_nbytes, size_t to_host_nbytes) = nullptr;
  void (*waited)(void* owner) = nullptr;
};

// A request for device memory that is answered with memory of the caller's.
struct Placement {
  int64_t ordinal = 0;
  size_t nbytes = 0;
  void* data = nullptr;
};

// One run of a library for CUDA.
struct GpuRun {
  void* stream = nullptr;
  // Nothing is enqueued: kernels are loaded, memory is asked for, and that is all.
  bool rehearsal = false;
  // What is enqueued will be replayed, so host memory may take no part in it.
  bool replayed = false;
  // The library's own events mean something: it computes constants. Else they stand for nothing, and waiting
  // for them would wait for other work on the stream.
  bool events = false;
  const Placement* placements = nullptr;
  size_t num_placements = 0;
};

struct ArenaCounts {
  int64_t allocations = 0;  // of host memory, since the arena was made
  int64_t tensors = 0;      // alive
  size_t nbytes = 0;        // of all blocks of host memory, in use or waiting
  int64_t launches = 0;     // of kernels, since the arena was made
  int32_t code = 0;         // of the driver: the first failure of the latest run
};

// `gpu`: of a library for CUDA. Null: no memory.
HEADRACE_API Arena* make_arena(const Gpu* gpu = nullptr);
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

// What the calling thread does from now on in the arena's library is this run; the placements are read until
// the next one begins. Precondition: an arena with a Gpu.
HEADRACE_API void begin_gpu_run(Arena* arena, const GpuRun& run);
// A copy of its own, with the same strides; null: take_error() says why.
HEADRACE_API Tensor* clone(const Tensor* from);
// Copies `from` to device memory of the same dtype and sizes, strides in elements, in the order of the run's
// stream. False: the driver failed, or it would take too many copies; take_error() says what.
HEADRACE_API bool copy_on_device(const Tensor* from, void* to, const int64_t* strides);

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
