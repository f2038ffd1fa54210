// headrace.Graph over MethodGraph.
#include <nanobind/stl/map.h>

#include "headrace/capture.h"
#include "python/call.h"
#include "python/gil.h"

namespace headrace {

namespace {

// A graph, and what its arguments are converted by.
struct PyGraph {
  std::shared_ptr<Method> method;
  std::shared_ptr<MethodGraph> graph;
};

nb::tuple capture(std::shared_ptr<Method> method, nb::tuple inputs, nb::object stream, int keep) {
  CallArguments args(*method, inputs, stream, nb::none());
  CaptureOptions options{args.on, keep};
  std::vector<Value> outputs;
  Result<std::shared_ptr<MethodGraph>> graph = Status();
  {
    GilRelease release;
    graph = method->capture(args.values, options, outputs);
  }
  check(graph.status());
  return nb::make_tuple(std::make_shared<PyGraph>(PyGraph{method, *graph}), args.results(outputs));
}

nb::tuple replay(PyGraph& self, nb::tuple inputs, nb::object stream, nb::object out, bool borrow) {
  CallArguments args(*self.method, inputs, stream, out);
  ReplayOptions options{args.on, borrow};
  std::vector<Value> outputs;
  Status status;
  {
    GilRelease release;
    status = self.graph->replay(args.values, args.given, options, outputs);
  }
  check(status);
  return args.results(outputs);
}

// ([(name, inside)…], kernels that are not told, other work that is not).
nb::tuple work(const PyGraph& self) {
  Result<GraphWork> found = Status();
  {
    GilRelease release;
    found = self.graph->work();
  }
  check(found.status());
  nb::list pieces;
  for (const GraphWork::Piece& piece : found->pieces)
    pieces.append(nb::make_tuple(text_of(piece.name), piece.inside));
  return nb::make_tuple(pieces, found->untold_kernels, found->untold);
}

nb::dict stats(const PyGraph& self) {
  GraphStats s = self.graph->stats();
  nb::dict out;
  out["captures"] = s.captures;
  out["replays"] = s.replays;
  out["eager"] = s.eager;
  out["recaptures"] = s.recaptures;
  out["evicted"] = s.evicted;
  out["kept"] = s.kept;
  out["memory_nbytes"] = s.memory_nbytes;
  out["last"] = describe_stats(s.last);
  out["total"] = describe_stats(s.total);
  return out;
}

}  // namespace

void bind_graphs(nb::module_& m) {
  nb::class_<PyGraph>(m, "Graph")
      .def("replay", &replay, nb::arg("inputs"), nb::arg("stream").none(), nb::arg("out").none(),
           nb::arg("borrow"))
      .def("stats", &stats)
      .def("work", &work)
      .def("close", [](PyGraph& self) {
        Status status;
        {
          GilRelease release;
          status = self.graph->close();
        }
        check(status);
      });
  m.def("capture", &capture, nb::arg("method"), nb::arg("inputs"), nb::arg("stream").none(), nb::arg("keep"));
  m.def("capture_stage", [] {
    static constexpr const char* kStages[] = {"call", "warm-up", "capture"};
    return kStages[static_cast<size_t>(capture_stage())];
  });
}

}  // namespace headrace
