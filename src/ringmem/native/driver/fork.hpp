// Which process of a line of forks this is. What was made before a fork does nothing in the child:
// the driver's state is the parent's, its threads are gone, and locks may be held by them for ever.
#pragma once

#include <atomic>
#include <cstdint>

#include "driver/status.hpp"

namespace ringmem {

extern std::atomic<std::uint64_t> forks;

// Grows by one in every forked child; one load, where getpid() is a system call.
inline std::uint64_t fork_generation() noexcept { return forks.load(std::memory_order_relaxed); }

// Why what is the parent's refuses its child, and what would do.
extern const char* const fork_explanation;

// Both are Status::not_initialized, for the two reasons that there are: the thread's next error of
// that status says which one.
[[gnu::cold]] Status refused_in_child() noexcept;
[[gnu::cold]] Status no_driver() noexcept;

// The reason that this thread was given last.
const char* not_initialized_reason() noexcept;

}  // namespace ringmem
