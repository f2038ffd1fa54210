// The engine's own Module, bound to a simulated device by the guard: `module PROGRAM IMAGES SCORES`, as
// examples/cpp/digits.cpp has them. The program's memory for the delegate is the device's.
#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>
#include <headrace/device.h>
#include <headrace/device_guard.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <vector>

#include "normalize.h"

int main(int, char** arguments) {
  std::ifstream file(arguments[2], std::ios::binary);
  std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  auto* images = reinterpret_cast<float*>(bytes.data());
  auto count = static_cast<int>(bytes.size() / sizeof(float) / 64);

  auto sim = headrace::make_sim_device({.schedule = headrace::SimOptions::Schedule::kLate});
  auto stream = sim->create_stream({});
  if (!stream.ok()) return 1;
  digits::compute_on_host([sim](cudaStream_t on, std::function<void()> work) {
    auto function = [work = std::move(work)]() -> headrace::Status {
      work();
      return {};
    };
    return sim->call(reinterpret_cast<headrace::StreamHandle>(on), function, {}).ok();
  });

  headrace::DeviceGuard guard(sim, *stream);
  if (!guard.status().ok()) {
    std::fprintf(stderr, "%s\n", guard.status().message().c_str());
    return 1;
  }
  executorch::extension::Module module(arguments[1]);
  auto input = executorch::extension::from_blob(images, {count, 1, 8, 8});
  auto output = module.forward(input);
  if (!output.ok()) return 1;
  std::printf("%d %d\n", digits::last_seen().selected,
              digits::last_seen().stream == reinterpret_cast<cudaStream_t>(*stream));
  auto scores = output->at(0).toTensor();
  std::ofstream out(arguments[3], std::ios::binary);
  out.write(reinterpret_cast<const char*>(scores.const_data_ptr<float>()),
            static_cast<std::streamsize>(scores.nbytes()));
  return out.flush().good() ? 0 : 1;
}
