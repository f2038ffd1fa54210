// The stream that the caller selected, one value per thread, for every delegate in the process.
//
//     headrace::CallerStreamGuard guard(stream);     // select; the former selection is back when it ends
//     auto chosen = headrace::caller_stream();       // what a delegate asks: a stream, or nothing selected
//
// The state is in libheadrace_stream.so, which depends on the C library alone. This header needs no CUDA
// toolkit; beside <cuda_runtime.h> it may come first or second. What is inside extern "C" is also C11.
//
// "Nothing selected" and "handle 0 selected" differ. Handles 0 and 1 are the legacy stream, 2 the per-thread
// one; all three are ordinary selections. 0 is kept as 1 from the moment of selection: DLPack and the CUDA
// array interface forbid 0, and code built for per-thread default streams reads it as another stream.
//
// Ownership: a selection borrows. The stream must live until the selection has ended; nothing here touches
// it. Threads: a selection belongs to the thread that made it; a new thread has none.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#include <optional>
#endif

#define HEADRACE_STREAM_API __attribute__((visibility("default")))

// Raised when a declaration below changes its meaning or layout. Additions do not raise it.
#define HEADRACE_STREAM_ABI 1

// As CUDA's driver_types.h declares it, so that the two may stand in one file.
struct CUstream_st;
typedef struct CUstream_st* cudaStream_t;

#ifdef __cplusplus
extern "C" {
#define HEADRACE_STREAM_NOEXCEPT noexcept
#else
#define HEADRACE_STREAM_NOEXCEPT
#endif

typedef struct headrace_selection {
  struct CUstream_st* stream;  // never 0 where `selected`; 0 otherwise
  int32_t device;              // headrace::Device::id() (a GPU's CUDA ordinal), or -1: not said
  int32_t selected;            // 0: nothing is selected
} headrace_selection;

// The HEADRACE_STREAM_ABI of the library that was found. Whoever loads it at run time compares first.
HEADRACE_STREAM_API int32_t headrace_stream_abi(void) HEADRACE_STREAM_NOEXCEPT;

// The calling thread's selection. Never fails. Neither this nor the exchange takes a lock; the first use on a
// thread may have the loader set up that thread's 16 bytes.
HEADRACE_STREAM_API headrace_selection headrace_get_selection(void) HEADRACE_STREAM_NOEXCEPT;

// Replaces the calling thread's selection and returns the former one, which the caller puts back with a
// second exchange. `next` is kept in its normal form: stream 0 as 1, any non-zero `selected` as 1, a negative
// device as -1, and with `selected` 0 the other members are not looked at. Whether stream and device exist is
// not checked.
HEADRACE_STREAM_API headrace_selection headrace_exchange_selection(headrace_selection next)
    HEADRACE_STREAM_NOEXCEPT;

// How many other copies of this library are mapped into the process: under another path, renamed, or linked
// into a library that exports it. Each copy has a selection of its own, so that a delegate which reads
// another one than the caller wrote would run on a stream that nobody chose: whoever finds a number other
// than 0 refuses to go on and names both files. Where there is a copy, `ours` gets the file of the library
// that answers and `other` that of the first other copy, zero-terminated and cut to the given size; null or
// size 0 is skipped. A copy that a program or library keeps hidden, or that dlmopen() put apart, is not seen.
// An answer of 0 is remembered until something is loaded; giving it again costs well under a microsecond, a
// look at every loaded object about that much for each.
HEADRACE_STREAM_API int32_t headrace_find_duplicate(char* ours, size_t ours_nbytes, char* other,
                                                    size_t other_nbytes) HEADRACE_STREAM_NOEXCEPT;

// ---- the mirror: ExecuTorch's own caller-stream library, for delegates that read that one

// How many such libraries are served at once. One is what a sound process has; copies under two names happen.
#define HEADRACE_MIRROR_LIBRARIES 4

// A scope in which the mirror stands: storage for begin and end, not to be copied, moved or looked into.
typedef struct headrace_mirror {
  int32_t count;
  void* guards[HEADRACE_MIRROR_LIBRARIES][8];
} headrace_mirror;

// Selects `selection.stream` for the calling thread in every library in the process that exports ExecuTorch's
// executorch::extension::cuda::CallerStreamGuard, whenever it was loaded, until the matching end. Returns in
// how many (0 where there is none, or where nothing is selected: their selections then stay as they are), or
// -1, nothing being selected anywhere, if one of them cannot be served; headrace_find_unmirrored() names it.
// End comes in every case but -1, on the same thread, last begun first ended.
//
// The selection must be a CUDA stream: those libraries hand it to CUDA. A library that is loaded between
// begin and end is served from the next begin on.
//
// Cheap where nothing was loaded since the last call. A library met for the first time is kept loaded for
// good, and the call waits until whoever is loading it is done: hold no lock that its constructors may want.
HEADRACE_STREAM_API int32_t headrace_mirror_begin(headrace_mirror* mirror,
                                                  headrace_selection selection) HEADRACE_STREAM_NOEXCEPT;
HEADRACE_STREAM_API void headrace_mirror_end(headrace_mirror* mirror) HEADRACE_STREAM_NOEXCEPT;

// 1 if a library in the process exports ExecuTorch's caller stream and cannot be served: its guard does not
// behave as the known one does, or there are more than HEADRACE_MIRROR_LIBRARIES. Its file is written to
// `library` as above. Otherwise 0.
HEADRACE_STREAM_API int32_t headrace_find_unmirrored(char* library,
                                                     size_t library_nbytes) HEADRACE_STREAM_NOEXCEPT;

#ifdef __cplusplus
}  // extern "C"

namespace headrace {

// The stream that the calling thread selected, or nothing. Never handle 0.
[[nodiscard]] inline std::optional<cudaStream_t> caller_stream() noexcept {
  const headrace_selection now = headrace_get_selection();
  if (now.selected == 0) return std::nullopt;
  return now.stream;
}

// Selects a stream for the calling thread until the end of the scope, then puts the former selection back, on
// every way out. Guards nest. A guard lives in a scope and nowhere else: ended on another thread or out of
// order, it would put back what is not its own to put back.
class CallerStreamGuard {
 public:
  // `device`: the stream's, as in headrace_selection. Where it is said, a program on another device refuses
  // the stream before anything is enqueued.
  [[nodiscard]] explicit CallerStreamGuard(cudaStream_t stream, int32_t device = -1) noexcept
      : former_(headrace_exchange_selection(headrace_selection{stream, device, 1})) {}
  ~CallerStreamGuard() { headrace_exchange_selection(former_); }

  CallerStreamGuard(const CallerStreamGuard&) = delete;
  CallerStreamGuard(CallerStreamGuard&&) = delete;
  CallerStreamGuard& operator=(const CallerStreamGuard&) = delete;
  CallerStreamGuard& operator=(CallerStreamGuard&&) = delete;
  static void* operator new(size_t) = delete;
  static void* operator new[](size_t) = delete;

 private:
  const headrace_selection former_;
};

}  // namespace headrace
#endif
