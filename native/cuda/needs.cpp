#include "cuda/needs.h"

#include <dlfcn.h>
#include <gnu/libc-version.h>
#include <link.h>

#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string_view>

#include "program/text.h"

namespace headrace {

namespace {

// Names of the versions that a mapped library defines.
std::set<std::string> defined_versions(const link_map& map) {
  std::set<std::string> names;
  const char* strings = nullptr;
  const char* table = nullptr;
  uint64_t count = 0;
  for (const ElfW(Dyn)* d = map.l_ld; d != nullptr && d->d_tag != DT_NULL; ++d) {
    // glibc relocates the address of the strings where they are mapped, and not that of the versions.
    if (d->d_tag == DT_STRTAB) strings = reinterpret_cast<const char*>(d->d_un.d_ptr);
    if (d->d_tag == DT_VERDEF) table = reinterpret_cast<const char*>(map.l_addr + d->d_un.d_ptr);
    if (d->d_tag == DT_VERDEFNUM) count = d->d_un.d_val;
  }
  if (strings == nullptr || table == nullptr) return names;
  for (uint64_t i = 0; i < count; ++i) {
    const auto* def = reinterpret_cast<const ElfW(Verdef)*>(table);
    const auto* aux = reinterpret_cast<const ElfW(Verdaux)*>(table + def->vd_aux);
    names.insert(strings + aux->vda_name);
    if (def->vd_next == 0) break;
    table += def->vd_next;
  }
  return names;
}

// ---- NVIDIA's libraries

struct Folders {
  std::mutex mutex;
  std::vector<std::string> paths;
};
Folders& folders() {
  static auto* f = new Folders();  // programs may be loaded late in the process's life
  return *f;
}

// "libcublas.so." of "libcublas.so.13": what the majors of one library have in common; empty for others'
// libraries.
std::string_view family(std::string_view library) {
  constexpr std::string_view kNames[] = {
      "libcublas",   "libcudart",   "libcudnn", "libcufft", "libcufile",    "libcupti",  "libcurand",
      "libcusolver", "libcusparse", "libnccl",  "libnpp",   "libnvJitLink", "libnvjpeg", "libnvrtc"};
  size_t so = library.find(".so.");
  if (so == std::string_view::npos) return {};
  for (std::string_view name : kNames) {
    if (library.starts_with(name)) return library.substr(0, so + 4);
  }
  return {};
}

std::string_view major_of(std::string_view library) {
  std::string_view version = library.substr(family(library).size());
  return version.substr(0, version.find('.'));
}

// A library in this process that is another major of the same; empty where there is none.
std::string of_another_major(const std::string& library) {
  struct Search {
    std::string_view wanted;
    std::string found;
  } search{library, {}};
  if (family(library).empty()) return {};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* argument) {
        auto& search = *static_cast<Search*>(argument);
        std::string_view path = info->dlpi_name == nullptr ? "" : info->dlpi_name;
        std::string_view name = path.substr(path.rfind('/') + 1);
        if (family(name) != family(search.wanted) || major_of(name) == major_of(search.wanted)) return 0;
        search.found = name;
        return 1;
      },
      &search);
  return search.found;
}

// As the system finds it, or from one of the folders. Kept: libgomp's idle threads would lose the code that
// they wait in.
void* open(const std::string& library) {
  constexpr int kHow = RTLD_LAZY | RTLD_LOCAL | RTLD_NODELETE;
  if (void* handle = dlopen(library.c_str(), kHow)) return handle;
  if (family(library).empty()) return nullptr;
  std::lock_guard lock(folders().mutex);
  for (const std::string& folder : folders().paths) {
    if (void* handle = dlopen((folder + "/" + library).c_str(), kHow)) return handle;
  }
  // For the reason: why the system does not find it.
  return dlopen(library.c_str(), kHow);
}

// What to tell a user to do about a library that is missing.
std::string advice(const std::string& library) {
  if (library == "libgomp.so.1")
    return "install the OpenMP run time (Debian and Ubuntu: libgomp1; Fedora: libgomp)";
  if (library == "libstdc++.so.6") return "install libstdc++6";
  if (!family(library).empty())
    return "pip install NVIDIA's package that has it, or put it where libraries are found";
  return "install the package that has it";
}

std::string reason() {
  const char* text = dlerror();
  return text == nullptr ? "no reason given" : text;
}

}  // namespace

void set_library_folders(std::vector<std::string> named) {
  std::lock_guard lock(folders().mutex);
  folders().paths = std::move(named);
}

std::vector<std::string> missing_needs(const LibraryFacts& facts) {
  std::vector<std::string> missing;
  std::map<std::string, std::optional<std::set<std::string>>> versions;
  for (const std::string& library : facts.needed) {
    if (library.find('/') != std::string::npos) {
      missing.push_back("the library " + quoted(library) +
                        ", which it names by a path; export it with one that the system finds");
      continue;
    }
    if (std::string other = of_another_major(library); !other.empty()) {
      missing.push_back(
          "the library " + quoted(library) + " where this process holds " + quoted(other) +
          ", of another major, which would answer its calls; run the program in a process of its own, or "
          "export it for that CUDA");
      continue;
    }
    void* handle = open(library);
    if (handle == nullptr) {
      missing.push_back("the library " + quoted(library) + " (" + reason() + "); " + advice(library));
      continue;
    }
    link_map* map = nullptr;
    if (dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr)
      versions[library] = defined_versions(*map);
    (void)dlclose(handle);
  }
  for (const VersionNeed& need : facts.versions) {
    auto found = versions.find(need.library);
    if (found == versions.end() || !found->second || found->second->count(need.version) != 0) continue;
    std::string have = need.library == "libc.so.6" ? "glibc " + std::string(gnu_get_libc_version())
                                                   : "a " + need.library + " without it";
    missing.push_back(quoted(need.version) + " of " + need.library + " (this system has " + have +
                      "); run it on a newer system, or export on one as old as this");
  }
  return missing;
}

}  // namespace headrace
