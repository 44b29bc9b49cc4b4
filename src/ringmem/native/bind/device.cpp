// Devices, the allocators that are the driver itself, and the override of a device's allocator
// for one thread. Python's floor 1 subclasses DeviceBase.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <cstdlib>
#include <string_view>
#include <utility>
#include <vector>

#include "bind/objects.hpp"
#include "bind/thread_state.hpp"
#include "memory/driver_allocators.hpp"

namespace ringmem::bind {
namespace {

PyObject* allocator_hook = nullptr;  // (object, device) -> Allocator; set once, never freed

std::string device_name(Driver& driver, int ordinal) {
  return std::string(driver.platform()) + ":" + std::to_string(ordinal);
}

// Whether the host may read and write what the device allocates: a CPU device in the host's own
// memory, unless it hides that. A GPU's allocations are not for the host even where it could.
bool host_can_access(Driver& driver, int ordinal) {
  int value = 0;
  return std::string_view(driver.platform()) == "cpu" &&
         ok(driver.attribute(ordinal, Attribute::integrated, &value)) && value != 0;
}

std::shared_ptr<Allocator> make_default_allocator(const DriverRef& driver, int ordinal) {
  int pools = 0;
  Status status = driver->attribute(ordinal, Attribute::memory_pools, &pools);
  if (status != Status::not_supported) check(status, "cuDeviceGetAttribute");
  if (pools) return std::make_shared<StreamOrderedAllocator>(driver, ordinal);
  return std::make_shared<PlainAllocator>(driver, ordinal);
}

void init_device(NativeDevice* self, DriverRef driver, int ordinal) {
  int count = 0;
  Status status;
  {
    ReleaseGil release;  // may load and initialize the driver
    status = driver->device_count(&count);
  }
  check(status, "cuDeviceGetCount");
  if (ordinal < 0 || ordinal >= count) {
    raise_error("InvalidDeviceError", "there is no device " + device_name(*driver, ordinal) +
                                          ": the driver has " + std::to_string(count) +
                                          (count == 1 ? " device" : " devices"));
  }
  auto allocator = make_default_allocator(driver, ordinal);
  std::string name = device_name(*driver, ordinal);
  bool accessible = host_can_access(*driver, ordinal);
  new (self) NativeDevice{std::move(driver), ordinal, std::move(name), accessible,
                          std::move(allocator)};
}

std::pair<std::size_t, std::size_t> memory_info(NativeDevice& self) {
  MemoryInfo info;
  Status status;
  {
    ReleaseGil release;
    status = self.driver->memory_info(self.ordinal, &info);
  }
  check(status, "cuMemGetInfo", "on " + self.name);
  return {info.free, info.total};
}

void synchronize(NativeDevice& self) {
  Status status;
  {
    ReleaseGil release;
    status = self.driver->synchronize(self.ordinal);
  }
  check(status, "cuCtxSynchronize", "on " + self.name);
}

void push_allocator(NativeDevice& self, nb::handle allocator) {
  auto native = allocator_of(allocator, self, Place::device);
  make_thread_state().allocators.push_back({&self, std::move(native)});
}

void pop_allocator(NativeDevice& self) {
  if (!thread_state) return;
  auto& stack = thread_state->allocators;
  for (std::size_t i = stack.size(); i-- > 0;) {
    if (stack[i].device != &self) continue;
    auto keep = std::move(stack[i].allocator);  // its destructor may run Python: erase first
    stack.erase(stack.begin() + static_cast<std::ptrdiff_t>(i));
    return;
  }
}

void set_allocator_hook(nb::callable hook) {
  PyObject* old = allocator_hook;
  allocator_hook = hook.inc_ref().ptr();
  Py_XDECREF(old);
}

void bind_allocators(nb::module_& m) {
  nb::class_<Allocator>(m, "Allocator",
                        "Gives memory and takes it back in stream order; base of native ones.")
      .def_prop_ro("may_block", &Allocator::may_block,
                   "bool: deallocating may wait for device work.");
  nb::class_<StreamOrderedAllocator, Allocator>(
      m, "StreamOrderedAllocator", "The driver's stream-ordered allocation, from an own pool.")
      .def_prop_ro("pool", &StreamOrderedAllocator::pool, "int: the driver's handle of the pool.")
      .def("trim", [](StreamOrderedAllocator& self, std::size_t keep_bytes) {
        Status status;
        {
          ReleaseGil release;
          status = self.trim(keep_bytes);
        }
        check(status, "cuMemPoolTrimTo");
      }, nb::arg("keep_bytes") = 0, "Give back what no live block needs, down to `keep_bytes`.");
  nb::class_<PlainAllocator, Allocator>(m, "PlainAllocator",
                                        "The driver's plain allocation; frees wait for the device.");
}

}  // namespace

std::string name_beside(const NativeDevice& device, const NativeDevice& beside) {
  const bool ambiguous = &device != &beside && device.name == beside.name;
  return device.name + (ambiguous ? " of another driver (such as a simulation's)" : "");
}

void raise_error(const char* name, const std::string& text) {
  nb::object cls = nb::module_::import_("ringmem.native.errors").attr(name);
  PyErr_SetString(cls.ptr(), text.c_str());
  throw nb::python_error();
}

const std::shared_ptr<Allocator>& current_allocator(NativeDevice& device) {
  if (thread_state) {
    auto& stack = thread_state->allocators;
    for (std::size_t i = stack.size(); i-- > 0;) {
      if (stack[i].device == &device) return stack[i].allocator;
    }
  }
  return device.allocator;
}

std::shared_ptr<Allocator> allocator_of(nb::handle argument, NativeDevice& device) {
  std::shared_ptr<Allocator> allocator;
  if (nb::try_cast(argument, allocator, false) && allocator) return allocator;
  if (nb::hasattr(argument, "native_allocator")) {
    nb::object inner = argument.attr("native_allocator");
    if (nb::try_cast(inner, allocator, false) && allocator) return allocator;
  }
  if (allocator_hook) {
    nb::object made = nb::handle(allocator_hook)(argument, nb::find(device));
    if (nb::try_cast(made, allocator, false) && allocator) return allocator;
  }
  raise_error("InvalidValueError",
              "allocator is " + std::string(nb::repr(argument).c_str()) +
                  ": give a pool, or an object with allocate(nbytes, stream) and "
                  "deallocate(ptr, nbytes, stream)");
}

std::shared_ptr<Allocator> allocator_of(nb::handle argument, NativeDevice& device, Place place) {
  auto allocator = allocator_of(argument, device);
  const Home home = allocator->home();
  if (!home.driver) return allocator;
  const char* const names[] = {"device", "page-locked", "managed"};
  const auto refuse = [&](const std::string& why) {
    raise_error("InvalidValueError",
                "allocator is " + std::string(nb::repr(argument).c_str()) + ": " + why);
  };
  if (home.place != place) {
    refuse(std::string("it gives ") + names[static_cast<int>(home.place)] + " memory, and " +
           names[static_cast<int>(place)] + " memory is needed");
  }
  const std::string of = std::string(home.driver->platform()) + ":" + std::to_string(home.device);
  if (home.driver != device.driver.get()) {
    refuse("its memory is that of " + of + ", and " + device.name + " belongs to another driver" +
           (of == device.name ? ", as in another simulation" : "") + "; give an allocator of " +
           device.name);
  }
  // Any device of the driver may use page-locked and managed memory.
  if (place == Place::device && home.device != device.ordinal) {
    refuse("its memory is that of " + of + ", and this is for " + device.name +
           "; give device=\"" + of + "\", or an allocator of " + device.name);
  }
  return allocator;
}

void bind_device(nb::module_& m) {
  bind_allocators(m);
  nb::class_<NativeDevice>(m, "DeviceBase", "One device of one driver.")
      .def("__init__", &init_device, nb::arg("driver"), nb::arg("ordinal"))
      .def_prop_ro("driver", [](NativeDevice& self) { return self.driver; },
                   "Driver: the raw driver.")
      .def_ro("ordinal", &NativeDevice::ordinal, "int: the driver's number of the device.")
      .def_ro("name", &NativeDevice::name, "str: platform and ordinal, such as \"cuda:0\".")
      .def_ro("host_accessible", &NativeDevice::host_accessible,
              "bool: the host may read and write its memory.")
      .def_ro("allocator", &NativeDevice::allocator, "Allocator: the device's own.")
      .def_prop_ro("current_allocator", [](NativeDevice& self) { return current_allocator(self); },
                   "Allocator: what buffers use on this thread.")
      .def("memory_info", &memory_info, "(free, total) in bytes.")
      .def("synchronize", &synchronize)
      .def("push_allocator", &push_allocator, nb::arg("allocator").none())
      .def("pop_allocator", &pop_allocator);
  m.def("name_beside", &name_beside, nb::arg("device"), nb::arg("beside"),
        "`device.name`, and that it is of another driver where `beside` has the same name.");
  m.def("is_ready", [](nb::handle object) {
    return nb::inst_check(object) && nb::inst_ready(object);
  }, nb::arg("object"),
        "Whether the native part was made: not in a subclass without super().__init__().");
  m.def("environment_value", [](const char* name) -> nb::object {
    const char* value = std::getenv(name);
    if (!value) return nb::none();
    PyObject* text = PyUnicode_DecodeFSDefault(value);
    if (!text) throw nb::python_error();
    return nb::steal(text);
  }, nb::arg("name"),
        nb::sig("def environment_value(name: str) -> str | None"),
        "What os.environ.get() returns, in 50 ns in place of 400.");
  m.def("set_allocator_hook", &set_allocator_hook, nb::arg("hook"),
        nb::sig("def set_allocator_hook(hook: Callable[[object, DeviceBase], Allocator]) -> None"),
        "`hook(object, device) -> Allocator` adapts objects that are no native allocator.");
}

}  // namespace ringmem::bind
