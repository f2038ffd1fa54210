#include "program/engine.h"

#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/core/device_allocator.h>
#include <executorch/runtime/kernel/operator_registry.h>
#include <executorch/runtime/platform/runtime.h>

#include <array>
#include <cstdlib>
#include <mutex>
#include <unordered_set>

#include "headrace/caller_stream.h"
#include "program/allocator.h"
#include "program/guards.h"
#include "program/log.h"

// The stock wheel exports these from libexecutorch_threadpool.so and ships no header for them
// (extension/threadpool/threadpool.h of ExecuTorch 1.5.1).
namespace executorch::extension::threadpool {
class ThreadPool {
 public:
  size_t get_thread_count() const;
  bool _unsafe_reset_threadpool(uint32_t num_threads);
};
ThreadPool* get_threadpool();
}  // namespace executorch::extension::threadpool

namespace headrace {

namespace et = executorch::runtime;
namespace pool = executorch::extension::threadpool;

namespace {
std::mutex threads_mutex;
int live_programs = 0;
}  // namespace

namespace {

// What is ours to register must not be there yet: programs would meet a CUDA delegate or memory that knows
// nothing of the caller's stream.
Status check_registries() {
  std::string taken;
  if (et::get_backend_class("CudaBackend") != nullptr) taken = "a delegate 'CudaBackend'";
  if (et::get_device_allocator(executorch::runtime::etensor::DeviceType::CUDA) != nullptr) {
    taken += (taken.empty() ? "" : " and ") + std::string("an allocator for CUDA memory");
  }
  if (taken.empty()) return {};
  return Status(ErrorCode::kEngine,
                "expected an ExecuTorch without CUDA parts of its own, got " + taken +
                    ", registered before headrace; import headrace first, or do without the library that "
                    "registers it");
}

}  // namespace

Status check_one_selection() {
  std::array<char, 4096> ours{}, other{};
  if (headrace_find_duplicate(ours.data(), ours.size(), other.data(), other.size()) == 0) return {};
  return Status(ErrorCode::kEngine, "expected one libheadrace_stream.so in this process, got " +
                                        std::string(other.data()) + " beside " + ours.data() +
                                        "; a stream selected in one would not reach delegates that read the "
                                        "other: link to the library of one headrace, or remove the other");
}

void program_begins() {
  std::lock_guard lock(threads_mutex);
  ++live_programs;
}

void program_ends() {
  std::lock_guard lock(threads_mutex);
  --live_programs;
}

Status initialize() {
  static std::once_flag once;
  static Status status;
  std::call_once(once, [] {
    status = check_registries();
    if (status.ok()) status = check_one_selection();
    if (!status.ok()) return;
    et::runtime_init();
    collect_engine_log();
    guard_kernels();
    status = register_allocator();
  });
  return status;
}

int num_threads() {
  std::lock_guard lock(threads_mutex);
  pool::ThreadPool* threads = pool::get_threadpool();
  return threads ? static_cast<int>(threads->get_thread_count()) : 1;
}

Status set_num_threads(int count) {
  if (count < 1 || count > 1024) {
    return Status(ErrorCode::kOption, "num_threads: expected a count between 1 and 1024, got " +
                                          std::to_string(count) + "; pass as many as there are cores");
  }
  std::lock_guard lock(threads_mutex);
  if (live_programs != 0) {
    return Status(ErrorCode::kOption, "num_threads: expected no loaded program, got " +
                                          std::to_string(live_programs) +
                                          "; set it before the first load, or close them first");
  }
  pool::ThreadPool* threads = pool::get_threadpool();
  if (threads == nullptr || !threads->_unsafe_reset_threadpool(static_cast<uint32_t>(count))) {
    return Status(ErrorCode::kOption, "num_threads: expected " + std::to_string(count) +
                                          " threads, got none from the engine; ask for fewer");
  }
  return {};
}

std::vector<std::string> registered_delegates() {
  std::vector<std::string> names;
  for (size_t i = 0; i < et::get_num_registered_backends(); ++i) {
    if (auto name = et::get_backend_name(i); name.ok()) names.emplace_back(*name);
  }
  return names;
}

std::vector<std::string> registered_kernels() {
  std::vector<std::string> names;
  for (const et::Kernel& kernel : et::get_registered_kernels()) names.emplace_back(kernel.name_);
  return names;
}

bool kernel_registered(const std::string& name) {
  static std::mutex mutex;
  static std::unordered_set<std::string> known;
  static size_t seen = 0;
  std::lock_guard lock(mutex);
  // Libraries may add kernels at any time; none is ever taken out.
  auto kernels = et::get_registered_kernels();
  for (; seen < kernels.size(); ++seen) known.insert(kernels[seen].name_);
  return known.count(name) != 0;
}

Status check_delegate(const std::string& id, const std::string& where) {
  et::BackendInterface* backend = et::get_backend_class(id.c_str());
  if (backend != nullptr && backend->is_available()) return {};
  std::string have;
  for (const std::string& name : registered_delegates()) have += (have.empty() ? "" : ", ") + name;
  Status status(ErrorCode::kDelegateUnavailable,
                where + ": expected the delegate '" + id + "', got " +
                    (backend ? "one that is not available on this machine" : "these: " + have) +
                    (backend ? "; run the program where what it needs is installed"
                             : "; load the library, or import the module (headrace run --import), that "
                               "provides it before the program"));
  status->delegate = id;
  return status;
}

namespace {
struct DataDelegates {
  std::mutex mutex;
  // XNNPACK's payload is a graph of known operators.
  std::unordered_set<std::string> names{"XnnpackBackend"};
};
DataDelegates& data_delegates() {
  static DataDelegates d;
  return d;
}
}  // namespace

bool payload_is_code(const std::string& id) {
  std::lock_guard lock(data_delegates().mutex);
  return data_delegates().names.count(id) == 0;
}

void set_payload_is_code(const std::string& id, bool code) {
  std::lock_guard lock(data_delegates().mutex);
  if (code) {
    data_delegates().names.erase(id);
  } else {
    data_delegates().names.insert(id);
  }
}

namespace {

// The instruction that the last log line with one names, counted over all chains, or -1. The engine writes
// "instruction 3: 0x…" for a delegate, whose chain it leaves out, and "instruction 0:3 in operator …", chain
// and instruction, for a kernel.
int instruction_in(const std::vector<std::string>& log, const MethodPlan& method) {
  const std::string word = "instruction ";
  for (size_t i = log.size(); i-- > 0;) {
    size_t at = log[i].find(word);
    if (at == std::string::npos) continue;
    const char* digits = log[i].c_str() + at + word.size();
    char* end = nullptr;
    long value = std::strtol(digits, &end, 10);
    long chain = method.chains.size() == 1 ? 0 : -1;
    if (end != digits && end[0] == ':' && end[1] >= '0' && end[1] <= '9') {
      chain = value;
      digits = end + 1;
      value = std::strtol(digits, &end, 10);
    }
    if (end == digits || value < 0 || chain < 0 || static_cast<size_t>(chain) >= method.chains.size())
      continue;
    if (static_cast<size_t>(value) >= method.chains[static_cast<size_t>(chain)].size()) continue;
    size_t before = 0;
    for (size_t c = 0; c < static_cast<size_t>(chain); ++c) before += method.chains[c].size();
    return static_cast<int>(before + static_cast<size_t>(value));
  }
  return -1;
}

ErrorCode code_of(et::Error error) {
  switch (error) {
    case et::Error::OperatorMissing:
      return ErrorCode::kDelegateUnavailable;
    case et::Error::InvalidProgram:
    case et::Error::InvalidExternalData:
    case et::Error::NotFound:
      return ErrorCode::kProgram;
    case et::Error::MemoryAllocationFailed:
    case et::Error::DelegateMemoryAllocationFailed:
    case et::Error::OutOfResources:
      return ErrorCode::kOutOfDeviceMemory;
    default:
      return ErrorCode::kDelegate;
  }
}

}  // namespace

Status engine_status(et::Error error, const std::string& doing, const MethodPlan& method,
                     std::vector<std::string> log) {
  std::string what;
  int island = instruction_in(log, method);
  std::string delegate;
  if (island >= 0) {
    auto at = static_cast<size_t>(island);
    size_t chain = 0;
    while (at >= method.chains[chain].size()) at -= method.chains[chain++].size();
    const Instruction& in = method.chains[chain][at];
    if (in.kind == InstructionKind::kDelegate) {
      delegate = method.delegates[static_cast<size_t>(in.target)].id;
      what = ", delegate '" + delegate + "'";
    } else if (in.kind == InstructionKind::kKernel) {
      what = ", kernel '" + method.operators[static_cast<size_t>(in.target)] + "'";
    }
    what = ", instruction " + std::to_string(island) + what;
  } else {
    for (const DelegatePlan& d : method.delegates) {
      for (const std::string& line : log) {
        if (delegate.empty() && line.find(d.id) != std::string::npos) delegate = d.id;
      }
    }
    if (!delegate.empty()) what = ", delegate '" + delegate + "'";
  }
  Status status(code_of(error), method.name + what + ": " + doing + " failed: " + et::to_string(error) +
                                    (log.empty() ? "" : "; the engine says: " + log.front()));
  status->method = method.name;
  status->delegate = delegate;
  status->island = island;
  status->log = std::move(log);
  return status;
}

}  // namespace headrace
