#include "cuda/image.h"

#include <elf.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>

#include "program/text.h"

namespace headrace {

namespace {

constexpr std::string_view kThreadExit = "__cxa_thread_atexit";
constexpr std::string_view kCheck = "aoti_torch_check";
// Versions of these are let go of: the copy asks for a name of ours, which has none.
constexpr std::string_view kUnversioned[] = {kThreadExit, "GOMP_parallel", "GOMP_barrier"};
constexpr std::string_view kDriver = "libcuda.so.1";
constexpr size_t kMaxSymbols = 1 << 20, kMaxEntries = 4096;
constexpr uint16_t kHidden = 0x8000;

struct Refusal {
  std::string text;
};

[[noreturn]] void refuse(std::string text) { throw Refusal{std::move(text)}; }

bool upper(char c) { return c >= 'A' && c <= 'Z'; }

bool of_driver(std::string_view name) { return name.starts_with("cu") && name.size() > 2 && upper(name[2]); }
bool of_runtime(std::string_view name) {
  return name.starts_with("cuda") && name.size() > 4 && upper(name[4]);
}

// One string of the string table that something refers to.
struct Use {
  uint64_t at;
  std::string who;
};

class Image {
 public:
  Image(const uint8_t* data, uint8_t* writable, size_t size)
      : data_(data), writable_(writable), size_(size) {}

  LibraryFacts run() {
    read_header();
    read_dynamic();
    count_symbols();
    check_tables();
    note_versions();
    walk_symbols();
    check_shared_bytes();
    if (facts_.cuda) facts_.gpu_code = find_gpu_code({data_, size_});
    if (writable_ != nullptr) change();
    return std::move(facts_);
  }

 private:
  template <class T>
  T get(uint64_t at) const {
    T value;
    if (at > size_ || size_ - at < sizeof value) refuse("a table that ends behind the file");
    std::memcpy(&value, data_ + at, sizeof value);
    return value;
  }
  template <class T>
  void put(uint64_t at, const T& value) {
    if (at > size_ || size_ - at < sizeof value) refuse("a table that ends behind the file");
    std::memcpy(writable_ + at, &value, sizeof value);
  }

  void read_header() {
    if (size_ < sizeof(Elf64_Ehdr) || std::memcmp(data_, ELFMAG, SELFMAG) != 0)
      refuse("bytes that are no ELF file");
    auto header = get<Elf64_Ehdr>(0);
    if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_ident[EI_DATA] != ELFDATA2LSB)
      refuse("an ELF file that is not 64-bit and little-endian");
    if (header.e_type != ET_DYN) refuse("an ELF file that is no shared library");
    if (header.e_machine != EM_X86_64) {
      refuse("a library for another processor (ELF machine " + std::to_string(header.e_machine) +
             ", wanted 62, x86-64)");
    }
    if (header.e_phentsize != sizeof(Elf64_Phdr)) refuse("program headers of a size that is not ELF64's");
    for (size_t i = 0; i < header.e_phnum; ++i) {
      uint64_t at = 0;
      if (__builtin_add_overflow(header.e_phoff, i * sizeof(Elf64_Phdr), &at))
        refuse("program headers out of reach");
      segments_.push_back({at, get<Elf64_Phdr>(at)});
    }
  }

  // Where a stretch of the library's memory lies in the file.
  uint64_t offset(uint64_t address, uint64_t nbytes, const char* what) const {
    for (const auto& [at, s] : segments_) {
      if (s.p_type != PT_LOAD || address < s.p_vaddr || address - s.p_vaddr > s.p_filesz) continue;
      uint64_t inside = address - s.p_vaddr, start = 0, end = 0;
      if (nbytes > s.p_filesz - inside) continue;
      if (__builtin_add_overflow(s.p_offset, inside, &start) || __builtin_add_overflow(start, nbytes, &end) ||
          end > size_) {
        break;
      }
      return start;
    }
    refuse(std::string(what) + " outside the file");
  }

  std::optional<uint64_t> tag(int64_t which) const {
    auto found = dynamic_.find(which);
    return found == dynamic_.end() ? std::nullopt : std::optional(found->second);
  }

  void read_dynamic() {
    const Elf64_Phdr* dynamic = nullptr;
    for (const auto& [at, s] : segments_) {
      if (s.p_type == PT_DYNAMIC) dynamic = &s;
      if (s.p_type == PT_GNU_STACK && (s.p_flags & PF_X) != 0) facts_.executable_stack = true;
    }
    if (dynamic == nullptr) refuse("a library with no dynamic section");
    uint64_t count = std::min<uint64_t>(dynamic->p_filesz / sizeof(Elf64_Dyn), kMaxEntries);
    dynamic_range_ = {dynamic->p_offset, dynamic->p_offset};
    std::vector<uint64_t> names;
    for (uint64_t i = 0; i < count; ++i) {
      uint64_t at = 0;
      if (__builtin_add_overflow(dynamic->p_offset, i * sizeof(Elf64_Dyn), &at))
        refuse("a dynamic section out of reach");
      auto entry = get<Elf64_Dyn>(at);
      dynamic_range_.second = at + sizeof entry;
      if (entry.d_tag == DT_NULL) break;
      switch (entry.d_tag) {
        case DT_NEEDED:
          needed_.push_back({at, entry.d_un.d_val});
          continue;
        case DT_SONAME:
        case DT_RPATH:
        case DT_RUNPATH:
        case DT_AUXILIARY:
        case DT_FILTER:
        case DT_AUDIT:
        case DT_DEPAUDIT:
          names.push_back(entry.d_un.d_val);
          break;
        case DT_TEXTREL:
          refuse("a library that the loader would have to rewrite (DT_TEXTREL)");
        default:
          break;
      }
      if (!dynamic_.emplace(entry.d_tag, entry.d_un.d_val).second && entry.d_tag >= 0 &&
          entry.d_tag <= DT_VERNEEDNUM) {
        refuse("two entries of one kind in the dynamic section (tag " + std::to_string(entry.d_tag) + ")");
      }
    }
    if (!tag(DT_STRTAB) || !tag(DT_STRSZ) || !tag(DT_SYMTAB)) refuse("a library with no dynamic symbols");
    strings_nbytes_ = *tag(DT_STRSZ);
    strings_ = offset(*tag(DT_STRTAB), strings_nbytes_, "a string table");
    if (strings_nbytes_ == 0 || data_[strings_ + strings_nbytes_ - 1] != 0)
      refuse("a string table without an end");
    if (tag(DT_SYMENT).value_or(sizeof(Elf64_Sym)) != sizeof(Elf64_Sym))
      refuse("symbols of a size that is not ELF64's");
    for (uint64_t at : names) uses_.push_back({at, "the dynamic section"});
    for (auto& [at, string] : needed_) {
      std::string library = name(string);
      uses_.push_back({string, "NEEDED " + quoted(library)});
      if (library == kDriver) {
        facts_.cuda = true;
      } else {
        facts_.needed.push_back(library);
      }
    }
  }

  std::string name(uint64_t at) const {
    if (at >= strings_nbytes_) refuse("a name outside the string table");
    return reinterpret_cast<const char*>(data_ + strings_ + at);
  }

  // The dynamic section says where the symbols begin, and a hash table how many there are.
  void count_symbols() {
    uint64_t count = 0;
    first_hashed_ = ~uint64_t{0};
    if (auto table = tag(DT_GNU_HASH)) {
      uint64_t at = offset(*table, 16, "a hash table");
      uint64_t buckets = get<uint32_t>(at), first = get<uint32_t>(at + 4), words = get<uint32_t>(at + 8);
      if (buckets > kMaxSymbols || words > kMaxSymbols || first > kMaxSymbols)
        refuse("a hash table beyond all measure");
      uint64_t whole = 16 + 8 * words + 4 * buckets;
      at = offset(*table, whole, "a hash table") + 16 + 8 * words;
      uint64_t last = 0;
      for (uint64_t b = 0; b < buckets; ++b) last = std::max<uint64_t>(last, get<uint32_t>(at + 4 * b));
      count = first_hashed_ = first;
      if (last >= first && last != 0) {
        uint64_t chain = at + 4 * buckets;
        for (count = last; (get<uint32_t>(chain + 4 * (count - first)) & 1) == 0; ++count) {
          if (count > kMaxSymbols) refuse("a hash table without an end");
        }
        ++count;
      }
      uint64_t start = offset(*table, 16, "a hash table");
      hash_range_ = {start, at + 4 * buckets + 4 * (count - first)};
    }
    if (auto table = tag(DT_HASH)) {
      uint64_t other = get<uint32_t>(offset(*table, 8, "a hash table") + 4);
      // The older table covers undefined names too: a changed one would be looked for under the old hash.
      if (!tag(DT_GNU_HASH))
        refuse("a library with the older hash table alone (DT_HASH), whose names cannot change");
      if (other != count) refuse("two hash tables that differ");
    }
    if (count == 0 || count > kMaxSymbols) refuse("a library with no hash table of its symbols");
    symbol_count_ = count;
    symbols_ = offset(*tag(DT_SYMTAB), count * sizeof(Elf64_Sym), "a symbol table");
    if (auto table = tag(DT_VERSYM)) versions_ = offset(*table, count * 2, "a table of versions");
  }

  // What is changed in one table must not be another's.
  void check_tables() const {
    std::vector<std::pair<uint64_t, uint64_t>> tables = {
        {0, sizeof(Elf64_Ehdr)},
        dynamic_range_,
        hash_range_,
        {strings_, strings_ + strings_nbytes_},
        {symbols_, symbols_ + symbol_count_ * sizeof(Elf64_Sym)}};
    if (versions_) tables.emplace_back(*versions_, *versions_ + symbol_count_ * 2);
    for (const auto& [at, segment] : segments_) tables.emplace_back(at, at + sizeof(Elf64_Phdr));
    std::sort(tables.begin(), tables.end());
    for (size_t i = 1; i < tables.size(); ++i) {
      if (tables[i].first < tables[i - 1].second) refuse("tables that overlap");
    }
  }

  void note_versions() {
    if (auto table = tag(DT_VERNEED)) {
      uint64_t address = *table;
      for (uint64_t i = 0, n = std::min<uint64_t>(tag(DT_VERNEEDNUM).value_or(0), kMaxEntries); i < n; ++i) {
        auto need = get<Elf64_Verneed>(offset(address, sizeof(Elf64_Verneed), "a needed version"));
        uses_.push_back({need.vn_file, "the file of a version"});
        uint64_t aux = address + need.vn_aux;
        for (int k = 0; k < need.vn_cnt; ++k) {
          auto one = get<Elf64_Vernaux>(offset(aux, sizeof(Elf64_Vernaux), "a needed version"));
          uses_.push_back({one.vna_name, "a version"});
          facts_.versions.push_back({name(need.vn_file), name(one.vna_name)});
          if (facts_.versions.size() > kMaxEntries) refuse("versions without an end");
          if (one.vna_next == 0) break;
          aux += one.vna_next;
        }
        if (need.vn_next == 0) break;
        address += need.vn_next;
      }
    }
    if (auto table = tag(DT_VERDEF)) {
      uint64_t address = *table;
      for (uint64_t i = 0, n = std::min<uint64_t>(tag(DT_VERDEFNUM).value_or(0), kMaxEntries); i < n; ++i) {
        auto def = get<Elf64_Verdef>(offset(address, sizeof(Elf64_Verdef), "a version"));
        uint64_t aux = address + def.vd_aux;
        for (int k = 0; k < def.vd_cnt; ++k) {
          auto one = get<Elf64_Verdaux>(offset(aux, sizeof(Elf64_Verdaux), "a version"));
          uses_.push_back({one.vda_name, "a version"});
          if (uses_.size() > kMaxSymbols) refuse("versions without an end");
          if (one.vda_next == 0) break;
          aux += one.vda_next;
        }
        if (def.vd_next == 0) break;
        address += def.vd_next;
      }
    }
    for (const VersionNeed& v : facts_.versions) {
      if (v.library == kDriver) refuse("versions asked of libcuda.so.1, which the copy does without");
    }
  }

  // Whether a check that fails on a thread of OpenMP can be left by ours: with the parts of OpenMP alone that
  // they answer for.
  bool guards_teams() const {
    bool checks = false;
    for (uint64_t i = 1; i < symbol_count_; ++i) {
      auto symbol = get<Elf64_Sym>(symbols_ + i * sizeof(Elf64_Sym));
      if (symbol.st_shndx != SHN_UNDEF) continue;
      std::string called = name(symbol.st_name);
      checks |= called == kCheck;
      if (called.starts_with("GOMP_") && called != "GOMP_parallel" && called != "GOMP_barrier") return false;
    }
    return checks;
  }

  void walk_symbols() {
    bool teams = guards_teams();
    for (uint64_t i = 1; i < symbol_count_; ++i) {
      uint64_t at = symbols_ + i * sizeof(Elf64_Sym);
      auto symbol = get<Elf64_Sym>(at);
      int binding = ELF64_ST_BIND(symbol.st_info);
      std::string called = name(symbol.st_name);
      if (binding == STB_GNU_UNIQUE) {
        ++facts_.unique_symbols;
        unique_.push_back(at);
      }
      bool versioned = false;
      if (versions_) versioned = (get<uint16_t>(*versions_ + 2 * i) & ~kHidden) > VER_NDX_GLOBAL;
      bool undefined = symbol.st_shndx == SHN_UNDEF && binding != STB_LOCAL;
      std::string to = undefined ? renamed(called) : std::string();
      if (!teams && called == "GOMP_barrier") to.clear();
      if (!teams && undefined && called == "GOMP_parallel") to = "HRMQ_parallel";
      if (!to.empty()) {
        bool other =
            std::find(std::begin(kUnversioned), std::end(kUnversioned), called) != std::end(kUnversioned);
        if (versioned && !other) {
          refuse(quoted(called) +
                 " in a version of its own: the library was linked against the one that has it");
        }
        if (i >= first_hashed_) refuse(quoted(called) + " undefined, and in the hash table");
        if (!other) facts_.shims.push_back(called);
        facts_.cuda |= of_driver(called) || of_runtime(called);
        changes_.push_back({symbol.st_name, called, to});
        if (versioned) unversioned_.push_back(*versions_ + 2 * i);
        continue;
      }
      uses_.push_back({symbol.st_name, quoted(called)});
      if (undefined && !versioned && binding == STB_GLOBAL) facts_.unknown.push_back(called);
    }
  }

  // No byte that changes may be seen by another string.
  void check_shared_bytes() {
    std::sort(changes_.begin(), changes_.end(), [](const Change& a, const Change& b) { return a.at < b.at; });
    auto same = [](const Change& a, const Change& b) { return a.at == b.at; };
    changes_.erase(std::unique(changes_.begin(), changes_.end(), same), changes_.end());
    for (const Change& c : changes_) uses_.push_back({c.at, quoted(c.from)});
    std::sort(uses_.begin(), uses_.end(), [](const Use& a, const Use& b) { return a.at < b.at; });
    for (const Change& c : changes_) {
      uint64_t low = c.at + c.to.size(), high = c.at;
      for (uint64_t k = 0; k < c.to.size(); ++k) {
        if (c.from[k] == c.to[k]) continue;
        low = std::min(low, c.at + k);
        high = c.at + k + 1;
      }
      // A string that shares bytes with this one begins between the end of the one before it and `high`.
      uint64_t begin = c.at;
      while (begin > 0 && data_[strings_ + begin - 1] != 0) --begin;
      auto use = std::lower_bound(uses_.begin(), uses_.end(), begin,
                                  [](const Use& u, uint64_t at) { return u.at < at; });
      for (; use != uses_.end() && use->at < high; ++use) {
        if (use->at == c.at && use->who == quoted(c.from)) continue;
        if (name(use->at).size() + use->at > low)
          refuse("bytes of " + quoted(c.from) + " shared with " + use->who);
      }
    }
    std::sort(facts_.shims.begin(), facts_.shims.end());
    facts_.shims.erase(std::unique(facts_.shims.begin(), facts_.shims.end()), facts_.shims.end());
  }

  void change() {
    for (const Change& c : changes_) {
      for (size_t k = 0; k < c.to.size(); ++k) put<char>(strings_ + c.at + k, c.to[k]);
    }
    for (uint64_t at : unversioned_) put<uint16_t>(at, VER_NDX_GLOBAL);
    for (uint64_t at : unique_) {
      auto symbol = get<Elf64_Sym>(at);
      symbol.st_info = ELF64_ST_INFO(STB_WEAK, ELF64_ST_TYPE(symbol.st_info));
      put(at, symbol);
    }
    for (auto& [at, string] : needed_) {
      // DT_DEBUG means nothing in a shared library.
      if (name(string) == kDriver) put(at, Elf64_Dyn{DT_DEBUG, {0}});
    }
    for (auto& [at, segment] : segments_) {
      if (segment.p_type != PT_GNU_STACK) continue;
      segment.p_flags &= ~static_cast<Elf64_Word>(PF_X);
      put(at, segment);
    }
  }

  struct Change {
    uint64_t at;
    std::string from, to;
  };
  const uint8_t* data_;
  uint8_t* writable_;
  uint64_t size_;
  std::vector<std::pair<uint64_t, Elf64_Phdr>> segments_;
  std::vector<std::pair<uint64_t, uint64_t>> needed_;  // where the entry is, its string
  std::map<int64_t, uint64_t> dynamic_;
  std::pair<uint64_t, uint64_t> dynamic_range_, hash_range_;
  uint64_t strings_ = 0, strings_nbytes_ = 0, symbols_ = 0, symbol_count_ = 0, first_hashed_ = 0;
  std::optional<uint64_t> versions_;
  std::vector<Use> uses_;
  std::vector<Change> changes_;
  std::vector<uint64_t> unversioned_, unique_;
  LibraryFacts facts_;
};

Result<LibraryFacts> read(const uint8_t* data, uint8_t* writable, size_t size) {
  try {
    return Image(data, writable, size).run();
  } catch (const Refusal& refusal) {
    return Status(ErrorCode::kProgram,
                  "expected a library that AOTInductor made, got " + refusal.text + "; export it again");
  }
}

}  // namespace

std::string renamed(std::string_view name) {
  std::string_view torch = "aoti_torch_";
  if (name.starts_with(torch)) return "aoti_hrace_" + std::string(name.substr(torch.size()));
  if (of_runtime(name)) return "hrce" + std::string(name.substr(4));
  if (of_driver(name)) return "hr" + std::string(name.substr(2));
  if (name == kThreadExit) return "__hra_thread_atexit";
  if (name == "GOMP_parallel" || name == "GOMP_barrier") return "HRMP_" + std::string(name.substr(5));
  return {};
}

Result<LibraryFacts> read_library(std::span<const uint8_t> image) {
  return read(image.data(), nullptr, image.size());
}

Result<LibraryFacts> adapt_library(std::span<uint8_t> image) {
  return read(image.data(), image.data(), image.size());
}

}  // namespace headrace
