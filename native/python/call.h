// The arguments of a call, a capture or a replay, between Python and the run time.
#pragma once

#include <vector>

#include "headrace/program.h"
#include "python/objects.h"

namespace headrace {

struct CallArguments {
  // Settles the stream first, since an argument's own code may select another. Raises InputError and
  // DeviceError for what cannot be an argument, CaptureError for a stream that captures. `stream` and `out`
  // may be None.
  CallArguments(const Method& method, nb::tuple inputs, nb::handle stream, nb::handle out);
  // The outputs as Python's, the caller's own arrays where `out` gave them.
  nb::tuple results(std::vector<Value>& outputs) const;

  std::vector<Value> values, given;
  CallStream on;  // settled

 private:
  std::vector<nb::object> keep_;
  nb::object arrays_;  // what `out` gave, as a tuple
};

nb::dict describe_stats(const CallStats& stats);

}  // namespace headrace
