// AOTInductor islands in programs that the engine's own `Module` runs: the delegate is there because its
// library is linked, or was opened.
//
//     module host PROGRAM
//     module sim|memory PROGRAM DATA INPUT OUTPUT      (float32[4, 16] and float32[4, 8], raw)
//     module gpu PROGRAM SUM                           (the MLP, on the fake driver: see child_aoti.py)
#include <dlfcn.h>
#include <executorch/extension/module/module.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "headrace/device.h"
#include "headrace/device_guard.h"
#include "headrace/program.h"
#include "program/allocator.h"

#include "../check.h"

namespace et = executorch::runtime;
using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::aten::TensorImpl;
using executorch::extension::Module;

struct Array {
  std::vector<int32_t> sizes, strides;
  std::vector<uint8_t> order;
  TensorImpl impl;
  Array(std::vector<int32_t> shape, void* data, bool device)
      : sizes(std::move(shape)),
        strides(steps(sizes)),
        order(count(sizes.size())),
        impl(ScalarType::Float, static_cast<ssize_t>(sizes.size()), sizes.data(), data, order.data(),
             strides.data(), et::TensorShapeDynamism::STATIC,
             device ? et::etensor::DeviceType::CUDA : et::etensor::DeviceType::CPU, 0) {}
  et::EValue value() { return et::EValue(Tensor(&impl)); }
  static std::vector<int32_t> steps(const std::vector<int32_t>& sizes) {
    std::vector<int32_t> out(sizes.size());
    int32_t step = 1;
    for (size_t d = sizes.size(); d-- > 0; step *= sizes[d]) out[d] = step;
    return out;
  }
  static std::vector<uint8_t> count(size_t n) {
    std::vector<uint8_t> out(n);
    for (size_t d = 0; d < n; ++d) out[d] = static_cast<uint8_t>(d);
    return out;
  }
};

static std::vector<float> numbers(const char* path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  std::vector<float> out(bytes.size() / sizeof(float));
  std::memcpy(out.data(), bytes.data(), out.size() * sizeof(float));
  return out;
}

// On the host, with no device bound: constants and library come from a loader that frees what it gave.
static void host(const char* path) {
  for (int round = 0; round < 3; ++round) {
    Module module(path);
    float x[] = {1, 2, 3};
    Array in({3}, x, false);
    auto out = module.forward(in.value());
    CHECK(out.ok());
    const float* y = out->at(0).toTensor().const_data_ptr<float>();
    CHECK(y[0] == 2 && y[1] == 3 && y[2] == 4);
  }
}

static void simulated(char** argv, bool wrong) {
  auto sim = headrace::make_sim_device({.schedule = headrace::SimOptions::Schedule::kLate});
  std::vector<float> x = numbers(argv[4]), want = numbers(argv[5]);
  CHECK(x.size() == 4 * 16 && want.size() == 4 * 8);
  headrace::CallContext context;
  headrace::DeviceGuard guard(sim, headrace::kPerThreadStream, &context);
  Module module(argv[2], argv[3]);
  auto a = sim->allocate(x.size() * 4, guard.stream()), b = sim->allocate(want.size() * 4, guard.stream());
  CHECK(a.ok() && b.ok());
  CHECK(sim->copy(*a, x.data(), x.size() * 4, guard.stream()).ok());
  // What the engine takes for device memory because it is told so.
  Array in({4, 16}, wrong ? static_cast<void*>(x.data()) : *a, true), out({4, 8}, *b, true);
  CHECK(module.load_method("forward") == et::Error::Ok);
  CHECK(module.set_output("forward", out.value(), 0) == et::Error::Ok);
  auto result = module.forward(in.value());
  if (wrong) {
    CHECK(!result.ok());
    std::printf("%s\n", context.failure.message().c_str());
    CHECK(context.failure.code() == headrace::ErrorCode::kDelegate);
    return;
  }
  if (!result.ok()) std::fprintf(stderr, "%s\n", context.failure.message().c_str());
  CHECK(result.ok());
  CHECK(sim->pending() > 0);
  std::vector<float> got(want.size());
  CHECK(sim->copy(got.data(), *b, got.size() * 4, guard.stream()).ok());
  CHECK(sim->synchronize(guard.stream()).ok());
  for (size_t i = 0; i < got.size(); ++i) CHECK(std::fabs(got[i] - want[i]) < 1e-5);
}

// A kernel of the fake driver: the first numbers of what it reads, added up, and one.
static void add_first_numbers(const char* name, const uint64_t* arguments) {
  size_t inputs = std::strncmp(name, "triton_poi", 10) == 0 ? 0 : 3;
  float sum = 1;
  for (size_t i = 0; i < inputs; ++i) sum += *reinterpret_cast<const float*>(arguments[i]);
  *reinterpret_cast<float*>(arguments[inputs]) = sum;
}

// Nobody of ours is above: the delegate itself orders its calls, and waits for the last one.
static void gpu(char** argv) {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  CHECK(driver != nullptr);
  auto kernel = reinterpret_cast<void (*)(const char*, const char*, void (*)(const char*, const uint64_t*))>(
      dlsym(driver, "fake_kernel"));
  auto fail = reinterpret_cast<void (*)(const char*, int64_t, int)>(dlsym(driver, "fake_fail"));
  auto calls = reinterpret_cast<int64_t (*)(const char*)>(dlsym(driver, "fake_calls"));
  auto left = reinterpret_cast<const char* (*)()>(dlsym(driver, "fake_left"));
  CHECK(kernel && fail && calls && left);
  kernel("", "pppp", add_first_numbers);
  auto device = headrace::cuda_device(0);
  CHECK(device.ok());
  std::vector<headrace::StreamHandle> streams = {headrace::kPerThreadStream};
  for (int i = 0; i < 2; ++i) {
    auto made = (*device)->create_stream({});
    CHECK(made.ok());
    streams.push_back(*made);
  }
  float want = std::stof(argv[3]);
  std::vector<float> x(4 * 16);
  Array in({4, 16}, x.data(), false);
  {
    std::optional<Module> module(argv[2]);
    {
      headrace::DeviceGuard guard(*device, streams[0]);
      CHECK(module->load_method("forward") == et::Error::Ok);
    }
    int64_t syncs = calls("cuStreamWaitEvent");
    for (int k = 0; k < 6; ++k) {
      headrace::DeviceGuard guard(*device, streams[static_cast<size_t>(k) % 3]);
      x[0] = static_cast<float>(k);
      auto result = module->forward(in.value());
      CHECK(result.ok());
      CHECK(std::fabs(result->at(0).toTensor().const_data_ptr<float>()[0] - x[0] - want) < 1e-4f);
    }
    CHECK(calls("cuStreamWaitEvent") >= syncs + 5);
    // The copy of the result fails behind kernels that are in flight, and the program ends: it waits for
    // them.
    headrace::CallContext context;
    headrace::DeviceGuard guard(*device, streams[1], &context);
    fail("cuMemcpyAsync", 1, 999);
    CHECK(!module->forward(in.value()).ok());
    CHECK(context.failure.code() == headrace::ErrorCode::kDevice);
    fail("cuLaunchKernel", 1, 999);
    context.failure = {};
    CHECK(!module->forward(in.value()).ok());
    CHECK(context.failure.code() == headrace::ErrorCode::kDevice);
    context.failure = {};
    CHECK(module->forward(in.value()).ok());
    module.reset();
  }
  for (size_t i = 1; i < streams.size(); ++i) CHECK((*device)->destroy_stream(streams[i]).ok());
  CHECK((*device)->synchronize().ok());
  CHECK((*device)->memory().current_nbytes == 0);
  std::string text = left();
  CHECK(text.find("module") == std::string::npos && text.find("stack") == std::string::npos);
}

int main(int, char** argv) {
  CHECK(headrace::initialize().ok());
  if (const char* library = std::getenv("OPEN")) CHECK(dlopen(library, RTLD_NOW | RTLD_LOCAL) != nullptr);
  std::string scenario = argv[1];
  if (scenario == "host") {
    host(argv[2]);
  } else if (scenario == "gpu") {
    gpu(argv);
  } else {
    simulated(argv, scenario == "memory");
  }
  int known = 0;
  for (const std::string& name : headrace::registered_delegates()) known += name == "CudaBackend";
  CHECK(known == 1);
}
