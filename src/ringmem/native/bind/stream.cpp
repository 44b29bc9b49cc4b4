// Streams, and the current stream of each device on each thread. Python's floor 1 subclasses
// StreamBase.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <optional>
#include <string>

#include "bind/stream.hpp"
#include "bind/thread_state.hpp"
#include "bind/wait.hpp"
#include "memory/event_order.hpp"
#include "memory/used_stream.hpp"

namespace ringmem::bind {
namespace {

std::string hex(std::uint64_t handle) {
  char text[24];
  snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(handle));
  return text;
}

PyObject* stream_hook = nullptr;  // (object, device) -> StreamBase; set once, never freed

void init_stream(NativeStream* self, DeviceRef device, StreamHandle handle, nb::object keep_alive) {
  auto used = std::make_shared<UsedStream>(device->driver, device->ordinal, handle);
  new (self) NativeStream;
  self->used = std::move(used);
  self->device = std::move(device);
  self->handle = handle;
  self->keep_alive = std::move(keep_alive);
}

// A priority out of the range of an int is clamped, as the driver clamps the others.
int priority_of(nb::handle value) {
  nb::object index = nb::steal(PyNumber_Index(value.ptr()));
  if (!index.is_valid()) {
    PyErr_Clear();
    refuse("priority", value, "give an integer; lower is more urgent");
  }
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow != 0) return overflow < 0 ? INT_MIN : INT_MAX;
  return static_cast<int>(std::clamp<long long>(number, INT_MIN, INT_MAX));
}

void create_stream(NativeStream* self, DeviceRef device, nb::handle priority,
                   nb::handle non_blocking) {
  const StreamFlags flags{flag_of("non_blocking", non_blocking), priority_of(priority)};
  StreamHandle handle = 0;
  Status status;
  {
    ReleaseGil release;
    status = device->driver->stream_create(device->ordinal, flags, &handle);
  }
  check(status, "cuStreamCreateWithPriority", "on " + device->name);
  std::shared_ptr<UsedStream> used;
  try {
    used = UsedStream::announce(device->driver, device->ordinal, handle);
  } catch (...) {
    static_cast<void>(device->driver->stream_destroy(device->ordinal, handle));
    throw;
  }
  new (self) NativeStream;
  self->used = std::move(used);
  self->device = std::move(device);
  self->handle = handle;
  self->owned = true;
}

// Idempotent. When destroying fails the stream is closed all the same: its handle is lost. `named`:
// somebody may still ask about the work of the closed stream. Whoever frees memory of it later waits
// for the event that it leaves; without one, for the device.
Status close_stream(NativeStream& self, bool named) noexcept {
  if (self.closing.exchange(true, std::memory_order_acq_rel)) return Status::success;
  self.used->close(named);
  self.closed.store(true, std::memory_order_release);  // whoever sees it finds the event
  if (!self.owned) return Status::success;
  if (stream_closing) stream_closing(*self.device, self.handle);
  return self.device->driver->stream_destroy(self.device->ordinal, self.handle);
}

bool query_stream(NativeStream& self) {
  check_open(self);
  Status status = self.device->driver->stream_query(self.device->ordinal, self.handle);
  if (status == Status::not_ready) return false;
  check(status, "cuStreamQuery", "on " + describe(self));
  return true;
}

bool stream_is_capturing(NativeStream& self) {
  check_open(self);
  bool capturing = false;
  check(self.device->driver->stream_capturing(self.device->ordinal, self.handle, &capturing),
        "cuStreamIsCapturing", "on " + describe(self));
  return capturing;
}

void synchronize_stream(NativeStream& self, nb::handle timeout) {
  check_open(self);
  const std::optional<double> timeout_s = seconds_of(timeout);
  nb::object keep = nb::find(self);  // another thread may drop the last reference meanwhile
  Driver& driver = *self.device->driver;
  int ordinal = self.device->ordinal;
  if (!timeout_s) {
    Status status;
    {
      ReleaseGil release;
      status = driver.stream_synchronize(ordinal, self.handle);
    }
    return check(status, "cuStreamSynchronize", "on " + describe(self));
  }
  Status status = poll([&] { return driver.stream_query(ordinal, self.handle); }, *timeout_s);
  if (status == Status::not_ready) {
    raise_timeout(describe(self) + " still has pending work", *timeout_s);
  }
  check(status, "cuStreamQuery", "on " + describe(self));
}

void check_same_driver(const NativeStream& stream, const DeviceRef& other,
                       const std::string& what) {
  if (stream.device->driver == other->driver) return;
  raise_error("InvalidDeviceError", describe(stream) + " cannot wait for " + what +
                                        ": they belong to different drivers; synchronize() it on "
                                        "the host instead");
}

void wait_event(NativeStream& self, NativeEvent& event) {
  check_open(self);
  check_open(event);
  check_same_driver(self, event.device, describe(event));
  check(self.device->driver->stream_wait_event(self.device->ordinal, self.handle, event.handle),
        "cuStreamWaitEvent", describe(self) + " waiting for " + describe(event));
}

// An event that lives as long as it takes to order two streams: a queued wait keeps its state.
void wait_stream(NativeStream& self, NativeStream& other) {
  check_open(self);
  check_open(other);
  check_same_driver(self, other.device, describe(other));
  Driver& driver = *self.device->driver;
  int theirs = other.device->ordinal;
  EventHandle event = 0;
  check(driver.event_create(theirs, EventFlags{}, &event), "cuEventCreate");
  const char* operation = "cuEventRecord";
  Status status = driver.event_record(theirs, event, other.handle);
  if (ok(status)) {
    operation = "cuStreamWaitEvent";
    status = driver.stream_wait_event(self.device->ordinal, self.handle, event);
  }
  destroy_event(driver, theirs, event);
  check(status, operation, describe(self) + " waiting for " + describe(other));
}

void push_stream(nb::handle_t<NativeStream> self) {
  NativeStream* stream = nb::inst_ptr<NativeStream>(self);
  check_open(*stream);
  make_thread_state().streams.push_back({stream, nb::borrow(self)});
}

void pop_stream(nb::handle_t<NativeStream> self) {
  if (!thread_state) return;
  auto& stack = thread_state->streams;
  for (std::size_t i = stack.size(); i-- > 0;) {
    if (!stack[i].object.is(self)) continue;
    stack.erase(stack.begin() + static_cast<std::ptrdiff_t>(i));
    return;
  }
}

const ThreadState::CurrentStream* find_current(const NativeDevice& device) {
  if (!thread_state) return nullptr;
  auto& stack = thread_state->streams;
  for (std::size_t i = stack.size(); i-- > 0;) {
    if (stack[i].stream->device.get() == &device) return &stack[i];
  }
  return nullptr;
}

// None: nothing was pushed, the default stream is current.
nb::object current_stream(NativeDevice& device) {
  const auto* entry = find_current(device);
  return entry ? entry->object : nb::none();
}

StreamHandle handle_on(NativeStream& stream, const NativeDevice& device) {
  check_open(stream);
  if (stream.device.get() != &device) [[unlikely]] {
    raise_error("InvalidDeviceError", describe(stream) + " was given for work on " +
                                          name_beside(device, *stream.device) + ": give a stream of " + device.name);
  }
  return stream.handle;
}

int traverse_stream(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  NativeStream* stream = nb::inst_ptr<NativeStream>(self);
  Py_VISIT(stream->keep_alive.ptr());
  return visit_device(stream->device, visit, arg);
}

int clear_stream(PyObject* self) {
  nb::inst_ptr<NativeStream>(self)->keep_alive.reset();
  return 0;
}

PyType_Slot stream_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse_stream)},
                              {Py_tp_clear, reinterpret_cast<void*>(clear_stream)},
                              {0, nullptr}};
void bind_stream_class(nb::module_& m) {
  nb::class_<NativeStream>(m, "StreamBase", nb::type_slots(stream_slots), "A stream of one device.")
      .def("__init__", &init_stream, nb::arg("device"), nb::arg("handle"),
           nb::arg("keep_alive").none() = nb::none())
      .def("__init__", &create_stream, nb::arg("device"), nb::kw_only(),
           nb::arg("priority").none(), nb::arg("non_blocking").none(),
           nb::sig("def __init__(self, device: DeviceBase, *, priority: int, non_blocking: bool) "
                   "-> None"))
      .def_ro("device", &NativeStream::device, "DeviceBase: the stream's device.")
      .def_prop_ro("handle", [](NativeStream& self) { check_open(self); return self.handle; },
                   "int: the driver's handle. ClosedError after close().")
      .def_ro("owned", &NativeStream::owned, "bool: destroyed on close().")
      .def_prop_ro("closed", [](NativeStream& self) { return self.closed.load(); },
                   "bool: close() was called.")
      .def_prop_ro("raw_handle", [](NativeStream& self) { return self.handle; },
                   "int: the handle, also after close(); for messages only.")
      .def("query", &query_stream)
      .def_prop_ro("is_capturing", &stream_is_capturing)
      .def("synchronize", &synchronize_stream, nb::arg("timeout_s").none() = nb::none(),
           nb::sig("def synchronize(self, timeout_s: float | None = None) -> None"))
      .def("wait_event", &wait_event, nb::arg("event"))
      .def("wait_stream", &wait_stream, nb::arg("stream"))
      .def("close", [](NativeStream& self) {
        check(close_stream(self, true), "cuStreamDestroy", "on " + describe(self));
      })
      .def("push", &push_stream)
      .def("pop", &pop_stream);
}

}  // namespace

std::string describe(const NativeStream& stream) {
  return "stream " + hex(stream.handle) + " of " + stream.device->name;
}

std::string describe(const NativeEvent& event) {
  return "event " + hex(event.handle) + " of " + event.device->name;
}

void refuse(const char* argument, nb::handle value, const char* wanted) {
  throw InvalidValue(std::string(argument) + " is " + nb::repr(value).c_str() + ": " + wanted);
}

bool flag_of(const char* argument, nb::handle value) {
  if (!PyBool_Check(value.ptr())) refuse(argument, value, "give True or False");
  return value.ptr() == Py_True;
}

void warn_not_destroyed(const std::string& what, Status status) noexcept {
  if (!nb::is_alive()) return;
  HoldGil gil;
  nb::error_scope keep;  // whatever was being raised goes on
  const std::string text = what + " could not be destroyed: " + status_name(status);
  warn_or_park(PyExc_ResourceWarning, text.c_str());
}

int visit_device(const DeviceRef& device, visitproc visit, void* arg) {
  if (device && device.use_count() == 1) Py_VISIT(nb::find(*device).ptr());
  return 0;
}

NativeStream::~NativeStream() {
  if (!device) return;
  Status status = close_stream(*this, false);
  if (!ok(status)) warn_not_destroyed(describe(*this), status);
}

StreamHandle stream_of(nb::handle argument, const NativeDevice& device, nb::object* owner) {
  if (argument.is_none()) {
    const auto* entry = find_current(device);
    if (owner) *owner = entry ? entry->object : nb::none();
    if (!entry) return default_stream;
    check_open(*entry->stream);
    return entry->stream->handle;
  }
  if (is<NativeStream>(argument)) [[likely]] {
    if (owner) *owner = nb::borrow(argument);
    return handle_on(*nb::inst_ptr<NativeStream>(argument), device);
  }
  if (!stream_hook) {  // floor 1 sets it when it is imported; this floor cannot reach up for it
    throw InvalidValue("stream is " + std::string(nb::repr(argument).c_str()) +
                       ": import ringmem.device to use streams of other libraries");
  }
  nb::object made = nb::handle(stream_hook)(argument, nb::find(device));
  StreamHandle handle = handle_on(*nb::cast<NativeStream*>(made), device);
  if (owner) *owner = std::move(made);
  return handle;
}

void bind_stream(nb::module_& m) {
  bind_stream_class(m);
  m.def("current_stream", &current_stream, nb::arg("device"),
        nb::sig("def current_stream(device: DeviceBase) -> StreamBase | None"),
        "The innermost `with stream:` of the device on this thread; None: the default stream.");
  m.def("stream_handle", [](nb::handle stream, NativeDevice& device) {
    return stream_of(stream, device);
  }, nb::arg("stream").none(), nb::arg("device"), "The handle that any stream-like names.");
  m.def("set_stream_hook", [](nb::callable hook) {
    PyObject* old = stream_hook;
    stream_hook = hook.inc_ref().ptr();
    Py_XDECREF(old);
  }, nb::arg("hook"),
        nb::sig("def set_stream_hook(hook: Callable[[object, DeviceBase], StreamBase]) -> None"),
        "`hook(object, device) -> StreamBase` adapts other libraries' streams.");
}

}  // namespace ringmem::bind
