// Waiting with a deadline: poll a driver query with the GIL released, back off, and let Python's
// signal handlers run.
#pragma once

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "bind/objects.hpp"

namespace ringmem::bind {

inline bool is_bool(nb::handle value) {
  if (PyFloat_CheckExact(value.ptr())) return false;
  const std::string_view type = Py_TYPE(value.ptr())->tp_name;
  return PyBool_Check(value.ptr()) || type == "numpy.bool" || type == "numpy.bool_";
}

// What Python gave as `timeout_s`: None, or seconds as any real number.
inline std::optional<double> seconds_of(nb::handle timeout_s) {
  if (timeout_s.is_none()) return std::nullopt;
  const double seconds = is_bool(timeout_s) ? -1 : PyFloat_AsDouble(timeout_s.ptr());
  if (PyErr_Occurred()) PyErr_Clear();  // it gave -1
  if (!(seconds >= 0)) {
    throw InvalidValue("timeout_s is " + std::string(nb::repr(timeout_s).c_str()) +
                       ": give seconds, 0 or more, or None to wait without limit");
  }
  return std::min(seconds, 1e9);  // about 30 years: infinity must not overflow the clock
}

[[noreturn]] inline void raise_timeout(const std::string& what, double timeout_s) {
  char text[32];
  snprintf(text, sizeof text, "%g", timeout_s);
  raise_error("TimeoutError", what + " after " + text + " s");
}

// Calls `query` until it answers anything but not_ready, or until the time is up; returns the last
// answer. The first 50 µs are spun, then pauses grow from 10 µs to 1 ms. Signals are looked at
// every 20 ms. Call with the GIL.
template <class Query>
Status poll(Query query, double timeout_s) {
  using Clock = std::chrono::steady_clock;
  using std::chrono::microseconds;
  const auto start = Clock::now();
  const auto deadline =
      start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s));
  Clock::duration pause = microseconds(10);
  // Looks until there is an answer, or it is time to look at the signals or to give up.
  const auto look_until = [&](Clock::time_point until) {
    const ReleaseGil released;
    for (;;) {
      const Status status = query();
      const auto now = Clock::now();
      if (status != Status::not_ready || now >= until) return status;
      if (now - start < microseconds(50)) continue;
      std::this_thread::sleep_for(std::min(pause, until - now));
      pause = std::min<Clock::duration>(pause * 2, std::chrono::milliseconds(1));
    }
  };
  for (;;) {
    const Status status = look_until(std::min(deadline, Clock::now() + std::chrono::milliseconds(20)));
    if (status != Status::not_ready || Clock::now() >= deadline) return status;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

}  // namespace ringmem::bind
