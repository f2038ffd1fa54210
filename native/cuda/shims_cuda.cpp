// What CUDA libraries call of the CUDA run time and of the driver, under our names for them, answered on the
// driver API (PK3). On a thread with no arena of a GPU they answer as on a machine that has none: such a
// library loads, and whatever would need the device says so.
//
// The run time's numbers for errors are the driver's wherever AOTInductor looks at them: 0 and 600 (not
// ready).
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cuda/arena.h"
#include "device/driver.h"

#define SHIM extern "C" __attribute__((visibility("default")))

namespace headrace::shims {

namespace {

// cudaErrorNoDevice (driver_types.h) and CUDA_ERROR_NO_DEVICE (cuda.h) are one number.
constexpr int32_t kNoDevice = 100;
constexpr int32_t kInvalidDevice = 101;
thread_local int32_t last = 0;

int32_t remember(int32_t code) {
  if (code != 0) last = code;
  return code;
}

// The calling thread's arena, if it is one of a GPU.
Arena* gpu_arena() {
  Arena* arena = current_arena();
  return arena != nullptr && arena->gpu.driver != nullptr ? arena : nullptr;
}

template <class Call>
int32_t on_driver(Call call) {
  Arena* arena = gpu_arena();
  if (arena == nullptr) return remember(kNoDevice);
  int32_t code = call(*arena, *arena->gpu.driver);
  return code == 0 ? 0 : remember(driver_failed(code));
}

cu::Address address(const void* data) { return reinterpret_cast<uintptr_t>(data); }
cu::Stream stream_of(void* handle) { return static_cast<cu::Stream>(handle); }

// Copies in stream order; waits where the caller is going to read host memory next.
int32_t copy(Arena& arena, void* to, const void* from, size_t nbytes, void* stream, bool waits) {
  if (arena.run.rehearsal || nbytes == 0) return 0;
  const cu::Driver& driver = *arena.gpu.driver;
  int32_t code = driver.MemcpyAsync(address(to), address(from), nbytes, stream_of(stream));
  if (code != 0 || !waits) return code;
  arena.gpu.waited(arena.gpu.owner);
  return driver.StreamSynchronize(stream_of(stream));
}

}  // namespace

int32_t driver_failed(int32_t code) {
  if (code == 0 || code == cu::kNotReady) return code;
  Arena* arena = gpu_arena();
  if (arena != nullptr && arena->counts.code == 0) arena->counts.code = code;
  return code;
}

int32_t copy_bytes(Arena& arena, void* to, bool to_host, const void* from, bool from_host, size_t nbytes) {
  if (to_host && from_host) {
    std::memcpy(to, from, nbytes);
    return 0;
  }
  if (arena.gpu.driver == nullptr) return fail("a copy of device memory on a machine without a GPU");
  if (to_host != from_host && arena.run.replayed)
    return fail(
        "a copy between host and device, which a graph would make once, at capture, and never at "
        "replay");
  if (to_host && arena.run.rehearsal) return fail("a value read from the device in a rehearsal");
  if (int32_t code = copy(arena, to, from, nbytes, arena.run.stream, to_host)) {
    (void)driver_failed(code);
    const char* text = nullptr;
    if (arena.gpu.driver->GetErrorString(code, &text) != 0 || text == nullptr) text = "an unknown error";
    return fail("a copy of %zu bytes: %s", nbytes, text);
  }
  if (to_host != from_host) arena.gpu.copied(arena.gpu.owner, from_host ? nbytes : 0, to_host ? nbytes : 0);
  return 0;
}

}  // namespace headrace::shims

using namespace headrace::shims;
namespace cu = headrace::cu;

// ---- the run time

// A container asks which device is current before it needs one.
SHIM int hrceGetDevice(int* device) {
  Arena* arena = gpu_arena();
  *device = arena == nullptr ? 0 : arena->gpu.ordinal;
  return 0;
}
SHIM int hrceSetDevice(int device) {
  Arena* arena = gpu_arena();
  if (arena == nullptr) return device == 0 ? 0 : remember(kNoDevice);
  return device == arena->gpu.ordinal ? 0 : remember(kInvalidDevice);
}
SHIM int hrceGetLastError() {
  int32_t code = last;
  last = 0;
  return code;
}
SHIM const char* hrceGetErrorString(int code) {
  const char* text = nullptr;
  Arena* arena = gpu_arena();
  if (code == 0) return "no error";
  if (arena == nullptr) return "no GPU: headrace answers for the CUDA run time on a machine without one";
  return arena->gpu.driver->GetErrorString(code, &text) == 0 && text != nullptr ? text : "unknown error";
}
SHIM int hrceFree(void* memory) {
  if (memory == nullptr) return 0;
  return on_driver([&](Arena& arena, const cu::Driver&) {
    arena.gpu.give(arena.gpu.owner, memory);
    return 0;
  });
}
SHIM int hrceMalloc(void** out, size_t nbytes) {
  return on_driver([&](Arena& arena, const cu::Driver&) -> int32_t {
    *out = arena.gpu.take(arena.gpu.owner, nbytes);
    return *out == nullptr ? static_cast<int32_t>(cu::kOutOfMemory) : 0;
  });
}
SHIM int hrceMemcpy(void* to, const void* from, size_t nbytes, int) {
  return on_driver(
      [&](Arena& arena, const cu::Driver&) { return copy(arena, to, from, nbytes, arena.run.stream, true); });
}
SHIM int hrceMemcpyAsync(void* to, const void* from, size_t nbytes, int, void* stream) {
  return on_driver(
      [&](Arena& arena, const cu::Driver&) { return copy(arena, to, from, nbytes, stream, false); });
}
SHIM int hrceMemsetAsync(void* to, int value, size_t nbytes, void* stream) {
  return on_driver([&](Arena& arena, const cu::Driver& driver) -> int32_t {
    if (arena.run.rehearsal || nbytes == 0) return 0;
    return driver.MemsetD8Async(address(to), static_cast<unsigned char>(value), nbytes, stream_of(stream));
  });
}

namespace {
// cudaPointerAttributes as CUDA 12 and 13 share it; CUDA 13 has more behind, which is left alone.
struct PointerAttributes {
  int type, device;
  void *on_device, *on_host;
};
static_assert(sizeof(PointerAttributes) == 24);
}  // namespace

SHIM int hrcePointerGetAttributes(PointerAttributes* out, const void* data) {
  return on_driver([&](Arena&, const cu::Driver& driver) -> int32_t {
    unsigned type = 0, managed = 0;
    int ordinal = -1;
    cu::Address on_device = 0;
    void* on_host = nullptr;
    int attributes[] = {cu::kPointerMemoryType, cu::kPointerDeviceOrdinal, cu::kPointerDevice,
                        cu::kPointerHost, cu::kPointerIsManaged};
    void* values[] = {&type, &ordinal, &on_device, &on_host, &managed};
    if (int32_t code = driver.PointerGetAttributes(5, attributes, values, address(data))) return code;
    // cudaMemoryType: 0 unregistered, 1 host, 2 device, 3 managed. Memory that CUDA does not know is no
    // error.
    out->type = managed != 0 ? 3 : static_cast<int>(type <= 2 ? type : 0);
    out->device = type != 0 ? ordinal : -2;
    out->on_device = reinterpret_cast<void*>(on_device);
    out->on_host = type != 0 ? on_host : const_cast<void*>(data);
    return 0;
  });
}

// The library's events: behind a run of its own, which ours stand for; see GpuRun::events.
SHIM int hrceEventCreate(void** event) {
  return on_driver([&](Arena&, const cu::Driver& driver) -> int32_t {
    return driver.EventCreate(reinterpret_cast<cu::Event*>(event), cu::kEventDisableTiming);
  });
}
SHIM int hrceEventDestroy(void* event) {
  return on_driver([&](Arena&, const cu::Driver& driver) -> int32_t {
    // Not asked twice where it fails: the driver may tell of earlier work, and have destroyed the event all
    // the same.
    return driver.EventDestroy(static_cast<cu::Event>(event));
  });
}
SHIM int hrceEventQuery(void* event) {
  return on_driver([&](Arena& arena, const cu::Driver& driver) -> int32_t {
    if (!arena.run.events) return 0;
    return driver.EventQuery(static_cast<cu::Event>(event));
  });
}
SHIM int hrceEventRecord(void* event, void* stream) {
  return on_driver([&](Arena& arena, const cu::Driver& driver) -> int32_t {
    return arena.run.events ? driver.EventRecord(static_cast<cu::Event>(event), stream_of(stream)) : 0;
  });
}
SHIM int hrceEventSynchronize(void* event) {
  return on_driver([&](Arena& arena, const cu::Driver& driver) -> int32_t {
    if (!arena.run.events) return 0;
    arena.gpu.waited(arena.gpu.owner);
    return driver.EventSynchronize(static_cast<cu::Event>(event));
  });
}
SHIM int hrceStreamSynchronize(void* stream) {
  return on_driver([&](Arena& arena, const cu::Driver& driver) -> int32_t {
    if (arena.run.rehearsal) return 0;
    arena.gpu.waited(arena.gpu.owner);
    return driver.StreamSynchronize(stream_of(stream));
  });
}

// ---- the driver

SHIM int hrGetErrorString(int code, const char** text) {
  *text = hrceGetErrorString(code);
  return 0;
}
SHIM int hrModuleLoadData(void** module, const void* image) {
  return on_driver([&](Arena&, const cu::Driver& driver) -> int32_t {
    return driver.ModuleLoadData(reinterpret_cast<cu::Module*>(module), image);
  });
}
SHIM int hrModuleUnload(void* module) {
  return on_driver([&](Arena&, const cu::Driver& driver) -> int32_t {
    return driver.ModuleUnload(static_cast<cu::Module>(module));
  });
}
SHIM int hrModuleGetFunction(void** function, void* module, const char* name) {
  return on_driver([&](Arena&, const cu::Driver& driver) -> int32_t {
    return driver.ModuleGetFunction(reinterpret_cast<cu::Function*>(function),
                                    static_cast<cu::Module>(module), name);
  });
}
SHIM int hrFuncSetAttribute(void* function, int attribute, int value) {
  return on_driver([&](Arena&, const cu::Driver& driver) -> int32_t {
    return driver.FuncSetAttribute(static_cast<cu::Function>(function), attribute, value);
  });
}
SHIM int hrLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared_nbytes, void* stream,
                        void** arguments, void** extra) {
  return on_driver([&](Arena& arena, const cu::Driver& driver) -> int32_t {
    if (arena.run.rehearsal) return 0;
    ++arena.counts.launches;
    return driver.LaunchKernel(static_cast<cu::Function>(function), grid_x, grid_y, grid_z, block_x, block_y,
                               block_z, shared_nbytes, stream_of(stream), arguments, extra);
  });
}

// ---- torch's guards: of the stream and the device that the thread allocates and copies on

namespace {
int32_t check_index(const char* what, int32_t index) {
  Arena* arena = gpu_arena();
  if (arena == nullptr) return remember(kNoDevice);
  if (index == arena->gpu.ordinal || index < 0) return 0;
  return fail("%s: expected device index %d, that of the program, got %d", what, arena->gpu.ordinal, index);
}
}  // namespace

SHIM int32_t aoti_hrace_create_cuda_stream_guard(void* stream, int32_t index, void** guard) {
  if (int32_t code = check_index("cuda_stream_guard", index)) return code;
  Arena& arena = *gpu_arena();
  if (arena.guards == kMaxGuards)
    return fail("cuda_stream_guard: expected at most %d guards at once, got one more", kMaxGuards);
  void*& former = arena.guarded[arena.guards++];
  former = arena.run.stream;
  arena.run.stream = stream;
  *guard = &former;
  return 0;
}
// Guards end in the opposite order of their beginning: each is a scope of the library's.
SHIM int32_t aoti_hrace_delete_cuda_stream_guard(void* guard) {
  Arena* arena = gpu_arena();
  if (guard == nullptr || arena == nullptr || arena->guards == 0) return 0;
  arena->run.stream = *static_cast<void**>(guard);
  --arena->guards;
  return 0;
}
// A library works on one device, which is current while it runs: there is nothing to put back.
SHIM int32_t aoti_hrace_create_cuda_guard(int32_t index, void** guard) {
  static char only;
  *guard = &only;
  return check_index("cuda_guard", index);
}
SHIM int32_t aoti_hrace_delete_cuda_guard(void*) { return 0; }
SHIM int32_t aoti_hrace_cuda_guard_set_index(void*, int32_t index) {
  return check_index("cuda_guard_set_index", index);
}
SHIM int32_t aoti_hrace_get_current_cuda_stream(int32_t index, void** stream) {
  if (int32_t code = check_index("get_current_cuda_stream", index)) return code;
  *stream = gpu_arena()->run.stream;
  return 0;
}
