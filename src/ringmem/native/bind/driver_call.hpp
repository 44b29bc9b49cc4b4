// How the raw bindings call the driver: without the GIL, and with a failure that says which call
// it was and with which arguments.
#pragma once

#include <nanobind/nanobind.h>

#include <concepts>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "bind/gil.hpp"
#include "driver/driver.hpp"
#include "driver/operations.hpp"

namespace ringmem::bind {

namespace nb = nanobind;

// One argument for the error message. Sizes and ordinals print in decimal, addresses and handles
// in hexadecimal.
struct Argument {
  std::string text;

  template <std::integral T>
  Argument(const char* name, T value) : text(std::string(name) + "=" + std::to_string(value)) {}
  template <class T>
    requires std::is_enum_v<T>
  Argument(const char* name, T value) : Argument(name, static_cast<int>(value)) {}
  Argument(const char* name, Location location);
  static Argument hex(const char* name, std::uint64_t value);
};

// "device=0, nbytes=…", and why there is no driver where that is what failed.
std::string describe(const Driver& driver, Status status, const std::vector<Argument>& arguments);

// Calls without the GIL; the status is the caller's to judge.
template <class Call>
Status status_of(Call&& call) {
  ReleaseGil release;
  return call();
}

// Calls without the GIL; throws DriverError. `arguments` is only called on failure.
template <class Call, class Arguments>
void invoke(const Driver& driver, const char* name, Call&& call, Arguments&& arguments) {
  const Status status = status_of(call);
  if (!ok(status)) [[unlikely]] {
    throw DriverError(status, name, describe(driver, status, arguments()));
  }
}

// The body of most bindings: RINGMEM_CALL(mem_alloc, (device, nbytes, &ptr), {"device", device}).
#define RINGMEM_CALL(operation, call_arguments, ...)                                  \
  invoke(                                                                             \
      driver, cuda_name(Operation::operation),                                        \
      [&] { return driver.operation call_arguments; },                                \
      [&] { return std::vector<Argument>{__VA_ARGS__}; })

// Access grants as Python gives them: a list of (location, access).
using Grants = std::vector<std::pair<Location, Access>>;

inline std::vector<AccessGrant> plain(const Grants& grants) {
  std::vector<AccessGrant> result;
  for (const auto& [location, access] : grants) result.push_back({location, access});
  return result;
}

// The rooms of the binding, in the order in which module.cpp's bind_driver calls them.
void bind_driver_types(nb::module_& m);
void bind_driver_memory(nb::class_<Driver>& cls);
void bind_driver_virtual(nb::class_<Driver>& cls);
void bind_driver_streams(nb::class_<Driver>& cls);
void bind_host_function(nb::class_<Driver>& cls);
void bind_driver_kinds(nb::module_& m);

}  // namespace ringmem::bind
