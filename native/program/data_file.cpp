// Data files (`.ptd`).
#include <unordered_set>

#include "program/file_reader.h"

namespace headrace {

namespace {

class DataFileReader : FileReader {
 public:
  explicit DataFileReader(const FileView& file) : FileReader(file), buffer_(nullptr, 0) {}

  std::vector<DataEntry> read() {
    if (!has_magic(4, "FT01") || !has_magic(8, "FH01")) {
      fail("expected an ExecuTorch data file ('FT01' at byte 4, 'FH01' at byte 8), got " + magic_text(4) +
               " and " + magic_text(8),
           "give the .ptd file that was exported with the program");
    }
    if (file_.size < 48)
      fail(format("expected a header of 40 bytes, got a file of %zu", file_.size), kCutOff);
    if (auto length = raw<uint32_t>(12); length != 40)
      fail(format("expected a header of 40 bytes, got %u", length));
    Header h{raw<uint64_t>(16), raw<uint64_t>(24), raw<uint64_t>(32), raw<uint64_t>(40)};
    check_header(h);
    // Offsets count from the start of the file; the header lies between the root offset and the tables.
    buffer_ = fb::Buffer(file_.data, h.tables_offset + h.tables_size);
    budget_ = 8 * h.tables_size + 64;
    fb::Table root(&buffer_, buffer_.follow(0));
    check_buffer(buffer_);
    if (auto version = root.scalar<uint32_t>(0); version != 0) {
      fail(format("expected version 0, got %u", version), "export it with ExecuTorch 1.5");
    }
    auto segments = read_segments(buffer_, root.vector(1), h);
    fb::Vector list = root.vector(2);
    check_buffer(buffer_);
    spend(list.size());
    std::vector<DataEntry> out;
    for (size_t i = 0; i < list.size(); ++i) out.push_back(read_entry(list.table(i), i, segments));
    where_.clear();
    std::unordered_set<std::string_view> keys;
    for (const DataEntry& e : out) {
      if (!keys.insert(e.key).second) fail("expected different keys, got " + quoted(e.key) + " twice");
    }
    return out;
  }

 private:
  DataEntry read_entry(const fb::Table& entry, size_t i, const std::vector<std::string_view>& segments) {
    DataEntry out;
    out.key = read_text(buffer_, entry, 0, "key");
    where_ = format(", entry %zu ", i) + quoted(out.key);
    auto segment = entry.scalar<uint32_t>(1);
    fb::Table layout = entry.table(2);
    check_buffer(buffer_);
    if (out.key.empty()) fail("expected a key, got none");
    if (segment >= segments.size()) {
      fail(format("expected a segment index below %zu, got %u", segments.size(), segment));
    }
    out.bytes = segments[segment];
    if (layout.present()) {
      out.is_tensor = true;
      out.dtype = read_dtype(layout.scalar<int8_t>(0));
      uint64_t nbytes =
          read_shape(layout.vector(1, 4), layout.vector(2, 1), out.dtype, out.sizes, out.dim_order);
      check_buffer(buffer_);
      if (nbytes > out.bytes.size()) {
        fail(format("expected %" PRIu64 " bytes for its shape, got a segment of %zu", nbytes,
                    out.bytes.size()));
      }
      check_aligned(out.bytes.data(), out.dtype, "data");
    }
    return out;
  }

  fb::Buffer buffer_;
};

}  // namespace

Result<std::vector<DataEntry>> read_data_file(const FileView& file) {
  return guarded<std::vector<DataEntry>>(file, [&] { return DataFileReader(file).read(); });
}

}  // namespace headrace
