// Libraries through the loader, on a machine that need not have a GPU: `library CUDA_LIBRARY KEY DIRECTORY`.
#include <dlfcn.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "cuda/library.h"

using headrace::Library;

#define CHECK(...)                                                           \
  do {                                                                       \
    if (!(__VA_ARGS__)) {                                                    \
      std::fprintf(stderr, "line %d: not so: %s\n", __LINE__, #__VA_ARGS__); \
      std::_Exit(1);                                                         \
    }                                                                        \
  } while (false)

static bool mapped(const char* what) {
  std::ifstream maps("/proc/self/maps");
  std::string line;
  while (std::getline(maps, line)) {
    if (line.find(what) != std::string::npos) return true;
  }
  return false;
}

int main(int, char** argv) {
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
