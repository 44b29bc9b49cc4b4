// Shapes and dtypes from Python arguments, with a small cache for dtypes: np.dtype("f4") costs
// 150 ns, a hit 5.
#include "bind/buffer.hpp"
#include "bind/lazily.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>

namespace ringmem::bind {

// --- shapes ------------------------------------------------------------------------------------

Shape& Shape::operator=(const Shape& other) {
  if (this == &other) return *this;
  resize(other.ndim_);
  std::copy_n(other.data(), ndim_, data());
  return *this;
}

void Shape::resize(int ndim) {
  more_.reset(ndim > static_cast<int>(inline_.size()) ? new std::int64_t[ndim] : nullptr);
  ndim_ = ndim;
}

bool operator==(const Shape& a, const Shape& b) noexcept {
  return a.ndim_ == b.ndim_ && std::equal(a.data(), a.data() + a.ndim_, b.data());
}

std::string Shape::text() const {
  std::string text = "(";
  for (int i = 0; i < ndim_; ++i) text += (i ? ", " : "") + std::to_string(data()[i]);
  return text + (ndim_ == 1 ? ",)" : ")");
}

nb::tuple Shape::tuple() const {
  PyObject* tuple = PyTuple_New(ndim_);
  if (!tuple) throw nb::python_error();
  for (int i = 0; i < ndim_; ++i) {
    PyTuple_SET_ITEM(tuple, i, PyLong_FromLongLong(data()[i]));
  }
  return nb::steal<nb::tuple>(tuple);
}

namespace {

std::string text_of(nb::handle object) {
  nb::object text = nb::steal(PyObject_Repr(object.ptr()));
  if (!text) {
    PyErr_Clear();
    return "<unprintable>";
  }
  return nb::str(text).c_str();
}

std::int64_t extent_of(nb::handle item, int axis) {
  nb::object index;
  if (!PyLong_Check(item.ptr())) [[unlikely]] {
    index = nb::steal(PyNumber_Index(item.ptr()));
    if (!index) {
      PyErr_Clear();
      throw InvalidValue("shape is " + text_of(item) + ": give an integer or a tuple of integers");
    }
    item = index;
  }
  int overflow = 0;
  const long long extent = PyLong_AsLongLongAndOverflow(item.ptr(), &overflow);
  if (overflow > 0) {
    throw InvalidValue("shape[" + std::to_string(axis) + "] is " + text_of(item) +
                       ": too large for any memory");
  }
  if (overflow < 0 || extent < 0) [[unlikely]] {
    throw InvalidValue("shape[" + std::to_string(axis) + "] is " + text_of(item) +
                       ": give sizes of 0 or more");
  }
  return extent;
}

Shape shape_of_sequence(nb::handle argument) {
  nb::object items = nb::steal(PySequence_Fast(argument.ptr(), ""));
  if (!items) {
    PyErr_Clear();
    throw InvalidValue("shape is " + text_of(argument) + ": give an integer or a tuple of integers");
  }
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(items.ptr());
  if (count > Shape::max_ndim) {
    throw InvalidValue("shape has " + std::to_string(count) + " dimensions: give at most " +
                       std::to_string(Shape::max_ndim));
  }
  Shape shape;
  shape.resize(static_cast<int>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    shape[static_cast<int>(i)] =
        extent_of(PySequence_Fast_GET_ITEM(items.ptr(), i), static_cast<int>(i));
  }
  return shape;
}

}  // namespace

Shape shape_of(nb::handle argument) {
  PyObject* object = argument.ptr();
  if (PyLong_Check(object)) return Shape(extent_of(argument, 0));
  if (PyTuple_Check(object) || PyList_Check(object)) return shape_of_sequence(argument);
  if (PyIndex_Check(object) && !PySequence_Check(object)) return Shape(extent_of(argument, 0));
  // An array of extents has __index__ too; so ask for a sequence first.
  if (PySequence_Check(object) && !PyUnicode_Check(object) && !PyBytes_Check(object)) {
    return shape_of_sequence(argument);
  }
  return Shape(extent_of(argument, 0));
}

// --- dtypes ------------------------------------------------------------------------------------

namespace {

// Keys are strong references, so an address names one object for good. Only immutable kinds of
// key get in: dtype objects, strings and classes.
struct CacheEntry {
  PyObject* key = nullptr;
  PyObject* dtype = nullptr;
  std::size_t itemsize = 0;
};
constexpr std::size_t cache_size = 64;
CacheEntry cache[cache_size];
nb::ft_mutex cache_mutex;

CacheEntry& slot_of(PyObject* key) {
  // Objects are 16-byte aligned; the multiplication spreads the rest over the high bits.
  const std::uint64_t hash = (reinterpret_cast<std::uint64_t>(key) >> 4) * 0x9E3779B97F4A7C15ull;
  return cache[hash >> 58];
}

PyObject* numpy_dtype_class() {
  static constinit Lazily<PyObject*> cls;
  return cls.get([] {
    return nb::object(nb::module_::import_("numpy").attr("dtype")).release().ptr();
  });
}

nb::object make_dtype(nb::handle argument) {
  if (argument.is_none()) throw InvalidValue("dtype is None: give a NumPy dtype");  // not float64
  PyObject* made = PyObject_CallOneArg(numpy_dtype_class(), argument.ptr());
  if (made) return nb::steal(made);
  nb::python_error error;
  const char* remedy = "; give a NumPy dtype or the name of one";
  if (PyUnicode_Check(argument.ptr())) {
    // bfloat16, float8_e4m3fn, int4 and the like, where ml_dtypes is installed.
    nb::object extra = nb::steal(PyImport_ImportModule("ml_dtypes"));
    nb::object cls = extra ? nb::steal(PyObject_GetAttr(extra.ptr(), argument.ptr())) : nb::object();
    made = cls ? PyObject_CallOneArg(numpy_dtype_class(), cls.ptr()) : nullptr;
    if (made) return nb::steal(made);
    PyErr_Clear();
    if (!extra) {
      remedy = "; give the name of a NumPy dtype; for bfloat16, float8_e4m3fn and the like, "
               "pip install ml_dtypes";
    }
  }
  throw InvalidValue("dtype is " + text_of(argument) + ": " + error.what() + remedy);
}

Dtype checked_dtype(nb::handle argument) {
  Dtype dtype{make_dtype(argument), 0};
  if (nb::cast<bool>(dtype.object.attr("hasobject"))) {
    throw InvalidValue("dtype is " + text_of(dtype.object) +
                       ": it holds Python objects, which no device can; give a plain type");
  }
  if (!dtype.object.attr("subdtype").is_none()) {
    throw InvalidValue("dtype is " + text_of(dtype.object) +
                       ": give its base as the dtype and append its shape to the shape");
  }
  dtype.itemsize = nb::cast<std::size_t>(dtype.object.attr("itemsize"));
  if (dtype.itemsize == 0) {
    throw InvalidValue("dtype is " + text_of(dtype.object) +
                       ": its elements have no bytes; give the size, as in \"S8\"");
  }
  return dtype;
}

bool may_be_key(PyObject* object) {
  return PyUnicode_CheckExact(object) || PyType_Check(object) ||
         PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(numpy_dtype_class()));
}

}  // namespace

Dtype dtype_of(nb::handle argument) {
  {
    nb::ft_lock_guard lock(cache_mutex);
    const CacheEntry& entry = slot_of(argument.ptr());
    if (entry.key == argument.ptr()) [[likely]] {
      return {nb::borrow(entry.dtype), entry.itemsize};
    }
  }
  Dtype dtype = checked_dtype(argument);
  if (!may_be_key(argument.ptr())) return dtype;
  CacheEntry fresh{argument.ptr(), dtype.object.ptr(), dtype.itemsize};
  Py_INCREF(fresh.key);
  Py_INCREF(fresh.dtype);
  {
    nb::ft_lock_guard lock(cache_mutex);
    std::swap(slot_of(argument.ptr()), fresh);
  }
  Py_XDECREF(fresh.key);
  Py_XDECREF(fresh.dtype);
  return dtype;
}

// --- specs -------------------------------------------------------------------------------------

Spec spec_of(Shape shape, Dtype dtype) {
  // Signed limits: NumPy's sizes and strides are signed.
  constexpr auto limit = static_cast<std::size_t>(std::numeric_limits<std::int64_t>::max());
  Spec spec{std::move(shape), std::move(dtype), 1, 0};
  bool empty = false;
  bool overflow = false;
  for (int i = 0; i < spec.shape.ndim(); ++i) {
    const auto extent = static_cast<std::size_t>(spec.shape[i]);
    if (extent == 0) empty = true;
    else overflow |= __builtin_mul_overflow(spec.size, extent, &spec.size);
  }
  overflow |= __builtin_mul_overflow(spec.size, spec.dtype.itemsize, &spec.nbytes);
  if (overflow || spec.nbytes > limit) [[unlikely]] {
    throw InvalidValue("shape is " + spec.shape.text() + " with elements of " +
                       std::to_string(spec.dtype.itemsize) +
                       " bytes: the size in bytes overflows 63 bits; give a smaller shape");
  }
  if (empty) spec.size = spec.nbytes = 0;
  return spec;
}

Spec spec_of(nb::handle shape, nb::handle dtype) {
  if (dtype.is_valid() && !dtype.is_none()) return spec_of(shape_of(shape), dtype_of(dtype));
  static constinit Lazily<PyObject*> known;
  PyObject* const raw = known.get([] { return dtype_of(nb::str("u1")).object.release().ptr(); });
  if (PyLong_CheckExact(shape.ptr())) [[likely]] {
    const std::int64_t nbytes = extent_of(shape, 0);
    const auto count = static_cast<std::size_t>(nbytes);
    if (count) return {Shape(nbytes), {nb::borrow(raw), 1}, count, count};
  }
  Spec spec = spec_of(shape_of(shape), {nb::borrow(raw), 1});
  if (spec.nbytes == 0) {
    throw InvalidValue("shape is " + spec.shape.text() +
                       ": raw memory of 0 bytes is nothing; give at least 1, or a dtype for a "
                       "typed buffer of size 0");
  }
  return spec;
}

}  // namespace ringmem::bind
