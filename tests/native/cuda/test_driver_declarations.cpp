// Our declarations of the driver API (native/device/driver.h) beside NVIDIA's own cuda.h. Only compiled.
#include <cuda.h>

#include <type_traits>

#include "device/driver.h"

namespace {

namespace cu = headrace::cu;

// What differs by name alone: a handle or a number of the same size, passed the same way.
template <class Ours, class Theirs>
constexpr bool alike() {
  if constexpr (std::is_same_v<Ours, Theirs>) {
    return true;
  } else if constexpr (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>) {
    return true;  // looked at one by one below where they are structures
  } else {
    return sizeof(Ours) == sizeof(Theirs) && (std::is_integral_v<Ours> || std::is_enum_v<Ours>) &&
           (std::is_integral_v<Theirs> || std::is_enum_v<Theirs>);
  }
}

template <class Ours, class Theirs>
struct Same : std::false_type {};
template <class... Ours, class... Theirs>
struct Same<cu::Code (*)(Ours...), CUresult (*)(Theirs...)> {
  static constexpr bool count = sizeof...(Ours) == sizeof...(Theirs);
  static constexpr bool check() {
    if constexpr (count) {
      return (alike<Ours, Theirs>() && ...);
    } else {
      return false;
    }
  }
  static constexpr bool value = check();
};

#define SAME(name, theirs) static_assert(Same<decltype(cu::Driver::name), CUresult(*) theirs>::value, #name)
#define SAME_FUNCTION(name, function) \
  static_assert(Same<decltype(cu::Driver::name), decltype(&function)>::value, #name)

SAME_FUNCTION(DriverGetVersion, cuDriverGetVersion);
SAME_FUNCTION(Init, cuInit);
SAME_FUNCTION(GetErrorName, cuGetErrorName);
SAME_FUNCTION(GetErrorString, cuGetErrorString);
SAME_FUNCTION(DeviceGetCount, cuDeviceGetCount);
SAME_FUNCTION(DeviceGet, cuDeviceGet);
SAME_FUNCTION(DeviceGetName, cuDeviceGetName);
SAME_FUNCTION(DeviceGetAttribute, cuDeviceGetAttribute);
SAME_FUNCTION(DeviceTotalMem, cuDeviceTotalMem_v2);
SAME_FUNCTION(DevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain);
SAME_FUNCTION(DevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2);
SAME_FUNCTION(CtxGetCurrent, cuCtxGetCurrent);
SAME_FUNCTION(CtxPushCurrent, cuCtxPushCurrent_v2);
SAME_FUNCTION(CtxPopCurrent, cuCtxPopCurrent_v2);
SAME_FUNCTION(CtxGetDevice, cuCtxGetDevice);
SAME_FUNCTION(CtxGetStreamPriorityRange, cuCtxGetStreamPriorityRange);
SAME_FUNCTION(CtxSynchronize, cuCtxSynchronize);
SAME_FUNCTION(MemGetInfo, cuMemGetInfo_v2);
SAME_FUNCTION(MemPoolCreate, cuMemPoolCreate);
SAME_FUNCTION(MemPoolDestroy, cuMemPoolDestroy);
SAME_FUNCTION(MemPoolSetAttribute, cuMemPoolSetAttribute);
SAME_FUNCTION(MemPoolGetAttribute, cuMemPoolGetAttribute);
SAME_FUNCTION(MemPoolTrimTo, cuMemPoolTrimTo);
SAME_FUNCTION(MemAllocFromPoolAsync, cuMemAllocFromPoolAsync);
SAME_FUNCTION(MemFreeAsync, cuMemFreeAsync);
SAME_FUNCTION(MemcpyAsync, cuMemcpyAsync);
SAME_FUNCTION(MemsetD8Async, cuMemsetD8Async);
SAME_FUNCTION(PointerGetAttributes, cuPointerGetAttributes);
SAME_FUNCTION(StreamCreateWithPriority, cuStreamCreateWithPriority);
SAME_FUNCTION(StreamDestroy, cuStreamDestroy_v2);
SAME_FUNCTION(StreamSynchronize, cuStreamSynchronize);
SAME_FUNCTION(StreamQuery, cuStreamQuery);
SAME_FUNCTION(StreamWaitEvent, cuStreamWaitEvent);
SAME_FUNCTION(StreamGetCtx, cuStreamGetCtx);
SAME_FUNCTION(LaunchHostFunc, cuLaunchHostFunc);
SAME_FUNCTION(EventCreate, cuEventCreate);
SAME_FUNCTION(EventDestroy, cuEventDestroy_v2);
SAME_FUNCTION(EventRecord, cuEventRecord);
SAME_FUNCTION(EventQuery, cuEventQuery);
SAME_FUNCTION(EventSynchronize, cuEventSynchronize);
SAME(EventElapsedTime, (float*, CUevent, CUevent));  // the header's own declaration is of _v2 by now
SAME_FUNCTION(StreamBeginCapture, cuStreamBeginCapture_v2);
SAME_FUNCTION(StreamEndCapture, cuStreamEndCapture);
SAME_FUNCTION(StreamIsCapturing, cuStreamIsCapturing);
// The header declares _v3; _v2 is in the part that only the driver's own sources see.
SAME(StreamGetCaptureInfo,
     (CUstream, CUstreamCaptureStatus*, cuuint64_t*, CUgraph*, const CUgraphNode**, size_t*));
SAME_FUNCTION(ThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode);
SAME_FUNCTION(GraphInstantiate, cuGraphInstantiateWithFlags);
SAME_FUNCTION(GraphUpload, cuGraphUpload);
SAME_FUNCTION(GraphLaunch, cuGraphLaunch);
SAME_FUNCTION(GraphDestroy, cuGraphDestroy);
SAME_FUNCTION(GraphExecDestroy, cuGraphExecDestroy);
SAME_FUNCTION(ModuleLoadData, cuModuleLoadData);
SAME_FUNCTION(ModuleUnload, cuModuleUnload);
SAME_FUNCTION(ModuleGetFunction, cuModuleGetFunction);
SAME_FUNCTION(FuncSetAttribute, cuFuncSetAttribute);
SAME_FUNCTION(LaunchKernel, cuLaunchKernel);
SAME_FUNCTION(StreamGetCtxBoth, cuStreamGetCtx_v2);
SAME_FUNCTION(StreamGetDevice, cuStreamGetDevice);
SAME_FUNCTION(DeviceGetDevResource, cuDeviceGetDevResource);
SAME_FUNCTION(DevSmResourceSplitByCount, cuDevSmResourceSplitByCount);
SAME_FUNCTION(DevResourceGenerateDesc, cuDevResourceGenerateDesc);
SAME_FUNCTION(GreenCtxCreate, cuGreenCtxCreate);
SAME_FUNCTION(GreenCtxDestroy, cuGreenCtxDestroy);
SAME_FUNCTION(GreenCtxGetDevResource, cuGreenCtxGetDevResource);
SAME_FUNCTION(GreenCtxStreamCreate, cuGreenCtxStreamCreate);
SAME_FUNCTION(GraphGetNodes, cuGraphGetNodes);
SAME_FUNCTION(GraphNodeGetType, cuGraphNodeGetType);
SAME_FUNCTION(GraphChildGraph, cuGraphChildGraphNodeGetGraph);
SAME_FUNCTION(GraphKernelNode, cuGraphKernelNodeGetParams_v2);
SAME_FUNCTION(FuncGetName, cuFuncGetName);
SAME_FUNCTION(KernelGetName, cuKernelGetName);
SAME_FUNCTION(LibraryLoadData, cuLibraryLoadData);
SAME_FUNCTION(LibraryUnload, cuLibraryUnload);
SAME_FUNCTION(LibraryGetKernel, cuLibraryGetKernel);

// Every entry of the table is compared above.
#define ONE(name, symbol, arguments) +1
static_assert(0 HEADRACE_DRIVER_REQUIRED(ONE) HEADRACE_DRIVER_OPTIONAL(ONE) == 74,
              "an entry is not compared here");

static_assert(sizeof(cu::PoolProperties) == sizeof(CUmemPoolProps));
static_assert(offsetof(cu::PoolProperties, allocation_type) == offsetof(CUmemPoolProps, allocType));
static_assert(offsetof(cu::PoolProperties, handle_types) == offsetof(CUmemPoolProps, handleTypes));
static_assert(offsetof(cu::PoolProperties, location_type) == offsetof(CUmemPoolProps, location));
static_assert(offsetof(cu::PoolProperties, location_id) == offsetof(CUmemPoolProps, location) + sizeof(int));
static_assert(offsetof(cu::PoolProperties, max_nbytes) == offsetof(CUmemPoolProps, maxSize));
static_assert(offsetof(cu::PoolProperties, usage) == offsetof(CUmemPoolProps, usage));
static_assert(sizeof(cu::KernelNode) == sizeof(CUDA_KERNEL_NODE_PARAMS_v2));
static_assert(offsetof(cu::KernelNode, function) == offsetof(CUDA_KERNEL_NODE_PARAMS_v2, func));
static_assert(offsetof(cu::KernelNode, kernel) == offsetof(CUDA_KERNEL_NODE_PARAMS_v2, kern));
static_assert(offsetof(cu::KernelNode, context) == offsetof(CUDA_KERNEL_NODE_PARAMS_v2, ctx));
static_assert(sizeof(cu::Resource) == sizeof(CUdevResource));
static_assert(offsetof(cu::Resource, sm) == offsetof(CUdevResource, sm));
static_assert(offsetof(cu::Resource, workqueues) == offsetof(CUdevResource, wqConfig));
static_assert(sizeof(cu::WorkqueueConfig) == sizeof(CUdevWorkqueueConfigResource));
static_assert(offsetof(cu::WorkqueueConfig, device) == offsetof(CUdevWorkqueueConfigResource, device));
static_assert(offsetof(cu::WorkqueueConfig, concurrency_limit) ==
              offsetof(CUdevWorkqueueConfigResource, wqConcurrencyLimit));
static_assert(offsetof(cu::WorkqueueConfig, scope) == offsetof(CUdevWorkqueueConfigResource, sharingScope));
static_assert(offsetof(cu::SmResource, sm_count) == offsetof(CUdevSmResource, smCount));
static_assert(offsetof(cu::SmResource, least) == offsetof(CUdevSmResource, minSmPartitionSize));
static_assert(offsetof(cu::SmResource, alignment) == offsetof(CUdevSmResource, smCoscheduledAlignment));

#define NUMBER(ours, theirs) static_assert(static_cast<int>(cu::ours) == static_cast<int>(theirs))
NUMBER(kSuccess, CUDA_SUCCESS);
NUMBER(kInvalidValue, CUDA_ERROR_INVALID_VALUE);
NUMBER(kOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY);
NUMBER(kNotInitialized, CUDA_ERROR_NOT_INITIALIZED);
NUMBER(kDeinitialized, CUDA_ERROR_DEINITIALIZED);
NUMBER(kNoDevice, CUDA_ERROR_NO_DEVICE);
NUMBER(kInvalidDevice, CUDA_ERROR_INVALID_DEVICE);
NUMBER(kInvalidContext, CUDA_ERROR_INVALID_CONTEXT);
NUMBER(kNoBinaryForGpu, CUDA_ERROR_NO_BINARY_FOR_GPU);
NUMBER(kInvalidPtx, CUDA_ERROR_INVALID_PTX);
NUMBER(kNoCompiler, CUDA_ERROR_JIT_COMPILER_NOT_FOUND);
NUMBER(kUnsupportedPtx, CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
NUMBER(kCompilerDisabled, CUDA_ERROR_JIT_COMPILATION_DISABLED);
NUMBER(kInvalidHandle, CUDA_ERROR_INVALID_HANDLE);
NUMBER(kIllegalState, CUDA_ERROR_ILLEGAL_STATE);
NUMBER(kNotReady, CUDA_ERROR_NOT_READY);
NUMBER(kIllegalAddress, CUDA_ERROR_ILLEGAL_ADDRESS);
NUMBER(kContextIsDestroyed, CUDA_ERROR_CONTEXT_IS_DESTROYED);
NUMBER(kLaunchFailed, CUDA_ERROR_LAUNCH_FAILED);
NUMBER(kNotPermitted, CUDA_ERROR_NOT_PERMITTED);
NUMBER(kNotSupported, CUDA_ERROR_NOT_SUPPORTED);
NUMBER(kSystemDriverMismatch, CUDA_ERROR_SYSTEM_DRIVER_MISMATCH);
NUMBER(kCaptureUnsupported, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
NUMBER(kCaptureInvalidated, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
NUMBER(kCaptureMerge, CUDA_ERROR_STREAM_CAPTURE_MERGE);
NUMBER(kCaptureUnmatched, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
NUMBER(kCaptureUnjoined, CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
NUMBER(kCaptureIsolation, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
NUMBER(kCaptureImplicit, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
NUMBER(kCapturedEvent, CUDA_ERROR_CAPTURED_EVENT);
NUMBER(kCaptureWrongThread, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
NUMBER(kInvalidResourceType, CUDA_ERROR_INVALID_RESOURCE_TYPE);
NUMBER(kInvalidResourceConfiguration, CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
NUMBER(kAttributeSmCount, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
NUMBER(kAttributeUnifiedAddressing, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING);
NUMBER(kAttributeCapabilityMajor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
NUMBER(kAttributeCapabilityMinor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
NUMBER(kAttributeMemoryPools, CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED);
NUMBER(kAttributeMps, CU_DEVICE_ATTRIBUTE_MPS_ENABLED);
NUMBER(kPointerMemoryType, CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
NUMBER(kPointerDevice, CU_POINTER_ATTRIBUTE_DEVICE_POINTER);
NUMBER(kPointerHost, CU_POINTER_ATTRIBUTE_HOST_POINTER);
NUMBER(kPointerIsManaged, CU_POINTER_ATTRIBUTE_IS_MANAGED);
NUMBER(kPointerDeviceOrdinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
NUMBER(kPointerRangeStart, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR);
NUMBER(kPointerRangeSize, CU_POINTER_ATTRIBUTE_RANGE_SIZE);
NUMBER(kMemoryHost, CU_MEMORYTYPE_HOST);
NUMBER(kMemoryDevice, CU_MEMORYTYPE_DEVICE);
NUMBER(kPoolReuseInternalDependencies, CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES);
NUMBER(kPoolReleaseThreshold, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD);
NUMBER(kPoolReservedNow, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
NUMBER(kPoolUsedNow, CU_MEMPOOL_ATTR_USED_MEM_CURRENT);
NUMBER(kAllocationPinned, CU_MEM_ALLOCATION_TYPE_PINNED);
NUMBER(kLocationDevice, CU_MEM_LOCATION_TYPE_DEVICE);
NUMBER(kStreamNonBlocking, CU_STREAM_NON_BLOCKING);
NUMBER(kEventDisableTiming, CU_EVENT_DISABLE_TIMING);
NUMBER(kCaptureGlobal, CU_STREAM_CAPTURE_MODE_GLOBAL);
NUMBER(kCaptureThreadLocal, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
NUMBER(kCaptureRelaxed, CU_STREAM_CAPTURE_MODE_RELAXED);
NUMBER(kStatusNone, CU_STREAM_CAPTURE_STATUS_NONE);
NUMBER(kStatusActive, CU_STREAM_CAPTURE_STATUS_ACTIVE);
NUMBER(kStatusInvalidated, CU_STREAM_CAPTURE_STATUS_INVALIDATED);
NUMBER(kNodeKernel, CU_GRAPH_NODE_TYPE_KERNEL);
NUMBER(kNodeCopy, CU_GRAPH_NODE_TYPE_MEMCPY);
NUMBER(kNodeFill, CU_GRAPH_NODE_TYPE_MEMSET);
NUMBER(kNodeHost, CU_GRAPH_NODE_TYPE_HOST);
NUMBER(kNodeGraph, CU_GRAPH_NODE_TYPE_GRAPH);
NUMBER(kNodeEmpty, CU_GRAPH_NODE_TYPE_EMPTY);
NUMBER(kNodeWait, CU_GRAPH_NODE_TYPE_WAIT_EVENT);
NUMBER(kNodeRecord, CU_GRAPH_NODE_TYPE_EVENT_RECORD);
NUMBER(kNodeSignalSemaphore, CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL);
NUMBER(kNodeWaitSemaphore, CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT);
NUMBER(kNodeAllocate, CU_GRAPH_NODE_TYPE_MEM_ALLOC);
NUMBER(kNodeFree, CU_GRAPH_NODE_TYPE_MEM_FREE);
NUMBER(kResourceSm, CU_DEV_RESOURCE_TYPE_SM);
NUMBER(kGreenDefaultStream, CU_GREEN_CTX_DEFAULT_STREAM);
NUMBER(kResourceWorkqueueConfig, CU_DEV_RESOURCE_TYPE_WORKQUEUE_CONFIG);
NUMBER(kWorkqueuesShared, CU_WORKQUEUE_SCOPE_DEVICE_CTX);
NUMBER(kWorkqueuesBalanced, CU_WORKQUEUE_SCOPE_GREEN_CTX_BALANCED);

}  // namespace

int main() {}
