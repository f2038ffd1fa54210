// What is known of AOTInductor libraries without running them.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "cuda/library.h"
#include "python/objects.h"

namespace headrace {

namespace {

nb::list texts(const std::vector<std::string>& items) {
  nb::list out;
  for (const std::string& item : items) out.append(text_of(item));
  return out;
}

nb::dict library_facts(nb::bytes image) {
  auto facts = read_library({reinterpret_cast<const uint8_t*>(image.c_str()), image.size()});
  check(facts.status());
  auto missing = missing_shims(facts->shims);
  check(missing.status());
  nb::dict out;
  out["cuda"] = facts->cuda;
  out["needed"] = texts(facts->needed);
  nb::list versions;
  for (const VersionNeed& v : facts->versions)
    versions.append(nb::make_tuple(text_of(v.library), text_of(v.version)));
  out["versions"] = versions;
  out["shims"] = texts(facts->shims);
  out["missing_shims"] = texts(*missing);
  out["missing_needs"] = texts(missing_needs(*facts));
  return out;
}

}  // namespace

void bind_cuda(nb::module_& m) { m.def("library_facts", &library_facts, nb::arg("image")); }

}  // namespace headrace
