// Views of a buffer: slices along the first axis, other dtypes, other shapes. A view is a buffer
// that counts as a use of the buffer that owns the memory and keeps it alive.
#include "bind/buffer.hpp"

#include <string>
#include <utility>

namespace ringmem::bind {
namespace {

// Views hang on the owner of the memory, not on each other: one in the middle may be closed.
nb::object make_view(nb::handle_t<Buffer> self, std::size_t offset, Spec spec) {
  Buffer& parent = *nb::inst_ptr<Buffer>(self);
  Use use(parent);  // a parent that is closed meanwhile would lose its root
  nb::object root_object = parent.root ? parent.root_object : nb::borrow(self);
  Buffer& root = parent.memory();
  nb::object object = nb::inst_alloc(buffer_type(parent.kind));
  Buffer* view = new (nb::inst_ptr<Buffer>(object)) Buffer;
  nb::inst_mark_ready(object);
  root.add_use();
  view->root = &root;
  view->root_object = std::move(root_object);
  view->kind = parent.kind;
  view->read_only = parent.read_only;
  view->ptr = parent.ptr + offset;
  view->nbytes = spec.nbytes;
  view->size = spec.size;
  view->itemsize = spec.dtype.itemsize;
  view->shape = std::move(spec.shape);
  view->dtype = std::move(spec.dtype.object);
  view->device_object = parent.device_object;
  view->device = parent.device;
  view->stream = parent.stream;
  return object;
}

// Bytes from one element of the first axis to the next.
std::size_t row_nbytes(const Buffer& buffer) {
  std::size_t nbytes = buffer.itemsize;
  for (int i = 1; i < buffer.shape.ndim(); ++i) nbytes *= static_cast<std::size_t>(buffer.shape[i]);
  return nbytes;
}

void require_axis(const Buffer& buffer) {
  if (buffer.shape.ndim() > 0) return;
  throw InvalidValue("index on " + describe(buffer) + ": it has no axis; give ... or nothing");
}

[[noreturn]] void refuse_index(nb::handle index) {
  throw InvalidValue("index is " + std::string(nb::repr(index).c_str()) +
                     ": give an integer or a slice of the first axis; views are contiguous");
}

// What an index that is no integer after all raised; what its own code raised goes through.
[[noreturn]] void refuse_raised(nb::handle index) {
  nb::python_error error;
  if (!error.matches(PyExc_TypeError) && !error.matches(PyExc_ValueError)) throw error;
  refuse_index(index);
}

nb::object element(nb::handle_t<Buffer> self, nb::handle index) {
  const Buffer& buffer = *nb::inst_ptr<Buffer>(self);
  require_axis(buffer);
  const std::int64_t extent = buffer.shape[0];
  const Py_ssize_t given = PyNumber_AsSsize_t(index.ptr(), nullptr);  // clips what does not fit
  if (given == -1 && PyErr_Occurred()) refuse_raised(index);
  const std::int64_t at = given < 0 ? given + extent : given;
  if (at < 0 || at >= extent) {
    throw InvalidValue("index is " + std::string(nb::str(index).c_str()) + " on an axis of " +
                       std::to_string(extent) + ": " +
                       (extent ? "give " + std::to_string(-extent) + " to " +
                                     std::to_string(extent - 1)
                               : "it has no elements; give a slice"));
  }
  Shape shape;
  shape.resize(buffer.shape.ndim() - 1);
  for (int i = 0; i < shape.ndim(); ++i) shape[i] = buffer.shape[i + 1];
  return make_view(self, static_cast<std::size_t>(at) * row_nbytes(buffer),
                   spec_of(std::move(shape), {buffer.dtype, buffer.itemsize}));
}

nb::object slice(nb::handle_t<Buffer> self, nb::handle index) {
  const Buffer& buffer = *nb::inst_ptr<Buffer>(self);
  require_axis(buffer);
  Py_ssize_t start = 0, stop = 0, step = 0;
  if (PySlice_Unpack(index.ptr(), &start, &stop, &step) < 0) refuse_raised(index);
  const Py_ssize_t count = PySlice_AdjustIndices(buffer.shape[0], &start, &stop, step);
  if (step != 1 && count > 1) {
    throw InvalidValue("slice step is " + std::to_string(step) +
                       ": views are contiguous; slice with step 1, or to_numpy() first");
  }
  Shape shape = buffer.shape;
  shape[0] = count;
  const std::size_t offset = count ? static_cast<std::size_t>(start) * row_nbytes(buffer) : 0;
  return make_view(self, offset, spec_of(std::move(shape), {buffer.dtype, buffer.itemsize}));
}

nb::object whole(nb::handle_t<Buffer> self) {
  const Buffer& buffer = *nb::inst_ptr<Buffer>(self);
  return make_view(self, 0, spec_of(buffer.shape, {buffer.dtype, buffer.itemsize}));
}

nb::object get_item(nb::handle_t<Buffer> self, nb::handle index) {
  nb::inst_ptr<Buffer>(self)->check_open();
  PyObject* object = index.ptr();
  if (PySlice_Check(object)) return slice(self, index);
  if (object == Py_Ellipsis) return whole(self);
  if (PyTuple_Check(object)) {
    if (PyTuple_GET_SIZE(object) == 0) return whole(self);
    if (PyTuple_GET_SIZE(object) == 1) return get_item(self, PyTuple_GET_ITEM(object, 0));
  } else if (PyIndex_Check(object) && !PyBool_Check(object)) {
    return element(self, index);
  }
  refuse_index(index);
}

nb::object view_as(nb::handle_t<Buffer> self, nb::handle dtype) {
  const Buffer& buffer = *nb::inst_ptr<Buffer>(self);
  buffer.check_open();
  Dtype wanted = dtype_of(dtype);
  Shape shape = buffer.shape;
  if (wanted.itemsize != buffer.itemsize) {
    const int last = shape.ndim() - 1;
    if (last < 0) {
      throw InvalidValue("dtype has " + std::to_string(wanted.itemsize) + " bytes, the element " +
                         std::to_string(buffer.itemsize) + ": reshape(1) first");
    }
    const std::size_t row = static_cast<std::size_t>(shape[last]) * buffer.itemsize;
    if (row % wanted.itemsize != 0) {
      throw InvalidValue("dtype is " + std::string(nb::str(wanted.object).c_str()) + ": its " +
                         std::to_string(wanted.itemsize) + " bytes do not divide the " +
                         std::to_string(row) + " bytes of the last axis; slice or reshape first");
    }
    shape[last] = static_cast<std::int64_t>(row / wanted.itemsize);
  }
  return make_view(self, 0, spec_of(std::move(shape), std::move(wanted)));
}

// The extent of -1 becomes what is left of the buffer's elements.
void resolve_free_axis(const Buffer& buffer, Shape& shape, int free_axis, nb::list extents) {
  std::size_t known = 1;
  bool overflow = false;
  for (int i = 0; i < shape.ndim(); ++i) {
    if (i == free_axis) continue;
    // An extent of 0 beside -1 leaves nothing to divide by; then only an empty buffer fits.
    if (shape[i] == 0) {
      throw InvalidValue("shape has -1 beside 0: the size of that axis is not defined");
    }
    overflow |= __builtin_mul_overflow(known, static_cast<std::size_t>(shape[i]), &known);
  }
  if (overflow || buffer.size % known != 0) {
    extents[free_axis] = -1;
    throw InvalidValue("shape is " + std::string(nb::repr(nb::tuple(extents)).c_str()) + ": the " +
                       std::to_string(buffer.size) + " elements of the buffer are no multiple of " +
                       (overflow ? "its other extents" : std::to_string(known)));
  }
  shape[free_axis] = static_cast<std::int64_t>(buffer.size / known);
}

// One extent may be -1: whatever is left.
Shape resolve_shape(const Buffer& buffer, nb::handle argument) {
  nb::list extents;
  if (PyTuple_Check(argument.ptr()) || PyList_Check(argument.ptr())) {
    for (nb::handle item : argument) extents.append(item);
  } else {
    extents.append(argument);
  }
  int free_axis = -1;
  for (std::size_t i = 0; i < extents.size(); ++i) {
    std::int64_t extent = 0;
    if (!nb::try_cast(extents[i], extent) || extent != -1) continue;
    if (free_axis >= 0) throw InvalidValue("shape has two extents of -1: give at most one");
    free_axis = static_cast<int>(i);
    extents[i] = 0;
  }
  Shape shape = shape_of(extents);
  if (free_axis >= 0) resolve_free_axis(buffer, shape, free_axis, extents);
  return shape;
}

nb::object reshape(nb::handle_t<Buffer> self, nb::args args) {
  const Buffer& buffer = *nb::inst_ptr<Buffer>(self);
  buffer.check_open();
  const nb::handle argument = args.size() == 1 ? nb::handle(args[0]) : nb::handle(args);
  Spec spec = spec_of(resolve_shape(buffer, argument), {buffer.dtype, buffer.itemsize});
  if (spec.size != buffer.size) {
    throw InvalidValue("shape is " + spec.shape.text() + " of " + std::to_string(spec.size) +
                       " elements: the buffer has " + std::to_string(buffer.size));
  }
  return make_view(self, 0, std::move(spec));
}

}  // namespace

void bind_buffer_view(nb::class_<Buffer>& cls) {
  cls.def("__getitem__", &get_item, nb::arg("index").none(),
          nb::sig("def __getitem__(self, index: typing.Any) -> typing.Any"))
      .def("__len__", [](const Buffer& self) {
        if (self.shape.ndim() == 0) throw InvalidValue(describe(self) + " has no axis, so no len");
        return self.shape[0];
      })
      .def("view", &view_as, nb::arg("dtype").none(),
           nb::sig("def view(self, dtype: typing.Any) -> typing.Any"),
           "The same bytes as another dtype; the last axis changes where the itemsize does.")
      .def("reshape", &reshape, nb::arg("shape"),
           nb::sig("def reshape(self, *shape: int | tuple[int, ...]) -> typing.Any"),
           "The same elements in another shape; one extent may be -1.");
}

}  // namespace ringmem::bind
