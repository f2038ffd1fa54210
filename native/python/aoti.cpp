// What is known of AOTInductor libraries without running them.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "cuda/library.h"
#include "cuda/needs.h"
#include "program/aoti_payload.h"
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
  nb::list gpu_code;
  for (const GpuKernel& kernel : facts->gpu_code) {
    nb::list names;
    for (const GpuCode& code : kernel) names.append(code.name());
    gpu_code.append(nb::tuple(names));
  }
  out["gpu_code"] = gpu_code;
  out["architectures"] = gpu_code_names(facts->gpu_code);
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

nb::dict aoti_payload(nb::bytes bytes, const std::string& method) {
  auto payload = read_aoti_payload({bytes.c_str(), bytes.size()}, method);
  check(payload.status());
  nb::list constants;
  for (const AotiConstant& c : payload->constants) {
    nb::dict one;
    one["fqn"] = text_of(c.fqn);
    one["key"] = text_of(c.key);
    one["nbytes"] = c.nbytes;
    one["dtype"] = dtype_name(c.dtype);
    one["device"] = c.device == 0 ? "cpu" : "cuda";
    one["shape"] = nb::tuple(nb::cast(c.sizes));
    constants.append(one);
  }
  nb::dict out;
  out["library_key"] = text_of(payload->library_key);
  out["blob_key"] = text_of(payload->blob_key);
  out["constants"] = constants;
  return out;
}

}  // namespace

void bind_aoti(nb::module_& m) {
  m.def("library_facts", &library_facts, nb::arg("image"));
  m.def("set_library_folders", &set_library_folders, nb::arg("folders"));
  m.def("read_aoti_payload", &aoti_payload, nb::arg("payload"), nb::arg("method"));
}

}  // namespace headrace
