// NVIDIA's driver, opened at run time: types, numbers and entry points of the CUDA driver API as far as they
// are used here, declared by hand so that no toolkit is needed to build. Everything is as in cuda.h of CUDA
// 13.0, workqueues as in that of 13.1, for 64-bit; tests/native/cuda/test_driver_declarations.cpp compares
// where a header is at hand.
//
// Entry points are looked up by the name that the library exports, its version suffix included: that name's
// signature never changes. None is a per-thread variant (_ptsz): streams are always named by a handle.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "headrace/status.h"

namespace headrace::cu {

using Code = int;                    // CUresult
using Device = int;                  // CUdevice
using Address = unsigned long long;  // CUdeviceptr_v2
using Context = struct ContextOf*;
using Stream = struct StreamOf*;
using Event = struct EventOf*;
using Pool = struct PoolOf*;
using Graph = struct GraphOf*;
using GraphExec = struct GraphExecOf*;
using GraphNode = struct GraphNodeOf*;
using Kernel = struct KernelOf*;
using Library = struct LibraryOf*;
using Module = struct ModuleOf*;
using Function = struct FunctionOf*;
using GreenContext = struct GreenContextOf*;
using ResourceDescription = struct ResourceDescriptionOf*;
using HostFunction = void (*)(void*);

// CUmemPoolProps_v1
struct PoolProperties {
  int allocation_type;
  int handle_types;
  int location_type;
  int location_id;
  void* security_attributes;
  size_t max_nbytes;
  unsigned short usage;
  unsigned char reserved[54];
};
static_assert(sizeof(PoolProperties) == 88);

// CUDA_KERNEL_NODE_PARAMS_v2
struct KernelNode {
  Function function;  // null where it was launched by `kernel`
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_nbytes;
  void** arguments;
  void** extra;
  Kernel kernel;
  Context context;
};
static_assert(sizeof(KernelNode) == 72);

// CUdevSmResource, the first members that every driver since 12.4 fills in
struct SmResource {
  unsigned sm_count;
  unsigned least;
  unsigned alignment;
};

// CUdevWorkqueueConfigResource
struct WorkqueueConfig {
  Device device;
  unsigned concurrency_limit;
  int scope;
};

// CUdevResource_v1
struct Resource {
  int type;
  unsigned char padding[92];
  union {
    SmResource sm;
    WorkqueueConfig workqueues;
    unsigned char oversize[48];
  };
};
static_assert(sizeof(Resource) == 144);

enum : Code {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kDeinitialized = 4,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kNoBinaryForGpu = 209,
  kInvalidPtx = 218,
  kNoCompiler = 221,
  kUnsupportedPtx = 222,
  kCompilerDisabled = 223,
  kInvalidHandle = 400,
  kIllegalState = 401,
  kNotReady = 600,
  kIllegalAddress = 700,
  kContextIsDestroyed = 709,
  kLaunchFailed = 719,
  kNotPermitted = 800,
  kNotSupported = 801,
  kSystemDriverMismatch = 803,
  kCaptureUnsupported = 900,
  kCaptureInvalidated = 901,
  kCaptureMerge = 902,
  kCaptureUnmatched = 903,
  kCaptureUnjoined = 904,
  kCaptureIsolation = 905,
  kCaptureImplicit = 906,
  kCapturedEvent = 907,
  kCaptureWrongThread = 908,
  kInvalidResourceType = 914,
  kInvalidResourceConfiguration = 915,
};

// CUdevice_attribute
enum : int {
  kAttributeSmCount = 16,
  kAttributeUnifiedAddressing = 41,
  kAttributeCapabilityMajor = 75,
  kAttributeCapabilityMinor = 76,
  kAttributeMemoryPools = 115,
  kAttributeMps = 133,
};

// CUpointer_attribute, CUmemorytype
enum : int {
  kPointerMemoryType = 2,
  kPointerDevice = 3,
  kPointerHost = 4,
  kPointerIsManaged = 8,
  kPointerDeviceOrdinal = 9,
  kPointerRangeStart = 11,
  kPointerRangeSize = 12,
};
enum : unsigned { kMemoryHost = 1, kMemoryDevice = 2 };

// CUmemPool_attribute, CUmemAllocationType, CUmemLocationType
enum : int {
  kPoolReuseInternalDependencies = 3,
  kPoolReleaseThreshold = 4,
  kPoolReservedNow = 5,
  kPoolUsedNow = 7,
};
enum : int { kAllocationPinned = 1, kLocationDevice = 1 };

// CUstream_flags, CUevent_flags
enum : unsigned { kStreamNonBlocking = 1, kEventDisableTiming = 2 };

// CUstreamCaptureMode, CUstreamCaptureStatus
enum : int { kCaptureGlobal = 0, kCaptureThreadLocal = 1, kCaptureRelaxed = 2 };
enum : int { kStatusNone = 0, kStatusActive = 1, kStatusInvalidated = 2 };

// CUgraphNodeType
enum : int {
  kNodeKernel = 0,
  kNodeCopy = 1,
  kNodeFill = 2,
  kNodeHost = 3,
  kNodeGraph = 4,
  kNodeEmpty = 5,
  kNodeWait = 6,
  kNodeRecord = 7,
  kNodeSignalSemaphore = 8,
  kNodeWaitSemaphore = 9,
  kNodeAllocate = 10,
  kNodeFree = 11,
};

// CUdevResourceType, CUgreenCtxCreate_flags
enum : int { kResourceSm = 1, kResourceWorkqueueConfig = 1000 };
enum : unsigned { kGreenDefaultStream = 1 };

// CUdevWorkqueueConfigScope
enum : int { kWorkqueuesShared = 0, kWorkqueuesBalanced = 1 };

// Every driver of CUDA 12.0 and later has these.
#define HEADRACE_DRIVER_REQUIRED(X)                                                                  \
  X(DriverGetVersion, "cuDriverGetVersion", (int*))                                                  \
  X(Init, "cuInit", (unsigned))                                                                      \
  X(GetErrorName, "cuGetErrorName", (Code, const char**))                                            \
  X(GetErrorString, "cuGetErrorString", (Code, const char**))                                        \
  X(DeviceGetCount, "cuDeviceGetCount", (int*))                                                      \
  X(DeviceGet, "cuDeviceGet", (Device*, int))                                                        \
  X(DeviceGetName, "cuDeviceGetName", (char*, int, Device))                                          \
  X(DeviceGetAttribute, "cuDeviceGetAttribute", (int*, int, Device))                                 \
  X(DeviceTotalMem, "cuDeviceTotalMem_v2", (size_t*, Device))                                        \
  X(DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (Context*, Device))                          \
  X(DevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", (Device))                               \
  X(CtxGetCurrent, "cuCtxGetCurrent", (Context*))                                                    \
  X(CtxPushCurrent, "cuCtxPushCurrent_v2", (Context))                                                \
  X(CtxPopCurrent, "cuCtxPopCurrent_v2", (Context*))                                                 \
  X(CtxGetDevice, "cuCtxGetDevice", (Device*))                                                       \
  X(CtxGetStreamPriorityRange, "cuCtxGetStreamPriorityRange", (int*, int*))                          \
  X(CtxSynchronize, "cuCtxSynchronize", ())                                                          \
  X(MemGetInfo, "cuMemGetInfo_v2", (size_t*, size_t*))                                               \
  X(MemPoolCreate, "cuMemPoolCreate", (Pool*, const PoolProperties*))                                \
  X(MemPoolDestroy, "cuMemPoolDestroy", (Pool))                                                      \
  X(MemPoolSetAttribute, "cuMemPoolSetAttribute", (Pool, int, void*))                                \
  X(MemPoolGetAttribute, "cuMemPoolGetAttribute", (Pool, int, void*))                                \
  X(MemPoolTrimTo, "cuMemPoolTrimTo", (Pool, size_t))                                                \
  X(MemAllocFromPoolAsync, "cuMemAllocFromPoolAsync", (Address*, size_t, Pool, Stream))              \
  X(MemFreeAsync, "cuMemFreeAsync", (Address, Stream))                                               \
  X(MemcpyAsync, "cuMemcpyAsync", (Address, Address, size_t, Stream))                                \
  X(MemsetD8Async, "cuMemsetD8Async", (Address, unsigned char, size_t, Stream))                      \
  X(PointerGetAttributes, "cuPointerGetAttributes", (unsigned, int*, void**, Address))               \
  X(StreamCreateWithPriority, "cuStreamCreateWithPriority", (Stream*, unsigned, int))                \
  X(StreamDestroy, "cuStreamDestroy_v2", (Stream))                                                   \
  X(StreamSynchronize, "cuStreamSynchronize", (Stream))                                              \
  X(StreamQuery, "cuStreamQuery", (Stream))                                                          \
  X(StreamWaitEvent, "cuStreamWaitEvent", (Stream, Event, unsigned))                                 \
  X(StreamGetCtx, "cuStreamGetCtx", (Stream, Context*))                                              \
  X(LaunchHostFunc, "cuLaunchHostFunc", (Stream, HostFunction, void*))                               \
  X(EventCreate, "cuEventCreate", (Event*, unsigned))                                                \
  X(EventDestroy, "cuEventDestroy_v2", (Event))                                                      \
  X(EventRecord, "cuEventRecord", (Event, Stream))                                                   \
  X(EventQuery, "cuEventQuery", (Event))                                                             \
  X(EventSynchronize, "cuEventSynchronize", (Event))                                                 \
  X(EventElapsedTime, "cuEventElapsedTime", (float*, Event, Event))                                  \
  X(StreamBeginCapture, "cuStreamBeginCapture_v2", (Stream, int))                                    \
  X(StreamEndCapture, "cuStreamEndCapture", (Stream, Graph*))                                        \
  X(StreamIsCapturing, "cuStreamIsCapturing", (Stream, int*))                                        \
  X(StreamGetCaptureInfo, "cuStreamGetCaptureInfo_v2",                                               \
    (Stream, int*, unsigned long long*, Graph*, const GraphNode**, size_t*))                         \
  X(ThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode", (int*))                    \
  X(GraphInstantiate, "cuGraphInstantiateWithFlags", (GraphExec*, Graph, unsigned long long))        \
  X(GraphUpload, "cuGraphUpload", (GraphExec, Stream))                                               \
  X(GraphLaunch, "cuGraphLaunch", (GraphExec, Stream))                                               \
  X(GraphDestroy, "cuGraphDestroy", (Graph))                                                         \
  X(GraphExecDestroy, "cuGraphExecDestroy", (GraphExec))                                             \
  X(ModuleLoadData, "cuModuleLoadData", (Module*, const void*))                                      \
  X(ModuleUnload, "cuModuleUnload", (Module))                                                        \
  X(ModuleGetFunction, "cuModuleGetFunction", (Function*, Module, const char*))                      \
  X(FuncSetAttribute, "cuFuncSetAttribute", (Function, int, int))                                    \
  X(LaunchKernel, "cuLaunchKernel",                                                                  \
    (Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**, \
     void**))

// Null where the driver lacks them: partitions need all the green ones, which came with CUDA 12.4.
#define HEADRACE_DRIVER_OPTIONAL(X)                                                                    \
  X(StreamGetCtxBoth, "cuStreamGetCtx_v2", (Stream, Context*, GreenContext*))                          \
  X(StreamGetDevice, "cuStreamGetDevice", (Stream, Device*))                                           \
  X(DeviceGetDevResource, "cuDeviceGetDevResource", (Device, Resource*, int))                          \
  X(DevSmResourceSplitByCount, "cuDevSmResourceSplitByCount",                                          \
    (Resource*, unsigned*, const Resource*, Resource*, unsigned, unsigned))                            \
  X(DevResourceGenerateDesc, "cuDevResourceGenerateDesc", (ResourceDescription*, Resource*, unsigned)) \
  X(GreenCtxCreate, "cuGreenCtxCreate", (GreenContext*, ResourceDescription, Device, unsigned))        \
  X(GreenCtxDestroy, "cuGreenCtxDestroy", (GreenContext))                                              \
  X(GreenCtxGetDevResource, "cuGreenCtxGetDevResource", (GreenContext, Resource*, int))                \
  X(GreenCtxStreamCreate, "cuGreenCtxStreamCreate", (Stream*, GreenContext, unsigned, int))            \
  X(GraphGetNodes, "cuGraphGetNodes", (Graph, GraphNode*, size_t*))                                    \
  X(GraphNodeGetType, "cuGraphNodeGetType", (GraphNode, int*))                                         \
  X(GraphChildGraph, "cuGraphChildGraphNodeGetGraph", (GraphNode, Graph*))                             \
  X(GraphKernelNode, "cuGraphKernelNodeGetParams_v2", (GraphNode, KernelNode*))                        \
  X(FuncGetName, "cuFuncGetName", (const char**, Function))                                            \
  X(KernelGetName, "cuKernelGetName", (const char**, Kernel))                                          \
  X(LibraryLoadData, "cuLibraryLoadData",                                                              \
    (Library*, const void*, int*, void**, unsigned, int*, void**, unsigned))                           \
  X(LibraryUnload, "cuLibraryUnload", (Library))                                                       \
  X(LibraryGetKernel, "cuLibraryGetKernel", (Kernel*, Library, const char*))

struct Driver {
  int version = 0;  // as cuDriverGetVersion counts: 13000 for CUDA 13.0
#define HEADRACE_DRIVER_ENTRY(name, symbol, arguments) Code(*name) arguments = nullptr;
  HEADRACE_DRIVER_REQUIRED(HEADRACE_DRIVER_ENTRY)
  HEADRACE_DRIVER_OPTIONAL(HEADRACE_DRIVER_ENTRY)
#undef HEADRACE_DRIVER_ENTRY

  // "CUDA_ERROR_INVALID_VALUE (invalid argument)"; "driver error 12345" for a code that it does not know.
  std::string text(Code code) const;
  // The first entry point that partitions need and this driver lacks; null where it has them all.
  const char* missing_for_partitions() const;
  // The same for reading a graph's nodes.
  const char* missing_for_nodes() const;
};

constexpr int kOldestDriver = 12000;
// CU_DEV_RESOURCE_TYPE_WORKQUEUE_CONFIG is in cuda.h of 13.1 and not in that of 13.0. It came with no entry
// point, so the version is all that tells beforehand.
constexpr int kOldestWithWorkqueues = 13010;

// "13.0" for 13000.
std::string version_text(int version);

// The process's driver, opened and initialized at the first call that finds one. kDevice: there is none, it
// is older than CUDA 12.0, or it does not start; the message says what to do. Loads and starts nothing else.
Result<const Driver*> driver();

}  // namespace headrace::cu
