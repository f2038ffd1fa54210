// How often CudaBackend is registered: linked, opened at run time, or both. Prints the count, and the kernels
// that came.
#include <headrace/program.h>

#include <cstdio>
#ifdef OPEN
#include <dlfcn.h>
#endif

int main() {
#ifdef OPEN
  for (int i = 0; i < 2; ++i) {
    if (dlopen(OPEN, RTLD_NOW | RTLD_LOCAL) == nullptr) {
      std::fprintf(stderr, "%s\n", dlerror());
      return 1;
    }
  }
#endif
  int cuda = 0, xnnpack = 0;
  for (const std::string& name : headrace::registered_delegates()) {
    cuda += name == "CudaBackend";
    xnnpack += name == "XnnpackBackend";
  }
  headrace::Status status = headrace::initialize();
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.message().c_str());
  std::printf("%d %d %d\n", cuda, xnnpack, headrace::registered_kernels().size() > 200);
  return status.ok() ? 0 : 1;
}
