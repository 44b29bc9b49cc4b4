// Address, dtype and size of a NumPy array in a few nanoseconds. The buffer protocol takes 300 ns
// for a structured dtype, because it writes out a format string, and refuses datetime64. So this
// reads the fields of PyArrayObject, whose order is NumPy's ABI (ndarraytypes.h,
// PyArrayObject_fields), after checking once on a live array that they are where they should be.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "bind/lazily.hpp"

namespace ringmem::bind {

namespace nb = nanobind;

struct NumpyArrayFields {
  PyObject_HEAD
  char* data;
  int nd;
  Py_ssize_t* dimensions;
  Py_ssize_t* strides;
  PyObject* base;
  PyObject* descr;
  int flags;
};

inline constexpr int numpy_c_contiguous = 0x0001;
inline constexpr int numpy_writeable = 0x0400;

// numpy.ndarray, or null if NumPy's arrays do not look as expected.
inline PyTypeObject* numpy_array_type() {
  static constinit Lazily<PyTypeObject*> type;
  return type.get([] {
    nb::object numpy = nb::module_::import_("numpy");
    nb::object array = numpy.attr("zeros")(nb::make_tuple(3, 5), "u2");
    nb::object dtype = array.attr("dtype");
    const auto* fields = reinterpret_cast<const NumpyArrayFields*>(array.ptr());
    const auto data = nb::cast<std::uintptr_t>(array.attr("ctypes").attr("data"));
    const bool as_expected = reinterpret_cast<std::uintptr_t>(fields->data) == data &&
                             fields->nd == 2 && fields->dimensions[1] == 5 &&
                             fields->strides[0] == 10 && fields->descr == dtype.ptr() &&
                             (fields->flags & numpy_c_contiguous) != 0 &&
                             (fields->flags & numpy_writeable) != 0;
    if (!as_expected) return static_cast<PyTypeObject*>(nullptr);
    return reinterpret_cast<PyTypeObject*>(nb::object(numpy.attr("ndarray")).release().ptr());
  });
}

// The fields of `object` if it is an ndarray of exactly this dtype object, else null.
inline const NumpyArrayFields* numpy_array_of(nb::handle object, nb::handle dtype) {
  PyTypeObject* const type = numpy_array_type();
  if (type == nullptr || !PyObject_TypeCheck(object.ptr(), type)) return nullptr;
  const auto* fields = reinterpret_cast<const NumpyArrayFields*>(object.ptr());
  return fields->descr == dtype.ptr() ? fields : nullptr;
}

inline std::uint64_t numpy_size(const NumpyArrayFields& array) {
  std::uint64_t size = 1;
  for (int i = 0; i < array.nd; ++i) size *= static_cast<std::uint64_t>(array.dimensions[i]);
  return size;
}

}  // namespace ringmem::bind
