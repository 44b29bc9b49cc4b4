// The kinds of driver in Python, and how one gets them.
#include "bind/driver_call.hpp"

#include <nanobind/stl/map.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>
#include <map>

#include "driver/cuda/cuda_driver.hpp"
#include "driver/faulty/faulty_driver.hpp"
#include "driver/fork.hpp"
#include "driver/host/host_driver.hpp"

namespace ringmem::bind {
namespace {

using namespace nb::literals;

// A simulated device may have to wait for a host function that wants the GIL before it can go.
struct WithoutGil {
  void operator()(HostDriver* driver) const {
    if (nb::is_alive() && PyGILState_Check()) {
      ReleaseGil release;
      delete driver;
    } else {
      delete driver;
    }
  }
};

std::shared_ptr<HostDriver> new_host_driver(const HostConfig& config) {
  return {new HostDriver(config), WithoutGil{}};
}

// "devices=2" and devices=2 mean the same; a setting in both is the keyword's.
std::shared_ptr<HostDriver> host_driver_of(const std::string& config, const nb::kwargs& settings) {
  std::string text = config;
  for (const auto& [key, value] : settings) {
    nb::object plain = nb::borrow(value);
    if (nb::isinstance<nb::bool_>(value)) plain = nb::int_(plain);
    text.append(",").append(nb::cast<std::string>(key));
    text.append("=").append(nb::cast<std::string>(nb::str(plain)));
  }
  return new_host_driver(parse_host_config(text));
}

// Never destroyed: its streams may run until the process ends.
const std::shared_ptr<HostDriver>& default_host_driver() {
  static const auto* driver = [] {
    const char* variable = std::getenv("RINGMEM_SIMULATE");
    const std::string config = variable ? variable : "";
    try {
      return new std::shared_ptr<HostDriver>(new_host_driver(parse_host_config(config)));
    } catch (const InvalidValue& error) {
      throw InvalidValue("RINGMEM_SIMULATE is \"" + config + "\": " + error.what());
    }
  }();
  return *driver;
}

int operation_number(const std::string& name) {
  if (name == "*") return FaultPlan::any_operation;
  const int number = find_operation(name);
  if (number < 0) {
    throw InvalidValue("operation is '" + name +
                       "'; it must be \"*\" or one of FaultyDriver.operations");
  }
  return number;
}

FaultWhen when_of(const std::string& when) {
  if (when == "before") return FaultWhen::before;
  if (when == "after") return FaultWhen::after;
  if (when == "sticky") return FaultWhen::sticky;
  throw InvalidValue("when is '" + when + "'; it must be \"before\", \"after\" or \"sticky\"");
}

void fail(FaultyDriver& driver, const std::string& operation, std::uint64_t nth, Status status,
          const std::string& when, std::uint64_t times) {
  if (nth == 0) throw InvalidValue("nth is 0; the next call is nth=1");
  if (times == 0) throw InvalidValue("times is 0; at least one call must fail");
  if (ok(status)) throw InvalidValue("status is Status.success, which is no failure");
  driver.plan().fail(operation_number(operation), nth, times, status, when_of(when));
}

void delay(FaultyDriver& driver, const std::string& operation, double seconds) {
  if (!(seconds >= 0)) {
    throw InvalidValue("seconds is " + std::to_string(seconds) + "; it must be 0 or more");
  }
  driver.plan().delay(operation_number(operation), std::chrono::duration<double>(seconds));
}

std::map<std::string, std::uint64_t> calls(FaultyDriver& driver) {
  std::map<std::string, std::uint64_t> result;
  const auto counts = driver.plan().calls();
  for (std::size_t i = 0; i < operation_count; ++i) result[operation_names[i]] = counts[i];
  return result;
}

std::map<std::string, std::size_t> live(FaultyDriver& driver) {
  std::map<std::string, std::size_t> result;
  const auto counts = driver.live().counts();
  for (std::size_t i = 0; i < live_kind_count; ++i) result[live_kind_names[i]] = counts[i];
  return result;
}

void begin_capture(FaultyDriver& driver, int device, StreamHandle stream) {
  check(driver.captures().begin({device, stream}), "cuStreamBeginCapture");
}

void end_capture(FaultyDriver& driver, int device, StreamHandle stream) {
  check(driver.captures().end({device, stream}), "cuStreamEndCapture");
}

std::vector<std::string> operations() { return {operation_names, operation_names + operation_count}; }

void bind_faulty(nb::module_& m) {
  nb::class_<FaultyDriver, Driver>(
      m, "FaultyDriver",
      "A driver around another one that fails chosen calls, delays them and counts live objects.\n\n"
      "A call that fails \"after\" has happened, but for what it would have handed to the caller\n"
      "(memory, a handle, a mapping, a registration): that is destroyed again first.")
      .def(nb::init<DriverRef>(), "driver"_a)
      .def_prop_ro("driver", [](FaultyDriver& driver) { return driver.inner(); },
                   "The driver inside.")
      .def_prop_ro_static("operations", [](nb::handle) { return operations(); },
                          "The names of all operations.")
      .def("fail", &fail, "operation"_a, "nth"_a = 1, "status"_a = Status::unknown,
           "when"_a = "before", "times"_a = 1,
           "Fail the nth call of `operation` from now (1: the next), and the `times` - 1 calls "
           "after it. \"*\" counts calls of every operation. `when` is \"before\" (nothing is "
           "done), \"after\" (done, then reported as failed) or \"sticky\" (not done, and every "
           "later call on that device fails too).")
      .def("delay", &delay, "operation"_a, "seconds"_a,
           "Start every call of `operation` (\"*\": of all) that much later; 0 ends it.")
      .def("clear", [](FaultyDriver& driver) { driver.plan().clear(); },
           "Forget rules, delays and sticky failures; the counters stay.")
      .def("begin_capture", &begin_capture, "device"_a, "stream"_a,
           "From now on refuse, and be spoiled by, what CUDA refuses while a graph is captured from "
           "the stream. Work given to the stream runs all the same.")
      .def("end_capture", &end_capture, "device"_a, "stream"_a,
           "Raise DriverError if anything spoiled the capture, or another stream joined it.")
      .def_prop_ro("pending", [](FaultyDriver& driver) { return driver.plan().pending(); },
                   "Rules that have not failed all their calls yet.")
      .def_prop_ro("calls", &calls, "Calls so far, by operation, failed ones included.")
      .def_prop_ro("live", &live, "Objects handed out and not given back, by kind.");
}

}  // namespace

void bind_driver_kinds(nb::module_& m) {
  nb::class_<CudaDriver, Driver>(m, "CudaDriver", "The CUDA driver of this machine, loaded at its "
                                                  "first use.")
      .def(nb::init<>())  // reads RINGMEM_CUDA_LIBRARY anew: for tests of loading
      .def_prop_ro("load_error", [](const CudaDriver& driver) { return driver.load_error(); },
                   "Why there is no usable driver; empty where there is one. Loads it.")
      .def_prop_ro("library", [](const CudaDriver& driver) { return driver.library(); },
                   "Path or name the library was asked for by.");
  m.def("cuda_driver", [] { return cuda_driver(); },
        "The CUDA driver. Nothing is loaded before its first operation.");
  nb::class_<HostDriver, Driver>(
      m, "HostDriver",
      "Devices simulated in host memory. Settings come as text, \"devices=2,capacity=8GiB\", as\n"
      "keywords, or both.")
      .def(nb::new_(&host_driver_of), "config"_a = "", "settings"_a)
      .def("check_access",
           [](const HostDriver& driver, int device, DevicePtr ptr, std::size_t nbytes, bool write) {
             return ok(driver.check_access(device, ptr, nbytes, write));
           },
           "device"_a, "ptr"_a, "nbytes"_a, "write"_a = false,
           "Whether `device` may read (or write) all of these bytes now.");
  m.def("forks", &fork_generation, "Forks between the process that loaded the module and this one.");
  m.def("host_driver", [] { return default_host_driver(); },
        "The simulated devices of this process, configured by RINGMEM_SIMULATE.");
  bind_faulty(m);
}

}  // namespace ringmem::bind
