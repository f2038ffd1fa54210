#include "python/call.h"

namespace headrace {

namespace {

constexpr char kOnePerOutput[] = "; pass a list of one array, or None, for each output";

// GC6: a green context does not keep others off its SMs.
void warn_outside_lanes(const Method& method) {
  std::string text = method.name() + ": runs outside every lane of " + method.device()->name() +
                     " while there are lanes, whose SMs it uses too; load it with lane=, or call it on a "
                     "stream of a lane";
  nb::object kind = nb::module_::import_("headrace").attr("LaneWarning");
  if (PyErr_WarnEx(kind.ptr(), text.c_str(), 2) < 0) throw nb::python_error();
}

}  // namespace

CallArguments::CallArguments(const Method& method, nb::tuple inputs, nb::handle stream, nb::handle out) {
  const auto& infos = method.inputs();
  size_t count = inputs.size(), num_outputs = method.outputs().size();
  values.resize(count);
  keep_.resize(count);
  if (!stream.is_none()) {
    StreamChoice choice = to_stream(stream, method.device(), "stream");
    on.stream = choice.handle;
    on.stream_device = choice.device;
  }
  auto settled = method.settle(on);
  check(settled.status());
  on.settled = *settled;
  if (method.outside_lanes(*settled)) warn_outside_lanes(method);
  Reader reader{method.device(), settled->stream};
  for (size_t i = 0; i < count; ++i) {
    Value::Kind expected = i < infos.size() ? infos[i].kind : Value::Kind::kTensor;
    values[i] = to_value(inputs[i], expected, keep_[i], method.name(), "input", i, reader);
  }
  if (!out.is_none()) {
    arrays_ = nb::steal(PySequence_Tuple(out.ptr()));
    if (!arrays_.is_valid()) {
      PyErr_Clear();
      raise(Status(ErrorCode::kInput, method.name() + ", out: expected a sequence of arrays, got " +
                                          Py_TYPE(out.ptr())->tp_name + kOnePerOutput));
    }
    size_t given_count = nb::len(arrays_);
    if (given_count != num_outputs) {
      raise(Status(ErrorCode::kInput, method.name() + ", out: expected " + std::to_string(num_outputs) +
                                          " arrays, got " + std::to_string(given_count) + kOnePerOutput));
    }
    keep_.resize(count + given_count);
    for (size_t i = 0; i < given_count; ++i) {
      given.push_back(to_out(arrays_[i], keep_[count + i], method.name(), i, reader));
    }
  }
  // Foreign device memory stays for as long as work of this call may read it.
  for (size_t i = 0; i < count; ++i) {
    if (values[i].device != nullptr && !values[i].block && keep_[i].is_valid())
      values[i].keep = hold(keep_[i]);
  }
  for (size_t i = 0; i < given.size(); ++i) {
    if (given[i].device != nullptr && !given[i].block && keep_[count + i].is_valid())
      given[i].keep = hold(keep_[count + i]);
  }
}

nb::tuple CallArguments::results(std::vector<Value>& outputs) const {
  nb::object result = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(outputs.size())));
  for (size_t i = 0; i < outputs.size(); ++i) {
    bool callers = i < given.size() && given[i].kind != Value::Kind::kNone;
    nb::object item = callers ? nb::object(arrays_[i]) : from_value(outputs[i]);
    PyTuple_SET_ITEM(result.ptr(), static_cast<Py_ssize_t>(i), item.release().ptr());
  }
  return nb::borrow<nb::tuple>(result);
}

nb::dict describe_stats(const CallStats& s) {
  nb::dict out;
  out["bytes_to_device"] = s.bytes_to_device;
  out["bytes_to_host"] = s.bytes_to_host;
  out["synchronizations"] = s.synchronizations;
  out["driver_allocations"] = s.driver_allocations;
  out["driver_frees"] = s.driver_frees;
  out["repacked_bytes"] = s.repacked_bytes;
  return out;
}

}  // namespace headrace
