// `Allocation`: one block of an allocator as a Python object. Written against Python's C API, not
// as a bound class, because a pair of allocate and drop is the hottest thing in the library
// (20 ns in this form, 70-90 ns as a bound class; measured on one core of an EPYC, 2026-11-21).
#pragma once

#include "bind/objects.hpp"

namespace ringmem::bind {

// What an owner of allocations tells this file about itself. `owner` (the Python object) keeps the
// allocator and the device alive; both pointers live as long as it does.
struct AllocationSource {
  PyObject* owner;
  Allocator* allocator;
  const NativeDevice* device;
  // Memory of the host: without a stream, neither given nor current, it is in no stream's order
  // (`no_stream`), where memory of the device is in the default stream's.
  bool of_host = false;
  // Where the owner can align: `alignment=` is an argument then.
  Block (*allocate_aligned)(Allocator&, std::size_t nbytes, StreamHandle, std::size_t alignment) =
      nullptr;
};

// `owner.allocate(nbytes, stream=None, alignment=None)` in the vectorcall convention; returns a new Allocation or
// nullptr with a Python error set.
PyObject* allocate_fast(const AllocationSource& source, PyObject* const* args, Py_ssize_t nargs,
                        PyObject* kwnames) noexcept;

// Adds a method in the vectorcall convention to a class made by nanobind.
void add_fast_method(nb::handle type, PyMethodDef* definition);

}  // namespace ringmem::bind
