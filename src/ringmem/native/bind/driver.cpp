// The raw drivers in Python: every operation under its C++ name, handles and addresses as ints.
// Cold by design: each call gives up the GIL and takes it again.
#include "bind/driver_call.hpp"

#include "bind/objects.hpp"
#include "driver/cuda/cuda_driver.hpp"
#include "driver/faulty/faulty_driver.hpp"
#include "driver/fork.hpp"

#include <cstdio>

namespace ringmem::bind {

Argument::Argument(const char* name, Location location) {
  static constexpr const char* kinds[] = {"device:", "host:", "host_numa:"};
  text = std::string(name) + "=" + kinds[static_cast<int>(location.kind)] +
         std::to_string(location.id);
}

Argument Argument::hex(const char* name, std::uint64_t value) {
  char digits[24];
  std::snprintf(digits, sizeof digits, "=0x%llx", static_cast<unsigned long long>(value));
  Argument result(name, 0);
  result.text = std::string(name) + digits;
  return result;
}

std::string describe(const Driver& driver, Status status, const std::vector<Argument>& arguments) {
  std::string text;
  for (const Argument& argument : arguments) {
    if (!text.empty()) text += ", ";
    text += argument.text;
  }
  const Driver* inner = &driver;
  while (const auto* faulty = dynamic_cast<const FaultyDriver*>(inner)) {
    inner = faulty->inner().get();
  }
  const auto* cuda = dynamic_cast<const CudaDriver*>(inner);
  if (!cuda || status != Status::not_initialized) return text;
  const std::string& why = cuda->load_error();
  // The error says itself that the process was forked.
  if (!why.empty() && why != fork_explanation) text += (text.empty() ? "" : "; ") + why;
  return text;
}

void bind_driver(nb::module_& m) {
  bind_driver_types(m);
  nb::class_<Driver> cls(m, "Driver",
                         "A driver's operations, raw: handles and addresses are ints, a failure "
                         "raises the DriverError that belongs to it.");
  bind_driver_memory(cls);
  bind_driver_virtual(cls);
  bind_driver_streams(cls);
  bind_host_function(cls);
  bind_driver_kinds(m);
}

}  // namespace ringmem::bind
