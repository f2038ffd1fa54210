// How a failure is told in C++: no exceptions cross this library. A function that can fail returns a
// Status, or a Result<T>; both are [[nodiscard]]. The message says where, what was expected, what came
// and what to do; `log` holds the engine's own log lines of the same failure, oldest first.
//
//     auto result = headrace::number();
//     if (!result.ok()) return result.status();
//     int value = *result;
//
// Threads: values, owned by whoever holds them; nothing here waits or locks.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#define HEADRACE_API __attribute__((visibility("default")))

namespace headrace {

// Who must act. Each code but kOk is one Python exception (headrace/errors.py).
enum class ErrorCode {
  kOk = 0,
  kProgram,              // the file: malformed, unknown version, missing data
  kInput,                // the caller's argument: dtype, rank, size, stride, device, count
  kOption,               // an option: unknown, of the wrong type, out of range
  kNotSupported,         // an option's value that would not be honoured
  kDelegate,             // a delegate or kernel failed while it ran
  kDelegateUnavailable,  // a delegate, kernel, library or architecture is absent
  kDevice,               // a device operation
  kOutOfDeviceMemory,    // a device, or the host on behalf of a program, has not enough memory
  kCapture,              // capture and replay of a graph
  kEngine,               // ExecuTorch itself: a registry is full, another copy is in the way
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(ErrorCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == ErrorCode::kOk; }
  ErrorCode code() const { return code_; }
  const std::string& message() const { return message_; }

  // Which delegate, method and island the failure belongs to; empty or -1 where it belongs to none.
  std::string delegate;
  std::string method;
  int island = -1;
  std::string device;
  std::string step;  // kCapture: of a capture or a replay
  std::vector<std::string> log;
  // What a language run time wants back when it raises this: Python's exception. Opaque here.
  std::shared_ptr<void> cause;

 private:
  ErrorCode code_ = ErrorCode::kOk;
  std::string message_;
};

// A value or the Status that says why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::in_place_index<0>, std::move(value)) {}         // NOLINT: implicit on purpose
  Result(Status status) : value_(std::in_place_index<1>, std::move(status)) {}  // NOLINT: implicit on purpose

  bool ok() const { return value_.index() == 0; }
  // Precondition: ok().
  T& operator*() { return std::get<0>(value_); }
  T* operator->() { return &std::get<0>(value_); }
  // kOk when there is a value.
  Status status() const { return ok() ? Status() : std::get<1>(value_); }

 private:
  std::variant<T, Status> value_;
};

}  // namespace headrace
