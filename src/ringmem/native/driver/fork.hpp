// Which process of a line of forks this is. What was made before a fork does nothing in the child:
// the driver's state is the parent's, its threads are gone, and locks may be held by them for ever.
#pragma once

#include <atomic>
#include <cstdint>

namespace ringmem {

extern std::atomic<std::uint64_t> forks;

// Grows by one in every forked child; one load, where getpid() is a system call.
inline std::uint64_t fork_generation() noexcept { return forks.load(std::memory_order_relaxed); }

}  // namespace ringmem
