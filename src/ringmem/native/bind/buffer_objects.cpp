// The Python objects of DeviceBuffer. Dead ones are kept for the next buffer: the collector's
// allocation, nanobind's table of instances and `subtype_dealloc` cost more than everything else
// that a buffer does around the driver's two calls.
#include "bind/buffer.hpp"

#include <new>

namespace ringmem::bind {
namespace {

PyTypeObject* recycled = nullptr;  // the class whose objects are kept; no subclass of it
destructor bound_dealloc = nullptr;  // nanobind's

// Only under the GIL; without one, nothing is kept. A spare is an instance that nanobind knows, and
// has neither a reference, a C++ object nor the collector's attention.
constexpr int max_spares = 64;
PyObject* spares[max_spares];
int spare_count = 0;
bool keep_spares = false;

PyObject* take_spare() noexcept {
  PyObject* object = PyObject_Init(spares[--spare_count], recycled);
  new (nb::inst_ptr<Buffer>(object)) Buffer;
  PyObject_GC_Track(object);
  return object;
}

void clear_weak_references(PyObject* object) {
  const char* base = reinterpret_cast<const char*>(object);
  const auto* list = reinterpret_cast<PyObject* const*>(base + recycled->tp_weaklistoffset);
  if (*list) PyObject_ClearWeakRefs(object);
}

// What only borrows or views may end a chain of any length, which must not become one of calls.
void dealloc_chained(PyObject* object);

void dealloc(PyObject* object) {
  PyObject_GC_UnTrack(object);
  if (Py_TYPE(object) != recycled || !nb::inst_ready(object)) [[unlikely]] {
    return bound_dealloc(object);
  }
  Buffer* buffer = nb::inst_ptr<Buffer>(object);
  if (buffer->owner || buffer->root_object || !keep_spares) return dealloc_chained(object);
  clear_weak_references(object);
  buffer->~Buffer();
  if (spare_count == max_spares || !keep_spares) [[unlikely]] {  // the destructor may run Python
    nb::inst_set_state(object, false, false);
    return bound_dealloc(object);
  }
  spares[spare_count++] = object;
  Py_DECREF(recycled);
}

void dealloc_chained(PyObject* object) {
  Py_TRASHCAN_BEGIN(object, dealloc)
  bound_dealloc(object);
  Py_TRASHCAN_END
}

}  // namespace

nb::object new_buffer_object(nb::handle type) {
  if (type.ptr() == reinterpret_cast<PyObject*>(recycled) && spare_count > 0) [[likely]] {
    return nb::steal(take_spare());
  }
  nb::object object = nb::inst_alloc(type);
  new (nb::inst_ptr<Buffer>(object)) Buffer;
  nb::inst_mark_ready(object);
  return object;
}

void drop_spare_objects() {
  keep_spares = false;
  while (spare_count > 0) {
    PyObject* object = PyObject_Init(spares[--spare_count], recycled);
    nb::inst_set_state(object, false, false);
    Py_DECREF(object);
  }
}

void recycle_objects(nb::handle type) {
#ifndef Py_GIL_DISABLED
  recycled = reinterpret_cast<PyTypeObject*>(type.ptr());
  bound_dealloc = reinterpret_cast<PyTypeObject*>(nb::type<Buffer>().ptr())->tp_dealloc;
  // As a class statement leaves it, this is subtype_dealloc, which for a class without slots of
  // its own does nothing that is not done here. A user's subclass gets here through its own.
  recycled->tp_dealloc = dealloc;
  keep_spares = true;
#else
  static_cast<void>(type);
#endif
}

}  // namespace ringmem::bind
