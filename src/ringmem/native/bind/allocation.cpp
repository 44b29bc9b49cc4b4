#include "bind/allocation.hpp"

#include <structmember.h>  // Py_T_PYSSIZET is public only from Python 3.12 on

#include <cstddef>
#include <memory>
#include <string>

#include "bind/last_work.hpp"

namespace ringmem::bind {
namespace {

struct AllocationObject {
  PyObject_HEAD
  PyObject* owner;
  Allocator* allocator;
  const NativeDevice* device;
  Block block;
  StreamHandle stream;
  PyObject* stream_owner;  // keeps `stream` valid; null for a default stream
  PyObject* weak_references;
  std::atomic<bool> live;
};

PyTypeObject* allocation_type = nullptr;

// Dead objects kept for the next allocation. Only under the GIL; without one, nothing is kept, and
// whoever closes or records a stream holds the object (a critical section, which costs nothing with
// a GIL): a stream must not be recorded for a block that another thread gives back meanwhile.
#ifndef Py_GIL_DISABLED
constexpr int max_spares = 256;
AllocationObject* spares[max_spares];
int spare_count = 0;
#endif

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

bool stream_closed(const AllocationObject* self) noexcept {
  if (self->stream_owner == nullptr) [[likely]] return false;
  return nb::inst_ptr<NativeStream>(self->stream_owner)->closed.load(std::memory_order_acquire);
}

// A reference that goes where Python runs.
std::shared_ptr<PyObject> held(PyObject* object) {
  return std::shared_ptr<PyObject>(Py_XNewRef(object), [](PyObject* last) {
    if (!last || !nb::is_alive()) return;
    const HoldGil gil;
    Py_DECREF(last);
  });
}

NativeStream* stream_of(const AllocationObject* self) {
  return self->stream_owner ? nb::inst_ptr<NativeStream>(self->stream_owner) : nullptr;
}

// Dropped while a capture forbids to free it: the reaper repeats it.
Status free_later(const AllocationObject* self) noexcept {
  try {
    ReaperJob job;
    job.driver = self->device->driver;
    job.what = "freeing " + std::to_string(self->block.nbytes) + " bytes";
    job.run = [owner = held(self->owner), stream_owner = held(self->stream_owner),
               block = self->block, allocator = self->allocator,
               last = LastUse{self->device, self->stream, stream_of(self)}] {
      return deallocate_later(*allocator, block, last);
    };
    Reaper::instance().post(std::move(job));
    return Status::success;
  } catch (...) {  // no memory or no thread for the job
    return Status::operating_system;
  }
}

// Its stream was closed before it; `also`: another that uses it, or null.
Status free_after_everything(const AllocationObject* self, const StreamHandle* also) noexcept {
  try {
    ReaperJob job;
    job.driver = self->device->driver;
    job.what = "freeing " + std::to_string(self->block.nbytes) + " bytes of a closed stream";
    job.run = [owner = held(self->owner), stream_owner = held(self->stream_owner),
               block = self->block, allocator = self->allocator] {
      return allocator->deallocate(block, allocator->idle_stream());
    };
    std::vector<LastUse> uses{{self->device, self->stream, stream_of(self)}};
    if (also && *also != self->stream) uses.push_back({self->device, *also, nullptr});
    release_after(uses, std::move(job));
    return Status::success;
  } catch (const DriverError& error) {
    return error.status;
  } catch (...) {  // no memory or no thread for the job
    return Status::operating_system;
  }
}

// Whoever turns `live` off gives the block back; everybody else has nothing to do. After a failure
// the block is as it was, unless it was freed by its address before. `stream`: null for its own.
Status give_back(AllocationObject* self, const StreamHandle* stream) noexcept {
  if (!self->live.exchange(false, std::memory_order_acq_rel)) return Status::success;
  Status status;
  if (stream_closed(self)) [[unlikely]] {
    status = free_after_everything(self, stream);
  } else if (self->allocator->free_may_block(self->block)) [[unlikely]] {
    const ReleaseGil release;
    status = self->allocator->deallocate(self->block, stream ? *stream : self->stream);
  } else {
    status = self->allocator->deallocate(self->block, stream ? *stream : self->stream);
  }
  if (!ok(status) && status != Status::illegal_state) [[unlikely]] self->live.store(true, std::memory_order_release);
  return status;
}

void dealloc(PyObject* object) {
  AllocationObject* self = self_of(object);
  if (self->weak_references != nullptr) PyObject_ClearWeakRefs(object);
  Status status = give_back(self, nullptr);
  if (forbidden_by_capture(status)) [[unlikely]] status = free_later(self);
  if (!ok(status) && status != Status::deinitialized) [[unlikely]] {
    const nb::error_scope keep_error;
    const std::string text = "an allocation of " + std::to_string(self->block.nbytes) +
                             " bytes could not be freed: " + status_name(status);
    warn_or_park(PyExc_ResourceWarning, text.c_str());
  }
  if (!ok(status)) [[unlikely]] self->allocator->forget(self->block);
  PyObject* owner = self->owner;
  PyObject* stream_owner = self->stream_owner;
  delete_object(self);
  Py_XDECREF(stream_owner);
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
  const bool given = nargs + keywords == 1 && args[0] != Py_None;
  try {
    if (!self->live.load(std::memory_order_acquire)) Py_RETURN_NONE;
    StreamHandle stream = self->stream;
    if (given) stream = stream_of(args[0], *self->device);  // may run Python
    const nb::ft_object_guard alone(object);
    if (given && self->live.load(std::memory_order_acquire)) {
      // The stream it was allocated on may have used it, too.
      if (stream != self->stream && self->stream != no_stream && !stream_closed(self)) {
        check(self->allocator->record_stream(self->block, self->stream), "cuEventRecord");
      }
    }
    const Status status = give_back(self, given ? &stream : nullptr);
    if (status == Status::illegal_state) [[unlikely]] {
      raise_error("DoubleFreeError", "the allocation of " + std::to_string(self->block.nbytes) +
                                         " bytes was freed already, by its address");
    }
    check(status, "cuMemFreeAsync");
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
    const nb::ft_object_guard alone(object);
    if (!require_live(self)) return nullptr;  // naming the stream may have run Python
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
  const StreamHandle stream = self_of(object)->stream;
  if (stream == no_stream) Py_RETURN_NONE;
  return PyLong_FromUnsignedLongLong(stream);
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
    {"stream", get_stream, nullptr, "Handle of the stream it was allocated on; None for host memory in no stream's order.", nullptr},
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
  std::size_t alignment = 0;  // 0: that of any block
};

[[noreturn]] void refuse(const char* name, PyObject* value, const char* remedy) {
  throw InvalidValue(std::string(name) + "=" + nb::repr(value).c_str() + ": " + remedy);
}

// Whether the error that is set is about the type of an argument; then it gets our words.
bool is_of_type(const char* name, PyObject* value) {
  if (!PyErr_ExceptionMatches(PyExc_TypeError)) return false;
  PyErr_Format(PyExc_TypeError, "%s=%R: give an integer", name, value);
  return true;
}

// (nbytes, stream=None, alignment=None); false with a Python error set.
bool parse(PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames, bool aligned,
           Arguments* parsed) {
  PyObject* nbytes = nargs > 0 ? args[0] : nullptr;
  PyObject* stream = nargs > 1 ? args[1] : nullptr;
  PyObject* alignment = nargs > 2 && aligned ? args[2] : nullptr;
  const Py_ssize_t keywords = kwnames != nullptr ? PyTuple_GET_SIZE(kwnames) : 0;
  for (Py_ssize_t i = 0; i < keywords; ++i) {
    PyObject* name = PyTuple_GET_ITEM(kwnames, i);
    PyObject** target = nullptr;
    if (PyUnicode_CompareWithASCIIString(name, "stream") == 0) target = &stream;
    if (PyUnicode_CompareWithASCIIString(name, "nbytes") == 0) target = &nbytes;
    if (aligned && PyUnicode_CompareWithASCIIString(name, "alignment") == 0) target = &alignment;
    if (target == nullptr || *target != nullptr) {
      PyErr_Format(PyExc_TypeError, "allocate() got an unexpected argument '%U'", name);
      return false;
    }
    *target = args[nargs + i];
  }
  if (nbytes == nullptr || nargs > (aligned ? 3 : 2)) {
    PyErr_SetString(PyExc_TypeError, aligned ? "allocate() takes nbytes, stream and alignment"
                                             : "allocate() takes nbytes and an optional stream");
    return false;
  }
  parsed->stream = stream;
  if (alignment != nullptr && alignment != Py_None) [[unlikely]] {
    const Py_ssize_t wanted = PyNumber_AsSsize_t(alignment, PyExc_OverflowError);
    if (wanted == -1 && PyErr_Occurred() && is_of_type("alignment", alignment)) return false;
    PyErr_Clear();
    if (wanted <= 0) refuse("alignment", alignment, "give a power of two up to 2**30");
    parsed->alignment = static_cast<std::size_t>(wanted);
  }
  const Py_ssize_t value = PyNumber_AsSsize_t(nbytes, PyExc_OverflowError);
  if (value > 0) [[likely]] {
    parsed->nbytes = static_cast<std::size_t>(value);
    return true;
  }
  if (value == -1 && PyErr_Occurred() && is_of_type("nbytes", nbytes)) return false;
  PyErr_Clear();
  refuse("nbytes", nbytes, "give 1 or more bytes, below 2**63");
}

// The Python object that keeps the stream valid: a stream of ours, else nothing.
PyObject* owner_of_stream(nb::object&& owner) noexcept {
  if (owner.is_none()) return nullptr;
  return owner.release().ptr();
}

}  // namespace

PyObject* allocate_fast(const AllocationSource& source, PyObject* const* args, Py_ssize_t nargs,
                        PyObject* kwnames) noexcept {
  try {
    Arguments parsed;
    if (!parse(args, nargs, kwnames, source.allocate_aligned != nullptr, &parsed)) return nullptr;
    nb::object stream_owner = nb::none();
    StreamHandle stream = stream_of(parsed.stream != nullptr ? parsed.stream : Py_None,
                                    *source.device, &stream_owner);
    if (source.of_host && stream_owner.is_none() && (!parsed.stream || parsed.stream == Py_None)) {
      stream = no_stream;
    }
    Block block;
    if (parsed.alignment != 0) [[unlikely]] {
      ReleaseGil release;
      block = source.allocate_aligned(*source.allocator, parsed.nbytes, stream, parsed.alignment);
    } else if (!source.allocator->try_allocate(parsed.nbytes, stream, &block)) [[unlikely]] {
      ReleaseGil release;
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
    object->stream_owner = owner_of_stream(std::move(stream_owner));
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
