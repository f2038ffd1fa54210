#include "stream/image.h"

#include <elf.h>
#include <string.h>
#include <unistd.h>

namespace headrace::stream {
namespace {

// The tables that looking a name up needs, as addresses in memory; 0 where the object has none.
struct Tables {
  uintptr_t symbols = 0;
  uintptr_t names = 0;
  size_t names_nbytes = 0;
  uintptr_t gnu_hash = 0;
  uintptr_t sysv_hash = 0;
};

template <class T>
T at(uintptr_t address) {
  T value;
  memcpy(&value, reinterpret_cast<const void*>(address), sizeof value);
  return value;
}

Tables tables_of(const Image& image, const dl_phdr_info& info) {
  Tables tables;
  // The loader leaves addresses in the dynamic section of most objects and offsets in a read-only one (the
  // vDSO's), so both are tried.
  const auto address = [&](uintptr_t value) {
    if (image.contains(value, 1)) return value;
    return image.contains(info.dlpi_addr + value, 1) ? info.dlpi_addr + value : 0;
  };
  for (size_t i = 0; i < info.dlpi_phnum; ++i) {
    const ElfW(Phdr) & header = info.dlpi_phdr[i];
    if (header.p_type != PT_DYNAMIC) continue;
    const uintptr_t first = info.dlpi_addr + header.p_vaddr;
    for (uintptr_t entry = first; image.contains(entry, sizeof(ElfW(Dyn))); entry += sizeof(ElfW(Dyn))) {
      const auto item = at<ElfW(Dyn)>(entry);
      if (item.d_tag == DT_NULL) break;
      if (item.d_tag == DT_SYMTAB) tables.symbols = address(item.d_un.d_ptr);
      if (item.d_tag == DT_STRTAB) tables.names = address(item.d_un.d_ptr);
      if (item.d_tag == DT_STRSZ) tables.names_nbytes = item.d_un.d_val;
      if (item.d_tag == DT_GNU_HASH) tables.gnu_hash = address(item.d_un.d_ptr);
      if (item.d_tag == DT_HASH) tables.sysv_hash = address(item.d_un.d_ptr);
    }
  }
  return tables;
}

// The address of symbol `index` if it is a function of this name that the object defines for others; else 0.
uintptr_t function_at(const Image& image, const Tables& tables, size_t index, const char* name) {
  const uintptr_t entry = tables.symbols + index * sizeof(ElfW(Sym));
  if (!image.contains(entry, sizeof(ElfW(Sym)))) return 0;
  const auto symbol = at<ElfW(Sym)>(entry);
  // The fields are laid out alike in both classes.
  const unsigned type = ELF64_ST_TYPE(symbol.st_info);
  const unsigned binding = ELF64_ST_BIND(symbol.st_info);
  if (symbol.st_shndx == SHN_UNDEF || type != STT_FUNC || (binding != STB_GLOBAL && binding != STB_WEAK)) {
    return 0;
  }
  const size_t length = strlen(name) + 1;
  if (symbol.st_name > tables.names_nbytes || tables.names_nbytes - symbol.st_name < length) return 0;
  if (memcmp(reinterpret_cast<const void*>(tables.names + symbol.st_name), name, length) != 0) return 0;
  const uintptr_t address = image.base() + symbol.st_value;
  return image.contains(address, 1) ? address : 0;
}

// https://flapenguin.me/elf-dt-gnu-hash describes the table: header, filter, buckets, then one hash a symbol
// from `first` on, the lowest bit set at the end of each bucket.
uintptr_t find_by_gnu_hash(const Image& image, const Tables& tables, const char* name) {
  uint32_t hash = 5381;
  for (const char* c = name; *c != '\0'; ++c) hash = hash * 33 + static_cast<unsigned char>(*c);

  struct Header {
    uint32_t buckets, first, filter_words, filter_shift;
  };
  if (!image.contains(tables.gnu_hash, sizeof(Header))) return 0;
  const auto header = at<Header>(tables.gnu_hash);
  const uintptr_t filter = tables.gnu_hash + sizeof(Header);
  const uintptr_t buckets = filter + header.filter_words * sizeof(ElfW(Addr));
  const uintptr_t hashes = buckets + header.buckets * sizeof(uint32_t);
  if (header.buckets == 0 || header.filter_words == 0 || header.filter_shift >= 32 ||
      !image.contains(filter, hashes - filter)) {
    return 0;
  }

  constexpr uint32_t kBits = 8 * sizeof(ElfW(Addr));
  const auto word = at<ElfW(Addr)>(filter + (hash / kBits) % header.filter_words * sizeof(ElfW(Addr)));
  if (((word >> (hash % kBits)) & (word >> ((hash >> header.filter_shift) % kBits)) & 1) == 0) return 0;

  const auto start = at<uint32_t>(buckets + hash % header.buckets * sizeof(uint32_t));
  if (start < header.first) return 0;  // an empty bucket
  for (size_t index = start;; ++index) {
    const uintptr_t entry = hashes + (index - header.first) * sizeof(uint32_t);
    if (!image.contains(entry, sizeof(uint32_t))) return 0;
    const auto other = at<uint32_t>(entry);
    if (((other ^ hash) & ~uint32_t{1}) == 0) {
      if (const uintptr_t found = function_at(image, tables, index, name); found != 0) return found;
    }
    if ((other & 1) != 0) return 0;
  }
}

// The older table also says how many symbols there are; objects that have only this one are few.
uintptr_t find_in_all(const Image& image, const Tables& tables, const char* name) {
  if (!image.contains(tables.sysv_hash, 2 * sizeof(uint32_t))) return 0;
  const auto count = at<uint32_t>(tables.sysv_hash + sizeof(uint32_t));
  for (size_t index = 0; index < count; ++index) {
    if (const uintptr_t found = function_at(image, tables, index, name); found != 0) return found;
  }
  return 0;
}

}  // namespace

bool Image::contains(uintptr_t address, size_t nbytes) const {
  for (size_t i = 0; i < info_.dlpi_phnum; ++i) {
    const ElfW(Phdr) & header = info_.dlpi_phdr[i];
    if (header.p_type != PT_LOAD) continue;
    const uintptr_t offset = address - (info_.dlpi_addr + header.p_vaddr);
    if (offset < header.p_memsz && nbytes <= header.p_memsz - offset) return true;
  }
  return false;
}

uintptr_t Image::exported(const char* name) const {
  const Tables tables = tables_of(*this, info_);
  if (tables.symbols == 0 || !contains(tables.names, tables.names_nbytes)) return 0;
  if (tables.gnu_hash != 0) return find_by_gnu_hash(*this, tables, name);
  return tables.sysv_hash != 0 ? find_in_all(*this, tables, name) : 0;
}

void Image::file(char* to, size_t nbytes) const {
  if (to == nullptr || nbytes == 0) return;
  size_t length = strlen(loader_name());
  if (length > 0) {
    length = length < nbytes ? length : nbytes - 1;
    memcpy(to, loader_name(), length);
  } else {  // the program itself
    const ssize_t read = readlink("/proc/self/exe", to, nbytes - 1);
    length = read > 0 ? static_cast<size_t>(read) : 0;
  }
  to[length] = '\0';
}

}  // namespace headrace::stream
