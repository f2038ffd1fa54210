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
#include <optional>
#include <string>
#include <utility>
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

// What belongs to a failure beside who must act and the message: which delegate, method and island; empty or
// -1 where it belongs to none.
struct Failure {
  std::string delegate;
  std::string method;
  int island = -1;
  std::string device;
  std::string step;  // kCapture: of a capture or a replay
  std::vector<std::string> log;
  // What a language run time wants back when it raises this: Python's exception. Opaque here.
  std::shared_ptr<void> cause;
};

// One pointer, null where all is well: a call passes dozens of them. One that was moved from is kOk.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(ErrorCode code, std::string message)
      : told_(code == ErrorCode::kOk ? nullptr : std::make_unique<Told>(code, std::move(message))) {}
  Status(const Status& other) : told_(other.ok() ? nullptr : std::make_unique<Told>(*other.told_)) {}
  Status& operator=(const Status& other) {
    if (this != &other) told_ = other.ok() ? nullptr : std::make_unique<Told>(*other.told_);
    return *this;
  }
  Status(Status&&) noexcept = default;
  Status& operator=(Status&&) noexcept = default;
  ~Status() = default;

  bool ok() const { return told_ == nullptr; }
  ErrorCode code() const { return ok() ? ErrorCode::kOk : told_->code; }
  const std::string& message() const {
    static const std::string none;
    return ok() ? none : told_->message;
  }
  // `status->log`. Precondition: !ok().
  Failure* operator->() { return told_.get(); }
  const Failure* operator->() const { return told_.get(); }

 private:
  struct Told : Failure {
    Told(ErrorCode c, std::string m) : code(c), message(std::move(m)) {}
    ErrorCode code;
    std::string message;
  };
  std::unique_ptr<Told> told_;
};

// A value or the Status that says why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT: implicit on purpose
  Result(Status status) : status_(std::move(status)) {}  // NOLINT: implicit on purpose

  bool ok() const { return value_.has_value(); }
  // Precondition: ok().
  T& operator*() { return *value_; }
  T* operator->() { return &*value_; }
  // kOk when there is a value.
  Status status() const { return status_; }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace headrace
