#include "cuda/shims.h"

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "cuda/arena.h"
#include "cuda/threads.h"

// The C++ run time is not linked: memory by malloc, no standard container.

namespace headrace::shims {

namespace {

constexpr size_t kAlignment = 64;

thread_local Arena* current = nullptr;

void* memory(Block* block) { return reinterpret_cast<char*>(block) + kAlignment; }

size_t width(int32_t dtype) { return itemsize(static_cast<DType>(dtype)); }

// Elements from the first to behind the last; false where they cannot be counted.
bool extent(int64_t ndim, const int64_t* sizes, const int64_t* strides, int64_t* out) {
  int64_t last = 1;
  for (int64_t d = 0; d < ndim; ++d) {
    if (sizes[d] < 0 || strides[d] < 0) return false;
  }
  for (int64_t d = 0; d < ndim; ++d) {
    if (sizes[d] == 0) {
      *out = 0;
      return true;
    }
    int64_t step = 0;
    if (__builtin_mul_overflow(sizes[d] - 1, strides[d], &step) || __builtin_add_overflow(last, step, &last))
      return false;
  }
  *out = last;
  return true;
}

// `arena`: of the tensor that had it.
void drop(Arena& arena, Storage* storage) {
  if (storage->references.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  if (storage->arena != nullptr) {
    if (storage->device_type == kCpu) {
      storage->arena->give(storage->base);
    } else {
      storage->arena->gpu.give(storage->arena->gpu.owner, storage->base);
    }
  }
  arena.storage_cells.give(storage);
}

void destroy(Tensor* tensor) {
  *tensor->previous = tensor->next;
  if (tensor->next != nullptr) tensor->next->previous = tensor->previous;
  Arena& arena = *tensor->arena;
  --arena.counts.tensors;
  drop(arena, tensor->storage);
  arena.tensor_cells.give(tensor);
}

// Takes the reference to `storage` over, also where it fails.
Tensor* make(Arena* arena, Storage* storage, int64_t ndim, const int64_t* sizes, const int64_t* strides,
             int64_t offset, int32_t dtype) {
  auto* tensor = ndim < 0 || ndim > static_cast<int64_t>(kMaxDims)
                     ? nullptr
                     : static_cast<Tensor*>(arena->tensor_cells.take());
  if (tensor == nullptr) {
    drop(*arena, storage);
    (void)fail("no memory for a tensor, or a rank of %lld where at most %zu is known",
               static_cast<long long>(ndim), kMaxDims);
    return nullptr;
  }
  tensor->arena = arena;
  tensor->storage = storage;
  tensor->offset = offset;
  tensor->dtype = dtype;
  tensor->ndim = static_cast<int>(ndim);
  tensor->borrowed = false;
  for (int64_t d = 0; d < ndim; ++d) {
    tensor->sizes[d] = sizes[d];
    tensor->strides[d] = strides[d];
  }
  tensor->next = arena->tensors;
  tensor->previous = &arena->tensors;
  if (tensor->next != nullptr) tensor->next->previous = &tensor->next;
  arena->tensors = tensor;
  ++arena->counts.tensors;
  return tensor;
}

Storage* make_storage(Arena& arena, void* base, size_t nbytes, int32_t device_type, int32_t device_index) {
  void* memory = arena.storage_cells.take();
  if (memory == nullptr) return nullptr;
  auto* storage = new (memory) Storage;
  storage->base = base;
  storage->nbytes = nbytes;
  storage->device_type = device_type;
  storage->device_index = device_index < 0 ? 0 : device_index;
  return storage;
}

// Device memory for the library: the caller's where it says so.
int32_t device_memory(Storage& storage, bool counts) {
  Arena& arena = *current;
  if (counts) {
    storage.ordinal = arena.requests++;
    for (size_t i = 0; i < arena.run.num_placements; ++i) {
      const Placement& p = arena.run.placements[i];
      if (p.ordinal != storage.ordinal || p.nbytes != storage.nbytes) continue;
      storage.base = p.data;
      return 0;
    }
  }
  storage.base = arena.gpu.take(arena.gpu.owner, storage.nbytes);
  if (storage.base == nullptr)
    return fail("empty_strided: %zu bytes of device memory could not be had", storage.nbytes);
  storage.arena = &arena;
  return 0;
}

// `counts`: a request that every run of the library makes alike.
int32_t empty(int64_t ndim, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t device_type,
              int32_t device_index, Tensor** out, bool counts) {
  int64_t elements = 0;
  size_t nbytes = 0;
  if (width(dtype) == 0) return fail("empty_strided: expected a dtype of those known, got number %d", dtype);
  if (!extent(ndim, sizes, strides, &elements) ||
      __builtin_mul_overflow(static_cast<size_t>(elements), width(dtype), &nbytes))
    return fail("empty_strided: expected sizes and strides that can be allocated, got others");
  if (current == nullptr) return fail("empty_strided: called outside headrace, on a thread with no arena");
  bool host = device_type == kCpu;
  if (!host && (device_type != kCuda || current->gpu.driver == nullptr))
    return fail("empty_strided: expected host memory, got device type %d", device_type);
  Storage* storage = make_storage(*current, nullptr, nbytes, device_type, device_index);
  if (storage == nullptr) return fail("empty_strided: no memory");
  if (!host) {
    if (int32_t code = device_memory(*storage, counts)) {
      current->storage_cells.give(storage);
      return code;
    }
  } else {
    storage->base = current->take(nbytes);
    if (storage->base == nullptr) {
      current->storage_cells.give(storage);
      return fail("empty_strided: %zu bytes of host memory could not be had", nbytes);
    }
    storage->arena = current;
  }
  *out = make(current, storage, ndim, sizes, strides, 0, dtype);
  return *out == nullptr;
}

// One run of elements without a gap on both sides, and how often it comes.
struct Runs {
  int ndim = 0;
  int64_t sizes[kMaxDims], from[kMaxDims], to[kMaxDims];  // steps in elements, outermost first
  int64_t length = 1, count = 1;
};

Runs runs_of(int ndim, const int64_t* sizes, const int64_t* from, const int64_t* to) {
  int order[kMaxDims], n = 0;
  Runs out;
  for (int d = 0; d < ndim; ++d) {
    if (sizes[d] != 1) order[n++] = d;
  }
  // By the steps of the target, smallest first: so that what lies side by side there comes side by side.
  for (int i = 1; i < n; ++i) {
    for (int k = i; k > 0 && to[order[k]] < to[order[k - 1]]; --k) {
      int d = order[k];
      order[k] = order[k - 1];
      order[k - 1] = d;
    }
  }
  int at = 0;
  while (at < n && from[order[at]] == out.length && to[order[at]] == out.length) {
    out.length *= sizes[order[at++]];
  }
  for (int i = n; i-- > at;) {
    out.sizes[out.ndim] = sizes[order[i]];
    out.from[out.ndim] = from[order[i]];
    out.to[out.ndim++] = to[order[i]];
    out.count *= sizes[order[i]];
  }
  return out;
}

constexpr int64_t kMaxCopies = 1 << 16;

// Between any two memories, at least one of the device, of one dtype and the same sizes.
int32_t copy_strided(Arena& arena, const char* what, char* to, const int64_t* to_strides, bool to_host,
                     const char* from, const int64_t* from_strides, bool from_host, int ndim,
                     const int64_t* sizes, size_t w) {
  for (int d = 0; d < ndim; ++d) {
    if (sizes[d] == 0) return 0;
  }
  Runs runs = runs_of(ndim, sizes, from_strides, to_strides);
  if (runs.count > kMaxCopies)
    return fail("%s: expected strides that %lld copies can serve, got some that take %lld", what,
                static_cast<long long>(kMaxCopies), static_cast<long long>(runs.count));
  int64_t index[kMaxDims] = {};
  for (int64_t left = runs.count; left > 0; --left) {
    int64_t source = 0, target = 0;
    for (int d = 0; d < runs.ndim; ++d) {
      source += index[d] * runs.from[d];
      target += index[d] * runs.to[d];
    }
    if (int32_t code = copy_bytes(arena, to + target * static_cast<int64_t>(w), to_host,
                                  from + source * static_cast<int64_t>(w), from_host,
                                  static_cast<size_t>(runs.length) * w))
      return code;
    for (int d = runs.ndim; d-- > 0;) {
      if (++index[d] < runs.sizes[d]) break;
      index[d] = 0;
    }
  }
  return 0;
}

// The strides of `from` as `to` of other sizes sees it; false where it does not broadcast.
bool broadcast(const Tensor* from, const Tensor* to, int64_t* steps) {
  if (from->ndim > to->ndim) return false;
  int lead = to->ndim - from->ndim;
  for (int d = 0; d < to->ndim; ++d) {
    int64_t size = d < lead ? 1 : from->sizes[d - lead];
    if (size != to->sizes[d] && size != 1) return false;
    steps[d] = size == 1 ? 0 : from->strides[d - lead];
  }
  return true;
}

bool on_host(const Tensor* t) { return t->storage->device_type == kCpu; }

// Walks all elements of `to`, in its order, with the place in `from` (stride 0 where `from` has size 1).
bool copy_elements(const Tensor* from, Tensor* to) {
  int64_t steps[kMaxDims], index[kMaxDims] = {};
  if (!broadcast(from, to, steps)) return false;
  size_t w = width(to->dtype);
  for (int64_t left = to->numel(); left > 0; --left) {
    int64_t source = 0, target = 0;
    for (int d = 0; d < to->ndim; ++d) {
      source += index[d] * steps[d];
      target += index[d] * to->strides[d];
    }
    std::memcpy(to->data() + target * static_cast<int64_t>(w),
                from->data() + source * static_cast<int64_t>(w), w);
    for (int d = to->ndim; d-- > 0;) {
      if (++index[d] < to->sizes[d]) break;
      index[d] = 0;
    }
  }
  return true;
}

// PyTorch's clone keeps strides that leave no gaps and overlap nowhere; others become contiguous.
int32_t make_clone(const Tensor* from, bool preserve, Tensor** out) {
  int64_t elements = 0;
  if (!extent(from->ndim, from->sizes, from->strides, &elements))
    return fail("clone: expected countable sizes");
  bool whole = elements == from->numel();
  int64_t strides[kMaxDims], step = 1;
  for (int d = from->ndim; d-- > 0;) {
    strides[d] = preserve || whole ? from->strides[d] : step;
    step *= from->sizes[d];
  }
  // Of inputs that happen to be misaligned, say: no request that every run makes.
  if (int32_t code = empty(from->ndim, from->sizes, strides, from->dtype, from->storage->device_type,
                           from->storage->device_index, out, false))
    return code;
  if (!on_host(from)) {
    int32_t code = preserve || whole
                       ? copy_bytes(*current, (*out)->data(), false, from->data(), false,
                                    static_cast<size_t>(elements) * width(from->dtype))
                       : copy_strided(*current, "clone", (*out)->data(), (*out)->strides, false, from->data(),
                                      from->strides, false, from->ndim, from->sizes, width(from->dtype));
    if (code != 0) {
      destroy(*out);
      *out = nullptr;
    }
    return code;
  }
  if (preserve || whole) {
    std::memcpy((*out)->data(), from->data(), static_cast<size_t>(elements) * width(from->dtype));
  } else if (!copy_elements(from, *out)) {
    return fail("clone: cannot happen");
  }
  return 0;
}

}  // namespace

thread_local char error[512];
void (*on_check_failed)(const char*, bool) = nullptr;

Arena* current_arena() { return current; }

int32_t fail(const char* pattern, ...) {
  va_list arguments;
  va_start(arguments, pattern);
  std::vsnprintf(error, sizeof error, pattern, arguments);
  va_end(arguments);
  return 1;
}

void* Arena::take(size_t nbytes) {
  Block** best = nullptr;
  Block** largest = nullptr;
  for (Block** at = &waiting; *at != nullptr; at = &(*at)->next) {
    if (largest == nullptr || (*at)->capacity > (*largest)->capacity) largest = at;
    if ((*at)->capacity >= nbytes && (best == nullptr || (*at)->capacity < (*best)->capacity)) best = at;
  }
  if (best != nullptr) {
    Block* block = *best;
    *best = block->next;
    return memory(block);
  }
  if (largest != nullptr) {
    Block* block = *largest;
    *largest = block->next;
    counts.nbytes -= block->capacity;
    std::free(block);
  }
  size_t capacity = (nbytes + kAlignment - 1) / kAlignment * kAlignment;
  if (capacity < nbytes || capacity + kAlignment < capacity) return nullptr;
  auto* block = static_cast<Block*>(std::aligned_alloc(kAlignment, capacity + kAlignment));
  if (block == nullptr) return nullptr;
  block->capacity = capacity;
  counts.nbytes += capacity;
  ++counts.allocations;
  return memory(block);
}

void Arena::give(void* data) {
  auto* block = reinterpret_cast<Block*>(static_cast<char*>(data) - kAlignment);
  block->next = waiting;
  waiting = block;
}

char* Tensor::data() const {
  return static_cast<char*>(storage->base) + offset * static_cast<int64_t>(width(dtype));
}

Arena* make_arena(const Gpu* gpu) {
  void* memory = std::malloc(sizeof(Arena));
  if (memory == nullptr) return nullptr;
  auto* arena = new (memory) Arena;
  if (gpu != nullptr) arena->gpu = *gpu;
  return arena;
}

void begin_gpu_run(Arena* arena, const GpuRun& run) {
  arena->run = run;
  arena->requests = 0;
  arena->guards = 0;
  arena->counts.code = 0;
}

Tensor* clone(const Tensor* from) {
  Tensor* out = nullptr;
  return make_clone(from, true, &out) == 0 ? out : nullptr;
}

bool copy_on_device(const Tensor* from, void* to, const int64_t* strides) {
  return copy_strided(*from->arena, "copy", static_cast<char*>(to), strides, false, from->data(),
                      from->strides, on_host(from), from->ndim, from->sizes, width(from->dtype)) == 0;
}

void destroy_arena(Arena* arena) {
  if (arena == nullptr) return;
  while (arena->tensors != nullptr) destroy(arena->tensors);
  while (arena->waiting != nullptr) {
    Block* block = arena->waiting;
    arena->waiting = block->next;
    std::free(block);
  }
  arena->tensor_cells.clear();
  arena->storage_cells.clear();
  std::free(arena);
}

ArenaCounts counts(const Arena* arena) { return arena->counts; }

Arena* exchange_arena(Arena* arena) {
  Arena* former = current;
  current = arena;
  return former;
}

Tensor* borrow(Arena* arena, void* memory, size_t storage_nbytes, int32_t dtype, int ndim,
               const int64_t* sizes, const int64_t* strides, int64_t offset, int32_t device_type,
               int32_t device_index) {
  Storage* storage = make_storage(*arena, memory, storage_nbytes, device_type, device_index);
  if (storage == nullptr) return nullptr;
  Tensor* tensor = make(arena, storage, ndim, sizes, strides, offset, dtype);
  if (tensor != nullptr) tensor->borrowed = true;
  return tensor;
}

void end_borrow(Tensor* tensor) { destroy(tensor); }

void release(Tensor* tensor) {
  if (tensor != nullptr && !tensor->borrowed) destroy(tensor);
}

View view(const Tensor* t) {
  return {t->data(),           t->dtype,       t->storage->device_type, t->ndim, t->sizes, t->strides,
          t->storage->ordinal, t->offset == 0, t->storage->nbytes};
}

const char* take_error() {
  thread_local char taken[sizeof error];
  std::memcpy(taken, error, sizeof error);
  error[0] = 0;
  return taken;
}

void set_on_check_failed(void (*function)(const char* message, bool may_throw)) {
  on_check_failed = function;
}

}  // namespace headrace::shims

// ---- what libraries call

using headrace::shims::Arena;
using headrace::shims::Tensor;
namespace shims = headrace::shims;

#define SHIM extern "C" __attribute__((visibility("default")))
#define NAMED(name) aoti_hrace_##name

SHIM int32_t NAMED(device_type_cpu)() { return shims::kCpu; }
SHIM int32_t NAMED(device_type_cuda)() { return shims::kCuda; }
SHIM int32_t NAMED(layout_strided)() { return 0; }

// torch numbers dtypes as ExecuTorch does (c10/core/ScalarType.h).
#define DTYPE(name, value) \
  SHIM int32_t NAMED(dtype_##name)() { return static_cast<int32_t>(headrace::DType::value); }
DTYPE(uint8, kUInt8)
DTYPE(int8, kInt8)
DTYPE(int16, kInt16)
DTYPE(int32, kInt32)
DTYPE(int64, kInt64)
DTYPE(uint16, kUInt16)
DTYPE(uint32, kUInt32)
DTYPE(uint64, kUInt64)
DTYPE(float16, kFloat16)
DTYPE(float32, kFloat32)
DTYPE(float64, kFloat64)
DTYPE(bool, kBool)
DTYPE(bfloat16, kBFloat16)
SHIM size_t NAMED(dtype_element_size)(int32_t dtype) { return shims::width(dtype); }

// There are no gradients here.
SHIM bool NAMED(grad_mode_is_enabled)() { return false; }
SHIM void NAMED(grad_mode_set_enabled)(bool) {}

SHIM void NAMED(warn)(const char* function, const char*, uint32_t line, const char* message) {
  std::fprintf(stderr, "headrace: a library warns (%s, line %u): %s\n", function, line, message);
}
SHIM void NAMED(check)(bool holds, const char* function, const char*, uint32_t line, const char* message) {
  if (holds) return;
  (void)shims::fail("%s (%s, line %u)", message, function, line);
  if (shims::in_region()) shims::leave_region();
  if (shims::on_check_failed != nullptr) shims::on_check_failed(shims::error, true);
}

SHIM int32_t NAMED(empty_strided)(int64_t ndim, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                  int32_t device_type, int32_t device_index, Tensor** out) {
  return shims::empty(ndim, sizes, strides, dtype, device_type, device_index, out, true);
}
SHIM int32_t NAMED(empty_strided_pinned)(int64_t ndim, const int64_t* sizes, const int64_t* strides,
                                         int32_t dtype, int32_t, int32_t, Tensor** out) {
  return shims::empty(ndim, sizes, strides, dtype, shims::kCpu, 0, out, false);
}
SHIM int32_t NAMED(delete_tensor_object)(Tensor* tensor) {
  shims::release(tensor);
  return 0;
}

// `data` is where the storage begins, as in torch: the first element is `offset` further on.
SHIM int32_t NAMED(create_tensor_from_blob)(void* data, int64_t ndim, const int64_t* sizes,
                                            const int64_t* strides, int64_t offset, int32_t dtype,
                                            int32_t device_type, int32_t device_index, Tensor** out) {
  int64_t elements = 0;
  size_t nbytes = 0;
  if (shims::width(dtype) == 0 || offset < 0 || !shims::extent(ndim, sizes, strides, &elements) ||
      __builtin_add_overflow(elements, offset, &elements) ||
      __builtin_mul_overflow(static_cast<size_t>(elements), shims::width(dtype), &nbytes))
    return shims::fail("create_tensor_from_blob: expected a known dtype and countable sizes, got others");
  if (shims::current == nullptr) return shims::fail("create_tensor_from_blob: called outside headrace");
  auto* storage = shims::make_storage(*shims::current, data, nbytes, device_type, device_index);
  if (storage == nullptr) return shims::fail("create_tensor_from_blob: no memory");
  *out = shims::make(shims::current, storage, ndim, sizes, strides, offset, dtype);
  return *out == nullptr;
}
SHIM int32_t NAMED(create_tensor_from_blob_v2)(void* data, int64_t ndim, const int64_t* sizes,
                                               const int64_t* strides, int64_t offset, int32_t dtype,
                                               int32_t device_type, int32_t device_index, Tensor** out,
                                               int32_t layout, const uint8_t*, int64_t metadata_nbytes) {
  if (layout != 0 || metadata_nbytes != 0)
    return shims::fail("create_tensor_from_blob_v2: expected a strided tensor, got layout %d", layout);
  return NAMED(create_tensor_from_blob)(data, ndim, sizes, strides, offset, dtype, device_type, device_index,
                                        out);
}

// `step` is added to the offset of the tensor.
SHIM int32_t NAMED(_reinterpret_tensor)(Tensor* tensor, int64_t ndim, const int64_t* sizes,
                                        const int64_t* strides, int64_t step, Tensor** out) {
  ++tensor->storage->references;
  *out =
      shims::make(tensor->arena, tensor->storage, ndim, sizes, strides, tensor->offset + step, tensor->dtype);
  return *out == nullptr;
}
SHIM int32_t NAMED(new_tensor_handle)(Tensor* tensor, Tensor** out) {
  return NAMED(_reinterpret_tensor)(tensor, tensor->ndim, tensor->sizes, tensor->strides, 0, out);
}
SHIM int32_t NAMED(assign_tensors_out)(Tensor* tensor, Tensor** out) {
  return NAMED(new_tensor_handle)(tensor, out);
}
SHIM int32_t NAMED(clone)(Tensor* tensor, Tensor** out) { return shims::make_clone(tensor, false, out); }
SHIM int32_t NAMED(clone_preserve_strides)(Tensor* tensor, Tensor** out) {
  return shims::make_clone(tensor, true, out);
}

SHIM int32_t NAMED(copy_)(Tensor* to, Tensor* from, int32_t) {
  if (to->dtype != from->dtype)
    return shims::fail("copy_: expected one dtype, got numbers %d and %d", to->dtype, from->dtype);
  if (!shims::on_host(to) || !shims::on_host(from)) {
    int64_t steps[headrace::kMaxDims];
    if (!shims::broadcast(from, to, steps))
      return shims::fail("copy_: expected shapes that broadcast, got others");
    return shims::copy_strided(*to->arena, "copy_", to->data(), to->strides, shims::on_host(to), from->data(),
                               steps, shims::on_host(from), to->ndim, to->sizes, shims::width(to->dtype));
  }
  if (!shims::copy_elements(from, to))
    return shims::fail("copy_: expected shapes that broadcast, got others");
  return 0;
}

#define GET(name, type, expression)                        \
  SHIM int32_t NAMED(get_##name)(Tensor * t, type * out) { \
    *out = expression;                                     \
    return 0;                                              \
  }
GET(data_ptr, void*, t->data())
GET(dim, int64_t, t->ndim)
GET(numel, int64_t, t->numel())
GET(sizes, int64_t*, t->sizes)
GET(strides, int64_t*, t->strides)
GET(storage_offset, int64_t, t->offset)
GET(storage_size, int64_t, static_cast<int64_t>(t->storage->nbytes))
GET(dtype, int32_t, t->dtype)
GET(device_type, int32_t, t->storage->device_type)
GET(device_index, int32_t, t->storage->device_index)
GET(layout, int32_t, (static_cast<void>(t), 0))

#define ITEM(name, type)                                                                            \
  SHIM int32_t NAMED(item_##name)(Tensor * t, type * out) {                                         \
    if (t->numel() != 1 || shims::width(t->dtype) != sizeof(type))                                  \
      return shims::fail("item_" #name ": expected one element of this dtype, got something else"); \
    return shims::copy_bytes(*t->arena, out, true, t->data(), shims::on_host(t), sizeof(type));     \
  }
ITEM(bool, bool)
ITEM(uint8, uint8_t)
ITEM(int8, int8_t)
ITEM(int16, int16_t)
ITEM(int32, int32_t)
ITEM(int64, int64_t)
ITEM(uint16, uint16_t)
ITEM(uint32, uint32_t)
ITEM(uint64, uint64_t)
ITEM(float16, uint16_t)
ITEM(bfloat16, uint16_t)
ITEM(float32, float)
ITEM(float64, double)
