// Which generation of forks this process is. A pool made before a fork does nothing in the child:
// its memory, its mappings and the driver are the parent's.
#pragma once

#include <atomic>
#include <cstdint>

namespace ringmem::pool {

extern std::atomic<std::uint64_t> fork_generation;

// Starts counting; called by every pool when it is made.
void watch_forks();

}  // namespace ringmem::pool
