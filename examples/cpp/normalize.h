// A delegate for ExecuTorch, in a library of its own: what the network of examples/digits asks for under the
// name "DigitsNormalize". Loading the library makes it known to the engine.
#pragma once

#include <headrace/caller_stream.h>

#include <functional>

namespace digits {

// How host code runs in the order of a stream: false where it could not be enqueued. `stream` is 0 where none
// is selected.
using Enqueue = std::function<bool(cudaStream_t stream, std::function<void()> work)>;

// For devices whose memory the host can use (cpu, and the simulated one): what the delegate does with its
// work from now on. Null, as at first: it launches a kernel on a GPU.
void compute_on_host(Enqueue enqueue);

// The stream that the delegate found selected when it ran last.
headrace_selection last_seen();

}  // namespace digits
