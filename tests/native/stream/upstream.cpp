// A library with the names of ExecuTorch's extension/cuda/caller_stream.h, as any user of it was compiled
// against them, and variants that a mirror has to refuse.
#include <unistd.h>

#include <optional>

struct CUstream_st;
using cudaStream_t = CUstream_st*;

#define EXPORTED __attribute__((visibility("default")))

namespace executorch::extension::cuda {
namespace {
thread_local std::optional<cudaStream_t> current;
}  // namespace

EXPORTED std::optional<cudaStream_t> getCallerStream() { return current; }

#if !defined(WITHOUT_GUARD)
class EXPORTED CallerStreamGuard {
 public:
  explicit CallerStreamGuard(cudaStream_t stream);
  ~CallerStreamGuard();

 private:
#if defined(LARGER)
  char more_[200] = {};
#endif
  std::optional<cudaStream_t> former_;
};

CallerStreamGuard::CallerStreamGuard(cudaStream_t stream) : former_(current) { current = stream; }
CallerStreamGuard::~CallerStreamGuard() {
#if !defined(KEEPS)
  current = former_;
#endif
}
#endif
}  // namespace executorch::extension::cuda

extern "C" {
EXPORTED volatile int constructors_done = 0;
}

namespace {
[[gnu::constructor]] void construct() {
#if defined(SLOW)
  usleep(500 * 1000);
#endif
  constructors_done = 1;
}
}  // namespace
