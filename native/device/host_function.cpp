#include "device/host_function.h"

#include <cxxabi.h>

#include <exception>

namespace headrace {

namespace {
thread_local int depth = 0;

Status threw(const std::string& device, const std::string& what) {
  return Status(ErrorCode::kDevice, device + ", host function: expected a Status, got the exception " + what +
                                        "; catch it and return a Status");
}

// glibc's unwinding has no object, and the reference that catches it is null.
__attribute__((noinline, no_sanitize("undefined"))) Status guarded(const HostFunction& function,
                                                                   const std::string& device) {
  try {
    return function();
  } catch (abi::__forced_unwind&) {
    throw;
  } catch (const std::exception& error) {
    return threw(device, "'" + std::string(error.what()) + "'");
  } catch (...) {
    return threw(device, "of a type that is not a std::exception");
  }
}
}  // namespace

HostFunctionScope::HostFunctionScope() { ++depth; }
HostFunctionScope::~HostFunctionScope() { --depth; }
bool in_host_function() { return depth > 0; }

Status run_host_function(const HostFunction& function, const std::string& device) {
  HostFunctionScope scope;
  Status status = guarded(function, device);
  if (!status.ok() && status->device.empty()) status->device = device;
  return status;
}

}  // namespace headrace
