// Giving the GIL away and taking it back, safely at the end of the interpreter: a thread that asks
// for the GIL then is ended by Python before 3.14 with pthread_exit(), which unwinds the stack, and
// unwinding through a destructor aborts the process. Here such a thread is parked for good, as
// Python itself does from 3.14 on. The binding files use nothing else to give away or take the GIL.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <cxxabi.h>

namespace ringmem::bind {

// The process ends without this thread. What it holds stays held: no lock is kept where the GIL is
// asked for.
[[noreturn]] inline void park_for_good() noexcept {
  for (;;) ::pause();
}

// Calls what asks for the GIL, or runs Python, which gives it away and asks for it again. Asking
// Py_IsFinalizing() before would not do: the end may begin while the thread is in the queue for the
// GIL, and the thread that ends the interpreter, where it is true as well, gets the GIL.
template <class Call>
decltype(auto) or_park(Call&& call) {
#if defined(__GLIBCXX__)
  try {
    return call();
  } catch (const abi::__forced_unwind&) {  // pthread_exit()
    park_for_good();
  }
#else
  return call();
#endif
}

// Calls Python for native code that has the GIL. A thread that is ended in there is parked on the
// spot, so that nothing of the caller's is unwound.
template <class... Args>
nanobind::object call_or_park(nanobind::handle callable, const Args&... args) {
  PyObject* const given[] = {args.ptr()..., nullptr};
  PyObject* const result = or_park([&] {
    return PyObject_Vectorcall(callable.ptr(), given, sizeof...(args), nullptr);
  });
  if (!result) nanobind::raise_python_error();
  return nanobind::steal(result);
}

// A warning, which may run Python that the user gave; one that is made an error goes where those of
// finalizers go.
inline void warn_or_park(PyObject* category, const char* text) {
  or_park([&] {
    if (PyErr_WarnEx(category, text, 1) < 0) PyErr_WriteUnraisable(nullptr);
  });
}

// Without the GIL while it lives.
class ReleaseGil {
 public:
  ReleaseGil() noexcept : state_(PyEval_SaveThread()) {}
  ReleaseGil(const ReleaseGil&) = delete;
  ReleaseGil& operator=(const ReleaseGil&) = delete;
  ~ReleaseGil() {
    or_park([this] { PyEval_RestoreThread(state_); });
  }

 private:
  PyThreadState* state_;
};

// With the GIL while it lives, in any thread that may have it already.
class HoldGil {
 public:
  HoldGil() noexcept {
    or_park([this] { state_ = PyGILState_Ensure(); });
  }
  HoldGil(const HoldGil&) = delete;
  HoldGil& operator=(const HoldGil&) = delete;
  ~HoldGil() { PyGILState_Release(state_); }

 private:
  PyGILState_STATE state_ = PyGILState_UNLOCKED;
};

}  // namespace ringmem::bind
