// Where arenas of host-visible memory come from: page-locked anonymous memory, and managed memory.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "driver/driver.hpp"
#include "memory/allocator.hpp"

namespace ringmem {

class ArenaSource {
 public:
  ArenaSource() = default;
  ArenaSource(const ArenaSource&) = delete;
  ArenaSource& operator=(const ArenaSource&) = delete;
  virtual ~ArenaSource() = default;

  // New memory of exactly `nbytes`, a multiple of 2 MiB. Slow: hold no lock. All or nothing.
  virtual Status acquire(std::size_t nbytes, DevicePtr* ptr, const char** operation) = 0;
  // Gives it back; for the reaper's thread, since every such call waits for the device.
  virtual std::function<Status()> release_of(DevicePtr ptr, std::size_t nbytes) = 0;
  virtual const char* release_name() const noexcept = 0;
  virtual Place place() const noexcept = 0;
};

// Anonymous memory, touched by several threads (a core clears 2-4 GB/s of fresh pages, and
// registering touched pages takes 60 ms for 1 GiB where allocating locked ones takes 406;
// measured on an H200's host), then page-locked by one registration.
std::unique_ptr<ArenaSource> pinned_arenas(DriverRef driver, int device);

// cuMemAllocManaged; refuses more than the device has free.
std::unique_ptr<ArenaSource> managed_arenas(DriverRef driver, int device);

}  // namespace ringmem
