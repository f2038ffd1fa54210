// A stand-in for libcuda.so.1 in host memory: what native/device uses of the driver API, by the rules that
// CUDA documents or that were measured. It is stricter: a call without a context where one is needed, an
// object used after its end and a per-thread handle in a green context are errors, and everything that is
// made is counted.
//
// Nothing runs before something waits for it (FAKE_EAGER=1: everything at once); each stream is a queue.
// Streams are ordered by events, and the legacy stream and blocking ones by the order of their calls. A
// launch runs a graph's nodes one after the other, as they were captured.
//
// Made to differ by the environment (FAKE_DEVICES, FAKE_VERSION, FAKE_INIT, FAKE_NO_POOLS, FAKE_MEMORY,
// FAKE_CAPABILITY, FAKE_NO_COMPILER, FAKE_FEWER_BLOCKS, FAKE_CONTEXTS, FAKE_NAME, FAKE_MPS, FAKE_GREEN,
// FAKE_GREEN_CREATE, FAKE_NO_WORKQUEUES, FAKE_CONNECTIONS, FAKE_UNBALANCED) and, for entry points that are
// missing, by macros (NO_GREEN, NO_NEWER, NO_NODES, NO_POOL_ENTRY, NO_DRIVER).
#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "device/driver.h"

#define ENTRY extern "C" __attribute__((visibility("default")))

namespace {

namespace cu = headrace::cu;
using cu::Code;

int number(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoi(text) : otherwise;
}
const int kDevices = number("FAKE_DEVICES", 1);
const bool kEager = number("FAKE_EAGER", 0) != 0;
const size_t kMemory = static_cast<size_t>(number("FAKE_MEMORY", 1 << 30));
const int kCapability = number("FAKE_CAPABILITY", 90);
constexpr unsigned kSms = 132, kLeast = 8;

struct Green;
struct Context {
  int device = 0;
  bool alive = true;
  Green* green = nullptr;
};
struct Capture;
using CaptureRef = std::shared_ptr<Capture>;
struct Stream;
struct Op {
  std::function<void()> run;      // with the lock held
  std::function<void()> outside;  // a host function: without
  std::shared_ptr<Op> after;      // of another stream
  Stream* stream = nullptr;
  uint64_t number = 0;
  bool done = false;
};
using OpRef = std::shared_ptr<Op>;
struct Stream {
  Context* context = nullptr;
  bool alive = true, blocking = false, legacy = false, busy = false;
  int priority = 0;
  std::deque<OpRef> queue;
  OpRef last;
  CaptureRef capture;
  size_t captured = 0;  // nodes of the capture that this stream's work is behind, as a count
};
struct Graph;
struct Function;
struct Node {
  std::function<void()> run, outside;
  int type = cu::kNodeCopy;
  Context* context = nullptr;  // of the stream it was captured on
  const Function* function = nullptr;
  std::shared_ptr<Graph> child = nullptr;
};
struct Capture {
  unsigned long long id = 0;
  Stream* origin = nullptr;
  int mode = 0;
  std::thread::id thread;
  std::vector<Node> nodes;
  std::map<Stream*, size_t> unjoined;  // streams with work that the origin does not wait for
  Code broken = 0;
  bool ended = false;
};
struct Event {
  Context* context = nullptr;
  bool alive = true, timing = false;
  OpRef op;
  CaptureRef capture;
  Stream* captured_on = nullptr;
  double at_ms = 0;
};
struct Graph {
  std::vector<Node> nodes;
  bool alive = true;
};
struct Exec {
  std::vector<Node> nodes;
  OpRef last;
  bool alive = true;
};
struct Pool {
  int device = 0;
  bool alive = true;
  size_t nbytes = 0;
  uint64_t threshold = 0;
  int internal_dependencies = 1;
};
struct Block {
  size_t nbytes = 0;
  Pool* pool = nullptr;
  int device = 0;
  bool managed = false, host = false;
};
struct Description {
  std::vector<cu::Resource> parts;
};
struct Module {
  int64_t pending = 0;  // launches of it that have not run, those in graphs included
};
struct Function {
  std::string name;
  std::shared_ptr<Module> module;
  bool of_library = false;  // a CUkernel
};
// What a launch of a kernel does: reads and writes memory as its arguments say. Which those are the driver
// knows from the code; here it is told, "p" for an address, "i" for 32 bits.
struct Kernel {
  std::string signature;
  void (*run)(const char* name, const uint64_t* arguments) = nullptr;
};
struct Green {
  Context context;
  unsigned sm_count = 0;
  std::vector<unsigned> sms;  // their numbers
  cu::WorkqueueConfig workqueues{};
  bool alive = true;
  int streams = 0;
};

std::recursive_mutex mutex;
using Lock = std::unique_lock<std::recursive_mutex>;
std::condition_variable_any idle;
bool started = false;
uint64_t numbers = 0;
double clock_ms = 0;
unsigned long long ids = 100;
std::vector<Context> primaries(8);
std::vector<int> retained(8);
std::set<Stream*> streams;  // all that were made by handle
std::set<Event*> events;
std::set<Graph*> graphs;
std::set<Exec*> execs;
std::set<Pool*> pools;
std::set<Green*> greens;
std::map<uintptr_t, Block> blocks;
std::map<void*, std::shared_ptr<Module>> modules;
std::map<void*, std::unique_ptr<Function>> functions;
std::map<std::string, Kernel> kernels;  // under "" for all others
std::vector<CaptureRef> captures;
std::vector<Stream*> spare;  // destroyed streams whose address is to be used again
bool reuse = false;
bool wraps = false;
std::string escapes;  // a kernel that leaves the partition
std::map<std::string, int64_t> calls;
struct Fault {
  std::string call;
  int64_t left;
  Code code;
};
std::vector<Fault> faults;
std::vector<std::string> wrong;  // what nobody should do, seen

thread_local std::vector<Context*> stack;
thread_local int mode_of_thread = cu::kCaptureGlobal;
thread_local bool in_callback = false;

Context* current() { return stack.empty() ? nullptr : stack.back(); }

struct PerThread {
  std::map<Context*, Stream*> streams;
};
thread_local PerThread per_thread;
std::map<int, Stream*> legacies;
std::vector<Stream*> per_thread_streams;  // of all threads, never destroyed

// ---- running

void run_until(const OpRef& op, Lock& lock);

void run_before(uint64_t number, bool of_legacy, Lock& lock) {
  // Copies: running a host function lets others in.
  std::vector<Stream*> all(streams.begin(), streams.end());
  all.insert(all.end(), per_thread_streams.begin(), per_thread_streams.end());
  for (auto& [device, legacy] : legacies) all.push_back(legacy);
  for (Stream* stream : all) {
    bool counts = of_legacy ? stream->blocking : stream->legacy;
    while (counts && !stream->queue.empty() && stream->queue.front()->number < number)
      run_until(OpRef(stream->queue.front()), lock);
  }
}

void run_until(const OpRef& op, Lock& lock) {
  Stream* stream = op->stream;
  while (!op->done) {
    if (stream->busy) {  // another thread waits for a host function of it
      idle.wait(lock);
      continue;
    }
    OpRef next = stream->queue.front();
    if (next->after && !next->after->done) {
      run_until(OpRef(next->after), lock);
      continue;
    }
    if (stream->legacy) run_before(next->number, true, lock);
    if (stream->blocking) run_before(next->number, false, lock);
    if (next->done || stream->busy || stream->queue.front() != next) continue;
    clock_ms += 0.001;
    if (next->run) next->run();
    if (next->outside) {
      // On a thread of the driver's, with no lock: it may wait for others who call the driver.
      stream->busy = true;
      lock.unlock();
      std::thread([&next] {
        in_callback = true;
        next->outside();
      }).join();
      lock.lock();
      stream->busy = false;
    }
    stream->queue.pop_front();
    next->done = true;
    next->run = next->outside = nullptr;  // with what they hold
    idle.notify_all();
  }
}

OpRef enqueue(Stream* stream, std::function<void()> run, std::function<void()> outside = nullptr,
              OpRef after = nullptr) {
  auto op = std::make_shared<Op>();
  op->run = std::move(run);
  op->outside = std::move(outside);
  op->after = std::move(after);
  op->stream = stream;
  op->number = ++numbers;
  stream->queue.push_back(op);
  stream->last = op;
  return op;
}

void advance(Stream* stream, Lock& lock) {
  if (kEager && stream->last && !stream->last->done) run_until(OpRef(stream->last), lock);
}

// ---- checks that calls share

Code begin(const char* name) {
  ++calls[name];
  if (in_callback) wrong.push_back(std::string(name) + " from inside a host function");
  for (auto fault = faults.begin(); fault != faults.end(); ++fault) {
    if (fault->call != name || fault->left-- != 0) continue;
    Code code = fault->code;
    faults.erase(fault);
    return code;
  }
  return started ? cu::kSuccess : cu::kNotInitialized;
}

#define BEGIN(name) \
  Lock lock(mutex); \
  if (Code code = begin(name)) return code
#define NEEDS_CONTEXT() \
  if (current() == nullptr || !current()->alive) return cu::kInvalidContext
#define STREAM(variable, handle) \
  Stream* variable = nullptr;    \
  if (Code code = find_stream(handle, &variable)) return code

Code find_stream(cu::Stream handle, Stream** out) {
  auto value = reinterpret_cast<uintptr_t>(handle);
  if (value <= 2) {
    NEEDS_CONTEXT();
    if (value == 2) {
      if (current()->green) return cu::kInvalidHandle;  // measured
      Stream*& mine = per_thread.streams[current()];
      if (mine == nullptr) {
        mine = new Stream();
        mine->context = current();
        mine->blocking = true;
        per_thread_streams.push_back(mine);
      }
      *out = mine;
      return cu::kSuccess;
    }
    Stream*& legacy = legacies[current()->device];
    if (legacy == nullptr) {
      legacy = new Stream();
      legacy->context = &primaries[static_cast<size_t>(current()->device)];
      legacy->legacy = true;
    }
    *out = legacy;
    return cu::kSuccess;
  }
  auto* stream = reinterpret_cast<Stream*>(handle);
  if (!streams.contains(stream)) return cu::kInvalidHandle;
  if (!stream->alive || !stream->context->alive) return cu::kContextIsDestroyed;
  *out = stream;
  return cu::kSuccess;
}

Code breaks(const CaptureRef& capture, Code code) {
  if (!capture->broken) capture->broken = code;
  return code;
}

// Work on the legacy stream while a blocking one captures: refused on both sides (measured).
Code check_implicit(Stream* stream) {
  if (!stream->legacy) return cu::kSuccess;
  Code code = cu::kSuccess;
  for (const CaptureRef& capture : captures) {
    if (capture->origin->blocking) code = breaks(capture, cu::kCaptureImplicit);
  }
  return code;
}

// "Potentially unsafe" calls of a thread that captures.
Code check_unsafe() {
  if (mode_of_thread == cu::kCaptureRelaxed) return cu::kSuccess;
  Code code = cu::kSuccess;
  for (const CaptureRef& capture : captures) {
    bool own = capture->thread == std::this_thread::get_id() && capture->mode != cu::kCaptureRelaxed;
    bool global = capture->mode == cu::kCaptureGlobal && mode_of_thread == cu::kCaptureGlobal;
    if (own || global) code = breaks(capture, cu::kCaptureUnsupported);
  }
  return code;
}

// Work: a node of the stream's capture, or an operation.
Code submit(Stream* stream, Lock& lock, std::function<void()> run, std::function<void()> outside = nullptr,
            int type = cu::kNodeCopy, const Function* function = nullptr) {
  if (Code code = check_implicit(stream)) return code;
  if (CaptureRef capture = stream->capture) {
    if (capture->broken) return cu::kCaptureInvalidated;
    Context* context = function && !escapes.empty() && function->name == escapes
                           ? &primaries[static_cast<size_t>(stream->context->device)]
                           : stream->context;
    capture->nodes.push_back({std::move(run), std::move(outside), type, context, function});
    stream->captured = capture->nodes.size();
    if (stream != capture->origin) capture->unjoined[stream] = stream->captured;
    return cu::kSuccess;
  }
  enqueue(stream, std::move(run), std::move(outside));
  advance(stream, lock);
  return cu::kSuccess;
}

const Block* block_of(uintptr_t at, uintptr_t* start) {
  auto next = blocks.upper_bound(at);
  if (next == blocks.begin()) return nullptr;
  auto found = std::prev(next);
  if (at >= found->first + found->second.nbytes) return nullptr;
  *start = found->first;
  return &found->second;
}

Code check_range(cu::Address address, size_t nbytes) {
  uintptr_t start = 0;
  const Block* block = block_of(static_cast<uintptr_t>(address), &start);
  if (block && static_cast<uintptr_t>(address) + nbytes > start + block->nbytes) return cu::kInvalidValue;
  return cu::kSuccess;
}

}  // namespace

// ---- control, for tests

ENTRY void fake_fail(const char* call, int64_t at, int code) {
  Lock lock(mutex);
  faults.push_back({call, at, code});
}
ENTRY void fake_forget_faults() {
  Lock lock(mutex);
  faults.clear();
}
ENTRY int64_t fake_calls(const char* call) {
  Lock lock(mutex);
  return calls[call];
}
ENTRY void fake_reuse_streams(int yes) {
  Lock lock(mutex);
  reuse = yes != 0;
}
ENTRY void fake_kernel(const char* name, const char* signature, void (*run)(const char*, const uint64_t*)) {
  Lock lock(mutex);
  kernels[name] = {signature, run};
}
// What is left, as text: empty where everything was given back but one context and one pool for each device
// that was opened.
ENTRY const char* fake_left() {
  Lock lock(mutex);
  static std::string text;
  text.clear();
  auto count = [&](const char* what, size_t n) {
    if (n) text += std::to_string(n) + " " + what + "; ";
  };
  size_t live = 0;
  for (Stream* stream : streams) live += stream->alive;
  count("streams", live);
  live = 0;
  for (Green* green : greens) live += green->alive;
  count("green contexts", live);
  count("events", events.size());
  count("graphs", graphs.size());
  count("executable graphs", execs.size());
  count("modules", modules.size());
  live = 0;
  for (auto& [at, block] : blocks) live += block.pool != nullptr;
  count("allocations", live);
  count("captures", captures.size());
  count("contexts on this thread's stack", stack.size());
  for (size_t device = 0; device < retained.size(); ++device) {
    size_t of_device = 0;
    for (Pool* pool : pools) of_device += static_cast<size_t>(pool->device) == device;
    if (retained[device] > 1 || of_device > 1 || static_cast<size_t>(retained[device]) != of_device)
      text += std::to_string(retained[device]) + " contexts and " + std::to_string(of_device) +
              " pools of device " + std::to_string(device) + "; ";
  }
  for (const std::string& what : wrong) text += what + "; ";
  return text.c_str();
}
// From now on the nodes of a capture that ends are those of a child graph, as libraries make them.
ENTRY void fake_wrap_captures(int yes) {
  Lock lock(mutex);
  wraps = yes != 0;
}
// A kernel of that name is captured in the primary context, as from a stream that a library forked off the
// lane.
ENTRY void fake_escape(const char* name) {
  Lock lock(mutex);
  escapes = name;
}
ENTRY size_t fake_pool_nbytes() {
  Lock lock(mutex);
  size_t all = 0;
  for (Pool* pool : pools) all += pool->nbytes;
  return all;
}
ENTRY int fake_internal_dependencies() {
  Lock lock(mutex);
  int any = 0;
  for (Pool* pool : pools) any |= pool->internal_dependencies;
  return any;
}
// Memory that another library would have: of a device, managed, or pinned host memory.
ENTRY void* fake_memory(size_t nbytes, int device, int managed, int host) {
  Lock lock(mutex);
  void* data = std::aligned_alloc(256, (nbytes + 255) / 256 * 256);
  Block block;
  block.nbytes = nbytes;
  block.device = device;
  block.managed = managed != 0;
  block.host = host != 0;
  blocks[reinterpret_cast<uintptr_t>(data)] = block;
  return data;
}
ENTRY void fake_run_all() {
  Lock lock(mutex);
  std::vector<Stream*> all(streams.begin(), streams.end());
  all.insert(all.end(), per_thread_streams.begin(), per_thread_streams.end());
  for (auto& [device, legacy] : legacies) all.push_back(legacy);
  for (Stream* stream : all) {
    if (stream->last && !stream->last->done) run_until(OpRef(stream->last), lock);
  }
}
ENTRY cu::Code cuGreenCtxCreate(cu::GreenContext*, cu::ResourceDescription, cu::Device, unsigned);
// Makes a green context current, as a library that works in one would.
ENTRY int fake_push_green() {
  Lock lock(mutex);
  static Green* green = nullptr;
  if (green == nullptr) {
    green = new Green();
    green->context.green = green;
  }
  stack.push_back(&green->context);
  return 0;
}
ENTRY void* fake_context(int device) {  // a context of cuCtxCreate
  static std::vector<Context> made(8);
  made[static_cast<size_t>(device)].device = device;
  return &made[static_cast<size_t>(device)];
}

// ---- the driver

#ifndef NO_DRIVER
ENTRY Code cuDriverGetVersion(int* version) {
  *version = number("FAKE_VERSION", 13000);
  return cu::kSuccess;
}
#endif

ENTRY Code cuInit(unsigned) {
  if (int code = number("FAKE_INIT", 0)) return code;
  if (kDevices == 0) return cu::kNoDevice;
  for (size_t d = 0; d < primaries.size(); ++d) {
    primaries[d].device = static_cast<int>(d);
    primaries[d].alive = false;
  }
  started = true;
  return cu::kSuccess;
}

ENTRY Code cuGetErrorName(Code code, const char** name) {
  static const std::map<Code, const char*> names = {{0, "CUDA_SUCCESS"},
                                                    {1, "CUDA_ERROR_INVALID_VALUE"},
                                                    {2, "CUDA_ERROR_OUT_OF_MEMORY"},
                                                    {3, "CUDA_ERROR_NOT_INITIALIZED"},
                                                    {100, "CUDA_ERROR_NO_DEVICE"},
                                                    {101, "CUDA_ERROR_INVALID_DEVICE"},
                                                    {201, "CUDA_ERROR_INVALID_CONTEXT"},
                                                    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
                                                    {400, "CUDA_ERROR_INVALID_HANDLE"},
                                                    {401, "CUDA_ERROR_ILLEGAL_STATE"},
                                                    {600, "CUDA_ERROR_NOT_READY"},
                                                    {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
                                                    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED"},
                                                    {801, "CUDA_ERROR_NOT_SUPPORTED"},
                                                    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"},
                                                    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
                                                    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
                                                    {904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"},
                                                    {905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"},
                                                    {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"},
                                                    {907, "CUDA_ERROR_CAPTURED_EVENT"},
                                                    {908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD"},
                                                    {914, "CUDA_ERROR_INVALID_RESOURCE_TYPE"},
                                                    {915, "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION"}};
  auto found = names.find(code);
  if (found == names.end()) return cu::kInvalidValue;
  *name = found->second;
  return cu::kSuccess;
}
ENTRY Code cuGetErrorString(Code code, const char** words) {
  if (Code unknown = cuGetErrorName(code, words)) return unknown;
  *words = "as the fake driver says";
  return cu::kSuccess;
}

ENTRY Code cuDeviceGetCount(int* count) {
  BEGIN("cuDeviceGetCount");
  *count = kDevices;
  return cu::kSuccess;
}
ENTRY Code cuDeviceGet(cu::Device* device, int ordinal) {
  BEGIN("cuDeviceGet");
  if (ordinal < 0 || ordinal >= kDevices) return cu::kInvalidDevice;
  *device = ordinal;
  return cu::kSuccess;
}
ENTRY Code cuDeviceGetName(char* name, int nbytes, cu::Device device) {
  BEGIN("cuDeviceGetName");
  const char* called = std::getenv("FAKE_NAME");
  std::snprintf(name, static_cast<size_t>(nbytes), "%s %d", called ? called : "Fake GPU", device);
  return cu::kSuccess;
}
ENTRY Code cuDeviceGetAttribute(int* value, int attribute, cu::Device) {
  BEGIN("cuDeviceGetAttribute");
  const std::map<int, int> values = {{cu::kAttributeSmCount, static_cast<int>(kSms)},
                                     {cu::kAttributeUnifiedAddressing, 1},
                                     {cu::kAttributeCapabilityMajor, kCapability / 10},
                                     {cu::kAttributeCapabilityMinor, kCapability % 10},
                                     {cu::kAttributeMemoryPools, number("FAKE_NO_POOLS", 0) ? 0 : 1},
                                     {cu::kAttributeMps, number("FAKE_MPS", 0)}};
  auto found = values.find(attribute);
  if (found == values.end()) return cu::kInvalidValue;
  *value = found->second;
  return cu::kSuccess;
}
ENTRY Code cuDeviceTotalMem_v2(size_t* nbytes, cu::Device) {
  *nbytes = kMemory;
  return cu::kSuccess;
}
ENTRY Code cuDevicePrimaryCtxRetain(cu::Context* context, cu::Device device) {
  BEGIN("cuDevicePrimaryCtxRetain");
  Context& primary = primaries[static_cast<size_t>(device)];
  primary.alive = true;
  ++retained[static_cast<size_t>(device)];
  *context = reinterpret_cast<cu::Context>(&primary);
  return cu::kSuccess;
}
ENTRY Code cuDevicePrimaryCtxRelease_v2(cu::Device device) {
  BEGIN("cuDevicePrimaryCtxRelease");
  if (--retained[static_cast<size_t>(device)] == 0) primaries[static_cast<size_t>(device)].alive = false;
  return cu::kSuccess;
}
ENTRY Code cuCtxGetCurrent(cu::Context* context) {
  BEGIN("cuCtxGetCurrent");
  *context = reinterpret_cast<cu::Context>(current());
  return cu::kSuccess;
}
ENTRY Code cuCtxPushCurrent_v2(cu::Context context) {
  BEGIN("cuCtxPushCurrent");
  auto* pushed = reinterpret_cast<Context*>(context);
  if (pushed == nullptr || !pushed->alive) return cu::kInvalidContext;
  stack.push_back(pushed);
  return cu::kSuccess;
}
ENTRY Code cuCtxPopCurrent_v2(cu::Context* context) {
  BEGIN("cuCtxPopCurrent");
  if (stack.empty()) return cu::kInvalidContext;
  if (context) *context = reinterpret_cast<cu::Context>(stack.back());
  stack.pop_back();
  return cu::kSuccess;
}
ENTRY Code cuCtxGetDevice(cu::Device* device) {
  BEGIN("cuCtxGetDevice");
  NEEDS_CONTEXT();
  *device = current()->device;
  return cu::kSuccess;
}
ENTRY Code cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  BEGIN("cuCtxGetStreamPriorityRange");
  NEEDS_CONTEXT();
  *least = 0;
  *greatest = -5;
  return cu::kSuccess;
}
ENTRY Code cuCtxSynchronize() {
  BEGIN("cuCtxSynchronize");
  NEEDS_CONTEXT();
  // Measured: refused while anything captures, in every mode, and the capture is invalidated.
  if (!captures.empty()) {
    for (const CaptureRef& capture : captures) breaks(capture, cu::kCaptureUnsupported);
    return cu::kCaptureUnsupported;
  }
  lock.unlock();
  fake_run_all();
  return cu::kSuccess;
}
ENTRY Code cuMemGetInfo_v2(size_t* free, size_t* total) {
  BEGIN("cuMemGetInfo");
  NEEDS_CONTEXT();
  size_t used = 0;
  for (auto& [at, block] : blocks) used += block.nbytes;
  *total = kMemory;
  *free = used < kMemory ? kMemory - used : 0;
  return cu::kSuccess;
}

// ---- memory

#ifndef NO_POOL_ENTRY
ENTRY Code cuMemPoolCreate(cu::Pool* pool, const cu::PoolProperties* properties) {
  BEGIN("cuMemPoolCreate");
  const char* raw = reinterpret_cast<const char*>(properties->reserved);
  bool zero = std::all_of(raw, raw + sizeof properties->reserved, [](char c) { return c == 0; });
  if (properties->allocation_type != cu::kAllocationPinned ||
      properties->location_type != cu::kLocationDevice || !zero)
    return cu::kInvalidValue;
  auto* made = new Pool();
  made->device = properties->location_id;
  pools.insert(made);
  *pool = reinterpret_cast<cu::Pool>(made);
  return cu::kSuccess;
}
#endif
ENTRY Code cuMemPoolDestroy(cu::Pool pool) {
  BEGIN("cuMemPoolDestroy");
  return pools.erase(reinterpret_cast<Pool*>(pool)) ? cu::kSuccess : cu::kInvalidValue;
}
ENTRY Code cuMemPoolSetAttribute(cu::Pool pool, int attribute, void* value) {
  BEGIN("cuMemPoolSetAttribute");
  auto* set = reinterpret_cast<Pool*>(pool);
  if (attribute == cu::kPoolReleaseThreshold) {
    set->threshold = *static_cast<uint64_t*>(value);
  } else if (attribute == cu::kPoolReuseInternalDependencies) {
    set->internal_dependencies = *static_cast<int*>(value);
  } else {
    return cu::kInvalidValue;
  }
  return cu::kSuccess;
}
ENTRY Code cuMemPoolGetAttribute(cu::Pool pool, int attribute, void* value) {
  BEGIN("cuMemPoolGetAttribute");
  if (attribute != cu::kPoolReservedNow && attribute != cu::kPoolUsedNow) return cu::kInvalidValue;
  *static_cast<uint64_t*>(value) = reinterpret_cast<Pool*>(pool)->nbytes;
  return cu::kSuccess;
}
ENTRY Code cuMemPoolTrimTo(cu::Pool, size_t) {
  BEGIN("cuMemPoolTrimTo");
  return check_unsafe();
}
ENTRY Code cuMemAllocFromPoolAsync(cu::Address* address, size_t nbytes, cu::Pool pool, cu::Stream handle) {
  BEGIN("cuMemAllocFromPoolAsync");
  NEEDS_CONTEXT();
  STREAM(stream, handle);
  if (nbytes == 0 || !pools.contains(reinterpret_cast<Pool*>(pool))) return cu::kInvalidValue;
  if (stream->capture) {
    wrong.push_back("an allocation on a stream that captures");
    return cu::kNotSupported;
  }
  if (Code code = check_implicit(stream)) return code;
  if (Code code = check_unsafe()) return code;
  auto* from = reinterpret_cast<Pool*>(pool);
  if (from->nbytes + nbytes > kMemory) return cu::kOutOfMemory;
  void* data = std::aligned_alloc(512, (nbytes + 511) / 512 * 512);
  std::memset(data, 0xFF, nbytes);
  Block block;
  block.nbytes = nbytes;
  block.pool = from;
  block.device = from->device;
  blocks[reinterpret_cast<uintptr_t>(data)] = block;
  from->nbytes += nbytes;
  *address = reinterpret_cast<uintptr_t>(data);
  return cu::kSuccess;
}
ENTRY Code cuMemFreeAsync(cu::Address address, cu::Stream handle) {
  BEGIN("cuMemFreeAsync");
  NEEDS_CONTEXT();
  Stream* stream = nullptr;
  if (Code code = find_stream(handle, &stream))
    return code == cu::kContextIsDestroyed ? cu::kInvalidContext : code;
  if (stream->capture) {
    wrong.push_back("a free on a stream that captures");
    return cu::kInvalidValue;  // measured
  }
  if (Code code = check_implicit(stream)) return code;
  if (Code code = check_unsafe()) return code;
  auto found = blocks.find(static_cast<uintptr_t>(address));
  if (found == blocks.end() || found->second.pool == nullptr) return cu::kInvalidValue;
  void* data = reinterpret_cast<void*>(address);
  size_t nbytes = found->second.nbytes;
  found->second.pool->nbytes -= nbytes;
  blocks.erase(found);
  enqueue(stream, [data, nbytes] {
    std::memset(data, 0xFF, nbytes);
    std::free(data);
  });
  advance(stream, lock);
  return cu::kSuccess;
}
ENTRY Code cuMemcpyAsync(cu::Address to, cu::Address from, size_t nbytes, cu::Stream handle) {
  BEGIN("cuMemcpyAsync");
  NEEDS_CONTEXT();
  STREAM(stream, handle);
  if (Code code = check_range(to, nbytes)) return code;
  if (Code code = check_range(from, nbytes)) return code;
  return submit(stream, lock,
                [=] { std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), nbytes); });
}
ENTRY Code cuMemsetD8Async(cu::Address to, unsigned char byte, size_t nbytes, cu::Stream handle) {
  BEGIN("cuMemsetD8Async");
  NEEDS_CONTEXT();
  STREAM(stream, handle);
  uintptr_t start = 0;
  if (block_of(static_cast<uintptr_t>(to), &start) == nullptr) return cu::kInvalidValue;
  if (Code code = check_range(to, nbytes)) return code;
  return submit(
      stream, lock, [=] { std::memset(reinterpret_cast<void*>(to), byte, nbytes); }, nullptr, cu::kNodeFill);
}
ENTRY Code cuPointerGetAttributes(unsigned count, int* attributes, void** values, cu::Address address) {
  BEGIN("cuPointerGetAttributes");
  NEEDS_CONTEXT();
  uintptr_t start = 0;
  const Block* block = block_of(static_cast<uintptr_t>(address), &start);
  for (unsigned i = 0; i < count; ++i) {
    switch (attributes[i]) {
      case cu::kPointerMemoryType:
        *static_cast<unsigned*>(values[i]) =
            !block ? 0u : unsigned{block->host ? cu::kMemoryHost : cu::kMemoryDevice};
        break;
      case cu::kPointerIsManaged:
        *static_cast<unsigned*>(values[i]) = block && block->managed;
        break;
      case cu::kPointerDeviceOrdinal:
        *static_cast<int*>(values[i]) = block ? block->device : -2;
        break;
      case cu::kPointerRangeStart:
        *static_cast<cu::Address*>(values[i]) = block ? start : 0;
        break;
      case cu::kPointerRangeSize:
        *static_cast<size_t*>(values[i]) = block ? block->nbytes : 0;
        break;
      default:
        return cu::kInvalidValue;
    }
  }
  return cu::kSuccess;
}

// ---- streams

namespace {
Code make_stream(cu::Stream* out, unsigned flags, int priority) {
  NEEDS_CONTEXT();
  Stream* made = nullptr;
  if (reuse && !spare.empty()) {
    made = spare.back();
    spare.pop_back();
    *made = Stream();
  } else {
    made = new Stream();
  }
  made->context = current();
  made->blocking = (flags & cu::kStreamNonBlocking) == 0;
  made->priority = priority;
  streams.insert(made);
  *out = reinterpret_cast<cu::Stream>(made);
  return cu::kSuccess;
}
}  // namespace

ENTRY Code cuStreamCreateWithPriority(cu::Stream* out, unsigned flags, int priority) {
  BEGIN("cuStreamCreateWithPriority");
  if (priority > 0 || priority < -5) wrong.push_back("a priority that is out of range");
  return make_stream(out, flags, priority);
}
ENTRY Code cuStreamDestroy_v2(cu::Stream handle) {
  BEGIN("cuStreamDestroy");
  STREAM(stream, handle);
  if (reinterpret_cast<uintptr_t>(handle) <= 2) return cu::kInvalidHandle;
  stream->alive = false;
  if (stream->context->green) --stream->context->green->streams;
  if (stream->capture && stream->capture->origin == stream) {
    stream->capture->ended = true;
    std::erase(captures, stream->capture);
  }
  stream->capture = nullptr;
  // Work on it goes on: only streams whose work is done have their address used again.
  if (stream->queue.empty()) spare.push_back(stream);
  return cu::kSuccess;
}
ENTRY Code cuStreamSynchronize(cu::Stream handle) {
  BEGIN("cuStreamSynchronize");
  NEEDS_CONTEXT();
  STREAM(stream, handle);
  if (stream->capture) return breaks(stream->capture, cu::kCaptureUnsupported);
  if (Code code = check_implicit(stream)) return code;
  if (Code code = check_unsafe()) return code;
  if (stream->legacy) run_before(UINT64_MAX, true, lock);
  if (stream->blocking) run_before(UINT64_MAX, false, lock);
  if (stream->last && !stream->last->done) run_until(OpRef(stream->last), lock);
  return cu::kSuccess;
}
ENTRY Code cuStreamQuery(cu::Stream handle) {
  BEGIN("cuStreamQuery");
  STREAM(stream, handle);
  if (stream->capture) return breaks(stream->capture, cu::kCaptureUnsupported);
  if (Code code = check_unsafe()) return code;
  return stream->last && !stream->last->done ? cu::kNotReady : cu::kSuccess;
}
ENTRY Code cuStreamGetCtx(cu::Stream handle, cu::Context* context) {
  BEGIN("cuStreamGetCtx");
  STREAM(stream, handle);
  *context = reinterpret_cast<cu::Context>(stream->context);
  return cu::kSuccess;
}
#ifndef NO_NEWER
ENTRY Code cuStreamGetCtx_v2(cu::Stream handle, cu::Context* context, cu::GreenContext* green) {
  BEGIN("cuStreamGetCtx_v2");
  STREAM(stream, handle);
  *green = reinterpret_cast<cu::GreenContext>(stream->context->green);
  *context = reinterpret_cast<cu::Context>(
      stream->context->green ? &primaries[static_cast<size_t>(stream->context->device)] : stream->context);
  return cu::kSuccess;
}
ENTRY Code cuStreamGetDevice(cu::Stream handle, cu::Device* device) {
  BEGIN("cuStreamGetDevice");
  STREAM(stream, handle);
  *device = stream->context->device;
  return cu::kSuccess;
}
#endif
ENTRY Code cuLaunchHostFunc(cu::Stream handle, cu::HostFunction function, void* data) {
  BEGIN("cuLaunchHostFunc");
  NEEDS_CONTEXT();
  STREAM(stream, handle);
  return submit(stream, lock, nullptr, [=] { function(data); }, cu::kNodeHost);
}

// ---- events

#define EVENT(variable, handle)                      \
  auto* variable = reinterpret_cast<Event*>(handle); \
  if (!events.contains(variable)) return cu::kInvalidHandle

ENTRY Code cuEventCreate(cu::Event* out, unsigned flags) {
  BEGIN("cuEventCreate");
  NEEDS_CONTEXT();
  auto* made = new Event();
  made->context = current();
  made->timing = (flags & cu::kEventDisableTiming) == 0;
  events.insert(made);
  *out = reinterpret_cast<cu::Event>(made);
  return cu::kSuccess;
}
ENTRY Code cuEventDestroy_v2(cu::Event handle) {
  BEGIN("cuEventDestroy");
  NEEDS_CONTEXT();
  EVENT(event, handle);
  events.erase(event);
  return cu::kSuccess;
}
ENTRY Code cuEventRecord(cu::Event handle, cu::Stream stream_handle) {
  BEGIN("cuEventRecord");
  NEEDS_CONTEXT();
  EVENT(event, handle);
  STREAM(stream, stream_handle);
  // "must be from the same context"; green contexts of a device and its primary one go together (measured).
  if (stream->context->device != event->context->device ||
      (stream->context->green == nullptr && stream->context != event->context &&
       event->context->green == nullptr))
    return cu::kInvalidHandle;
  if (Code code = check_implicit(stream)) return code;
  if (CaptureRef capture = stream->capture) {
    if (capture->broken) return cu::kCaptureInvalidated;
    event->capture = capture;
    event->captured_on = stream;
    event->op = nullptr;
    return cu::kSuccess;
  }
  event->capture = nullptr;
  event->op = enqueue(stream, [event_op = event] {
    if (events.contains(event_op)) event_op->at_ms = clock_ms;
  });
  advance(stream, lock);
  return cu::kSuccess;
}
ENTRY Code cuStreamWaitEvent(cu::Stream stream_handle, cu::Event handle, unsigned) {
  BEGIN("cuStreamWaitEvent");
  NEEDS_CONTEXT();
  EVENT(event, handle);
  STREAM(stream, stream_handle);
  if (Code code = check_implicit(stream)) return code;
  if (!stream->capture && !event->capture) {
    if (event->op) enqueue(stream, nullptr, nullptr, event->op);
    advance(stream, lock);
    return cu::kSuccess;
  }
  if (stream->capture && stream->capture->broken) return cu::kCaptureInvalidated;
  if (!event->capture) {
    if (!event->op) return cu::kSuccess;
    return breaks(stream->capture, cu::kCaptureIsolation);
  }
  if (event->capture->ended) {
    if (stream->capture) breaks(stream->capture, cu::kInvalidValue);
    return cu::kInvalidValue;
  }
  if (stream->capture && stream->capture != event->capture) {
    breaks(event->capture, cu::kCaptureMerge);
    return breaks(stream->capture, cu::kCaptureMerge);
  }
  if (stream->legacy) return breaks(event->capture, cu::kCaptureImplicit);
  stream->capture = event->capture;
  if (stream == event->capture->origin) event->capture->unjoined.erase(event->captured_on);
  return cu::kSuccess;
}
ENTRY Code cuEventQuery(cu::Event handle) {
  BEGIN("cuEventQuery");
  NEEDS_CONTEXT();
  EVENT(event, handle);
  if (event->capture)
    return event->capture->ended ? cu::kInvalidValue : breaks(event->capture, cu::kCapturedEvent);
  if (Code code = check_unsafe()) return code;
  return !event->op || event->op->done ? cu::kSuccess : cu::kNotReady;
}
ENTRY Code cuEventSynchronize(cu::Event handle) {
  BEGIN("cuEventSynchronize");
  NEEDS_CONTEXT();
  EVENT(event, handle);
  if (event->capture)
    return event->capture->ended ? cu::kInvalidValue : breaks(event->capture, cu::kCapturedEvent);
  if (Code code = check_unsafe()) return code;
  if (event->op && !event->op->done) run_until(OpRef(event->op), lock);
  return cu::kSuccess;
}
ENTRY Code cuEventElapsedTime(float* ms, cu::Event from_handle, cu::Event to_handle) {
  BEGIN("cuEventElapsedTime");
  EVENT(from, from_handle);
  EVENT(to, to_handle);
  if (!from->timing || !to->timing || !from->op || !to->op) return cu::kInvalidHandle;
  if (!from->op->done || !to->op->done) return cu::kNotReady;
  *ms = static_cast<float>(to->at_ms - from->at_ms);
  return cu::kSuccess;
}

// ---- capture

ENTRY Code cuStreamBeginCapture_v2(cu::Stream handle, int mode) {
  BEGIN("cuStreamBeginCapture");
  NEEDS_CONTEXT();
  STREAM(stream, handle);
  if (stream->legacy) return cu::kCaptureUnsupported;
  if (stream->capture) return cu::kIllegalState;
  auto capture = std::make_shared<Capture>();
  capture->id = ++ids;
  capture->origin = stream;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  stream->capture = capture;
  captures.push_back(capture);
  return cu::kSuccess;
}
ENTRY Code cuStreamEndCapture(cu::Stream handle, cu::Graph* out) {
  BEGIN("cuStreamEndCapture");
  NEEDS_CONTEXT();
  STREAM(stream, handle);
  *out = nullptr;
  CaptureRef capture = stream->capture;
  if (!capture) return cu::kIllegalState;
  if (capture->origin != stream) return breaks(capture, cu::kCaptureUnmatched);
  Code code = cu::kSuccess;
  if (capture->broken) {
    code = cu::kCaptureInvalidated;
  } else if (capture->mode != cu::kCaptureRelaxed && capture->thread != std::this_thread::get_id()) {
    code = cu::kCaptureWrongThread;
  } else if (!capture->unjoined.empty()) {
    code = cu::kCaptureUnjoined;
  }
  capture->ended = true;
  std::vector<Node> nodes = std::move(capture->nodes);  // events may keep the capture
  std::erase(captures, capture);
  for (Stream* other : streams) {
    if (other->capture == capture) other->capture = nullptr;
  }
  for (Stream* other : per_thread_streams) {
    if (other->capture == capture) other->capture = nullptr;
  }
  if (code) return code;
  auto* graph = new Graph();
  graph->nodes = std::move(nodes);
  if (wraps && graph->nodes.size() > 1) {
    auto child = std::make_shared<Graph>(*graph);
    Node node;
    node.type = cu::kNodeGraph;
    node.child = child;
    graph->nodes = {node};
  }
  graphs.insert(graph);
  *out = reinterpret_cast<cu::Graph>(graph);
  return cu::kSuccess;
}
ENTRY Code cuStreamIsCapturing(cu::Stream handle, int* status) {
  BEGIN("cuStreamIsCapturing");
  STREAM(stream, handle);
  if (stream->legacy) {
    for (const CaptureRef& capture : captures) {
      if (capture->origin->blocking) return cu::kCaptureImplicit;
    }
  }
  *status = !stream->capture          ? cu::kStatusNone
            : stream->capture->broken ? cu::kStatusInvalidated
                                      : cu::kStatusActive;
  return cu::kSuccess;
}
ENTRY Code cuStreamGetCaptureInfo_v2(cu::Stream handle, int* status, unsigned long long* id, cu::Graph*,
                                     const cu::GraphNode**, size_t*) {
  if (Code code = cuStreamIsCapturing(handle, status)) return code;
  BEGIN("cuStreamGetCaptureInfo");
  STREAM(stream, handle);
  if (*status == cu::kStatusActive && id) *id = stream->capture->id;
  return cu::kSuccess;
}
ENTRY Code cuThreadExchangeStreamCaptureMode(int* mode) {
  BEGIN("cuThreadExchangeStreamCaptureMode");
  std::swap(mode_of_thread, *mode);
  return cu::kSuccess;
}
ENTRY Code cuGraphInstantiateWithFlags(cu::GraphExec* out, cu::Graph handle, unsigned long long) {
  BEGIN("cuGraphInstantiate");
  auto* graph = reinterpret_cast<Graph*>(handle);
  if (!graphs.contains(graph)) return cu::kInvalidValue;
  if (Code code = check_unsafe()) return code;
  auto* made = new Exec();
  made->nodes = graph->nodes;
  execs.insert(made);
  *out = reinterpret_cast<cu::GraphExec>(made);
  return cu::kSuccess;
}
ENTRY Code cuGraphUpload(cu::GraphExec handle, cu::Stream stream_handle) {
  BEGIN("cuGraphUpload");
  STREAM(stream, stream_handle);
  if (!execs.contains(reinterpret_cast<Exec*>(handle))) return cu::kInvalidValue;
  if (stream->capture) return breaks(stream->capture, cu::kCaptureUnsupported);
  return cu::kSuccess;
}
ENTRY Code cuGraphLaunch(cu::GraphExec handle, cu::Stream stream_handle) {
  BEGIN("cuGraphLaunch");
  NEEDS_CONTEXT();
  STREAM(stream, stream_handle);
  auto* exec = reinterpret_cast<Exec*>(handle);
  if (!execs.contains(exec)) return cu::kInvalidValue;
  if (stream->capture) return breaks(stream->capture, cu::kCaptureUnsupported);
  if (exec->last) enqueue(stream, nullptr, nullptr, exec->last);
  for (const Node& node : exec->nodes) {
    if (!node.child) enqueue(stream, node.run, node.outside);
    for (size_t i = 0; node.child && i < node.child->nodes.size(); ++i)
      enqueue(stream, node.child->nodes[i].run, node.child->nodes[i].outside);
  }
  exec->last = enqueue(stream, nullptr);
  advance(stream, lock);
  return cu::kSuccess;
}
ENTRY Code cuGraphDestroy(cu::Graph handle) {
  BEGIN("cuGraphDestroy");
  auto* graph = reinterpret_cast<Graph*>(handle);
  if (graphs.erase(graph) == 0) return cu::kInvalidValue;
  delete graph;
  return cu::kSuccess;
}
ENTRY Code cuGraphExecDestroy(cu::GraphExec handle) {
  BEGIN("cuGraphExecDestroy");
  auto* exec = reinterpret_cast<Exec*>(handle);
  if (execs.erase(exec) == 0) return cu::kInvalidValue;
  delete exec;
  return cu::kSuccess;
}

// ---- kernels

ENTRY Code cuModuleLoadData(cu::Module* out, const void* image) {
  BEGIN("cuModuleLoadData");
  NEEDS_CONTEXT();
  if (Code code = check_unsafe()) return code;
  const auto* bytes = static_cast<const unsigned char*>(image);
  bool text = std::strncmp(static_cast<const char*>(image), ".version ", 9) == 0;
  if (text && number("FAKE_NO_COMPILER", 0)) return cu::kNoCompiler;
  bool fatbin = bytes[0] == 0x50 && bytes[1] == 0xED && bytes[2] == 0x55 && bytes[3] == 0xBA;
  if (!text && !fatbin &&
      std::memcmp(bytes,
                  "\x7F"
                  "ELF",
                  4) != 0)
    return cu::kInvalidValue;
  auto made = std::make_shared<Module>();
  modules[made.get()] = made;
  *out = reinterpret_cast<cu::Module>(made.get());
  return cu::kSuccess;
}
ENTRY Code cuModuleUnload(cu::Module handle) {
  BEGIN("cuModuleUnload");
  NEEDS_CONTEXT();
  if (Code code = check_unsafe()) return code;
  auto found = modules.find(handle);
  if (found == modules.end()) return cu::kInvalidHandle;
  if (found->second->pending != 0) wrong.push_back("a module unloaded with work in flight, or in a graph");
  std::erase_if(functions, [&](auto& item) { return item.second->module == found->second; });
  modules.erase(found);
  return cu::kSuccess;
}
ENTRY Code cuModuleGetFunction(cu::Function* out, cu::Module handle, const char* name) {
  BEGIN("cuModuleGetFunction");
  NEEDS_CONTEXT();
  auto found = modules.find(handle);
  if (found == modules.end()) return cu::kInvalidHandle;
  auto made = std::make_unique<Function>(Function{name, found->second, false});
  *out = reinterpret_cast<cu::Function>(made.get());
  functions[made.get()] = std::move(made);
  return cu::kSuccess;
}
ENTRY Code cuFuncSetAttribute(cu::Function handle, int, int) {
  BEGIN("cuFuncSetAttribute");
  NEEDS_CONTEXT();
  return functions.contains(handle) ? cu::kSuccess : cu::kInvalidHandle;
}
ENTRY Code cuLaunchKernel(cu::Function handle, unsigned x, unsigned y, unsigned z, unsigned, unsigned,
                          unsigned, unsigned, cu::Stream stream_handle, void** arguments, void**) {
  BEGIN("cuLaunchKernel");
  NEEDS_CONTEXT();
  STREAM(stream, stream_handle);
  auto found = functions.find(handle);
  if (found == functions.end()) return cu::kInvalidHandle;
  if (x == 0 || y == 0 || z == 0) return cu::kInvalidValue;
  const Function& function = *found->second;
  auto kernel = kernels.find(function.name);
  if (kernel == kernels.end()) kernel = kernels.find("");
  std::function<void()> work;
  if (function.name == "headrace_sms_seen") {
    // Blocks of it are on all multiprocessors of the stream's context, one after the other; those of a graph
    // on the ones it was captured in (measured).
    std::vector<unsigned> sms =
        stream->context->green ? stream->context->green->sms : std::vector<unsigned>();
    for (unsigned i = 0; sms.size() < kSms && stream->context->green == nullptr; ++i) sms.push_back(i);
    if (number("FAKE_FEWER_BLOCKS", 0)) x -= 1;
    auto* seen = reinterpret_cast<unsigned*>(*static_cast<cu::Address*>(arguments[0]));
    work = [=] {
      for (unsigned i = 0; i < x; ++i) seen[i] = sms[i % sms.size()];
    };
  } else if (kernel != kernels.end()) {
    std::vector<uint64_t> values;
    for (size_t i = 0; i < kernel->second.signature.size(); ++i) {
      uint64_t value = 0;
      std::memcpy(&value, arguments[i], kernel->second.signature[i] == 'i' ? 4 : 8);
      values.push_back(value);
    }
    work = [run = kernel->second.run, name = function.name, values] { run(name.c_str(), values.data()); };
  }
  // Alive for as long as the work is: in a queue, or in a graph.
  ++function.module->pending;
  std::shared_ptr<Module> held(function.module.get(),
                               [module = function.module](Module*) { --module->pending; });
  if (!work) return submit(stream, lock, [held] {}, nullptr, cu::kNodeKernel, &function);
  return submit(stream, lock, nullptr, [held, work] { work(); }, cu::kNodeKernel, &function);
}
ENTRY Code cuFuncGetName(const char** name, cu::Function handle) {
  BEGIN("cuFuncGetName");
  auto found = functions.find(handle);
  if (found == functions.end()) return cu::kInvalidHandle;
  *name = found->second->name.c_str();
  return cu::kSuccess;
}

#ifndef NO_NEWER
ENTRY Code cuLibraryLoadData(cu::Library* out, const void* image, int*, void**, unsigned, int*, void**,
                             unsigned) {
  BEGIN("cuLibraryLoadData");
  if (Code code = check_unsafe()) return code;
  if (std::strncmp(static_cast<const char*>(image), ".version ", 9) != 0) return cu::kInvalidValue;
  auto made = std::make_shared<Module>();
  modules[made.get()] = made;
  *out = reinterpret_cast<cu::Library>(made.get());
  return cu::kSuccess;
}
ENTRY Code cuLibraryUnload(cu::Library handle) {
  BEGIN("cuLibraryUnload");
  auto found = modules.find(handle);
  if (found == modules.end()) return cu::kInvalidHandle;
  if (found->second->pending != 0) wrong.push_back("a library unloaded with work in flight, or in a graph");
  std::erase_if(functions, [&](auto& item) { return item.second->module == found->second; });
  modules.erase(found);
  return cu::kSuccess;
}
ENTRY Code cuLibraryGetKernel(cu::Kernel* out, cu::Library handle, const char* name) {
  BEGIN("cuLibraryGetKernel");
  auto found = modules.find(handle);
  if (found == modules.end()) return cu::kInvalidHandle;
  auto made = std::make_unique<Function>(Function{name, found->second, true});
  *out = reinterpret_cast<cu::Kernel>(made.get());
  functions[made.get()] = std::move(made);
  return cu::kSuccess;
}
ENTRY Code cuKernelGetName(const char** name, cu::Kernel handle) {
  BEGIN("cuKernelGetName");
  auto found = functions.find(handle);
  if (found == functions.end()) return cu::kInvalidHandle;
  *name = found->second->name.c_str();
  return cu::kSuccess;
}
#endif

// ---- a graph's nodes

#ifndef NO_NODES
ENTRY Code cuGraphGetNodes(cu::Graph handle, cu::GraphNode* nodes, size_t* count) {
  BEGIN("cuGraphGetNodes");
  auto* graph = reinterpret_cast<Graph*>(handle);
  size_t room = nodes ? *count : graph->nodes.size();
  *count = std::min(room, graph->nodes.size());
  for (size_t i = 0; nodes != nullptr && i < room; ++i)
    nodes[i] = i < *count ? reinterpret_cast<cu::GraphNode>(&graph->nodes[i]) : nullptr;
  return cu::kSuccess;
}
ENTRY Code cuGraphNodeGetType(cu::GraphNode node, int* type) {
  BEGIN("cuGraphNodeGetType");
  *type = reinterpret_cast<Node*>(node)->type;
  return cu::kSuccess;
}
ENTRY Code cuGraphChildGraphNodeGetGraph(cu::GraphNode node, cu::Graph* graph) {
  BEGIN("cuGraphChildGraphNodeGetGraph");
  *graph = reinterpret_cast<cu::Graph>(reinterpret_cast<Node*>(node)->child.get());
  return *graph ? cu::kSuccess : cu::kInvalidValue;
}
// FAKE_CONTEXTS: "1": functions have the primary context wherever they were captured, kernels of libraries
// the stream's; "2": all have the primary one.
ENTRY Code cuGraphKernelNodeGetParams_v2(cu::GraphNode handle, cu::KernelNode* params) {
  BEGIN("cuGraphKernelNodeGetParams");
  const Node& node = *reinterpret_cast<Node*>(handle);
  if (node.type != cu::kNodeKernel) return cu::kInvalidValue;
  *params = cu::KernelNode{};
  auto* function = const_cast<Function*>(node.function);
  if (function->of_library) {
    params->kernel = reinterpret_cast<cu::Kernel>(function);
  } else {
    params->function = reinterpret_cast<cu::Function>(function);
  }
  int hides = number("FAKE_CONTEXTS", 0);
  bool told = hides == 0 || (hides == 1 && function->of_library);
  params->context = reinterpret_cast<cu::Context>(
      told ? node.context : &primaries[static_cast<size_t>(node.context->device)]);
  return cu::kSuccess;
}
#endif

// ---- green contexts

#ifndef NO_GREEN
namespace {
uint64_t splits = 0;
// What the driver hides in a resource: the split it came from, and which part.
struct Hidden {
  uint64_t split;
  uint64_t part;
};
Hidden& hidden(cu::Resource& resource) { return *reinterpret_cast<Hidden*>(resource.padding + 4); }
// Of CUDA 13.1: the type came without an entry point. What a device has is CUDA_DEVICE_MAX_CONNECTIONS'.
const bool kWorkqueues =
    number("FAKE_VERSION", 13000) >= cu::kOldestWithWorkqueues && number("FAKE_NO_WORKQUEUES", 0) == 0;
const unsigned kConnections = static_cast<unsigned>(number("FAKE_CONNECTIONS", 8));
constexpr uint64_t kWorkqueuesOf = 5000;
}  // namespace

ENTRY Code cuDeviceGetDevResource(cu::Device device, cu::Resource* resource, int type) {
  BEGIN("cuDeviceGetDevResource");
  if (int code = number("FAKE_GREEN", 0)) return code;
  *resource = cu::Resource{};
  if (type == cu::kResourceWorkqueueConfig && kWorkqueues) {
    resource->type = type;
    resource->workqueues = {device, kConnections, cu::kWorkqueuesShared};
    hidden(*resource).part = kWorkqueuesOf + static_cast<uint64_t>(device);
    return cu::kSuccess;
  }
  if (type != cu::kResourceSm) return cu::kInvalidResourceType;
  resource->type = cu::kResourceSm;
  resource->sm = {kSms, kLeast, kLeast};
  return cu::kSuccess;
}
ENTRY Code cuDevSmResourceSplitByCount(cu::Resource* groups, unsigned* count, const cu::Resource* from,
                                       cu::Resource* rest, unsigned, unsigned least) {
  BEGIN("cuDevSmResourceSplitByCount");
  if (from->type != cu::kResourceSm) return cu::kInvalidResourceType;
  if (hidden(const_cast<cu::Resource&>(*from)).split != 0)
    return cu::kInvalidResourceConfiguration;  // measured
  unsigned size = (std::max(least, kLeast) + kLeast - 1) / kLeast * kLeast;
  // Measured: 15 groups of 8 and 12 left, not 16 and 4.
  unsigned most = size == kLeast ? 15 : (kSms - 4) / size;
  if (groups == nullptr) {
    *count = most;
    return cu::kSuccess;
  }
  *count = std::min(*count, most);
  ++splits;
  for (unsigned i = 0; i < *count; ++i) {
    groups[i] = *from;
    groups[i].sm.sm_count = size;
    hidden(groups[i]) = {splits, i};
  }
  if (rest) {
    *rest = *from;
    rest->sm.sm_count = kSms - *count * size;
    hidden(*rest) = {splits, 1000};
  }
  return cu::kSuccess;
}
ENTRY Code cuDevResourceGenerateDesc(cu::ResourceDescription* out, cu::Resource* parts, unsigned count) {
  BEGIN("cuDevResourceGenerateDesc");
  *out = nullptr;
  std::set<uint64_t> seen;
  for (unsigned i = 0; i < count; ++i) {
    if (parts[i].type == cu::kResourceWorkqueueConfig) {
      const cu::WorkqueueConfig& asked = parts[i].workqueues;
      bool ours = hidden(parts[i]).part == kWorkqueuesOf + static_cast<uint64_t>(asked.device);
      if (!kWorkqueues || asked.concurrency_limit == 0 || asked.scope < 0 || asked.scope > 1)
        return cu::kInvalidValue;
      if (!ours || !seen.insert(kWorkqueuesOf).second) return cu::kInvalidResourceConfiguration;
      continue;
    }
    if (parts[i].type != cu::kResourceSm) return cu::kInvalidResourceType;
    if (hidden(parts[i]).split != hidden(parts[0]).split || !seen.insert(hidden(parts[i]).part).second)
      return cu::kInvalidResourceConfiguration;
  }
  static std::vector<std::unique_ptr<Description>> made;  // CUDA has no call to give one back
  made.push_back(std::make_unique<Description>(Description{{parts, parts + count}}));
  *out = reinterpret_cast<cu::ResourceDescription>(made.back().get());
  return cu::kSuccess;
}
ENTRY Code cuGreenCtxCreate(cu::GreenContext* out, cu::ResourceDescription description, cu::Device device,
                            unsigned flags) {
  BEGIN("cuGreenCtxCreate");
  if (int code = number("FAKE_GREEN_CREATE", 0)) return code;
  if (flags != cu::kGreenDefaultStream) return cu::kInvalidValue;
  auto* green = new Green();
  green->context.device = device;
  green->context.green = green;
  // Measured: without a description it has every SM.
  green->sm_count = kSms;
  if (description) {
    green->sm_count = 0;
    for (cu::Resource& part : reinterpret_cast<Description*>(description)->parts) {
      if (part.type == cu::kResourceWorkqueueConfig) {
        // How a driver rounds is not documented: here it grants no more than the device has.
        green->workqueues = part.workqueues;
        green->workqueues.concurrency_limit = std::min(part.workqueues.concurrency_limit, kConnections);
        if (number("FAKE_UNBALANCED", 0)) green->workqueues.scope = cu::kWorkqueuesShared;
        continue;
      }
      green->sm_count += part.sm.sm_count;
      uint64_t at = hidden(part).part;
      unsigned first = at == 1000 ? kSms - part.sm.sm_count : static_cast<unsigned>(at) * part.sm.sm_count;
      for (unsigned i = 0; i < part.sm.sm_count; ++i) green->sms.push_back(first + i);
    }
  } else {
    wrong.push_back("a green context from a failed description");
  }
  greens.insert(green);
  *out = reinterpret_cast<cu::GreenContext>(green);
  return cu::kSuccess;
}
ENTRY Code cuGreenCtxDestroy(cu::GreenContext handle) {
  BEGIN("cuGreenCtxDestroy");
  auto* green = reinterpret_cast<Green*>(handle);
  if (!greens.contains(green) || !green->alive) return cu::kContextIsDestroyed;
  if (green->streams != 0) wrong.push_back("a green context destroyed before its streams");
  for (Stream* stream : streams) {
    if (stream->context == &green->context && !stream->queue.empty())
      wrong.push_back("a green context destroyed with work in flight");
  }
  green->alive = false;
  green->context.alive = false;
  return cu::kSuccess;
}
ENTRY Code cuGreenCtxGetDevResource(cu::GreenContext handle, cu::Resource* resource, int type) {
  BEGIN("cuGreenCtxGetDevResource");
  auto* green = reinterpret_cast<Green*>(handle);
  if (type != cu::kResourceSm && !(type == cu::kResourceWorkqueueConfig && kWorkqueues))
    return cu::kInvalidResourceType;
  *resource = cu::Resource{};
  resource->type = type;
  if (type == cu::kResourceSm) {
    resource->sm = {green->sm_count, kLeast, kLeast};
  } else {
    resource->workqueues = green->workqueues;
  }
  return cu::kSuccess;
}
ENTRY Code cuGreenCtxStreamCreate(cu::Stream* out, cu::GreenContext handle, unsigned flags, int priority) {
  BEGIN("cuGreenCtxStreamCreate");
  auto* green = reinterpret_cast<Green*>(handle);
  if (!greens.contains(green) || !green->alive) return cu::kInvalidContext;
  if ((flags & cu::kStreamNonBlocking) == 0) return cu::kInvalidValue;
  stack.push_back(&green->context);
  Code code = make_stream(out, flags, priority);
  stack.pop_back();
  if (code == cu::kSuccess) ++green->streams;
  return code;
}
#endif
