// Loads and runs programs through the C++ interface: run_files FOLDER [FROM]. For each NAME.pte in FOLDER, in
// order of names from FROM on, with the data files NAME.*.ptd, every method is called twice, with zeros and
// with ones. One line before a program ("start NAME") and one behind it ("end NAME OUTCOME").
//
// Built with HEADRACE_SANITIZE it runs under AddressSanitizer without a Python around it.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "headrace/program.h"
#include "program/pages.h"

namespace {

using headrace::Value;

// What `info` asks for, every byte `fill`; sizes of 1 where they may vary and `fill` is not zero.
Value make_input(const headrace::ValueInfo& info, int fill, std::vector<headrace::Pages>& keep,
                 bool& too_large) {
  Value value;
  value.kind = info.kind;
  value.int_value = info.int_value;
  value.bool_value = info.int_value != 0;
  value.double_value = info.double_value;
  if (info.kind != Value::Kind::kTensor) return value;
  headrace::TensorView& view = value.tensor;
  view.dtype = info.dtype;
  view.ndim = static_cast<int>(info.shape.size());
  double count = 1;
  for (size_t d = 0; d < info.shape.size(); ++d) {
    view.sizes[d] = info.dynamic && fill != 0 ? std::min<int64_t>(info.shape[d], 1) : info.shape[d];
    count *= static_cast<double>(view.sizes[d]);
  }
  auto step = static_cast<int64_t>(headrace::itemsize(info.dtype));
  if (count > 1e8) {
    too_large = true;
    return value;
  }
  for (size_t d = info.shape.size(); d-- > 0;) {
    view.strides_bytes[d] = step;
    step *= std::max<int64_t>(view.sizes[d], 1);
  }
  headrace::Pages& pages = keep.emplace_back(view.nbytes());
  if (view.nbytes() != 0) std::memset(pages.data(), fill, view.nbytes());
  view.data = pages.data();
  return value;
}

const char* code_name(headrace::ErrorCode code) {
  switch (code) {
    case headrace::ErrorCode::kProgram:
      return "kProgram";
    case headrace::ErrorCode::kInput:
      return "kInput";
    case headrace::ErrorCode::kOption:
      return "kOption";
    case headrace::ErrorCode::kDelegate:
      return "kDelegate";
    case headrace::ErrorCode::kDelegateUnavailable:
      return "kDelegateUnavailable";
    case headrace::ErrorCode::kOutOfDeviceMemory:
      return "kOutOfDeviceMemory";
    default:
      return "another";
  }
}

std::string run(const std::filesystem::path& path) {
  auto file = headrace::Bytes::read(path);
  if (!file.ok()) return code_name(file.status().code());
  headrace::LoadOptions options;
  options.max_steps = 200'000;
  std::vector<std::string> data;
  std::string stem = path.stem().string() + ".";
  for (const auto& entry : std::filesystem::directory_iterator(path.parent_path())) {
    std::string name = entry.path().filename().string();
    if (name.starts_with(stem) && name.ends_with(".ptd")) data.push_back(entry.path().string());
  }
  std::sort(data.begin(), data.end());
  for (const std::string& name : data) {
    auto bytes = headrace::Bytes::read(name);
    if (!bytes.ok()) return code_name(bytes.status().code());
    options.data.push_back(*bytes);
  }
  auto program = headrace::Program::load(*file, options);
  if (!program.ok()) return code_name(program.status().code());
  std::string outcome = "ran";
  for (const std::string& name : (*program)->method_names()) {
    auto method = (*program)->method(name);
    for (int fill : {0, 1}) {
      std::vector<headrace::Pages> keep;
      std::vector<Value> inputs, outputs;
      bool too_large = false;
      for (const auto& info : method->inputs()) inputs.push_back(make_input(info, fill, keep, too_large));
      if (too_large) continue;
      auto status = method->run(inputs, {}, {}, outputs);
      if (!status.ok()) outcome = code_name(status.code());
    }
  }
  return outcome;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: run_files FOLDER [FROM]\n");
    return 2;
  }
  for (const char* name : {"libexecutorch_kernels_optimized.so", "libexecutorch_backend_xnnpack.so"}) {
    if (dlopen(name, RTLD_NOW | RTLD_LOCAL) == nullptr) {
      std::fprintf(stderr, "%s\n", dlerror());
      return 2;
    }
  }
  if (!headrace::initialize().ok()) return 2;
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(argv[1])) {
    if (entry.path().extension() == ".pte") paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  for (const auto& path : paths) {
    std::string name = path.stem().string();
    if (argc > 2 && name < argv[2]) continue;
    std::printf("start %s\n", name.c_str());
    std::fflush(stdout);
    std::string outcome = run(path);
    std::printf("end %s %s\n", name.c_str(), outcome.c_str());
    std::fflush(stdout);
  }
  return 0;
}
