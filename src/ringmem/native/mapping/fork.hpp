// Which process an object belongs to. After fork() the child has neither the driver's state nor our
// threads, and locks may be held by threads that do not exist: an inherited object refuses work
// before it touches a lock, and releases nothing.
#pragma once

#include <cstdint>

#include "driver/fork.hpp"
#include "driver/status.hpp"

namespace ringmem::mapping {

class ProcessMark {
 public:
  ProcessMark() noexcept : generation_(fork_generation()) {}

  bool inherited() const noexcept { return generation_ != fork_generation(); }
  void require_own(const char* what) const {
    if (inherited()) {
      throw DriverError(Status::not_permitted, what,
                        "the object was made before fork(); it cannot be used in the child: use "
                        "the start method \"spawn\", or share() and attach()");
    }
  }

 private:
  std::uint64_t generation_;
};

}  // namespace ringmem::mapping
