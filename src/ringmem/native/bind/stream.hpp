// What the files of streams and of events share: texts, refusals, and what the collector sees.
#pragma once

#include <string>

#include "bind/objects.hpp"

namespace ringmem::bind {

std::string describe(const NativeStream& stream);
std::string describe(const NativeEvent& event);

template <class T>
void check_open(const T& object) {
  if (object.closed.load(std::memory_order_acquire)) [[unlikely]] {
    throw Closed(describe(object) + " is closed; create another");
  }
}

[[noreturn]] void refuse(const char* argument, nb::handle value, const char* wanted);

bool flag_of(const char* argument, nb::handle value);  // True or False, nothing like them

// A finalizer's failure: one warning, never an exception.
void warn_not_destroyed(const std::string& what, Status status) noexcept;

// A device may hold streams and events of its own (staging), which hold it: the collector must see
// the native reference. It counts only while nobody shares it, since it is one Python reference.
// Clearing breaks the cycle at the device; the destructor of the holder still needs it.
int visit_device(const DeviceRef& device, visitproc visit, void* arg);

}  // namespace ringmem::bind
