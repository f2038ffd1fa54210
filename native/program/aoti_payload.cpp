#include "program/aoti_payload.h"

#include <algorithm>
#include <cstring>

#include "program/text.h"

namespace headrace {

namespace {

constexpr std::string_view kMagic = "ETCUDAFQN3";
constexpr std::string_view kFamily = "ETCUDAFQN";

class Cursor {
 public:
  explicit Cursor(std::string_view bytes) : left_(bytes) {}

  template <class T>
  bool get(T& value) {
    if (left_.size() < sizeof value) return false;
    std::memcpy(&value, left_.data(), sizeof value);
    left_.remove_prefix(sizeof value);
    return true;
  }
  bool get(std::string& text) {
    uint32_t size = 0;
    if (!get(size) || size > left_.size()) return false;
    text.assign(left_.substr(0, size));
    left_.remove_prefix(size);
    return is_text(text);
  }
  bool get(std::vector<int64_t>& numbers, uint32_t count) {
    if (count > left_.size() / sizeof(int64_t)) return false;
    numbers.resize(count);
    for (int64_t& n : numbers) (void)get(n);
    return true;
  }
  size_t left() const { return left_.size(); }

 private:
  std::string_view left_;
};

// Whether the constant's last element lies inside its bytes.
bool lies_inside(const AotiConstant& c) {
  bool empty = false;
  for (size_t d = 0; d < c.sizes.size(); ++d) {
    if (c.sizes[d] < 0 || c.strides[d] < 0) return false;
    empty |= c.sizes[d] == 0;
  }
  if (empty) return true;
  int64_t last = c.offset;
  for (size_t d = 0; d < c.sizes.size(); ++d) {
    int64_t step = 0;
    if (__builtin_mul_overflow(c.sizes[d] - 1, c.strides[d], &step) ||
        __builtin_add_overflow(last, step, &last))
      return false;
  }
  uint64_t end = 0;
  return !__builtin_add_overflow(static_cast<uint64_t>(last), uint64_t{1}, &end) &&
         !__builtin_mul_overflow(end, itemsize(c.dtype), &end) && end <= c.nbytes;
}

// Whether the product of the sizes can be counted in bytes.
bool countable(const AotiConstant& c) {
  int64_t nbytes = static_cast<int64_t>(itemsize(c.dtype));
  for (int64_t size : c.sizes) {
    if (size != 0 && __builtin_mul_overflow(nbytes, size, &nbytes)) return false;
  }
  return true;
}

Status wrong(const std::string& got, const char* advice = kDamaged) {
  return Status(ErrorCode::kProgram,
                "expected a payload in the format " + std::string(kMagic) + ", got " + got + "; " + advice);
}

}  // namespace

namespace {

constexpr std::string_view kLibraryEnd = "_so_blob", kBlobEnd = "_weights_blob";

bool is_hash(std::string_view text) {
  auto digit = [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); };
  return text.size() == 64 && std::all_of(text.begin(), text.end(), digit);
}

// The two forms without a magic.
Result<AotiPayload> read_keys(std::string_view bytes, std::string_view method) {
  AotiPayload payload;
  if (bytes.empty()) {
    payload.library_key = std::string(method) + std::string(kLibraryEnd);
    payload.blob_key = std::string(method) + std::string(kBlobEnd);
    payload.hashed = false;
    return payload;
  }
  auto line = bytes.find('\n');
  if (line == std::string_view::npos || bytes.find('\n', line + 1) != std::string_view::npos ||
      bytes.size() > 4096 || !is_text(bytes.substr(0, line)) || !is_text(bytes.substr(line + 1)))
    return wrong("other bytes");
  payload.library_key = bytes.substr(0, line);
  payload.blob_key = bytes.substr(line + 1);
  if (!payload.library_key.ends_with(kLibraryEnd) || !payload.blob_key.ends_with(kBlobEnd))
    return wrong("other bytes");
  payload.hashed = is_hash(bytes.substr(0, payload.library_key.size() - kLibraryEnd.size()));
  return payload;
}

}  // namespace

Result<AotiPayload> read_aoti_payload(std::string_view bytes, std::string_view method) {
  if (!bytes.starts_with(kMagic)) {
    if (bytes.starts_with(kFamily)) {
      return wrong("one in the format " + quoted(bytes.substr(0, kMagic.size())) +
                       ", of another version of ExecuTorch",
                   "export it with executorch 1.5.1");
    }
    return read_keys(bytes, method);
  }
  Cursor cursor(bytes.substr(kMagic.size()));
  AotiPayload payload;
  uint32_t count = 0;
  if (!cursor.get(payload.library_key) || !cursor.get(count)) return wrong("one that is cut off in its head");
  // An entry has 36 bytes at least.
  if (count > cursor.left() / 36) return wrong(std::to_string(count) + " constants in too few bytes");
  for (uint32_t i = 0; i < count; ++i) {
    AotiConstant c;
    int32_t dtype = 0;
    uint32_t ndim = 0;
    if (!cursor.get(c.fqn) || !cursor.get(c.key) || !cursor.get(c.nbytes) || !cursor.get(dtype) ||
        !cursor.get(c.device) || !cursor.get(c.offset) || !cursor.get(ndim)) {
      return wrong("one whose constant " + std::to_string(i) + " is cut off, or whose name is no text");
    }
    std::string which = "constant " + std::to_string(i) + " " + quoted(c.fqn);
    if (ndim > kMaxDims) return wrong(which + " of rank " + std::to_string(ndim));
    if (!cursor.get(c.sizes, ndim) || !cursor.get(c.strides, ndim))
      return wrong(which + ", which is cut off");
    c.dtype = static_cast<DType>(dtype);
    if (dtype < 0 || dtype > 127 || itemsize(c.dtype) == 0)
      return wrong(which + " of dtype number " + std::to_string(dtype));
    if (c.device != 0 && c.device != 1)
      return wrong(which + " on device type " + std::to_string(c.device) + ", neither host (0) nor CUDA (1)");
    if (c.offset < 0 || !countable(c) || !lies_inside(c))
      return wrong(which + ", which reaches beyond its bytes");
    payload.constants.push_back(std::move(c));
  }
  if (cursor.left() != 0) return wrong(std::to_string(cursor.left()) + " bytes behind its end");
  return payload;
}

std::string check_aoti_payload(std::string_view bytes, std::string_view method, const FindBytes& find) {
  auto payload = read_aoti_payload(bytes, method);
  if (!payload.ok()) return payload.status().message();
  std::string missing;
  auto want = [&](const std::string& key) {
    auto found = find(key);
    if (!found) missing += (missing.empty() ? "" : ", ") + quoted(key);
    return found;
  };
  (void)want(payload->library_key);
  // Whether constants in one piece are wanted at all, the library alone knows.
  for (const AotiConstant& c : payload->constants) {
    auto found = want(c.key);
    if (found && found->size() != c.nbytes) {
      return "expected " + std::to_string(c.nbytes) + " bytes under the key " + quoted(c.key) + ", got " +
             std::to_string(found->size()) + "; " + kDamaged;
    }
  }
  if (missing.empty()) return {};
  return "expected data with the keys " + missing +
         ", got none; pass the .ptd files that were exported with it as data=";
}

}  // namespace headrace
