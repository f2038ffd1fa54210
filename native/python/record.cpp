// The record, as plain data for headrace.ordering.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "device/record.h"
#include "python/objects.h"

namespace headrace {

namespace {

nb::tuple touches_of(const record::Log& log, const record::Entry& entry) {
  nb::object out = nb::steal(PyTuple_New(entry.touches));
  for (uint32_t i = 0; i < entry.touches; ++i) {
    const record::Touch& t = log.touches[entry.first_touch + i];
    nb::tuple item = nb::make_tuple(t.data, t.nbytes, t.write, t.value);
    PyTuple_SET_ITEM(out.ptr(), static_cast<Py_ssize_t>(i), item.release().ptr());
  }
  return nb::borrow<nb::tuple>(out);
}

nb::dict stop(uint64_t began) {
  static constexpr const char* kBackends[] = {"cpu", "sim", "cuda"};
  record::Log log;
  {
    nb::gil_scoped_release release;
    log = record::stop(began);
  }
  std::vector<nb::object> names;
  for (const std::string& name : log.names) names.push_back(text_of(name));
  nb::object entries = nb::steal(PyList_New(static_cast<Py_ssize_t>(log.entries.size())));
  for (size_t i = 0; i < log.entries.size(); ++i) {
    const record::Entry& e = log.entries[i];
    nb::tuple item = nb::make_tuple(log.first + i, static_cast<int>(e.kind), e.at_ns, e.thread, e.stream,
                                    e.call, e.island, e.object, e.other, names[e.name], touches_of(log, e));
    PyList_SET_ITEM(entries.ptr(), static_cast<Py_ssize_t>(i), item.release().ptr());
  }
  nb::dict streams, calls, islands, labels;
  for (const auto& s : log.streams) {
    streams[nb::int_(s.number)] =
        nb::make_tuple(s.number, s.device_id, s.device, kBackends[static_cast<size_t>(s.backend)], s.handle,
                       s.blocking, s.thread, s.sm_count);
  }
  for (const auto& c : log.calls)
    calls[nb::int_(c.number)] = nb::make_tuple(c.number, text_of(c.method), c.instance);
  for (const auto& i : log.islands)
    islands[nb::int_(i.number)] = nb::make_tuple(i.number, text_of(i.delegate), i.instruction);
  for (const auto& l : log.labels) {
    nb::list values;
    for (const std::string& label : l.values) values.append(text_of(label));
    labels[nb::int_(l.instance)] = values;
  }
  nb::dict out;
  out["entries"] = entries;
  out["streams"] = streams;
  out["calls"] = calls;
  out["islands"] = islands;
  out["labels"] = labels;
  return out;
}

}  // namespace

void bind_record(nb::module_& m) {
  m.def("record_start", &record::start);
  m.def("record_stop", &stop, nb::arg("began"));
}

}  // namespace headrace
