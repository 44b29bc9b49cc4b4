// DLPack capsules, made and taken. The choice of device, stream and copy is made in Python
// (ringmem.buffers); here are only the structures and who owns what.
#include "bind/buffer.hpp"
#include "bind/dlpack.hpp"

#include <memory>
#include <string>
#include <type_traits>
#include <vector>

namespace ringmem::bind {
namespace {

using namespace dlpack;

// What an exported tensor points to; lives until the consumer calls the deleter.
template <class Managed>
struct Export {
  Managed managed{};
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
  PyObject* hold = nullptr;  // one use of the buffer
};

// A consumer may call this from any thread, without the GIL, or after the interpreter is gone.
template <class Managed>
void delete_export(Managed* managed) {
  auto* exported = static_cast<Export<Managed>*>(managed->context);
  if (nb::is_alive()) {
    HoldGil gil;
    Py_DECREF(exported->hold);
  }
  delete exported;
}

template <class Managed>
constexpr const char* capsule_name() {
  return sizeof(Managed) == sizeof(VersionedTensor) ? "dltensor_versioned" : "dltensor";
}

// A capsule that nobody consumed still has its first name.
template <class Managed>
void delete_capsule(PyObject* capsule) {
  const char* name = capsule_name<Managed>();
  if (!PyCapsule_IsValid(capsule, name)) return;
  auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule, name));
  managed->deleter(managed);
}

void fill_shape(const Buffer& buffer, std::vector<std::int64_t>& shape,
                std::vector<std::int64_t>& strides) {
  const int ndim = buffer.shape.ndim();
  shape.assign(buffer.shape.data(), buffer.shape.data() + ndim);
  strides.resize(ndim);
  std::int64_t stride = 1;
  for (int i = ndim; i-- > 0;) {
    strides[i] = stride;
    stride *= shape[i] > 0 ? shape[i] : 1;
  }
}

template <class Managed>
nb::object make_capsule(const Buffer& buffer, nb::object hold, Device device, DataType dtype,
                        std::uint64_t flags) {
  auto exported = std::make_unique<Export<Managed>>();
  fill_shape(buffer, exported->shape, exported->strides);
  Managed& managed = exported->managed;
  managed.tensor = {reinterpret_cast<void*>(buffer.ptr), device, buffer.shape.ndim(), dtype,
                    exported->shape.data(), exported->strides.data(), 0};
  managed.context = exported.get();
  managed.deleter = delete_export<Managed>;
  if constexpr (std::is_same_v<Managed, VersionedTensor>) {
    managed.version = {1, 0};
    managed.flags = flags;
  }
  PyObject* capsule =
      PyCapsule_New(&managed, capsule_name<Managed>(), delete_capsule<Managed>);
  if (!capsule) throw nb::python_error();
  exported.release()->hold = hold.release().ptr();
  return nb::steal(capsule);
}

nb::object to_capsule(nb::handle_t<Buffer> self, nb::object hold, int device_type, int device_id,
                      int code, int bits, bool versioned, bool copied) {
  const Buffer& buffer = *nb::inst_ptr<Buffer>(self);
  const Device device{device_type, device_id};
  const DataType dtype{static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(bits), 1};
  const std::uint64_t flags = (buffer.read_only ? flag_read_only : 0) | (copied ? flag_copied : 0);
  if (versioned) {
    return make_capsule<VersionedTensor>(buffer, std::move(hold), device, dtype, flags);
  }
  return make_capsule<LegacyTensor>(buffer, std::move(hold), device, dtype, flags);
}

// --- taking ------------------------------------------------------------------------------------

// A tensor that is ours now (its capsule was renamed): calls the producer's deleter when the last buffer on it goes.
class Imported {
 public:
  explicit Imported(LegacyTensor* managed) : legacy_(managed), tensor_(managed->tensor) {}
  explicit Imported(VersionedTensor* managed)
      : versioned_(managed), tensor_(managed->tensor), flags_(managed->flags) {}
  Imported(const Imported&) = delete;
  Imported& operator=(const Imported&) = delete;
  ~Imported() {
    if (legacy_ && legacy_->deleter) legacy_->deleter(legacy_);
    if (versioned_ && versioned_->deleter) versioned_->deleter(versioned_);
  }

  const Tensor& tensor() const { return tensor_; }
  std::uint64_t flags() const { return flags_; }

 private:
  LegacyTensor* legacy_ = nullptr;
  VersionedTensor* versioned_ = nullptr;
  Tensor tensor_;
  std::uint64_t flags_ = 0;
};

template <class Managed>
nb::object adopt(nb::handle capsule, const char* used_name) {
  auto* managed =
      static_cast<Managed*>(PyCapsule_GetPointer(capsule.ptr(), capsule_name<Managed>()));
  if (!managed) throw nb::python_error();
  if constexpr (std::is_same_v<Managed, VersionedTensor>) {
    // The rule of the protocol: of another major version only the deleter may be used.
    if (managed->version.major != 1) {
      raise_error("NotSupportedError", "the tensor is of DLPack " +
                                           std::to_string(managed->version.major) +
                                           ": ringmem reads version 1");
    }
  }
  if (PyCapsule_SetName(capsule.ptr(), used_name) != 0) throw nb::python_error();
  return nb::cast(new Imported(managed), nb::rv_policy::take_ownership);
}

nb::object take_capsule(nb::handle capsule) {
  const nb::ft_object_guard alone(capsule);  // one thread takes it, others find it used
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
    return adopt<VersionedTensor>(capsule, "used_dltensor_versioned");
  }
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
    return adopt<LegacyTensor>(capsule, "used_dltensor");
  }
  throw InvalidValue("__dlpack__() gave " + std::string(nb::repr(capsule).c_str()) +
                     ": a fresh capsule named \"dltensor\" or \"dltensor_versioned\" was due");
}

nb::tuple extents(const std::int64_t* values, int count) {
  nb::list list;
  for (int i = 0; i < count; ++i) list.append(values[i]);
  return nb::tuple(list);
}

}  // namespace

void bind_buffer_dlpack(nb::module_& m) {
  nb::class_<Imported>(m, "ImportedTensor", "A tensor taken from a DLPack capsule, and its owner.")
      .def_prop_ro("ptr", [](const Imported& self) {
        return reinterpret_cast<std::uint64_t>(self.tensor().data) + self.tensor().byte_offset;
      })
      .def_prop_ro("device", [](const Imported& self) {
        return nb::make_tuple(self.tensor().device.type, self.tensor().device.id);
      })
      .def_prop_ro("dtype", [](const Imported& self) {
        const DataType& dtype = self.tensor().dtype;
        return nb::make_tuple(dtype.code, dtype.bits, dtype.lanes);
      })
      .def_prop_ro("shape", [](const Imported& self) {
        return extents(self.tensor().shape, self.tensor().ndim);
      })
      .def_prop_ro("strides", [](const Imported& self) -> nb::object {
        if (!self.tensor().strides) return nb::none();
        return extents(self.tensor().strides, self.tensor().ndim);
      }, "tuple of int or None: in elements.")
      .def_prop_ro("readonly",
                   [](const Imported& self) { return (self.flags() & flag_read_only) != 0; });
  m.def("dlpack_capsule", &to_capsule, nb::arg("buffer"), nb::arg("hold"), nb::arg("device_type"),
        nb::arg("device_id"), nb::arg("code"), nb::arg("bits"), nb::arg("versioned"),
        nb::arg("copied"));
  m.def("take_dlpack_capsule", &take_capsule, nb::arg("capsule").none());
}

}  // namespace ringmem::bind
