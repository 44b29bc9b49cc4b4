// Native exceptions become the Python classes of ringmem.native.errors.
#include "bind/objects.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <utility>

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

// What a pool knows about the shortage that this thread may be about to raise.
struct Explanation {
  std::size_t requested = 0;
  PyObject* cause = nullptr;    // owned; null: none
  PyObject* holders = nullptr;  // owned; null: nothing to say
};
thread_local Explanation explanation;

void forget_explanation() noexcept {
  Py_CLEAR(explanation.cause);
  Py_CLEAR(explanation.holders);
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
  const bool explained = shortage && explanation.holders &&
                         shortage->requested == std::optional(explanation.requested);
  if (explained) kwargs["holders"] = nb::handle(explanation.holders);
  nb::object instance = cls(nb::str(error.what()), **kwargs);
  if (explained && explanation.cause) {
    PyException_SetCause(instance.ptr(), std::exchange(explanation.cause, nullptr));
  }
  forget_explanation();
  PyErr_SetObject(cls.ptr(), instance.ptr());
}

void translate(const std::exception_ptr& pointer, void*) {
  if (!pointer) park_for_good();  // pthread_exit(): the interpreter ends
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

void explain_out_of_memory(std::size_t requested, nb::object cause, nb::object holders) {
  forget_explanation();
  explanation.requested = requested;
  if (!cause.is_none()) explanation.cause = cause.release().ptr();
  explanation.holders = holders.release().ptr();
}

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
