// One record into and out of Python in tens of nanoseconds: the bytes behind a structured scalar, a
// one-element array or a bytes object, and a NumPy scalar made from bytes. Like numpy_array.hpp it
// relies on NumPy's ABI (PyVoidScalarObject of arrayscalars.h; entry 60 of the API table is
// PyArray_Scalar since 1.0) after trying both once on live objects.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "bind/numpy_array.hpp"

namespace ringmem::bind {

struct NumpyVoidScalarFields {
  PyObject_VAR_HEAD
  char* data;
  PyObject* descr;
};

// numpy.void, or null if its scalars do not look as expected.
inline PyTypeObject* numpy_void_type() {
  static constinit Lazily<PyTypeObject*> type;
  return type.get([] {
    nb::object numpy = nb::module_::import_("numpy");
    nb::list fields;
    fields.append(nb::make_tuple("value", "u8"));
    nb::object dtype = numpy.attr("dtype")(fields);
    nb::object array = numpy.attr("zeros")(1, dtype);
    nb::object scalar = nb::steal(PySequence_GetItem(array.ptr(), 0));
    const auto* view = reinterpret_cast<const NumpyArrayFields*>(array.ptr());
    const auto* record = reinterpret_cast<const NumpyVoidScalarFields*>(scalar.ptr());
    if (!scalar.is_valid() || record->data != view->data || record->descr != view->descr) {
      PyErr_Clear();
      return static_cast<PyTypeObject*>(nullptr);
    }
    return reinterpret_cast<PyTypeObject*>(nb::object(numpy.attr("void")).release().ptr());
  });
}

using NumpyMakeScalar = PyObject* (*)(void* data, PyObject* descr, PyObject* base);

// PyArray_Scalar, or null if it is not where it should be.
inline NumpyMakeScalar numpy_make_scalar() {
  static constinit Lazily<NumpyMakeScalar> make;
  return make.get([] {
    nb::object numpy = nb::module_::import_("numpy");
    nb::object core = nb::getattr(numpy, "_core", nb::none());
    nb::object module = nb::module_::import_(core.is_none() ? "numpy.core._multiarray_umath"
                                                            : "numpy._core._multiarray_umath");
    auto* const* table = static_cast<void* const*>(
        PyCapsule_GetPointer(module.attr("_ARRAY_API").ptr(), nullptr));
    if (table == nullptr) {
      PyErr_Clear();
      return static_cast<NumpyMakeScalar>(nullptr);
    }
    auto* const found = reinterpret_cast<NumpyMakeScalar>(table[60]);
    std::uint64_t value = 0x0123456789abcdef;
    nb::object dtype = numpy.attr("dtype")("u8");
    nb::object scalar = nb::steal(found(&value, dtype.ptr(), nullptr));
    const bool good = scalar.is_valid() && nb::cast<std::uint64_t>(scalar.attr("item")()) == value;
    return good ? found : nullptr;
  });
}

// Records of one dtype.
class RecordFormat {
 public:
  explicit RecordFormat(nb::object dtype)
      : dtype_(std::move(dtype)), nbytes_(nb::cast<std::size_t>(dtype_.attr("itemsize"))) {
    numpy_array_type();  // asked here once, so that no call pays for it
    numpy_void_type();
    numpy_make_scalar();
  }
  RecordFormat(const RecordFormat&) = delete;
  RecordFormat& operator=(const RecordFormat&) = delete;
  ~RecordFormat() { Py_XDECREF(equal_.load(std::memory_order_relaxed)); }

  nb::handle dtype() const { return dtype_; }
  std::size_t nbytes() const { return nbytes_; }

  // The bytes of `object` if they can be had at once, else null. They are `object`'s.
  const std::byte* bytes_of(PyObject* object) {
    if (PyTypeObject* type = numpy_void_type(); type != nullptr && PyObject_TypeCheck(object, type)) {
      const auto* record = reinterpret_cast<const NumpyVoidScalarFields*>(object);
      return is_mine(record->descr) ? reinterpret_cast<std::byte*>(record->data) : nullptr;
    }
    if (PyTypeObject* type = numpy_array_type(); type != nullptr && PyObject_TypeCheck(object, type)) {
      const auto* array = reinterpret_cast<const NumpyArrayFields*>(object);
      const bool one = is_mine(array->descr) && numpy_size(*array) == 1;
      return one ? reinterpret_cast<std::byte*>(array->data) : nullptr;
    }
    if (PyBytes_Check(object) && static_cast<std::size_t>(PyBytes_GET_SIZE(object)) == nbytes_) {
      return reinterpret_cast<const std::byte*>(PyBytes_AS_STRING(object));
    }
    return nullptr;
  }

  // A new scalar with a copy of the bytes; null with a Python error set.
  PyObject* make(const void* data) const {
    if (NumpyMakeScalar make = numpy_make_scalar(); make != nullptr) [[likely]] {
      return make(const_cast<void*>(data), dtype_.ptr(), nullptr);
    }
    nb::object bytes = nb::bytes(static_cast<const char*>(data), nbytes_);
    nb::object array = nb::module_::import_("numpy").attr("frombuffer")(bytes, dtype_);
    return PySequence_GetItem(array.ptr(), 0);
  }

 private:
  // Two dtypes may be equal without being one object: the last such one is remembered.
  bool is_mine(PyObject* descr) {
    if (descr == dtype_.ptr() || descr == equal_.load(std::memory_order_relaxed)) return true;
    const int same = PyObject_RichCompareBool(descr, dtype_.ptr(), Py_EQ);
    if (same < 0) PyErr_Clear();
    if (same <= 0 || nb::cast<std::size_t>(nb::handle(descr).attr("itemsize")) != nbytes_) return false;
    Py_XDECREF(equal_.exchange(Py_NewRef(descr), std::memory_order_acq_rel));
    return true;
  }

  nb::object dtype_;
  std::atomic<PyObject*> equal_{nullptr};  // owned; callers of one ring look before their turn
  std::size_t nbytes_;
};

}  // namespace ringmem::bind
