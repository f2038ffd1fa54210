// The arguments of a call, a capture or a replay, between Python and the run time.
#pragma once

#include <optional>
#include <vector>

#include "headrace/program.h"
#include "python/objects.h"

namespace headrace {

struct CallArguments {
  // Raises InputError and DeviceError for what cannot be an argument. `out` may be None.
  CallArguments(const std::string& method, const std::vector<ValueInfo>& infos, size_t num_outputs,
                const DeviceRef& device, nb::tuple inputs, nb::handle stream, nb::handle out);
  // The outputs as Python's, the caller's own arrays where `out` gave them.
  nb::tuple results(std::vector<Value>& outputs) const;

  std::vector<Value> values, given;
  std::optional<StreamHandle> stream;
  int32_t stream_device = -1;

 private:
  std::vector<nb::object> keep_;
  nb::object arrays_;  // what `out` gave, as a tuple
};

nb::dict describe_stats(const CallStats& stats);

}  // namespace headrace
