// Classifies handwritten digits: loads the network of examples/digits, selects a stream, runs it.
//
//     digits PROGRAM IMAGES SCORES [--sim | --cuda]
//
// PROGRAM is digits.pte, or digits_split.pte, whose first operation is the delegate of normalize.cpp. IMAGES
// holds float32[n, 1, 8, 8] as raw numbers, and SCORES gets float32[n, 10] so. Exit status: 0 done, 1
// something failed, 2 usage.
#include <headrace/caller_stream.h>
#include <headrace/device.h>
#include <headrace/program.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "normalize.h"

using headrace::DeviceRef;
using headrace::Result;
using headrace::Status;
using headrace::StreamHandle;
using headrace::Value;

namespace {

constexpr int64_t kPixels = 64, kClasses = 10;

// The caller's streams, so that one seen elsewhere is called by the name that it has here.
std::map<StreamHandle, std::string> names{
    {0, "none"}, {1, "the legacy stream"}, {2, "the per-thread stream"}};

std::string name_of(const headrace_selection& selection) {
  auto found = names.find(reinterpret_cast<StreamHandle>(selection.stream));
  return found == names.end() ? "a stream of somebody else's" : found->second;
}

Result<DeviceRef> open(const std::string& option) {
  if (option == "--cuda") return headrace::cuda_device(0);
  if (option == "--sim") {
    // Work runs only when something waits for it: what is read too early is wrong in every run.
    return DeviceRef(headrace::make_sim_device({.schedule = headrace::SimOptions::Schedule::kLate}));
  }
  return headrace::cpu_device();
}

Status run(headrace::Method& method, std::vector<float>& images, std::vector<float>& scores) {
  int64_t count = static_cast<int64_t>(images.size()) / kPixels;
  Value input;
  input.kind = Value::Kind::kTensor;
  input.tensor.data = images.data();
  input.tensor.ndim = 4;
  input.tensor.sizes = {count, 1, 8, 8};
  headrace::set_dense_strides(input.tensor);
  scores.resize(static_cast<size_t>(count * kClasses));
  Value output;
  output.kind = Value::Kind::kTensor;
  output.tensor.data = scores.data();
  output.tensor.ndim = 2;
  output.tensor.sizes = {count, kClasses};
  headrace::set_dense_strides(output.tensor);

  std::printf("caller stream set: %s\n", headrace::caller_stream() ? "yes" : "no");
  // The images come from the host and the scores go there, so this returns when they are there.
  std::vector<Value> outputs;
  return method.run({&input, 1}, {&output, 1}, {}, outputs);
}

Status classify(const std::string& path, std::vector<float>& images, std::vector<float>& scores,
                const std::string& option) {
  auto device = open(option);
  if (!device.ok()) return device.status();
  if (option != "--cuda") {
    // The delegate knows nothing of our devices: here is how work gets into the order of a stream of this
    // one.
    digits::compute_on_host([device = *device](cudaStream_t stream, std::function<void()> work) {
      StreamHandle handle = stream ? reinterpret_cast<StreamHandle>(stream) : headrace::kPerThreadStream;
      auto function = [work = std::move(work)]() -> Status {
        work();
        return {};
      };
      return device->call(handle, function, {}).ok();
    });
  }
  auto file = headrace::Bytes::read(path);
  if (!file.ok()) return file.status();
  headrace::LoadOptions options;
  options.device = *device;
  auto program = headrace::Program::load(*file, std::move(options));
  if (!program.ok()) return program.status();
  auto forward = (*program)->method("forward");
  if (forward == nullptr)
    return Status(headrace::ErrorCode::kProgram, path + ": expected a method 'forward', got none");
  bool ours = false;
  std::printf("device: %s\nislands:", (*device)->name().c_str());
  for (const headrace::IslandInfo& island : forward->islands()) {
    std::printf(" %s", island.delegate.c_str());
    ours |= island.delegate == "DigitsNormalize";
  }
  std::printf("\n");

  std::vector<float> unselected;
  if (Status status = run(*forward, images, unselected); !status.ok()) return status;
  if (ours) std::printf("the delegate ran on: %s\n", name_of(digits::last_seen()).c_str());

  auto stream = (*device)->create_stream({});
  if (!stream.ok()) return stream.status();
  names[*stream] = "the caller's stream";
  {
    headrace::CallerStreamGuard guard(reinterpret_cast<cudaStream_t>(*stream), (*device)->id());
    if (Status status = run(*forward, images, scores); !status.ok()) return status;
    if (ours) std::printf("the delegate ran on: %s\n", name_of(digits::last_seen()).c_str());
  }
  std::printf("caller stream set: %s\n", headrace::caller_stream() ? "yes" : "no");
  if (scores != unselected) {
    return Status(headrace::ErrorCode::kDelegate, path + ": expected one answer on every stream, got two");
  }
  if (Status status = (*program)->close(); !status.ok()) return status;
  return (*device)->destroy_stream(*stream);
}

}  // namespace

int main(int count, char** arguments) {
  std::string option = count > 4 ? arguments[4] : "";
  if (count < 4 || count > 5 || (!option.empty() && option != "--sim" && option != "--cuda")) {
    std::fprintf(stderr, "usage: digits PROGRAM IMAGES SCORES [--sim | --cuda]\n");
    return 2;
  }
  std::ifstream file(arguments[2], std::ios::binary);
  std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  if (!file.good() && bytes.empty()) {
    std::fprintf(stderr, "digits: %s: expected images, got a file that cannot be read\n", arguments[2]);
    return 1;
  }
  std::vector<float> images(bytes.size() / sizeof(float) / kPixels * kPixels), scores;
  std::memcpy(images.data(), bytes.data(), images.size() * sizeof(float));

  if (Status status = classify(arguments[1], images, scores, option); !status.ok()) {
    std::fprintf(stderr, "digits: %s\n", status.message().c_str());
    return 1;
  }
  std::array<int, kClasses> found{};
  for (size_t i = 0; i < scores.size(); i += kClasses) {
    auto first = scores.begin() + static_cast<std::ptrdiff_t>(i);
    ++found[static_cast<size_t>(std::max_element(first, first + kClasses) - first)];
  }
  std::printf("digits 0 to 9 found:");
  for (int n : found) std::printf(" %d", n);
  std::printf("\n");
  std::ofstream out(arguments[3], std::ios::binary);
  out.write(reinterpret_cast<const char*>(scores.data()),
            static_cast<std::streamsize>(scores.size() * sizeof(float)));
  return out.flush().good() ? 0 : 1;
}
