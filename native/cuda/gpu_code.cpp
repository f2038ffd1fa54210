#include "cuda/gpu_code.h"

#include <elf.h>

#include <algorithm>
#include <cstring>
#include <set>

namespace headrace {

namespace {

constexpr uint8_t kFatbinMagic[] = {0x50, 0xED, 0x55, 0xBA};
constexpr size_t kContainerNbytes = 16, kEntryNbytes = 64;
constexpr uint16_t kPtx = 1, kSass = 2, kSassToo = 16;
constexpr uint64_t kSpecific = 0x100000, kFamily = 0x200000;
constexpr uint16_t kCudaMachine = 190;  // EM_CUDA
// More kernels than a library has; behind it nothing is read.
constexpr size_t kMaxKernels = 1 << 16;
constexpr int kMaxEntries = 1 << 10;  // of one kernel

template <class T>
T get(std::span<const uint8_t> bytes, size_t at) {
  T value{};
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

// The container at the front of `bytes`, and its size; 0 where there is none that reads to its end.
size_t read_fatbin(std::span<const uint8_t> bytes, GpuKernel& kernel) {
  if (bytes.size() < kContainerNbytes || std::memcmp(bytes.data(), kFatbinMagic, 4) != 0) return 0;
  auto version = get<uint16_t>(bytes, 4), header = get<uint16_t>(bytes, 6);
  auto nbytes = get<uint64_t>(bytes, 8);
  if (version != 1 || header != kContainerNbytes || nbytes == 0 || nbytes > bytes.size() - header) return 0;
  auto entries = bytes.subspan(header, nbytes);
  for (int n = 0; !entries.empty(); ++n) {
    if (entries.size() < kEntryNbytes || n == kMaxEntries) return 0;
    auto kind = get<uint16_t>(entries, 0);
    auto head = get<uint32_t>(entries, 4);
    auto stored = get<uint64_t>(entries, 8);
    auto arch = get<uint32_t>(entries, 28);
    auto flags = get<uint64_t>(entries, 40);
    if (head < kEntryNbytes || head > entries.size() || stored > entries.size() - head || arch > 9999)
      return 0;
    if (kind == kPtx || kind == kSass || kind == kSassToo) {
      char suffix = (flags & kFamily) != 0 ? 'f' : (flags & kSpecific) != 0 ? 'a' : 0;
      kernel.push_back({kind == kPtx, static_cast<int>(arch), suffix});
    }
    entries = entries.subspan(head + stored);
  }
  return kernel.empty() ? 0 : header + nbytes;
}

// A GPU's ELF file at the front of `bytes`. From ABI version 8 on the architecture is in the second byte of
// the flags, before it in the first.
bool read_cubin(std::span<const uint8_t> bytes, GpuKernel& kernel) {
  if (bytes.size() < sizeof(Elf64_Ehdr) || std::memcmp(bytes.data(), ELFMAG, SELFMAG) != 0) return false;
  auto header = get<Elf64_Ehdr>(bytes, 0);
  if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_machine != kCudaMachine) return false;
  uint32_t arch = header.e_ident[EI_ABIVERSION] >= 8 ? header.e_flags >> 8 & 0xFF : header.e_flags & 0xFF;
  if (arch < 20) return false;
  kernel.push_back({false, static_cast<int>(arch), 0});
  return true;
}

}  // namespace

std::string GpuCode::name() const {
  std::string text = (ptx ? "compute_" : "sm_") + std::to_string(arch);
  if (suffix != 0) text += suffix;
  return text;
}

bool GpuCode::runs_on(int major, int minor) const {
  int there = major * 10 + minor;
  if (suffix == 'a') return there == arch;
  if (ptx && suffix == 0) return there >= arch;
  return major == arch / 10 && there >= arch;
}

std::vector<GpuKernel> find_gpu_code(std::span<const uint8_t> bytes) {
  std::vector<GpuKernel> out;
  // The library itself is an ELF file too, of another machine.
  for (size_t at = 0; at + 4 <= bytes.size() && out.size() < kMaxKernels;) {
    const uint8_t* first = bytes.data() + at;
    // Both begin with a byte that is rare enough in what is between.
    const auto* found = std::find_if(first, bytes.data() + bytes.size(),
                                     [](uint8_t b) { return b == kFatbinMagic[0] || b == ELFMAG0; });
    at = static_cast<size_t>(found - bytes.data());
    if (at >= bytes.size()) break;
    GpuKernel kernel;
    if (size_t nbytes = read_fatbin(bytes.subspan(at), kernel); nbytes != 0) {
      out.push_back(std::move(kernel));
      at += nbytes;  // the cubins inside are told already
      continue;
    }
    kernel.clear();
    if (read_cubin(bytes.subspan(at), kernel)) out.push_back(std::move(kernel));
    ++at;
  }
  return out;
}

std::string gpu_code_names(std::span<const GpuKernel> kernels) {
  std::set<std::string> names;
  for (const GpuKernel& kernel : kernels) {
    for (const GpuCode& code : kernel) names.insert(code.name());
  }
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace headrace
