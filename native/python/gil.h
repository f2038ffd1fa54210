// The GIL, given up around the engine's work and taken back.
#pragma once

#include <Python.h>

#include <exception>

#include "program/exit.h"

namespace headrace {

// Calls a CPython function that waits for the GIL. Once the interpreter ends, CPython (before 3.14) ends
// the waiting thread in there by pthread_exit, whose unwinding would meet a noexcept frame, nanobind's or
// ours, and end the process by std::terminate. Such a thread has nothing left to do: it is parked instead.
// What pthread_exit unwinds with is no object: nothing can be bound to it (abi::__forced_unwind), and it is
// no std::exception, as everything is that is thrown in there otherwise.
template <class Wait>
void wait_for_gil(Wait wait) {
  try {
    wait();
  } catch (const std::exception&) {
    throw;
  } catch (...) {
    park();
  }
}

// Gives the GIL up while it lives.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  ~GilRelease() {
    wait_for_gil([this] { PyEval_RestoreThread(state_); });
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* state_;
};

// Takes the GIL while it lives, wherever the thread comes from.
class GilAcquire {
 public:
  GilAcquire() {
    wait_for_gil([this] { state_ = PyGILState_Ensure(); });
  }
  ~GilAcquire() { PyGILState_Release(state_); }
  GilAcquire(const GilAcquire&) = delete;
  GilAcquire& operator=(const GilAcquire&) = delete;

 private:
  PyGILState_STATE state_;
};

}  // namespace headrace
