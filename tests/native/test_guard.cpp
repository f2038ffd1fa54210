// Where the engine's allocator, delegates and the small library think that a thread works: `test_guard
// SCENARIO`. Exit status 0: as expected.
#include <executorch/runtime/core/device_allocator.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "headrace/caller_stream.h"
#include "headrace/device.h"
#include "headrace/device_guard.h"
#include "headrace/program.h"

#include "check.h"

namespace et = executorch::runtime;
using headrace::CallerStreamGuard;
using headrace::DeviceGuard;
using headrace::ErrorCode;
using headrace::StreamHandle;

namespace {

using Sim = std::shared_ptr<headrace::SimDevice>;

Sim late(int ordinal = 0) {
  return headrace::make_sim_device({.schedule = headrace::SimOptions::Schedule::kLate, .ordinal = ordinal});
}

et::DeviceAllocator& allocator() {
  et::DeviceAllocator* ours = et::get_device_allocator(et::etensor::DeviceType::CUDA);
  CHECK(ours != nullptr);
  return *ours;
}

cudaStream_t as_cuda(StreamHandle stream) { return reinterpret_cast<cudaStream_t>(stream); }

bool selected(StreamHandle stream, int32_t device) {
  headrace_selection now = headrace_get_selection();
  return now.selected == 1 && now.stream == as_cuda(stream) && now.device == device;
}

// Memory that holds 7 once the work on `stream` has run, and nobody has waited for it.
uint8_t* pending_seven(headrace::Device& device, StreamHandle stream) {
  auto data = device.allocate(1, stream);
  CHECK(data.ok());
  CHECK(device.fill(*data, 7, 1, stream).ok());
  return static_cast<uint8_t*>(*data);
}

uint8_t copied(const void* data) {
  uint8_t out = 0;
  CHECK(allocator().copy_device_to_host(&out, data, 1, 0) == et::Error::Ok);
  return out;
}

// No guard at all: the stream is the thread's selection, so a copy sees what that stream wrote. Streams here
// do not wait for the legacy one, nor it for them.
void unbound() {
  CHECK(headrace::initialize().ok());
  Sim sim = late();
  auto stream = sim->create_stream({}), other = sim->create_stream({});
  CHECK(stream.ok() && other.ok());
  {
    CallerStreamGuard guard(as_cuda(*stream), sim->id());
    uint8_t* data = pending_seven(*sim, *stream);
    CHECK(copied(data) == 7);
    // What nobody asked for has not run.
    CHECK(sim->fill(data, 8, 1, *other).ok());
    uint8_t nine = 9;
    CHECK(allocator().copy_host_to_device(data, &nine, 1, 0) == et::Error::Ok);
    CHECK(copied(data) == 9);
    CHECK(sim->pending() > 0);
    CHECK(sim->synchronize().ok());
  }
  // Nothing selected: the per-thread stream. A legacy stream that is held up is not waited for, since a copy
  // on it would be behind the blocking stream here, whose work fails.
  auto blocking = sim->create_stream({.blocking = true});
  CHECK(blocking.ok());
  uint8_t* data = pending_seven(*sim, headrace::kPerThreadStream);
  CHECK(sim->call(*blocking, [] { return headrace::Status(ErrorCode::kDelegate, "on purpose"); }, {}).ok());
  CHECK(copied(data) == 7);
  CHECK(!sim->synchronize(*blocking).ok());
  // Another device's stream.
  Sim far = late(1);
  CallerStreamGuard guard(as_cuda(headrace::kLegacyStream), far->id());
  uint8_t out = 0;
  CHECK(allocator().copy_device_to_host(&out, data, 1, 0) != et::Error::Ok);
  CHECK(out == 0);
}

// An index that no machine has: the engine's index is the GPU's where no guard says otherwise.
void index() {
  CHECK(headrace::initialize().ok());
  CHECK(!allocator().allocate(1, 120, 16).ok());
  Sim sim = late();
  DeviceGuard guard(sim);
  CHECK(guard.status().ok());
  auto data = allocator().allocate(1, 120, 16);
  CHECK(data.ok());
  CHECK(sim->where(*data).kind == headrace::PointerInfo::Kind::kDevice);
  allocator().deallocate(*data, 120);
  CHECK(sim->memory().current_nbytes == 0);
}

void selects() {
  Sim sim = late();
  auto a = sim->create_stream({}), b = sim->create_stream({});
  CHECK(a.ok() && b.ok());
  CHECK(DeviceGuard::current() == nullptr);
  {
    DeviceGuard guard(sim, *a);
    CHECK(guard.status().ok() && DeviceGuard::current() == &guard);
    CHECK(selected(*a, sim->id()) && guard.stream() == *a);
    CHECK(copied(pending_seven(*sim, *a)) == 7);
    {
      // The innermost selects, whichever kind it is.
      CallerStreamGuard inner(as_cuda(*b), sim->id());
      CHECK(guard.stream() == *b);
      CHECK(copied(pending_seven(*sim, *b)) == 7);
      DeviceGuard third(sim, *a);
      CHECK(selected(*a, sim->id()) && third.stream() == *a && guard.stream() == *a);
    }
    CHECK(selected(*a, sim->id()) && DeviceGuard::current() == &guard);
    {
      CallerStreamGuard inner(as_cuda(*b));
      DeviceGuard keeps(sim);
      CHECK(keeps.stream() == *b && selected(*b, -1));
      CHECK(copied(pending_seven(*sim, *b)) == 7);
    }
  }
  CHECK(DeviceGuard::current() == nullptr && headrace_get_selection().selected == 0);
  DeviceGuard none(sim);
  CHECK(none.stream() == headrace::kPerThreadStream && headrace_get_selection().selected == 0);
  DeviceGuard legacy(sim, 0);
  CHECK(legacy.stream() == headrace::kLegacyStream);
  DeviceGuard cpu(headrace::cpu_device());
  CHECK(cpu.stream() == headrace::kPerThreadStream);
}

// A guard that cannot hold says why, selects nothing, and what the engine asks of it fails.
void refuses() {
  Sim sim = late(), far = late(1);
  auto stream = sim->create_stream({});
  CHECK(stream.ok());
  void* data = pending_seven(*sim, *stream);
  uint8_t out = 0;
  {
    DeviceGuard guard(nullptr, *stream);
    CHECK(guard.status().code() == ErrorCode::kDevice);
    CHECK(DeviceGuard::current() == nullptr && headrace_get_selection().selected == 0);
    CHECK(allocator().copy_device_to_host(&out, data, 1, 0) != et::Error::Ok);
  }
  {
    DeviceGuard guard(far, *stream);
    CHECK(!guard.status().ok());
    std::printf("%s\n", guard.status().message().c_str());
    CHECK(headrace_get_selection().selected == 0);
    CHECK(!allocator().allocate(1, 0, 16).ok());
    CHECK(far->memory().allocations == 0);
  }
  {
    DeviceGuard guard(sim, 12345);
    CHECK(!guard.status().ok());
    std::printf("%s\n", guard.status().message().c_str());
  }
  // Within a good guard, a selection that says another device.
  DeviceGuard guard(sim, *stream);
  CallerStreamGuard inner(as_cuda(1), far->id());
  CHECK(guard.status().ok());
  CHECK(allocator().copy_device_to_host(&out, data, 1, 0) != et::Error::Ok);
  CHECK(!allocator().allocate(1, 0, 16).ok());
  CHECK(out == 0);
}

}  // namespace

int main(int, char** argv) {
  std::string scenario = argv[1];
  if (scenario == "unbound") unbound();
  if (scenario == "index") index();
  if (scenario == "selects") selects();
  if (scenario == "refuses") refuses();
  std::puts("done");
}
