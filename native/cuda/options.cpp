#include "cuda/options.h"

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <vector>

#include "program/text.h"

namespace headrace {

namespace {

struct Known {
  std::string_view name;
  bool flag;                 // else a text
  std::string_view refused;  // why a value other than false or "" would not be honoured; empty: it is
};

// The last: PyTorch ExecuTorch's backends/cuda of 1.5 has the others.
constexpr std::array<Known, 5> kKnown = {{
    {"use_shared_cuda_stream", true,
     "headrace runs every delegate on the stream of the call, which is the caller's; select one with "
     "headrace.caller_stream() or stream="},
    {"enable_cuda_graph_for_method", false, "graphs of a delegate alone are not made; leave it empty"},
    {"skip_copy_output_to_cpu_for_method", false,
     "the program's plan says where outputs lie; export it with outputs on the device"},
    {"weight_sharing_across_methods", true, ""},  // always so
    {"library_directory", false, ""},
}};

// Levenshtein's distance.
size_t distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      size_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1])});
      diagonal = above;
    }
  }
  return row[b.size()];
}

const char* kind_of(const std::variant<bool, int, std::string>& value) {
  return std::array{"a bool", "an int", "a text"}[value.index()];
}

}  // namespace

Status CudaOptions::set(const std::string& key, const std::variant<bool, int, std::string>& value) {
  const auto* known =
      std::find_if(kKnown.begin(), kKnown.end(), [&](const Known& k) { return k.name == key; });
  std::string where = "option " + quoted(key) + ": ";
  if (known == kKnown.end()) {
    const auto* nearest = std::min_element(kKnown.begin(), kKnown.end(), [&](const Known& a, const Known& b) {
      return distance(a.name, key) < distance(b.name, key);
    });
    return Status(ErrorCode::kOption, "option: expected one that CudaBackend has, got " + quoted(key) +
                                          "; the nearest is '" + std::string(nearest->name) + "'");
  }
  const auto* flag = std::get_if<bool>(&value);
  const auto* text = std::get_if<std::string>(&value);
  if (known->flag ? flag == nullptr : text == nullptr) {
    return Status(ErrorCode::kOption, where + "expected " + (known->flag ? "a bool" : "a text") + ", got " +
                                          kind_of(value) + "; pass that, or leave the option out");
  }
  bool asked = flag != nullptr ? *flag : !text->empty();
  if (asked && !known->refused.empty()) {
    return Status(ErrorCode::kNotSupported, where + "expected " + (known->flag ? "false" : "an empty text") +
                                                ", got " + (flag != nullptr ? "true" : quoted(*text)) +
                                                ", which is not supported: " + std::string(known->refused));
  }
  if (key == "library_directory" && asked) {
    struct stat info{};
    if (text->front() != '/' || stat(text->c_str(), &info) != 0 || !S_ISDIR(info.st_mode)) {
      return Status(ErrorCode::kOption, where + "expected the absolute path of a folder, got " +
                                            quoted(*text) + "; make it, and give its whole path");
    }
    library_directory = *text;
  }
  return {};
}

}  // namespace headrace
