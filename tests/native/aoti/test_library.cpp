// Libraries through the loader, on a machine that need not have a GPU: `library CUDA_LIBRARY KEY DIRECTORY`.
#include <dlfcn.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "cuda/library.h"

#include "../check.h"

using headrace::Library;

static bool mapped(const char* what) {
  std::ifstream maps("/proc/self/maps");
  std::string line;
  while (std::getline(maps, line)) {
    if (line.find(what) != std::string::npos) return true;
  }
  return false;
}

// NVIDIA's rules: which GPUs run which code.
static void architectures() {
  using headrace::GpuCode;
  struct Case {
    GpuCode code;
    int major, minor;
    bool runs;
  };
  const Case cases[] = {
      {{false, 90, 'a'}, 9, 0, true},    {{false, 90, 'a'}, 10, 0, false}, {{true, 90, 'a'}, 9, 0, true},
      {{true, 90, 'a'}, 12, 0, false},   {{false, 80, 0}, 8, 0, true},     {{false, 80, 0}, 8, 9, true},
      {{false, 86, 0}, 8, 0, false},     {{false, 80, 0}, 9, 0, false},    {{true, 80, 0}, 8, 0, true},
      {{true, 80, 0}, 12, 1, true},      {{true, 86, 0}, 8, 0, false},     {{false, 100, 'f'}, 10, 3, true},
      {{false, 100, 'f'}, 11, 0, false}, {{true, 100, 'f'}, 10, 3, true},  {{true, 100, 'f'}, 12, 0, false},
      {{false, 120, 0}, 12, 1, true},
  };
  for (const Case& c : cases) CHECK(c.code.runs_on(c.major, c.minor) == c.runs);
  CHECK((GpuCode{false, 90, 'a'}.name() == "sm_90a" && GpuCode{true, 80, 0}.name() == "compute_80"));
}

int main(int, char** argv) {
  architectures();
  std::ifstream file(argv[1], std::ios::binary);
  std::vector<uint8_t> image((std::istreambuf_iterator<char>(file)), {});
  auto facts = headrace::read_library(image);
  CHECK(facts.ok() && facts->cuda && facts->unique_symbols == 1);
  for (const std::string& library : facts->needed) CHECK(library != "libcuda.so.1");
  for (bool memory_file : {true, false}) {
    auto loaded = Library::load(image, argv[2], {argv[3], memory_file});
    if (!loaded.ok()) std::fprintf(stderr, "%s\n", loaded.status().message().c_str());
    CHECK(loaded.ok());
    CHECK(mapped(memory_file ? "memfd:headrace:" : "/library.so"));
    void* container = nullptr;
    CHECK((*loaded)->calls().create(&container, 1, "cuda", nullptr) == 0);
    // What the library's run asks of the device: our answers say that there is none.
    CHECK((*loaded)->calls().run(container, nullptr, 0, nullptr, 0, nullptr, nullptr) == 100);
    CHECK((*loaded)->calls().destroy(container) == 0);
    CHECK(!mapped("libcuda.so") && !mapped("libcudart"));
    // The same bytes again are the same library, while it lives.
    auto again = Library::load(image, argv[2], {argv[3], memory_file});
    CHECK(again.ok() && *again == *loaded);
    *loaded = nullptr;
    CHECK(mapped(memory_file ? "memfd:headrace:" : "/library.so"));
    *again = nullptr;
    CHECK(!mapped("memfd:headrace:") && !mapped("/library.so"));
  }
  std::printf("well\n");
}
