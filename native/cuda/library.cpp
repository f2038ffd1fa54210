#include "cuda/library.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

#include "cuda/needs.h"
#include "cuda/sha256.h"
#include "cuda/shims.h"
#include "program/text.h"

namespace headrace {

namespace {

constexpr std::string_view kKeyEnd = "_so_blob";

std::string reason() {
  const char* text = dlerror();
  return text == nullptr ? "no reason given" : text;
}

std::string reason(int code) {
  char text[128];
  return strerror_r(code, text, sizeof text);
}

// libheadrace_shims.so, visible to every library that is loaded later.
Result<void*> shims_handle() {
  static const Result<void*> handle = []() -> Result<void*> {
    Dl_info info{};
    if (dladdr(reinterpret_cast<void*>(&shims::make_arena), &info) == 0 || info.dli_fname == nullptr) {
      return Status(ErrorCode::kEngine,
                    "libheadrace_shims.so: expected to find where it lies, got nothing; reinstall headrace");
    }
    void* opened = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_GLOBAL | RTLD_NODELETE);
    if (opened == nullptr) {
      return Status(ErrorCode::kEngine, std::string(info.dli_fname) +
                                            ": expected to make its names visible, got: " + reason() +
                                            "; reinstall headrace");
    }
    return opened;
  }();
  return handle;
}

// ---- the copy in memory or in a file

// Paths by which the loader knows a library. One that it may still know is not used again: it would give that
// library back, whatever lies there by then.
class LoaderPaths {
 public:
  std::string take(int descriptor) {
    std::lock_guard lock(mutex_);
    std::string number = std::to_string(descriptor), slashes = "/";
    for (;; slashes += '/') {
      std::string path = "/proc/self/fd" + slashes + number;
      if (taken_.insert(path).second) return path;
    }
  }
  void give(const std::string& path) {
    std::lock_guard lock(mutex_);
    taken_.erase(path);
  }

 private:
  std::mutex mutex_;
  std::set<std::string> taken_;
};
LoaderPaths& loader_paths() {
  static auto* paths = new LoaderPaths();  // libraries may be closed late in the process's life
  return *paths;
}

struct Descriptor {
  int number = -1;
  explicit Descriptor(int n) : number(n) {}
  ~Descriptor() {
    if (number >= 0) (void)close(number);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int take() { return std::exchange(number, -1); }
};

// 0, or an error number.
int write_all(int descriptor, std::span<const uint8_t> bytes) {
  for (size_t at = 0; at < bytes.size();) {
    ssize_t wrote = write(descriptor, bytes.data() + at, bytes.size() - at);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) return wrote < 0 ? errno : ENOSPC;
    at += static_cast<size_t>(wrote);
  }
  return 0;
}

}  // namespace

struct Library::Mapping {
  void* handle = nullptr;
  int descriptor = -1;  // kept while the library is mapped: its number is part of its name
  std::string path;
  const void *begin = nullptr, *end = nullptr;  // in memory

  ~Mapping();
  // Empty, or why not.
  std::string from_memory(std::span<const uint8_t> image, const std::string& label);
  std::string from_directory(std::span<const uint8_t> image, const std::string& directory);
  void measure();
};

std::string Library::Mapping::from_memory(std::span<const uint8_t> image, const std::string& label) {
  constexpr unsigned kExecutable =
      0x10;  // MFD_EXEC, from Linux 6.3 on; older ones refuse flags they do not know
  unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  int number = memfd_create(label.c_str(), flags | kExecutable);
  if (number < 0 && errno == EINVAL) number = memfd_create(label.c_str(), flags);
  if (number < 0) return "memory file: " + reason(errno);
  Descriptor file(number);
  if (int code = write_all(file.number, image); code != 0) return "memory file: " + reason(code);
  // From here on nobody can change what is mapped, whoever gets at the descriptor.
  (void)fcntl(file.number, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL);
  std::string name = loader_paths().take(file.number);
  handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    std::string text = "memory file: " + reason();
    loader_paths().give(name);
    return text;
  }
  path = name;
  descriptor = file.take();
  return {};
}

std::string Library::Mapping::from_directory(std::span<const uint8_t> image, const std::string& directory) {
  std::string folder = directory + "/headrace-XXXXXX";
  if (mkdtemp(folder.data()) == nullptr) return directory + ": " + reason(errno);
  std::string name = folder + "/library.so";
  std::string failed;
  {
    Descriptor file(open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0500));
    int code = file.number < 0 ? errno : write_all(file.number, image);
    if (code != 0) failed = directory + ": " + reason(code);
  }
  if (failed.empty()) {
    handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) failed = directory + ": " + reason();
  }
  // What is mapped stays; the name is random and never comes again.
  (void)unlink(name.c_str());
  (void)rmdir(folder.c_str());
  if (failed.empty()) path = name;
  return failed;
}

void Library::Mapping::measure() {
  link_map* map = nullptr;
  if (dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0 || map == nullptr) return;
  struct Search {
    const link_map* map;
    Mapping* self;
  } search{map, this};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        auto* s = static_cast<Search*>(data);
        if (info->dlpi_addr != s->map->l_addr) return 0;
        uintptr_t low = UINTPTR_MAX, high = 0;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& p = info->dlpi_phdr[i];
          if (p.p_type != PT_LOAD) continue;
          low = std::min<uintptr_t>(low, info->dlpi_addr + p.p_vaddr);
          high = std::max<uintptr_t>(high, info->dlpi_addr + p.p_vaddr + p.p_memsz);
        }
        s->self->begin = reinterpret_cast<const void*>(low);
        s->self->end = reinterpret_cast<const void*>(high);
        return 1;
      },
      &search);
}

Library::Mapping::~Mapping() {
  if (handle != nullptr) {
    shims::end_thread_objects(begin, end);
    (void)dlclose(handle);
  }
  if (path.empty()) return;
  if (void* still = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD)) {
    // Something holds it. Its name stays taken, and its descriptor open, so that the number is never used
    // again.
    (void)dlclose(still);
    return;
  }
  if (descriptor >= 0) (void)close(descriptor);
  loader_paths().give(path);
}

Library::~Library() = default;

Result<std::vector<std::string>> missing_shims(std::span<const std::string> wanted) {
  auto handle = shims_handle();
  if (!handle.ok()) return handle.status();
  std::vector<std::string> missing;
  for (const std::string& name : wanted) {
    if (dlsym(*handle, renamed(name).c_str()) == nullptr) missing.push_back(name);
  }
  (void)dlerror();
  return missing;
}

namespace {

// Libraries that are loaded, by SHA-256.
struct LoadedLibraries {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<Library>> by_hash;
};
LoadedLibraries& loaded_libraries() {
  static auto* libraries = new LoadedLibraries();
  return *libraries;
}

Status unavailable(const std::string& text) { return Status(ErrorCode::kDelegateUnavailable, text); }

std::string joined(const std::vector<std::string>& items, const char* between) {
  std::string out;
  for (const std::string& item : items) out += (out.empty() ? "" : between) + item;
  return out;
}

template <class Function>
bool look_up(void* handle, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  return function != nullptr;
}

// The first name that is not there, or null.
const char* look_up(void* handle, LibraryCalls& calls) {
#define LOOK_UP(field, name) \
  if (!look_up(handle, "AOTInductor" name, calls.field)) return "AOTInductor" name
  LOOK_UP(create, "ModelContainerCreateWithDevice");
  LOOK_UP(destroy, "ModelContainerDelete");
  LOOK_UP(num_inputs, "ModelContainerGetNumInputs");
  LOOK_UP(num_outputs, "ModelContainerGetNumOutputs");
  LOOK_UP(num_constants, "ModelContainerGetNumConstants");
  LOOK_UP(constant_name, "ModelContainerGetConstantName");
  LOOK_UP(constant_fqn, "ModelContainerGetConstantOriginalFQN");
  LOOK_UP(constant_folded, "ModelContainerGetConstantFromFolded");
  LOOK_UP(constant_type, "ModelContainerGetConstantType");
  LOOK_UP(constant_dtype, "ModelContainerGetConstantDtype");
  LOOK_UP(constant_nbytes, "ModelContainerGetConstantDataSize");
  LOOK_UP(bind, "ModelContainerUpdateUserManagedConstantBufferPairs");
  LOOK_UP(fold, "ModelContainerRunConstantFolding");
  LOOK_UP(run, "ModelContainerRunSingleThreaded");
  LOOK_UP(last_error, "GetLastError");
#undef LOOK_UP
  (void)look_up(handle, "AOTInductorModelContainerGetConstantsBlobSize", calls.blob_size);
  (void)look_up(handle, "AOTInductorModelUpdateConstantsFromBlob", calls.bind_blob);
  return nullptr;
}

}  // namespace

Result<std::shared_ptr<Library>> Library::load(std::span<const uint8_t> image, const std::string& key,
                                               const LibraryPlace& place, bool hashed) {
  std::string hash = sha256_hex(image);
  if (hashed && key != hash + std::string(kKeyEnd)) {
    return Status(ErrorCode::kProgram, "library: expected bytes of the SHA-256 that its name " + quoted(key) +
                                           " says, got " + hash.substr(0, 16) +
                                           "…; the file is damaged, export it again");
  }
  std::lock_guard lock(loaded_libraries().mutex);
  std::weak_ptr<Library>& known = loaded_libraries().by_hash[hash];
  if (auto library = known.lock()) return library;

  std::vector<uint8_t> copy(image.begin(), image.end());
  auto facts = adapt_library(copy);
  if (!facts.ok()) return Status(ErrorCode::kProgram, "library: " + facts.status().message());
  auto missing = missing_shims(facts->shims);
  if (!missing.ok()) return missing.status();
  if (!missing->empty()) {
    return unavailable("library: expected to call functions that headrace has, got calls of " +
                       joined(*missing, ", ") + "; export without the operators that need them");
  }
  if (auto lacks = missing_needs(*facts); !lacks.empty()) {
    return unavailable("library: expected what it asks of the system, got none of: " + joined(lacks, "; "));
  }

  std::shared_ptr<Library> self(new Library());
  self->facts_ = std::move(*facts);
  self->mapping_ = std::make_unique<Mapping>();
  std::vector<std::string> failed;
  std::vector<std::string> directories = {"/dev/shm", "/tmp", "/var/tmp"};
  if (!place.directory.empty()) directories = {place.directory};
  bool mapped = false;
  if (place.memory_file) {
    failed.push_back(self->mapping_->from_memory(copy, "headrace:" + hash.substr(0, 12)));
    mapped = failed.back().empty();
  } else {
    failed.push_back("memory file: not tried");
  }
  for (size_t i = 0; i < directories.size() && !mapped; ++i) {
    failed.push_back(self->mapping_->from_directory(copy, directories[i]));
    mapped = failed.back().empty();
  }
  if (!mapped) {
    return unavailable(
        "library: expected a place to load it from, got none: " + joined(failed, "; ") +
        "; set the option 'library_directory' of CudaBackend to a folder that may hold programs");
  }
  self->mapping_->measure();
  if (const char* absent = look_up(self->mapping_->handle, self->calls_)) {
    return Status(ErrorCode::kProgram,
                  "library: expected the functions of AOTInductor in torch 2.13, got one without " +
                      std::string(absent) + "; export it with torch 2.13");
  }
  known = self;
  return self;
}

}  // namespace headrace
