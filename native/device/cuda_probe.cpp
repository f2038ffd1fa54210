// On which multiprocessors work of a CUDA device runs: of a stream, by a kernel that says so; of a captured
// graph, by the contexts of its kernels.
#include <algorithm>
#include <utility>

#include "device/cuda.h"
#include "device/cuda_operation.h"
#include "device/refusal.h"

namespace headrace {

namespace {

// Each block notes the multiprocessor it runs on, and stays there for `ns` nanoseconds so that the others go
// elsewhere. PTX, which every driver compiles for its GPU: %smid needs sm_20, %globaltimer sm_30; both are as
// in the reference of PTX ("Special Registers"), and a read of the timer is never merged with another.
constexpr const char* kKernel = "headrace_sms_seen";
constexpr const char* kCode = R"(.version 6.0
.target sm_60
.address_size 64

.visible .entry headrace_sms_seen(.param .u64 seen, .param .u64 ns)
{
  .reg .pred %p<3>;
  .reg .u32 %r<4>;
  .reg .u64 %d<8>;
  ld.param.u64 %d0, [seen];
  ld.param.u64 %d1, [ns];
  mov.u32 %r0, %tid.x;
  setp.ne.u32 %p0, %r0, 0;
  @%p0 bra BEGIN;
  cvta.to.global.u64 %d2, %d0;
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %smid;
  mul.wide.u32 %d3, %r1, 4;
  add.u64 %d4, %d2, %d3;
  st.global.u32 [%d4], %r2;
BEGIN:
  mov.u64 %d5, %globaltimer;
AGAIN:
  mov.u64 %d6, %globaltimer;
  sub.u64 %d7, %d6, %d5;
  setp.lt.u64 %p1, %d7, %d1;
  @%p1 bra AGAIN;
  ret;
}
)";

// One or two of such blocks fill a multiprocessor. 2,000 of another kernel's, as large and staying as long,
// were on all 132 of an H200 and on all 8 of a partition (tests/cuda/kernels.py). Here it takes 2,112 for
// 132: 2.6 ms in a partition of 8.
constexpr unsigned kThreads = 1024;
constexpr unsigned kBlocksPerSm = 16;
constexpr unsigned long long kStayNs = 20'000;
constexpr unsigned kNobody = 0xFFFFFFFF;

// Types that run nothing on multiprocessors.
bool is_work(int type) {
  switch (type) {
    case cu::kNodeHost:
    case cu::kNodeEmpty:
    case cu::kNodeWait:
    case cu::kNodeRecord:
    case cu::kNodeSignalSemaphore:
    case cu::kNodeWaitSemaphore:
    case cu::kNodeAllocate:
    case cu::kNodeFree:
      return false;
    default:
      return true;
  }
}

}  // namespace

// The kernel loaded, and memory for its notes. Needs a Current; the thread's capture mode is relaxed for as
// long as it lives, since loading and allocating are forbidden to threads that capture elsewhere. Waits for
// its stream before it gives anything back.
class CudaDevice::Probe {
 public:
  Probe(CudaDevice& device, const char* operation, StreamHandle stream)
      : device_(device), operation_(operation), stream_(stream), relaxed_(device.driver_) {}
  ~Probe() {
    if (graph_ != nullptr) (void)driver().GraphDestroy(graph_);
    for (StreamHandle own : own_) (void)device_.do_destroy_stream(own);
    if (notes_ != nullptr) {
      (void)driver().StreamSynchronize(raw(stream_));
      (void)device_.do_free(notes_, stream_);
    }
    if (library_ != nullptr) (void)driver().LibraryUnload(library_);
    if (module_ != nullptr) (void)driver().ModuleUnload(module_);
  }
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;

  // Runs it once too: code may be brought to the GPU at its first launch, which a capture could not wait for.
  Status load() {
    int total = 0;
    if (cu::Code code = driver().DeviceGetAttribute(&total, cu::kAttributeSmCount, device_.device_);
        code != cu::kSuccess)
      return device_.failed(operation_, code);
    blocks_ = static_cast<unsigned>(std::max(total, 1)) * kBlocksPerSm;
    cu::Code code = driver().ModuleLoadData(&module_, kCode);
    if (code == cu::kInvalidPtx || code == cu::kNoCompiler || code == cu::kUnsupportedPtx ||
        code == cu::kCompilerDisabled || code == cu::kNoBinaryForGpu)
      return refusal(
          ErrorCode::kDevice, device_.name(), operation_,
          "a driver that compiles PTX, for the kernel that says where it runs", driver().text(code),
          "give the process the driver's compiler, libnvidia-ptxjitcompiler.so.1 (in a container: the "
          "capability 'compute'), and leave CUDA_DISABLE_PTX_JIT unset");
    if (code == cu::kSuccess) code = driver().ModuleGetFunction(&function_, module_, kKernel);
    if (code != cu::kSuccess) return device_.failed(operation_, code);
    auto notes = device_.do_allocate(nbytes(), stream_);
    if (!notes.ok()) return notes.status();
    notes_ = *notes;
    if (Status status = clear(); !status.ok()) return status;
    return launch(stream_);
  }

  Status clear() { return device_.do_fill(notes_, 0xFF, nbytes(), stream_); }

  Status launch(StreamHandle stream) {
    auto address = reinterpret_cast<cu::Address>(notes_);
    unsigned long long stay = kStayNs;
    void* arguments[] = {&address, &stay};
    cu::Code code =
        driver().LaunchKernel(function_, blocks_, 1, 1, kThreads, 1, 1, 0, raw(stream), arguments, nullptr);
    return code == cu::kSuccess ? Status() : device_.failed(operation_, code);
  }

  // The kernel captured on a stream of its own in the partition (null: in none), until the next one.
  Result<cu::Graph> capture(const PartitionRef& partition) {
    // Non-blocking, and nobody else's: what others enqueued there meanwhile would be taken into the capture.
    auto own = device_.do_create_stream({.priority = 0, .blocking = false, .partition = partition});
    if (!own.ok()) return own.status();
    own_.push_back(*own);
    if (graph_ != nullptr) (void)driver().GraphDestroy(std::exchange(graph_, nullptr));
    cu::Code code = driver().StreamBeginCapture(raw(*own), cu::kCaptureRelaxed);
    if (code != cu::kSuccess) return device_.failed(operation_, code);
    Status status = launch(*own);
    code = driver().StreamEndCapture(raw(*own), &graph_);
    if (!status.ok()) return status;
    if (code != cu::kSuccess || graph_ == nullptr)
      return device_.failed(operation_, code != cu::kSuccess ? code : cu::kCaptureInvalidated);
    return graph_;
  }

  Status replay(const PartitionRef& partition) {
    auto graph = capture(partition);
    if (!graph.ok()) return graph.status();
    cu::GraphExec exec = nullptr;
    cu::Code code = driver().GraphInstantiate(&exec, *graph, 0);
    if (code != cu::kSuccess) return device_.failed(operation_, code);
    code = driver().GraphLaunch(exec, raw(stream_));
    if (code == cu::kSuccess) code = driver().StreamSynchronize(raw(stream_));
    (void)driver().GraphExecDestroy(exec);
    return code == cu::kSuccess ? Status() : device_.failed(operation_, code);
  }

  // The contexts that nodes of captured kernels have, captured in the partition and in none.
  Status look(const PartitionRef& partition, NodeContexts& contexts) {
    if (Status status = look_at(partition, contexts); !status.ok()) return status;
    if (driver().LibraryLoadData == nullptr || driver().LibraryGetKernel == nullptr ||
        driver().LibraryUnload == nullptr)
      return {};
    cu::Kernel kernel = nullptr;
    cu::Code code = driver().LibraryLoadData(&library_, kCode, nullptr, nullptr, 0, nullptr, nullptr, 0);
    if (code == cu::kSuccess) code = driver().LibraryGetKernel(&kernel, library_, kKernel);
    if (code != cu::kSuccess) return device_.failed(operation_, code);
    // A kernel is launched as a function is (the reference of cuLaunchKernel).
    function_ = reinterpret_cast<cu::Function>(kernel);
    if (Status status = launch(stream_); !status.ok()) return status;
    return look_at(partition, contexts);
  }

  Result<std::vector<int>> read() {
    std::vector<unsigned> notes(blocks_, kNobody);
    if (Status status = device_.do_copy(notes.data(), notes_, nbytes(), stream_); !status.ok()) return status;
    if (cu::Code code = driver().StreamSynchronize(raw(stream_)); code != cu::kSuccess)
      return device_.failed(operation_, code);
    std::sort(notes.begin(), notes.end());
    notes.erase(std::unique(notes.begin(), notes.end()), notes.end());
    if (notes.back() == kNobody)
      return refusal(ErrorCode::kDevice, device_.name(), operation_,
                     "a note of every block of the kernel that says where it runs", "fewer",
                     "report the driver's version with this message");
    return std::vector<int>(notes.begin(), notes.end());
  }

 private:
  Status look_at(const PartitionRef& partition, NodeContexts& contexts) {
    for (bool inside : {true, false}) {
      auto graph = capture(inside ? partition : nullptr);
      if (!graph.ok()) return graph.status();
      cu::GraphNode node = nullptr;
      size_t count = 1;
      cu::KernelNode found{};
      cu::Code code = driver().GraphGetNodes(*graph, &node, &count);
      if (code == cu::kSuccess && count != 1) code = cu::kInvalidValue;
      if (code == cu::kSuccess) code = driver().GraphKernelNode(node, &found);
      if (code != cu::kSuccess) return device_.failed(operation_, code);
      (inside ? contexts.inside : contexts.outside)[found.function != nullptr] = found.context;
    }
    return {};
  }

  const cu::Driver& driver() const { return device_.driver_; }
  size_t nbytes() const { return blocks_ * sizeof(unsigned); }

  CudaDevice& device_;
  const char* operation_;
  const StreamHandle stream_;
  const Relaxed relaxed_;
  unsigned blocks_ = 0;
  cu::Module module_ = nullptr;
  cu::Library library_ = nullptr;
  cu::Function function_ = nullptr;
  void* notes_ = nullptr;
  cu::Graph graph_ = nullptr;
  std::vector<StreamHandle> own_;
};

Result<std::vector<int>> CudaDevice::do_sms_seen(StreamHandle stream, bool replayed) {
  HEADRACE_CURRENT("sms_seen");
  HEADRACE_USABLE("sms_seen", stream);
  PartitionRef partition;
  if (replayed) {
    auto of = do_partition_of(stream);
    if (!of.ok()) return of.status();
    partition = std::move(*of);
  }
  Probe probe(*this, "sms_seen", stream);
  if (Status status = probe.load(); !status.ok()) return status;
  if (replayed) {
    Status status = probe.clear();  // what the first launch noted
    if (status.ok()) status = probe.replay(partition);
    if (!status.ok()) return status;
  }
  return probe.read();
}

Result<GraphWork> CudaDevice::do_work_of(Graph& graph, const PartitionRef& partition) {
  HEADRACE_CURRENT("work_of");
  const std::string lacking =
      "a driver that tells in which partition a graph's kernels run, by their contexts";
  if (const char* missing = driver_.missing_for_nodes())
    return refusal(ErrorCode::kNotSupported, name(), "work_of", lacking,
                   "one for CUDA " + cu::version_text(driver_.version) + ", without " + missing,
                   "update the driver");
  // Any stream of the device does: only the captured kernels matter.
  Probe probe(*this, "work_of", kPerThreadStream);
  if (Status status = probe.load(); !status.ok()) return status;
  NodeContexts contexts;
  if (Status status = probe.look(partition, contexts); !status.ok()) return status;
  // The driver's reference says that a node has a context, and not that it is a partition's. So it is tried.
  if (!contexts.tells(false) && !contexts.tells(true))
    return refusal(
        ErrorCode::kNotSupported, name(), "work_of", lacking,
        "one that gives kernels captured in the partition the context of those captured outside it",
        "go by the multiprocessors that sms_seen() names");
  GraphWork found;
  if (Status status = read_nodes(static_cast<CudaGraph&>(graph).graph, contexts, found); !status.ok())
    return status;
  return found;
}

Status CudaDevice::read_nodes(cu::Graph graph, const NodeContexts& contexts, GraphWork& found) const {
  size_t count = 0;
  HEADRACE_DRIVER("work_of", GraphGetNodes(graph, nullptr, &count));
  std::vector<cu::GraphNode> nodes(count);
  // With room for none the driver would count again.
  if (count != 0) HEADRACE_DRIVER("work_of", GraphGetNodes(graph, nodes.data(), &count));
  nodes.resize(std::min(count, nodes.size()));
  for (cu::GraphNode node : nodes) {
    int type = cu::kNodeEmpty;
    HEADRACE_DRIVER("work_of", GraphNodeGetType(node, &type));
    if (type == cu::kNodeGraph) {
      cu::Graph child = nullptr;  // the node's own: not to be destroyed
      HEADRACE_DRIVER("work_of", GraphChildGraph(node, &child));
      if (Status status = read_nodes(child, contexts, found); !status.ok()) return status;
    } else if (type == cu::kNodeKernel) {
      cu::KernelNode kernel{};
      HEADRACE_DRIVER("work_of", GraphKernelNode(node, &kernel));
      bool function = kernel.function != nullptr;
      if (!contexts.tells(function)) {
        ++found.untold_kernels;
        continue;
      }
      const char* name = nullptr;
      cu::Code code = cu::kNotSupported;
      if (function && driver_.FuncGetName != nullptr) {
        code = driver_.FuncGetName(&name, kernel.function);
      } else if (kernel.kernel != nullptr && driver_.KernelGetName != nullptr) {
        code = driver_.KernelGetName(&name, kernel.kernel);
      }
      found.pieces.push_back(
          {code == cu::kSuccess && name != nullptr ? name : "", kernel.context == contexts.inside[function]});
    } else if (is_work(type)) {
      ++found.untold;
    }
  }
  return {};
}

}  // namespace headrace
