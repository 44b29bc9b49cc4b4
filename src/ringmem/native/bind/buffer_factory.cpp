// How buffers come to be: from an allocator, around memory that exists, and by other rooms. The
// constructors of DeviceBuffer and `empty` parse their own arguments, because a generic parser
// costs as much as the allocation itself.
#include "bind/buffer.hpp"

#include <nanobind/stl/shared_ptr.h>

#include <atomic>
#include <cstddef>
#include <utility>

#include "memory/host_allocators.hpp"

namespace ringmem::bind {
namespace {

constexpr std::size_t kind_count = 4;
PyObject* types[kind_count] = {};      // the Python classes; set once, never freed
PyObject* default_device = nullptr;    // () -> Device
PyObject* device_class = nullptr;      // (name or Device) -> Device
// Floor 2 registers the above when it is imported; this floor cannot reach up for it.
constexpr const char* not_registered =
    "ringmem.buffers is not imported: import it before buffers are made";
std::atomic<bool> tracking{false};     // remember where buffers are allocated

[[noreturn]] void raise_type_error(const std::string& text) {
  PyErr_SetString(PyExc_TypeError, text.c_str());
  throw nb::python_error();
}

// --- arguments -----------------------------------------------------------------------------------

struct Names {
  PyObject* names[5] = {PyUnicode_InternFromString("shape"), PyUnicode_InternFromString("dtype"),
                        PyUnicode_InternFromString("device"), PyUnicode_InternFromString("stream"),
                        PyUnicode_InternFromString("allocator")};
};

const Names* known = nullptr;  // made with the module, never freed

int index_of(PyObject* name) {
  for (int i = 0; i < 5; ++i) {
    if (known->names[i] == name) return i;
  }
  for (int i = 0; i < 5; ++i) {  // a name that was not interned
    if (PyUnicode_Compare(known->names[i], name) == 0) return i;
  }
  return -1;
}

Request parse(const char* function, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  nb::handle given[5];
  if (nargs > 2) {
    raise_type_error(std::string(function) + "() takes shape and dtype by position; give the " +
                     "others by name");
  }
  for (Py_ssize_t i = 0; i < nargs; ++i) given[i] = args[i];
  const Py_ssize_t named = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
  for (Py_ssize_t i = 0; i < named; ++i) {
    PyObject* name = PyTuple_GET_ITEM(kwnames, i);
    const int index = index_of(name);
    if (index < 0 || given[index].is_valid()) {
      raise_type_error(std::string(function) + "() got " +
                       (index < 0 ? "an unknown argument '" : "two values for '") +
                       std::string(nb::str(nb::handle(name)).c_str()) + "'");
    }
    given[index] = args[nargs + i];
  }
  if (!given[0].is_valid()) raise_type_error(std::string(function) + "() needs a shape");
  return {given[0], given[1], given[2], given[3], given[4]};
}

bool absent(nb::handle argument) { return !argument.is_valid() || argument.is_none(); }

// --- construction --------------------------------------------------------------------------------

void describe_memory(Buffer& buffer, MemoryKind kind, Spec&& spec, nb::handle device,
                     StreamRef&& stream) {
  buffer.kind = kind;
  buffer.nbytes = spec.nbytes;
  buffer.size = spec.size;
  buffer.itemsize = spec.dtype.itemsize;
  buffer.shape = std::move(spec.shape);
  buffer.dtype = std::move(spec.dtype.object);
  buffer.device_object = nb::borrow(device);
  buffer.device = nb::inst_ptr<NativeDevice>(device);
  buffer.stream = std::move(stream);
  if (tracking.load(std::memory_order_relaxed)) [[unlikely]] buffer.place = place_of_call();
}

Block take(Allocator& allocator, MemoryKind kind, std::size_t nbytes, StreamHandle stream) {
  Block block;
  if (allocator.try_allocate(nbytes, stream, &block)) return block;
  if (kind == MemoryKind::device && !allocator.allocate_may_block()) [[likely]] {
    return allocator.allocate(nbytes, stream);
  }
  ReleaseGil release;  // page-locking 1 GiB takes 0.4 s, and a pool may wait
  return allocator.allocate(nbytes, stream);
}

std::shared_ptr<Allocator> default_allocator(MemoryKind kind, NativeDevice& device) {
  if (kind == MemoryKind::device) {
    const std::shared_ptr<Allocator>& current = current_allocator(device);
    if (&current != &device.allocator) return current;
    return {std::shared_ptr<Allocator>(), current.get()};  // see Buffer::allocator
  }
  if (kind == MemoryKind::pinned) {
    return std::make_shared<PinnedAllocator>(device.driver, device.ordinal, HostFlags{});
  }
  return std::make_shared<ManagedAllocator>(device.driver, device.ordinal, ManagedAttach::global);
}

void own_memory(Buffer& buffer, std::shared_ptr<Allocator> allocator) {
  if (buffer.nbytes == 0) return;  // a typed buffer of size 0: nothing to allocate
  buffer.block = take(*allocator, buffer.kind, buffer.nbytes, buffer.stream.handle);
  if (buffer.block.ptr == 0) {
    raise_error("AllocationFailedError", "the allocator returned a null address for " +
                                             std::to_string(buffer.nbytes) + " bytes on " +
                                             buffer.device->name);
  }
  buffer.ptr = buffer.block.ptr;
  buffer.allocator = std::move(allocator);
}

// A new, empty object of `type`; `fill` makes it a buffer. What `fill` throws destroys it.
template <class Fill>
nb::object make(nb::handle type, Fill fill) {
  nb::object object = new_buffer_object(type);
  fill(*nb::inst_ptr<Buffer>(object));
  return object;
}

nb::handle registered(MemoryKind kind) {
  nb::handle type = buffer_type(kind);
  if (!type.is_valid()) [[unlikely]] throw InvalidValue(not_registered);
  return type;
}

nb::object make_requested(nb::handle type, const Request& request) {
  return make(type, [&](Buffer& buffer) { allocate_into(buffer, MemoryKind::device, request); });
}

// --- entry points from Python --------------------------------------------------------------------

PyObject* construct_device_buffer(PyObject* type, PyObject* const* args, std::size_t nargsf,
                                  PyObject* kwnames) {
  try {
    const Request request =
        parse("DeviceBuffer", args, PyVectorcall_NARGS(nargsf), kwnames);
    return make_requested(type, request).release().ptr();
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

PyObject* empty(PyObject*, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  try {
    const Request request = parse("empty", args, nargs, kwnames);
    return make_requested(registered(MemoryKind::device), request).release().ptr();
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

PyMethodDef empty_method = {
    "empty", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&empty)),
    METH_FASTCALL | METH_KEYWORDS,
    "empty($module, shape, dtype=None, *, device=None, stream=None, allocator=None)\n--\n\n"
    "Device memory with undefined content."};

void init_buffer(Buffer* self, int kind, nb::handle shape, nb::handle dtype, nb::handle device,
                 nb::handle stream, nb::handle allocator) {
  new (self) Buffer;
  try {
    allocate_into(*self, static_cast<MemoryKind>(kind), {shape, dtype, device, stream, allocator});
  } catch (...) {
    self->~Buffer();
    throw;
  }
}

void set_types(nb::handle device, nb::handle pinned, nb::handle managed, nb::handle devices,
               nb::handle default_device_function) {
  PyObject* given[kind_count] = {device.ptr(), pinned.ptr(), managed.ptr(), device.ptr()};
  for (std::size_t i = 0; i < kind_count; ++i) types[i] = Py_NewRef(given[i]);
  device_class = Py_NewRef(devices.ptr());
  default_device = Py_NewRef(default_device_function.ptr());
  // Only the class itself: a user's subclass may have an __init__ of its own.
  reinterpret_cast<PyTypeObject*>(device.ptr())->tp_vectorcall = construct_device_buffer;
  recycle_objects(device);
}

nb::object borrow_memory(int kind, DevicePtr ptr, nb::handle shape, nb::handle dtype,
                         nb::handle device, nb::handle stream, bool read_only, nb::handle owner) {
  const auto memory = static_cast<MemoryKind>(kind);
  return make(registered(memory), [&](Buffer& buffer) {
    StreamRef order = stream_ref(stream, *nb::cast<NativeDevice*>(device));
    describe_memory(buffer, memory, spec_of(shape_of(shape), dtype_of(dtype)), device,
                    std::move(order));
    buffer.ptr = buffer.nbytes ? ptr : 0;
    buffer.read_only = read_only;
    buffer.owner = nb::borrow(owner);
  });
}

// --- page-locking memory that exists -------------------------------------------------------------

// The owner as the native side holds it.
std::shared_ptr<void> hold(nb::handle object) {
  return std::shared_ptr<void>(object.inc_ref().ptr(), [](void* held) {
    if (!nb::is_alive()) return;
    HoldGil gil;
    Py_DECREF(static_cast<PyObject*>(held));
  });
}

nb::object pin_memory(DevicePtr ptr, nb::handle shape, nb::handle dtype, nb::handle device,
                      nb::handle stream, bool read_only, nb::handle owner) {
  return make(registered(MemoryKind::pinned), [&](Buffer& buffer) {
    auto* native = nb::cast<NativeDevice*>(device);
    StreamRef order = stream_ref(stream, *native);
    describe_memory(buffer, MemoryKind::pinned, spec_of(shape_of(shape), dtype_of(dtype)), device,
                    std::move(order));
    buffer.read_only = read_only;
    if (buffer.nbytes == 0) return;
    HostFlags flags;
    flags.read_only = read_only;
    auto memory = std::make_shared<RegisteredMemory>(native->driver, native->ordinal, flags,
                                                     hold(owner));
    {
      ReleaseGil release;
      buffer.block = memory->adopt(ptr, buffer.nbytes);
    }
    buffer.ptr = ptr;
    buffer.allocator = std::move(memory);
  });
}

}  // namespace

nb::object place_of_call() {
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  while (frame) {
    nb::object current = nb::steal(reinterpret_cast<PyObject*>(frame));
    nb::object name = current.attr("f_globals").attr("get")("__name__", "");
    if (!nb::cast<bool>(name.attr("startswith")("ringmem."))) {
      return nb::make_tuple(current.attr("f_code").attr("co_filename"), current.attr("f_lineno"));
    }
    frame = PyFrame_GetBack(frame);
  }
  return {};
}

nb::handle buffer_type(MemoryKind kind) { return types[static_cast<std::size_t>(kind)]; }

StreamRef stream_ref(nb::handle argument, NativeDevice& device) {
  StreamRef stream;
  stream.device = &device;
  stream.handle = stream_of(argument.is_valid() ? argument : nb::handle(Py_None), device,
                            &stream.owner);
  if (stream.owner.is_none()) stream.owner.reset();
  return stream;
}

nb::object device_of(nb::handle argument, nb::handle stream) {
  if (!absent(argument) && is<NativeDevice>(argument)) return nb::borrow(argument);
  if (!device_class) throw InvalidValue(not_registered);
  if (!absent(argument)) return nb::handle(device_class)(argument);
  if (!absent(stream) && is<NativeStream>(stream)) {
    return nb::find(*nb::inst_ptr<NativeStream>(stream)->device);
  }
  PyObject* device = PyObject_CallNoArgs(default_device);
  if (!device) throw nb::python_error();
  return nb::steal(device);
}

std::shared_ptr<Allocator> allocator_for(MemoryKind kind, nb::handle asked, NativeDevice& device) {
  if (absent(asked)) return default_allocator(kind, device);
  const Place place = kind == MemoryKind::device   ? Place::device
                      : kind == MemoryKind::pinned ? Place::pinned
                                                   : Place::managed;
  return allocator_of(asked, device, place);
}

void allocate_into(Buffer& buffer, MemoryKind kind, const Request& request) {
  Spec spec = spec_of(request.shape, request.dtype);
  nb::object device = device_of(request.device, request.stream);
  NativeDevice& native = *nb::inst_ptr<NativeDevice>(device);
  StreamRef stream = stream_ref(request.stream, native);
  std::shared_ptr<Allocator> allocator = allocator_for(kind, request.allocator, native);
  describe_memory(buffer, kind, std::move(spec), device, std::move(stream));
  own_memory(buffer, std::move(allocator));
}

nb::object make_buffer(MemoryKind kind, const Block& block, std::shared_ptr<Allocator> allocator,
                       Spec spec, nb::handle device, StreamRef stream) {
  const StreamHandle order = stream.handle;
  try {
    return make(registered(kind), [&](Buffer& buffer) {
      describe_memory(buffer, kind, std::move(spec), device, std::move(stream));
      buffer.block = block;
      buffer.ptr = block.ptr;
      if (block.ptr) buffer.allocator = allocator;  // the last step: now the block is the buffer's
    });
  } catch (...) {
    if (block.ptr) static_cast<void>(allocator->deallocate(block, order));
    throw;
  }
}

nb::object make_device_buffer(const Block& block, std::shared_ptr<Allocator> allocator, Spec spec,
                              NativeDevice& device, StreamRef stream) {
  return make_buffer(MemoryKind::device, block, std::move(allocator), std::move(spec),
                     nb::find(device), std::move(stream));
}

void bind_buffer_factory(nb::module_& m, nb::class_<Buffer>& cls) {
  known = new Names;
  cls.def("__init__", &init_buffer, nb::arg("kind"), nb::arg("shape").none(), nb::arg("dtype").none(),
          nb::arg("device").none(), nb::arg("stream").none(), nb::arg("allocator").none());
  nb::object function = nb::steal(PyCFunction_NewEx(&empty_method, m.ptr(), nullptr));
  m.attr("empty") = function;
  m.def("set_buffer_types", &set_types, nb::arg("device"), nb::arg("pinned"), nb::arg("managed"),
        nb::arg("device_class"), nb::arg("default_device"),
        "Registers the classes of ringmem.buffers and the way to devices.");
  m.def("borrow_memory", &borrow_memory, nb::arg("kind"), nb::arg("ptr"), nb::arg("shape"),
        nb::arg("dtype"), nb::arg("device"), nb::arg("stream").none(), nb::arg("read_only"),
        nb::arg("owner"), "A buffer around memory that `owner` keeps alive.");
  m.def("pin_memory", &pin_memory, nb::arg("ptr"), nb::arg("shape"), nb::arg("dtype"),
        nb::arg("device"), nb::arg("stream").none(), nb::arg("read_only"), nb::arg("owner"),
        "Page-locks memory that `owner` keeps alive.");
  m.def("track_allocation_places", [](bool on) { return tracking.exchange(on); },
        nb::arg("on"), "Remember where buffers are allocated; returns what was set before.");
}

}  // namespace ringmem::bind
