// Running a host function: what every maker does around one.
#pragma once

#include <string>

#include "headrace/device.h"

namespace headrace {

// Marks the calling thread as inside a host function, for its lifetime.
class HostFunctionScope {
 public:
  HostFunctionScope();
  ~HostFunctionScope();
  HostFunctionScope(const HostFunctionScope&) = delete;
  HostFunctionScope& operator=(const HostFunctionScope&) = delete;
};

// Runs it and turns an exception into kDevice. The Status names `device` unless it names one already.
// The unwinding that ends a thread (pthread_exit, pthread_cancel) passes through: glibc ends the process when
// it is caught and not thrown again, and a Python of 3.13 or older ends daemon threads so at exit.
Status run_host_function(const HostFunction& function, const std::string& device);

}  // namespace headrace
