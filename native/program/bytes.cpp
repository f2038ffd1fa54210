#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "headrace/program.h"

namespace headrace {

Result<std::shared_ptr<Bytes>> Bytes::allocate(size_t size, std::string name) {
  // Anonymous pages: aligned for any tensor, and given back to the system as soon as they are dropped.
  void* data = mmap(nullptr, size ? size : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    return Status(ErrorCode::kOutOfDeviceMemory, name + ": expected " + std::to_string(size) +
                                                     " bytes of host memory, got " + std::strerror(errno));
  }
  return std::shared_ptr<Bytes>(new Bytes(static_cast<uint8_t*>(data), size, std::move(name)));
}

Bytes::~Bytes() { munmap(data_, size_ ? size_ : 1); }

Result<std::shared_ptr<const Bytes>> Bytes::copy(const void* data, size_t size, std::string name) {
  auto bytes = allocate(size, std::move(name));
  if (!bytes.ok()) return bytes.status();
  if (size != 0) std::memcpy((*bytes)->data_, data, size);
  return std::shared_ptr<const Bytes>(std::move(*bytes));
}

Result<std::shared_ptr<const Bytes>> Bytes::read(const std::string& path) {
  auto failed = [&](const char* what) {
    return Status(ErrorCode::kProgram, path + ": " + what + ": " + std::strerror(errno));
  };
  int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return failed("expected a file that can be read");
  struct Closer {
    int fd;
    ~Closer() { close(fd); }
  } closer{fd};
  struct stat st{};
  if (fstat(fd, &st) != 0) return failed("cannot tell its size");
  if (!S_ISREG(st.st_mode))
    return Status(ErrorCode::kProgram, path + ": expected a regular file, got another kind");
  auto bytes = allocate(static_cast<size_t>(st.st_size), path);
  if (!bytes.ok()) return bytes.status();
  size_t done = 0;
  while (done < (*bytes)->size_) {
    ssize_t n = ::read(fd, (*bytes)->data_ + done, (*bytes)->size_ - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return failed("cannot be read");
    if (n == 0) return Status(ErrorCode::kProgram, path + ": the file became shorter while it was read");
    done += static_cast<size_t>(n);
  }
  return std::shared_ptr<const Bytes>(std::move(*bytes));
}

}  // namespace headrace
