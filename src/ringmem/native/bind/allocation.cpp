#include "bind/allocation.hpp"

#include <structmember.h>  // Py_T_PYSSIZET is public only from Python 3.12 on

#include <cstddef>
#include <string>

namespace ringmem::bind {
namespace {

struct AllocationObject {
  PyObject_HEAD
  PyObject* owner;
  Allocator* allocator;
  const NativeDevice* device;
  Block block;
  StreamHandle stream;
  PyObject* weak_references;
  std::atomic<bool> live;
};

PyTypeObject* allocation_type = nullptr;

// Dead objects kept for the next allocation. Only under the GIL; without one, nothing is kept.
constexpr int max_spares = 256;
AllocationObject* spares[max_spares];
int spare_count = 0;

AllocationObject* new_object() noexcept {
#ifndef Py_GIL_DISABLED
  if (spare_count > 0) {
    AllocationObject* object = spares[--spare_count];
    PyObject_Init(reinterpret_cast<PyObject*>(object), allocation_type);
    return object;
  }
#endif
  return PyObject_New(AllocationObject, allocation_type);
}

void delete_object(AllocationObject* object) noexcept {
#ifndef Py_GIL_DISABLED
  if (spare_count < max_spares) {
    spares[spare_count++] = object;
    Py_DECREF(allocation_type);
    return;
  }
#endif
  PyObject_Free(object);
  Py_DECREF(allocation_type);
}

AllocationObject* self_of(PyObject* object) noexcept {
  return reinterpret_cast<AllocationObject*>(object);
}

// Whoever turns `live` off gives the block back; everybody else has nothing to do.
Status give_back(AllocationObject* self, StreamHandle stream) noexcept {
  if (!self->live.exchange(false, std::memory_order_acq_rel)) return Status::success;
  return self->allocator->deallocate(self->block, stream);
}

void dealloc(PyObject* object) {
  AllocationObject* self = self_of(object);
  if (self->weak_references != nullptr) PyObject_ClearWeakRefs(object);
  const Status status = give_back(self, self->stream);
  if (!ok(status)) [[unlikely]] {
    const nb::error_scope keep_error;
    if (PyErr_WarnFormat(PyExc_ResourceWarning, 1, "an allocation of %zu bytes could not be freed: %s",
                         self->block.nbytes, status_name(status).c_str()) != 0) {
      PyErr_WriteUnraisable(nullptr);
    }
  }
  PyObject* owner = self->owner;
  delete_object(self);
  Py_DECREF(owner);
}

bool require_live(const AllocationObject* self) {
  if (self->live.load(std::memory_order_acquire)) return true;
  try {
    throw Closed("the allocation is closed");
  } catch (...) {
    set_python_error();
  }
  return false;
}

PyObject* close(PyObject* object, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  AllocationObject* self = self_of(object);
  const Py_ssize_t keywords = kwnames != nullptr ? PyTuple_GET_SIZE(kwnames) : 0;
  const bool named = keywords == 1 && nargs == 0 &&
                     PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(kwnames, 0), "stream") == 0;
  if (nargs + keywords > 1 || (keywords == 1 && !named)) {
    PyErr_SetString(PyExc_TypeError, "close() takes one optional argument, stream");
    return nullptr;
  }
  StreamHandle stream = self->stream;
  try {
    if (nargs + keywords == 1 && args[0] != Py_None) stream = stream_of(args[0], *self->device);
    check(give_back(self, stream), "cuMemFreeAsync");
  } catch (...) {
    set_python_error();
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* record_stream(PyObject* object, PyObject* argument) {
  AllocationObject* self = self_of(object);
  if (!require_live(self)) return nullptr;
  try {
    const StreamHandle stream = stream_of(argument, *self->device);
    check(self->allocator->record_stream(self->block, stream), "cuEventRecord");
  } catch (...) {
    set_python_error();
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* enter(PyObject* object, PyObject*) {
  if (!require_live(self_of(object))) return nullptr;
  return Py_NewRef(object);
}

PyObject* exit(PyObject* object, PyObject*) { return close(object, nullptr, 0, nullptr); }

PyObject* get_ptr(PyObject* object, void*) {
  if (!require_live(self_of(object))) return nullptr;
  return PyLong_FromUnsignedLongLong(self_of(object)->block.ptr);
}

PyObject* get_nbytes(PyObject* object, void*) {
  return PyLong_FromSize_t(self_of(object)->block.nbytes);
}

PyObject* get_stream(PyObject* object, void*) {
  return PyLong_FromUnsignedLongLong(self_of(object)->stream);
}

PyObject* get_closed(PyObject* object, void*) {
  return PyBool_FromLong(!self_of(object)->live.load(std::memory_order_acquire));
}

PyObject* get_owner(PyObject* object, void*) { return Py_NewRef(self_of(object)->owner); }

PyObject* repr(PyObject* object) {
  const AllocationObject* self = self_of(object);
  if (!self->live.load(std::memory_order_acquire)) {
    return PyUnicode_FromFormat("<Allocation of %zu bytes on %s, closed>", self->block.nbytes,
                                self->device->name.c_str());
  }
  return PyUnicode_FromFormat("<Allocation of %zu bytes at %p on %s>", self->block.nbytes,
                              reinterpret_cast<void*>(self->block.ptr), self->device->name.c_str());
}

PyMethodDef methods[] = {
    {"close", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(close)),
     METH_FASTCALL | METH_KEYWORDS,
     "close(stream=None)\n--\n\nGive the memory back in the order of `stream` (default: the stream "
     "it was allocated on).\n\nIdempotent. Raises DriverError where the driver refused."},
    {"record_stream", record_stream, METH_O,
     "record_stream(stream)\n--\n\nSay that work on `stream` uses the memory too: after close it is "
     "reused only once the work submitted there so far is done. Waits on the device, never here."},
    {"__enter__", enter, METH_NOARGS, nullptr},
    {"__exit__", exit, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef properties[] = {
    {"ptr", get_ptr, nullptr, "Address on the device; ClosedError after close().", nullptr},
    {"nbytes", get_nbytes, nullptr, "Bytes requested.", nullptr},
    {"stream", get_stream, nullptr, "Handle of the stream it was allocated on.", nullptr},
    {"closed", get_closed, nullptr, "Whether the memory was given back.", nullptr},
    {"owner", get_owner, nullptr, "The pool or allocator that it came from.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMemberDef members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(AllocationObject, weak_references), READONLY,
     nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char*>("One block of memory from a pool. Given back when closed or dropped.")},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_repr, reinterpret_cast<void*>(repr)},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {Py_tp_members, members},
    {0, nullptr},
};

PyType_Spec spec = {"ringmem.native._native.Allocation", sizeof(AllocationObject), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

struct Arguments {
  std::size_t nbytes = 0;
  PyObject* stream = nullptr;
};

// (nbytes, stream=None); false with a Python error set.
bool parse(PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames, Arguments* parsed) {
  PyObject* nbytes = nargs > 0 ? args[0] : nullptr;
  PyObject* stream = nargs > 1 ? args[1] : nullptr;
  const Py_ssize_t keywords = kwnames != nullptr ? PyTuple_GET_SIZE(kwnames) : 0;
  for (Py_ssize_t i = 0; i < keywords; ++i) {
    PyObject* name = PyTuple_GET_ITEM(kwnames, i);
    PyObject** target = nullptr;
    if (PyUnicode_CompareWithASCIIString(name, "stream") == 0) target = &stream;
    if (PyUnicode_CompareWithASCIIString(name, "nbytes") == 0) target = &nbytes;
    if (target == nullptr || *target != nullptr) {
      PyErr_Format(PyExc_TypeError, "allocate() got an unexpected argument '%U'", name);
      return false;
    }
    *target = args[nargs + i];
  }
  if (nbytes == nullptr || nargs > 2) {
    PyErr_SetString(PyExc_TypeError, "allocate() takes nbytes and an optional stream");
    return false;
  }
  parsed->stream = stream;
  const Py_ssize_t value = PyNumber_AsSsize_t(nbytes, PyExc_OverflowError);
  if (value > 0) [[likely]] {
    parsed->nbytes = static_cast<std::size_t>(value);
    return true;
  }
  if (value == -1 && PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_OverflowError)) return false;
  PyErr_Clear();
  PyObject* text = PyObject_Repr(nbytes);
  const char* utf8 = text != nullptr ? PyUnicode_AsUTF8(text) : nullptr;
  if (utf8 == nullptr) {
    Py_XDECREF(text);
    return false;
  }
  const std::string message = "nbytes=" + std::string(utf8) + ": give 1 or more bytes, below 2**63";
  Py_DECREF(text);
  throw InvalidValue(message);
}

}  // namespace

PyObject* allocate_fast(const AllocationSource& source, PyObject* const* args, Py_ssize_t nargs,
                        PyObject* kwnames) noexcept {
  try {
    Arguments parsed;
    if (!parse(args, nargs, kwnames, &parsed)) return nullptr;
    const StreamHandle stream =
        stream_of(parsed.stream != nullptr ? parsed.stream : Py_None, *source.device);
    Block block;
    if (!source.allocator->try_allocate(parsed.nbytes, stream, &block)) [[unlikely]] {
      nb::gil_scoped_release release;
      block = source.allocator->allocate(parsed.nbytes, stream);
    }
    AllocationObject* object = new_object();
    if (object == nullptr) {
      static_cast<void>(source.allocator->deallocate(block, stream));
      return nullptr;
    }
    object->owner = Py_NewRef(source.owner);
    object->allocator = source.allocator;
    object->device = source.device;
    object->block = block;
    object->stream = stream;
    object->weak_references = nullptr;
    new (&object->live) std::atomic<bool>(true);
    return reinterpret_cast<PyObject*>(object);
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

void add_fast_method(nb::handle type, PyMethodDef* definition) {
  PyObject* method = PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type.ptr()), definition);
  if (method == nullptr) nb::raise_python_error();
  nb::setattr(type, definition->ml_name, nb::steal(method));
}

void bind_allocation(nb::module_& m) {
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) nb::raise_python_error();
  allocation_type = reinterpret_cast<PyTypeObject*>(type);
  m.attr("Allocation") = nb::steal(type);
}

}  // namespace ringmem::bind
