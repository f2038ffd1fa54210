// What CUDA libraries call of the CUDA run time and of the driver, under our names for them, as on a machine
// that has no GPU: they load, and their containers are made; whatever would need the device says so.
#include <cstddef>
#include <cstdint>

#define SHIM extern "C" __attribute__((visibility("default")))

namespace {
// cudaErrorNoDevice (driver_types.h) and CUDA_ERROR_NO_DEVICE (cuda.h) are one number.
constexpr int kNoDevice = 100;
thread_local int last = 0;
int no_device() { return last = kNoDevice; }
}  // namespace

// A container asks which device is current before it needs one.
SHIM int hrceGetDevice(int* device) {
  *device = 0;
  return 0;
}
SHIM int hrceSetDevice(int device) { return device == 0 ? 0 : no_device(); }
SHIM int hrceGetLastError() {
  int code = last;
  last = 0;
  return code;
}
SHIM const char* hrceGetErrorString(int code) {
  return code == 0 ? "no error" : "no GPU: headrace answers for the CUDA run time on a machine without one";
}
SHIM int hrceFree(void* memory) { return memory == nullptr ? 0 : no_device(); }
SHIM int hrceMalloc(void**, size_t) { return no_device(); }
SHIM int hrceMemcpy(void*, const void*, size_t, int) { return no_device(); }
SHIM int hrceMemcpyAsync(void*, const void*, size_t, int, void*) { return no_device(); }
SHIM int hrcePointerGetAttributes(void*, const void*) { return no_device(); }
SHIM int hrceEventCreate(void**) { return no_device(); }
SHIM int hrceEventDestroy(void*) { return no_device(); }
SHIM int hrceEventQuery(void*) { return no_device(); }
SHIM int hrceEventRecord(void*, void*) { return no_device(); }
SHIM int hrceEventSynchronize(void*) { return no_device(); }
SHIM int hrceStreamSynchronize(void*) { return no_device(); }

SHIM int hrGetErrorString(int code, const char** text) {
  *text = hrceGetErrorString(code);
  return 0;
}
SHIM int hrModuleLoadData(void**, const void*) { return no_device(); }
SHIM int hrModuleUnload(void*) { return no_device(); }
SHIM int hrModuleGetFunction(void**, void*, const char*) { return no_device(); }
SHIM int hrFuncSetAttribute(void*, int, int) { return no_device(); }
SHIM int hrLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*,
                        void**, void**) {
  return no_device();
}

SHIM int32_t aoti_hrace_create_cuda_stream_guard(void*, int32_t, void**) { return no_device(); }
SHIM int32_t aoti_hrace_delete_cuda_stream_guard(void*) { return 0; }
SHIM int32_t aoti_hrace_create_cuda_guard(int32_t, void**) { return no_device(); }
SHIM int32_t aoti_hrace_delete_cuda_guard(void*) { return 0; }
SHIM int32_t aoti_hrace_cuda_guard_set_index(void*, int32_t) { return no_device(); }
SHIM int32_t aoti_hrace_get_current_cuda_stream(int32_t, void**) { return no_device(); }
