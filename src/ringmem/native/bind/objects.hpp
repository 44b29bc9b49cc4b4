// What the binding files share: the C++ side of Device, Stream and Event, and how to get from a
// Python argument to them. Python's floor 1 subclasses or wraps these; hot paths read the fields.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <memory>
#include <string>

#include "bind/gil.hpp"
#include "driver/driver.hpp"
#include "memory/allocator.hpp"
#include "memory/used_stream.hpp"

namespace ringmem::bind {

namespace nb = nanobind;

// One device of one driver. Python keeps one object a device, so identity is equality. A DeviceRef
// made from the Python object (nb::cast<DeviceRef>) keeps that object alive.
struct NativeDevice {
  DriverRef driver;
  int ordinal = 0;
  std::string name;                       // "cuda:0", "cpu:1"
  bool host_accessible = false;           // the host may read and write its memory (CPU devices)
  std::shared_ptr<Allocator> allocator;   // default for buffers: the driver's pool, else plain
};
using DeviceRef = std::shared_ptr<NativeDevice>;

// A stream of one device. `owned`: destroyed on close. Otherwise it belongs to somebody else
// (another library's stream, the default stream) and `keep_alive` holds that.
struct NativeStream {
  DeviceRef device;
  StreamHandle handle = default_stream;
  bool owned = false;
  std::atomic<bool> closing{false};  // by one thread
  std::atomic<bool> closed{false};
  std::shared_ptr<UsedStream> used;  // what it left when it was closed; one that is owned, an event
  nb::object keep_alive;

  NativeStream() = default;
  ~NativeStream();  // closes what is still open; a failure is a warning
};

struct NativeEvent {
  DeviceRef device;
  EventHandle handle = 0;
  bool timing = false;
  std::atomic<bool> recorded{false};
  std::atomic<bool> closed{false};

  NativeEvent() = default;
  ~NativeEvent();  // closes what is still open; a failure is a warning
};

// The name of `device` where that of `beside` is said too: devices of two drivers may share it.
std::string name_beside(const NativeDevice& device, const NativeDevice& beside);

// The stream that `argument` names on `device`: None (the thread's current stream of the device,
// by default its default stream) or a NativeStream. Anything else goes through the Python hook
// that floor 1 registered (`__cuda_stream__`, integers, other libraries' streams).
// Throws the typed error for a closed stream or one of another device. Fast for the first two.
// With `owner`: also the Python object that keeps the handle valid (None for the default stream),
// for whoever uses the handle again later, as a buffer does when it frees.
StreamHandle stream_of(nb::handle argument, const NativeDevice& device,
                       nb::object* owner = nullptr);

// The allocator for buffers of `device` on this thread: the innermost `with device.use(…)`, else
// the device's own. The reference is good until the thread enters or leaves a `use`: whoever
// keeps blocks copies the pointer. Needs the GIL; makes no driver call.
const std::shared_ptr<Allocator>& current_allocator(NativeDevice& device);

// The native allocator behind a Python argument: an Allocator itself, an object whose
// `native_allocator` is one (pools), else what the hook that floor 2 registered makes of it.
std::shared_ptr<Allocator> allocator_of(nb::handle argument, NativeDevice& device);
// The same for memory of one kind: refuses an allocator of another kind, driver, or (for device
// memory) device.
std::shared_ptr<Allocator> allocator_of(nb::handle argument, NativeDevice& device, Place place);

// Whether `object` is a T or of a subclass. nb::isinstance looks the type up every time; hot paths
// ask several times a call.
template <class T>
bool is(nb::handle object) {
  static PyTypeObject* const type = reinterpret_cast<PyTypeObject*>(nb::type<T>().ptr());
  return PyObject_TypeCheck(object.ptr(), type);
}

// Raises a class of ringmem.native.errors. The GIL must be held.
[[noreturn]] void raise_error(const char* name, const std::string& text);

// Inside a catch block of a function that Python calls directly, not through nanobind: sets the
// Python error that belongs to the exception in flight.
void set_python_error() noexcept;

// Told of a stream of ours just before it is destroyed, while it can still be named. Set once.
inline void (*stream_closing)(const NativeDevice& device, StreamHandle stream) noexcept = nullptr;

// What the OutOfMemoryError that this thread may be about to raise for a request of `requested`
// bytes should say as well: its cause (an exception or None) and its holders. The GIL must be held.
void explain_out_of_memory(std::size_t requested, nb::object cause, nb::object holders);

void bind_errors(nb::module_& m);
void bind_allocation(nb::module_& m);
void bind_driver(nb::module_& m);   // Driver and its three kinds, raw operations
void bind_device(nb::module_& m);   // NativeDevice, allocators of the driver, overrides
void bind_stream(nb::module_& m);   // NativeStream, current streams
void bind_event(nb::module_& m);    // NativeEvent
void bind_buffer(nb::module_& m);   // NativeBuffer
void bind_layout(nb::module_& m);   // aligned structures
void bind_pool(nb::module_& m);
void bind_mapping(nb::module_& m);
void bind_residency(nb::module_& m);
void bind_ring(nb::module_& m);
void bind_ring_kernel(nb::module_& m);   // CPU kernels, the watchdog
void bind_ring_measure(nb::module_& m);  // verified echo figures
void bind_ring_call(nb::module_& m);     // one message and its reply
void bind_ring_aio(nb::module_& m);      // the same for asyncio
void bind_ring_bridge(nb::module_& m);   // what a bridge's flush does

}  // namespace ringmem::bind
