// Native exceptions become the Python classes of ringmem.native.errors.
#include "bind/objects.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

namespace ringmem::bind {
namespace {

const char* class_of(Status status) {
  switch (status) {
    case Status::out_of_memory:
      return "OutOfMemoryError";
    case Status::not_initialized:
    case Status::no_device:
    case Status::stub_library:
    case Status::system_not_ready:
      return "NotInitializedError";
    case Status::invalid_device:
      return "InvalidDeviceError";
    case Status::not_supported:
    case Status::shared_object_symbol_not_found:
    case Status::call_requires_newer_driver:
    case Status::peer_access_unsupported:
      return "NotSupportedError";
    default:
      return "DriverError";
  }
}

nb::object error_class(const char* name) {
  return nb::module_::import_("ringmem.native.errors").attr(name);
}

void raise(const char* name, const char* text) {
  PyErr_SetString(error_class(name).ptr(), text);
}

// `shortage`: only where memory ran out.
void raise_driver_error(const DriverError& error, const Shortage* shortage = nullptr) {
  nb::object cls = error_class(class_of(error.status));
  nb::dict kwargs;
  kwargs["operation"] = error.operation;
  kwargs["code"] = static_cast<int>(error.status);
  kwargs["name"] = status_name(error.status);
  if (shortage) {
    kwargs["requested"] = shortage->requested;
    kwargs["free"] = shortage->free;
    kwargs["largest_free_block"] = shortage->largest_free_block;
    kwargs["reserved"] = shortage->reserved;
  }
  nb::object instance = cls(nb::str(error.what()), **kwargs);
  PyErr_SetObject(cls.ptr(), instance.ptr());
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const OutOfMemory& error) {
    raise_driver_error(error, &error.shortage);
  } catch (const DriverError& error) {
    raise_driver_error(error);
  } catch (const InvalidValue& error) {
    raise("InvalidValueError", error.what());
  } catch (const Closed& error) {
    raise("ClosedError", error.what());
  }
}

}  // namespace

void set_python_error() noexcept {
  try {
    translate(std::current_exception(), nullptr);
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

void bind_errors(nb::module_&) { nb::register_exception_translator(translate); }

}  // namespace ringmem::bind
