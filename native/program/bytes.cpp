#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "headrace/program.h"
#include "program/pages.h"

namespace headrace {

Result<std::shared_ptr<Bytes>> Bytes::allocate(size_t size, std::string name) {
  auto pages = std::make_shared<Pages>(size);
  if (pages->data() == nullptr) {
    return Status(ErrorCode::kOutOfDeviceMemory, name + ": expected " + std::to_string(size) +
                                                     " bytes of host memory, got " + std::strerror(errno) +
                                                     "; free memory");
  }
  uint8_t* data = pages->data();
  return std::shared_ptr<Bytes>(new Bytes(data, size, std::move(name), std::move(pages)));
}

Bytes::~Bytes() = default;

Result<std::shared_ptr<const Bytes>> Bytes::copy(const void* data, size_t size, std::string name) {
  auto bytes = allocate(size, std::move(name));
  if (!bytes.ok()) return bytes.status();
  if (size != 0) std::memcpy((*bytes)->data_, data, size);
  return std::shared_ptr<const Bytes>(std::move(*bytes));
}

Result<std::shared_ptr<const Bytes>> Bytes::read(const std::string& path) {
  auto failed = [&](const char* what) {
    return Status(ErrorCode::kProgram,
                  path + ": expected " + what + ", got: " + std::strerror(errno) + "; check the path");
  };
  // Not blocking: opening a pipe would wait for its writer.
  int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return failed("a file that can be read");
  struct Closer {
    int fd;
    ~Closer() { close(fd); }
  } closer{fd};
  struct stat st{};
  if (fstat(fd, &st) != 0) return failed("a file that tells its size");
  if (!S_ISREG(st.st_mode))
    return Status(ErrorCode::kProgram, path + ": expected a regular file, got another kind; check the path");
  auto bytes = allocate(static_cast<size_t>(st.st_size), path);
  if (!bytes.ok()) return bytes.status();
  size_t done = 0;
  while (done < (*bytes)->size_) {
    ssize_t n = ::read(fd, (*bytes)->data_ + done, (*bytes)->size_ - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return failed("a file that can be read to its end");
    if (n == 0)
      return Status(
          ErrorCode::kProgram,
          path + ": expected " + std::to_string((*bytes)->size_) +
              " bytes, got a file that became shorter while it was read; load it when nobody writes it");
    done += static_cast<size_t>(n);
  }
  return std::shared_ptr<const Bytes>(std::move(*bytes));
}

}  // namespace headrace
