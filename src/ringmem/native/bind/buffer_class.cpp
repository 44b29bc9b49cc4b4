// BufferBase as Python sees it: lifetime, properties, and the functions by which ringmem.buffers
// asks for what users need not see.
#include "bind/buffer.hpp"

#include "bind/allocation.hpp"
#include "bind/last_work.hpp"
#include "bind/wait.hpp"

namespace ringmem::bind {
namespace {

void close_buffer(Buffer& self, nb::handle stream) {
  if (stream.is_none()) [[likely]] return self.close(nullptr);
  if (self.closed()) return;
  const StreamRef free_on = stream_ref(stream, *self.device);
  self.close(&free_on);
}

// In the vectorcall convention, which costs a third of a bound method's.
PyObject* close(PyObject* object, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  const Py_ssize_t named = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
  if (nargs + named > 1 ||
      (named && PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(kwnames, 0), "stream") != 0)) {
    PyErr_SetString(PyExc_TypeError, "close() takes one optional argument, stream");
    return nullptr;
  }
  if (!nb::inst_ready(object)) [[unlikely]] {
    PyErr_SetString(PyExc_TypeError, "close() of a buffer whose __init__ was never called");
    return nullptr;
  }
  try {
    close_buffer(*nb::inst_ptr<Buffer>(object), nargs + named ? args[0] : Py_None);
  } catch (...) {
    set_python_error();
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyMethodDef close_method = {
    "close", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&close)),
    METH_FASTCALL | METH_KEYWORDS,
    "close($self, stream=None)\n--\n\n"
    "Give the memory back in the order of `stream` (default: the buffer's own). Idempotent."};

// With an exception on its way, a second one would hide it: what cannot be closed then is left to
// the finalizer.
void exit_buffer(Buffer& self, nb::handle type, nb::handle, nb::handle) {
  if (type.is_none()) return self.close(nullptr);
  try {
    self.close(nullptr);
  } catch (const nb::python_error&) {
  } catch (const DriverError&) {
  }
}

DevicePtr open_ptr(const Buffer& self) {
  self.check_open();
  return self.ptr;
}

nb::tuple stream_pair(const StreamRef& stream) {
  return nb::make_tuple(stream.handle, stream.owner.is_valid() ? stream.owner : nb::none());
}

nb::list uses_of(const Buffer& self) {
  nb::list streams;
  for (const StreamRef& stream : self.streams_in_use()) {
    if (!stream.closed()) streams.append(nb::make_tuple(stream.device->ordinal, stream.handle));
  }
  return streams;
}

// Their handles say nothing any more.
nb::list closed_streams_of(const Buffer& self) {
  nb::list streams;
  for (const StreamRef& stream : self.streams_in_use()) {
    if (stream.closed()) streams.append(stream.owner);
  }
  return streams;
}

void order_after(NativeStream& stream, NativeDevice& device, StreamHandle later) {
  Status status;
  {
    ReleaseGil release;
    status = stream.used->order_before(device.ordinal, later);
  }
  check(status, "cuStreamWaitEvent", "for a closed stream of " + stream.device->name);
}

void synchronize_closed(NativeStream& stream, nb::handle timeout) {
  const std::optional<double> timeout_s = seconds_of(timeout);
  Status status;
  if (timeout_s && stream.used->left_event()) {
    status = poll([&] { return stream.used->query(); }, *timeout_s);
    if (status == Status::not_ready) raise_timeout("a closed stream still has pending work", *timeout_s);
  } else {
    ReleaseGil release;
    status = stream.used->wait();
  }
  check(status, "cuEventSynchronize", "of a closed stream of " + stream.device->name);
}

// A consumer's stream waits, on the device, for all work on the buffer so far.
void let_wait(Buffer& self, NativeDevice& device, StreamHandle handle) {
  Use use(self);
  StreamRef consumer;
  consumer.handle = handle;
  consumer.device = &device;
  for (const StreamRef& stream : self.streams_in_use()) {
    if (stream.same_as(consumer)) continue;
    Status status;
    {
      ReleaseGil release;
      status = wait_on_device(consumer, stream);
    }
    check(status, "cuStreamWaitEvent");
  }
}

// The other way round: later work on the buffer's own stream comes after that on `stream` so far.
void follow(Buffer& self, nb::handle_t<NativeStream> stream) {
  const NativeStream& native = *nb::inst_ptr<NativeStream>(stream);
  StreamRef earlier;
  earlier.handle = native.handle;
  earlier.device = native.device.get();
  const auto [memory, keep] = self.look();
  const StreamRef& own = memory->stream;
  if (own.closed() || own.same_as(earlier)) return;
  check(wait_on_device(own, earlier), "cuStreamWaitEvent");
}

void note_stream(Buffer& self, nb::handle_t<NativeStream> stream) {
  const Use use(self);
  NativeStream& native = *nb::inst_ptr<NativeStream>(stream);
  StreamRef used;
  used.handle = native.handle;
  used.owner = nb::borrow(stream);
  used.device = native.device.get();
  if (!used.closed()) self.follow_closed(used);
  self.note_use(used);
}

void synchronize_uses(Buffer& self) {
  Use use(self);
  const std::vector<StreamRef> streams = self.streams_in_use();
  for (const StreamRef& stream : streams) {
    Status status;
    {
      ReleaseGil release;
      status = stream.closed() ? stream.object()->used->wait()
                               : stream.device->driver->stream_synchronize(stream.device->ordinal,
                                                                           stream.handle);
    }
    if (!ok(status)) check(status, "cuStreamSynchronize", "for the host to read " + describe(self));
  }
}

void bind_lifetime(nb::class_<Buffer>& cls) {
  add_fast_method(cls, &close_method);
  cls.def("__enter__", [](nb::handle_t<Buffer> self) {
        nb::inst_ptr<Buffer>(self)->check_open();
        return nb::borrow(self);
      })
      .def("__exit__", &exit_buffer, nb::arg("type").none(), nb::arg("value").none(),
           nb::arg("traceback").none())
      .def("record_stream", [](Buffer& self, nb::handle stream) {
        const Use use(self);
        self.note_use(stream_ref(stream, *self.device));
      }, nb::arg("stream").none(),
           "Work on `stream` uses the memory too: freeing it waits for that work, on the device.")
      .def_prop_ro("closed", &Buffer::closed, "bool: `close()` was called.");
}

}  // namespace

void bind_buffer_class(nb::module_& m, nb::class_<Buffer>& cls) {
  bind_lifetime(cls);
  cls.def_prop_ro("ptr", &open_ptr, "int: the address. ClosedError after `close()`.")
      .def_ro("nbytes", &Buffer::nbytes, "int: size in bytes.")
      .def_ro("size", &Buffer::size, "int: number of elements.")
      .def_ro("itemsize", &Buffer::itemsize, "int: bytes of one element.")
      .def_prop_ro("shape", [](const Buffer& self) { return self.shape.tuple(); },
                   "tuple of int: extents.")
      .def_prop_ro("ndim", [](const Buffer& self) { return self.shape.ndim(); },
                   "int: number of dimensions.")
      .def_ro("dtype", &Buffer::dtype, "numpy.dtype: type of the elements.")
      .def_ro("device", &Buffer::device_object, "Device: whose memory it is, or who may reach it.")
      .def_ro("readonly", &Buffer::read_only, "bool: the memory must not be written.")
      .def_prop_ro("is_view", [](const Buffer& self) { return self.look().first != &self; },
                   "bool: the memory belongs to another buffer.");
  m.def("buffer_kind", [](const Buffer& self) { return static_cast<int>(self.kind); },
        nb::arg("buffer"), "0 device, 1 pinned, 2 managed, 3 pageable memory of somebody else.");
  m.def("buffer_owner", &Buffer::owner_or_none, nb::arg("buffer"), "What keeps a view or borrowed memory.");
  m.def("buffer_uses", &Buffer::uses, nb::arg("buffer"), "Live views and exports; -1 when closed.");
  m.def("buffer_place", [](const Buffer& self) { return self.place ? self.place : nb::none(); },
        nb::arg("buffer"), "(file, line) of the allocation when tracking is on, else None.");
  m.def("buffer_stream", [](const Buffer& self) {
    const auto [memory, keep] = self.look();
    return stream_pair(memory->stream);
  },
        nb::arg("buffer"), "(handle, Stream or None): where allocation and free are ordered.");
  m.def("buffer_order", [](Buffer& self, nb::handle stream) {
    return stream_pair(order_of(stream, self));
  }, nb::arg("buffer"), nb::arg("stream").none(), "(handle, Stream or None) for work on the buffer.");
  m.def("buffer_streams_in_use", &uses_of, nb::arg("buffer"),
        "(device ordinal, handle) of open streams whose work may touch the memory.");
  m.def("buffer_closed_streams", &closed_streams_of, nb::arg("buffer"),
        nb::sig("def buffer_closed_streams(buffer: BufferBase) -> list[StreamBase]"),
        "Closed streams whose work may touch the memory still.");
  m.def("order_after_closed", &order_after, nb::arg("stream"), nb::arg("device"), nb::arg("handle"),
        "Lets work on a stream come after what a closed stream was given.");
  m.def("closed_and_done", [](NativeStream& stream) { return stream.closed && stream.used->done(); },
        nb::arg("stream"),
        "Whether all that a closed stream was given is known to be done.");
  m.def("synchronize_closed", &synchronize_closed, nb::arg("stream"),
        nb::arg("timeout_s").none() = nb::none(),
        nb::sig("def synchronize_closed(stream: StreamBase, timeout_s: float | None = None) -> None"),
        "Blocks until what a closed stream was given is done.");
  m.def("buffer_root", [](const Buffer& self) {
    const auto [memory, keep] = self.look();
    return nb::make_tuple(memory->ptr, memory->nbytes);
  }, nb::arg("buffer"), "(ptr, nbytes) of the memory that a view is a part of.");
  m.def("buffer_note_use", &note_stream, nb::arg("buffer"), nb::arg("stream"),
        "Work on a stream of any device, to be submitted next, uses the memory: it comes after what "
        "closed streams left, and freeing waits for it.");
  m.def("buffer_synchronize", &synchronize_uses, nb::arg("buffer"),
        "Blocks until all work on the buffer is done.");
  m.def("buffer_let_wait", &let_wait, nb::arg("buffer"), nb::arg("device"), nb::arg("handle"),
        "The stream waits, on the device, for all work on the buffer so far.");
  m.def("buffer_follow", &follow, nb::arg("buffer"), nb::arg("stream"),
        "The buffer's own stream waits, on the device, for the work on `stream` so far.");
  m.def("buffer_set_host_only", [](Buffer& self, bool on) {
    const auto [memory, keep] = self.look();
    return memory->host_only.exchange(on);
  }, nb::arg("buffer"), nb::arg("on"),
        "Device work on the buffer is refused while on. Returns what was set before.");
  m.def("buffer_attached", [](Buffer& self) {
    const auto [memory, keep] = self.look();
    return memory->attached.load();
  }, nb::arg("buffer"), "Who may use managed memory.");
  m.def("buffer_set_attached", [](Buffer& self, ManagedAttach mode) {
    const auto [memory, keep] = self.look();
    memory->attached.store(mode);
  }, nb::arg("buffer"), nb::arg("mode"));
  m.def("buffer_check_device_may_use", [](Buffer& self) {
    const Use use(self);
    self.check_device_may_use();
  }, nb::arg("buffer"));
}

}  // namespace ringmem::bind
