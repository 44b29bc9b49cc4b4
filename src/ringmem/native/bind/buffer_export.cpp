// Memory of a buffer that others look at while it lives: host views for NumPy and the buffer
// protocol, and holds for everybody else. Each counts as a use, so the buffer cannot be closed
// under it.
#include "bind/buffer.hpp"
#include "bind/lazily.hpp"

#include <atomic>
#include <bit>
#include <string>
#include <utility>

namespace ringmem::bind {
namespace {

// One use of a buffer as a Python object; with host-readable memory also a buffer of bytes.
struct Hold {
  explicit Hold(nb::handle_t<Buffer> target, bool readable, bool only_read)
      : object(nb::borrow(target)), host_readable(readable), read_only(only_read) {
    buffer().add_use();
  }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;
  ~Hold() { release(); }

  // Idempotent. A host view is never released before it dies: an array may still look at it.
  void release() noexcept {
    if (!released_.exchange(true)) buffer().drop_use();
  }

  Buffer& buffer() const { return *nb::inst_ptr<Buffer>(object); }

  nb::object object;
  bool host_readable;
  bool read_only;

 private:
  std::atomic<bool> released_{false};
};

int get_bytes(PyObject* self, Py_buffer* view, int flags) {
  const Hold& hold = *nb::inst_ptr<Hold>(self);
  if (!hold.host_readable) {
    PyErr_SetString(PyExc_BufferError, "the host cannot read this memory");
    return -1;
  }
  static char nothing = 0;  // an address for a buffer of size 0
  const Buffer& buffer = hold.buffer();
  void* data = buffer.nbytes ? reinterpret_cast<void*>(buffer.ptr) : &nothing;
  return PyBuffer_FillInfo(view, self, data, static_cast<Py_ssize_t>(buffer.nbytes), hold.read_only,
                           flags);
}

PyType_Slot hold_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_bytes)}, {0, nullptr}};

bool host_can_read(const Buffer& buffer) {
  return buffer.kind != MemoryKind::device || buffer.device->host_accessible;
}

void require_host_readable(const Buffer& buffer) {
  if (host_can_read(buffer)) return;
  raise_error("NotSupportedError", "the host cannot read " + describe(buffer) +
                                       ": to_numpy() copies it, copy_to(array) copies into yours");
}

// An ndarray over the memory, without waiting for anything.
nb::object host_array(nb::handle_t<Buffer> self, bool read_only) {
  Buffer& buffer = *nb::inst_ptr<Buffer>(self);
  const Use use(buffer);  // until the hold below has its own
  require_host_readable(buffer);
  buffer.check_usable();
  if (buffer.read_only && !read_only) {
    throw InvalidValue("readonly is False, but " + describe(buffer) +
                       " is read-only: give readonly=True");
  }
  nb::object hold = nb::cast(new Hold(self, true, read_only), nb::rv_policy::take_ownership);
  static constinit Lazily<PyObject*> known;
  PyObject* const ndarray = known.get([] {
    return nb::object(nb::module_::import_("numpy").attr("ndarray")).release().ptr();
  });
  nb::dict named;
  named["buffer"] = hold;
  return nb::handle(ndarray)(buffer.shape.tuple(), buffer.dtype, **named);
}

// Whether NumPy reads the dtype back from the format that it writes for it: it writes none for
// dates and the types of ml_dtypes, makes padding of V5, and forgets padding at the end.
bool has_format(const Buffer& buffer, nb::handle array) {
  constexpr int unicode = 19, half = 23;  // NPY_TYPES: up to unicode only object has no format
  const int number = nb::cast<int>(buffer.dtype.attr("num"));
  if (number <= unicode || number == half) [[likely]] return true;
  nb::object seen = nb::steal(PyMemoryView_FromObject(array.ptr()));
  if (seen) {
    nb::object asarray = nb::module_::import_("numpy").attr("asarray");
    seen = nb::steal(PyObject_CallOneArg(asarray.ptr(), seen.ptr()));
  }
  if (seen) return seen.attr("dtype").equal(buffer.dtype);
  PyErr_Clear();
  return false;
}

[[noreturn]] void refuse_format(const Buffer& buffer) {
  const char kind = nb::str(buffer.dtype.attr("kind")).c_str()[0];
  const std::size_t nbytes =
      buffer.itemsize <= 8 && std::has_single_bit(buffer.itemsize) ? buffer.itemsize : 1;
  throw InvalidValue("the buffer protocol has no format for " +
                     std::string(nb::str(buffer.dtype).c_str()) + ": use view(\"" +
                     (kind == 'M' || kind == 'm' ? "i" : "u") + std::to_string(nbytes) + "\")");
}

// memoryview(buffer) and whatever else asks for bytes: the request is passed on to an ndarray,
// which knows the format of every dtype that has one.
int get_typed_buffer(PyObject* self, Py_buffer* view, int flags) {
  try {
    nb::handle_t<Buffer> handle(self);
    Buffer& buffer = *nb::inst_ptr<Buffer>(self);
    buffer.check_open();
    require_host_readable(buffer);
    nb::object array = host_array(handle, buffer.read_only);
    if ((flags & PyBUF_FORMAT) && !has_format(buffer, array)) refuse_format(buffer);
    handle.attr("_wait_for_host")();
    view->obj = nullptr;
    return PyObject_GetBuffer(array.ptr(), view, flags);
  } catch (...) {
    set_python_error();
  }
  // The protocol wants a BufferError; ours stays as its cause.
  view->obj = nullptr;
  return -1;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  const Buffer& buffer = *nb::inst_ptr<Buffer>(self);
  Py_VISIT(buffer.dtype.ptr());
  Py_VISIT(buffer.device_object.ptr());
  Py_VISIT(buffer.stream.owner.ptr());
  Py_VISIT(buffer.owner.ptr());
  Py_VISIT(buffer.root_object.ptr());
  return 0;
}

}  // namespace

// Nothing is cleared by the collector: the finalizer still needs all of it. Cycles through a
// buffer always pass an object with a dictionary, which can be cleared.
PyType_Slot buffer_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_typed_buffer)},
                              {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                              {0, nullptr}};

void bind_buffer_export(nb::module_& m) {
  nb::class_<Hold>(m, "Hold", nb::type_slots(hold_slots),
                   "Keeps a buffer from being closed for as long as it lives.")
      .def_prop_ro("buffer", [](const Hold& self) { return self.object; })
      .def("__enter__", [](nb::handle_t<Hold> self) { return nb::borrow(self); },
           nb::sig("def __enter__(self) -> Hold"))
      .def("__exit__", [](Hold& self, nb::handle, nb::handle, nb::handle) {
        if (!self.host_readable) self.release();
      }, nb::arg("type").none(), nb::arg("value").none(), nb::arg("traceback").none());
  m.def("buffer_host_array", &host_array, nb::arg("buffer"), nb::arg("read_only"),
        "An ndarray over the memory; waits for nothing.");
  m.def("buffer_hold", [](nb::handle_t<Buffer> self) {
    return nb::cast(new Hold(self, false, true), nb::rv_policy::take_ownership);
  }, nb::arg("buffer"), nb::sig("def buffer_hold(buffer: BufferBase) -> Hold"),
        "One use of the buffer, for as long as the answer lives.");
  m.def("buffer_host_readable", &host_can_read, nb::arg("buffer"));
}

}  // namespace ringmem::bind
