#include "device/driver.h"

#include <dlfcn.h>

#include <mutex>

namespace headrace::cu {

namespace {

// By the name that drivers install; a path would pick one of several.
constexpr const char* kLibrary = "libcuda.so.1";
constexpr const char* kElsewhere =
    "or use device='sim' (simulated) or device='cpu' (of a command, --device sim or --device cpu)";

Status refused(const std::string& expected, const std::string& got, const std::string& advice) {
  Status status(ErrorCode::kDevice, "cuda: expected " + expected + ", got " + got + "; " + advice);
  status->device = "cuda";
  return status;
}

Status too_old(const std::string& got) {
  return refused("an NVIDIA driver for CUDA " + version_text(kOldestDriver) + " or newer (525 or newer)", got,
                 std::string("update the driver, ") + kElsewhere);
}

Result<const Driver*> open() {
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    return refused("an NVIDIA driver",
                   std::string("none (") + (why ? why : "libcuda.so.1 cannot be opened") + ")",
                   std::string("install NVIDIA's driver, in a container give it the GPU, ") + kElsewhere);
  }
  // Never closed: the driver keeps threads of its own.
  static Driver found;
  found = Driver();
  const char* missing = nullptr;
#define HEADRACE_DRIVER_ENTRY(name, symbol, arguments)                      \
  found.name = reinterpret_cast<Code(*) arguments>(dlsym(library, symbol)); \
  if (found.name == nullptr && missing == nullptr) missing = symbol;
  HEADRACE_DRIVER_REQUIRED(HEADRACE_DRIVER_ENTRY)
#undef HEADRACE_DRIVER_ENTRY
#define HEADRACE_DRIVER_ENTRY(name, symbol, arguments) \
  found.name = reinterpret_cast<Code(*) arguments>(dlsym(library, symbol));
  HEADRACE_DRIVER_OPTIONAL(HEADRACE_DRIVER_ENTRY)
#undef HEADRACE_DRIVER_ENTRY
  if (found.DriverGetVersion == nullptr)
    return refused("an NVIDIA driver", std::string("a ") + kLibrary + " that is none (no cuDriverGetVersion)",
                   std::string("look which library that is (ldconfig -p), ") + kElsewhere);
  // Works before cuInit (the reference lists no CUDA_ERROR_NOT_INITIALIZED for it).
  if (Code code = found.DriverGetVersion(&found.version); code != kSuccess)
    return refused("an NVIDIA driver", "one that does not tell its version: " + found.text(code),
                   std::string("reinstall the driver, ") + kElsewhere);
  if (found.version < kOldestDriver) return too_old("one for CUDA " + version_text(found.version));
  if (missing != nullptr)
    return too_old("one for CUDA " + version_text(found.version) + " without " + missing);
  if (Code code = found.Init(0); code != kSuccess) {
    if (code == kNoDevice)
      return refused("a GPU", "an NVIDIA driver that sees none (" + found.text(code) + ")",
                     std::string("look at nvidia-smi and at CUDA_VISIBLE_DEVICES, ") + kElsewhere);
    return refused(
        "an NVIDIA driver that starts", found.text(code),
        std::string(code == kSystemDriverMismatch
                        ? "restart after the driver's update: its library and kernel module differ, "
                        : "look at nvidia-smi and at the kernel's log, ") +
            kElsewhere);
  }
  return &found;
}

}  // namespace

std::string Driver::text(Code code) const {
  const char* name = nullptr;
  const char* words = nullptr;
  if (GetErrorName == nullptr || GetErrorName(code, &name) != kSuccess || name == nullptr)
    return "driver error " + std::to_string(code);
  if (GetErrorString == nullptr || GetErrorString(code, &words) != kSuccess || words == nullptr) return name;
  return std::string(name) + " (" + words + ")";
}

const char* Driver::missing_for_partitions() const {
  if (DeviceGetDevResource == nullptr) return "cuDeviceGetDevResource";
  if (DevSmResourceSplitByCount == nullptr) return "cuDevSmResourceSplitByCount";
  if (DevResourceGenerateDesc == nullptr) return "cuDevResourceGenerateDesc";
  if (GreenCtxCreate == nullptr) return "cuGreenCtxCreate";
  if (GreenCtxDestroy == nullptr) return "cuGreenCtxDestroy";
  if (GreenCtxGetDevResource == nullptr) return "cuGreenCtxGetDevResource";
  if (GreenCtxStreamCreate == nullptr) return "cuGreenCtxStreamCreate";
  return nullptr;
}

const char* Driver::missing_for_nodes() const {
  if (GraphGetNodes == nullptr) return "cuGraphGetNodes";
  if (GraphNodeGetType == nullptr) return "cuGraphNodeGetType";
  if (GraphChildGraph == nullptr) return "cuGraphChildGraphNodeGetGraph";
  if (GraphKernelNode == nullptr) return "cuGraphKernelNodeGetParams_v2";
  return nullptr;
}

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

Result<const Driver*> driver() {
  static std::mutex mutex;
  static const Driver* found = nullptr;
  std::lock_guard lock(mutex);
  if (found == nullptr) {
    auto opened = open();
    if (!opened.ok()) return opened;  // asked again the next time: a driver may come
    found = *opened;
  }
  return found;
}

}  // namespace headrace::cu
