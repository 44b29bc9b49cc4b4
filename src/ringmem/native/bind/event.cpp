// Events: points in the work of a stream. Python's floor 1 subclasses EventBase.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

#include "bind/stream.hpp"
#include "bind/wait.hpp"

namespace ringmem::bind {
namespace {

void create_event(NativeEvent* self, DeviceRef device, nb::handle timing,
                  nb::handle blocking_sync) {
  const EventFlags flags{flag_of("timing", timing), flag_of("blocking_sync", blocking_sync)};
  EventHandle handle = 0;
  check(device->driver->event_create(device->ordinal, flags, &handle),
        "cuEventCreate", "on " + device->name);
  new (self) NativeEvent;
  self->device = std::move(device);
  self->handle = handle;
  self->timing = flags.timing;
}

Status close_event(NativeEvent& self) noexcept {
  if (self.closed.exchange(true, std::memory_order_acq_rel)) return Status::success;
  return self.device->driver->event_destroy(self.device->ordinal, self.handle);
}

void record_event(NativeEvent& self, NativeStream& stream) {
  check_open(self);
  check_open(stream);
  if (stream.device.get() != self.device.get()) {
    raise_error("InvalidDeviceError", describe(self) + " cannot be recorded on " +
                                          describe(stream) + ": create it on " +
                                          name_beside(*stream.device, *self.device));
  }
  check(self.device->driver->event_record(self.device->ordinal, self.handle, stream.handle),
        "cuEventRecord", describe(self) + " on " + describe(stream));
  self.recorded = true;
}

bool query_event(NativeEvent& self) {
  check_open(self);
  Status status = self.device->driver->event_query(self.device->ordinal, self.handle);
  if (status == Status::not_ready) return false;
  check(status, "cuEventQuery", "on " + describe(self));
  return true;
}

void synchronize_event(NativeEvent& self, nb::handle timeout) {
  check_open(self);
  const std::optional<double> timeout_s = seconds_of(timeout);
  nb::object keep = nb::find(self);
  Driver& driver = *self.device->driver;
  int ordinal = self.device->ordinal;
  if (!timeout_s) {
    Status status;
    {
      ReleaseGil release;
      status = driver.event_synchronize(ordinal, self.handle);
    }
    return check(status, "cuEventSynchronize", "on " + describe(self));
  }
  Status status = poll([&] { return driver.event_query(ordinal, self.handle); }, *timeout_s);
  if (status == Status::not_ready) {
    raise_timeout(describe(self) + " has not happened yet", *timeout_s);
  }
  check(status, "cuEventQuery", "on " + describe(self));
}

void check_elapsed_operand(const NativeEvent& event, const char* argument) {
  check_open(event);
  const char* wrong = !event.timing     ? " was created without timing: create_event(timing=True)"
                      : !event.recorded ? " was never recorded: record() it first"
                                        : nullptr;
  if (wrong) throw InvalidValue(std::string(argument) + ": " + describe(event) + wrong);
}

float elapsed_ms(NativeEvent& self, nb::handle earlier) {
  if (!is<NativeEvent>(earlier)) refuse("since", earlier, "give an event that was recorded earlier");
  NativeEvent& since = *nb::inst_ptr<NativeEvent>(earlier);
  check_elapsed_operand(since, "since");
  check_elapsed_operand(self, "end");
  if (self.device.get() != since.device.get()) {
    raise_error("InvalidDeviceError", "no time between " + describe(since) + " and " +
                                          describe(self) + ": they belong to two " +
                                          (self.device->driver == since.device->driver
                                               ? "devices"
                                               : "drivers, such as a simulation's"));
  }
  float milliseconds = 0;
  Status status = self.device->driver->event_elapsed(self.device->ordinal, since.handle,
                                                     self.handle, &milliseconds);
  check(status, "cuEventElapsedTime",
        status == Status::not_ready ? "synchronize() the later event first" : "");
  return milliseconds;
}

int traverse_event(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? visit_device(nb::inst_ptr<NativeEvent>(self)->device, visit, arg)
                              : 0;
}

PyType_Slot event_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse_event)},
                             {0, nullptr}};

}  // namespace

NativeEvent::~NativeEvent() {
  if (!device) return;
  Status status = close_event(*this);
  if (!ok(status)) warn_not_destroyed(describe(*this), status);
}

void bind_event(nb::module_& m) {
  nb::class_<NativeEvent>(m, "EventBase", nb::type_slots(event_slots),
                           "A point in the work of a stream.")
      .def("__init__", &create_event, nb::arg("device"), nb::arg("timing").none(),
           nb::arg("blocking_sync").none(),
           nb::sig("def __init__(self, device: DeviceBase, timing: bool, blocking_sync: bool) "
                   "-> None"))
      .def_ro("device", &NativeEvent::device, "DeviceBase: the event's device.")
      .def_prop_ro("handle", [](NativeEvent& self) { check_open(self); return self.handle; },
                   "int: the driver's handle. ClosedError after close().")
      .def_ro("timing", &NativeEvent::timing, "bool: elapsed_ms works.")
      .def_prop_ro("recorded", [](NativeEvent& self) { return self.recorded.load(); },
                   "bool: recorded at least once.")
      .def_prop_ro("closed", [](NativeEvent& self) { return self.closed.load(); },
                   "bool: close() was called.")
      .def("record", &record_event, nb::arg("stream"))
      .def("query", &query_event)
      .def("synchronize", &synchronize_event, nb::arg("timeout_s").none() = nb::none(),
           nb::sig("def synchronize(self, timeout_s: float | None = None) -> None"))
      .def("elapsed_ms", &elapsed_ms, nb::arg("since").none(),
           nb::sig("def elapsed_ms(self, since: EventBase) -> float"))
      .def("close", [](NativeEvent& self) {
        check(close_event(self), "cuEventDestroy", "on " + describe(self));
      });
}

}  // namespace ringmem::bind
