// Damaged libraries, payloads and compile specs of AOTInductor islands, through the readers that meet them
// first.
//
//     cuda image|payload|spec FILE SEED COUNT
//
// Prints how many were accepted and refused. The sanitizers it is built with end it where a reader errs.
#include <elf.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cuda/host_spec.h"
#include "cuda/image.h"
#include "program/aoti_payload.h"

using Bytes = std::vector<uint8_t>;
using Random = std::mt19937_64;

static uint64_t below(Random& random, uint64_t n) { return n == 0 ? 0 : random() % n; }

// Numbers that readers trip over.
static uint64_t number(Random& random, uint64_t size) {
  switch (below(random, 8)) {
    case 0:
      return 0;
    case 1:
      return ~uint64_t{0};
    case 2:
      return size;
    case 3:
      return size - below(random, 64);
    case 4:
      return uint64_t{1} << below(random, 64);
    case 5:
      return below(random, size);
    case 6:
      return below(random, 64);
    default:
      return random();
  }
}

static void damage(Random& random, Bytes& bytes, uint64_t begin, uint64_t end) {
  end = std::min<uint64_t>(end, bytes.size());
  if (begin >= end) return;
  uint64_t at = begin + below(random, end - begin);
  size_t width = size_t{1} << below(random, 4);
  if (below(random, 3) == 0) at = at / width * width;
  uint64_t value = number(random, bytes.size());
  if (below(random, 4) == 0) {
    // A little more or less than what is there.
    std::memcpy(&value, &bytes[at], std::min<size_t>(width, bytes.size() - at));
    value += below(random, 17) - 8;
  }
  std::memcpy(&bytes[at], &value, std::min<size_t>(width, bytes.size() - at));
}

// Where in an ELF file its tables lie, so that most damage is done where it matters.
static std::vector<std::pair<uint64_t, uint64_t>> tables(const Bytes& file) {
  std::vector<std::pair<uint64_t, uint64_t>> out = {{0, sizeof(Elf64_Ehdr)}};
  Elf64_Ehdr header;
  std::memcpy(&header, file.data(), sizeof header);
  out.emplace_back(header.e_phoff, header.e_phoff + header.e_phnum * sizeof(Elf64_Phdr));
  for (int i = 0; i < header.e_phnum; ++i) {
    Elf64_Phdr segment;
    std::memcpy(&segment, &file[header.e_phoff + static_cast<size_t>(i) * sizeof segment], sizeof segment);
    if (segment.p_type != PT_DYNAMIC) continue;
    out.emplace_back(segment.p_offset, segment.p_offset + segment.p_filesz);
    for (uint64_t at = segment.p_offset; at + 16 <= segment.p_offset + segment.p_filesz; at += 16) {
      Elf64_Dyn entry;
      std::memcpy(&entry, &file[at], sizeof entry);
      for (int64_t tag : {DT_GNU_HASH, DT_STRTAB, DT_SYMTAB, DT_VERNEED, DT_VERSYM}) {
        // The first segment of a library lies where it is mapped.
        if (entry.d_tag == tag) out.emplace_back(entry.d_un.d_ptr, entry.d_un.d_ptr + 2048);
      }
    }
  }
  return out;
}

[[noreturn]] static void wrong(uint64_t k, const std::string& what) {
  std::fprintf(stderr, "case %llu: %s\n", static_cast<unsigned long long>(k), what.c_str());
  std::abort();
}

int main(int, char** argv) {
  std::string kind = argv[1];
  std::ifstream stream(argv[2], std::ios::binary);
  const Bytes seed((std::istreambuf_iterator<char>(stream)), {});
  auto places = kind == "image" ? tables(seed) : std::vector<std::pair<uint64_t, uint64_t>>{{0, seed.size()}};
  uint64_t first = std::strtoull(argv[3], nullptr, 10), count = std::strtoull(argv[4], nullptr, 10);
  uint64_t accepted = 0, refused = 0;
  for (uint64_t k = 0; k < count; ++k) {
    Random random(first * 1'000'003 + k);
    Bytes bytes = seed;
    for (uint64_t n = 1 + below(random, 4); n > 0; --n) {
      auto [begin, end] = places[below(random, places.size())];
      damage(random, bytes, begin, end);
    }
    if (below(random, 10) == 0) bytes.resize(below(random, bytes.size() + 1));
    // Exactly as large as it is, so that a byte behind it is seen.
    std::unique_ptr<uint8_t[]> exact(new uint8_t[bytes.size()]);
    if (!bytes.empty()) std::memcpy(exact.get(), bytes.data(), bytes.size());
    std::string_view text(reinterpret_cast<char*>(exact.get()), bytes.size());
    bool ok = false;
    if (kind == "image") {
      auto told = headrace::read_library({exact.get(), bytes.size()});
      auto made = headrace::adapt_library({exact.get(), bytes.size()});
      ok = made.ok();
      // The two are one reader. What was changed has nothing left to change.
      if (told.ok() != ok) wrong(k, "read and adapted differ: " + made.status().message());
      if (ok) {
        auto again = headrace::read_library({exact.get(), bytes.size()});
        if (again.ok() && (!again->shims.empty() || again->unique_symbols != 0))
          wrong(k, again->shims.empty() ? "a unique symbol is left" : "left: " + again->shims[0]);
      }
    } else if (kind == "payload") {
      auto payload = headrace::read_aoti_payload(text, "forward");
      ok = payload.ok();
      for (size_t i = 0; ok && i < payload->constants.size(); ++i) {
        const auto& c = payload->constants[i];
        uint64_t last = static_cast<uint64_t>(c.offset), numel = 1;
        for (size_t d = 0; d < c.sizes.size(); ++d) {
          numel *= static_cast<uint64_t>(c.sizes[d]);
          last += (static_cast<uint64_t>(c.sizes[d]) - 1) * static_cast<uint64_t>(c.strides[d]);
        }
        if (numel != 0 && (last + 1) * headrace::itemsize(c.dtype) > c.nbytes)
          wrong(k, "constant " + c.fqn + " reaches beyond its bytes");
      }
    } else {
      auto spec = headrace::read_host_spec(text);
      ok = spec.ok();
      for (int round = 0; ok && round < 4; ++round) {
        std::vector<int64_t> symbols;
        for (size_t i = 0; i < spec->symbols.size(); ++i)
          symbols.push_back(static_cast<int64_t>(number(random, 1000)));
        for (const auto& dims : spec->outputs) {
          for (const auto& dim : dims) {
            auto size = dim.value(symbols);
            if (size.ok() && *size < 0) wrong(k, "a negative size");
          }
        }
      }
    }
    ++(ok ? accepted : refused);
  }
  std::printf("%llu accepted, %llu refused\n", static_cast<unsigned long long>(accepted),
              static_cast<unsigned long long>(refused));
}
