#include "driver/fork.hpp"

#include <pthread.h>

namespace ringmem {

std::atomic<std::uint64_t> forks{0};

namespace {

// When the module is loaded: a static of a function, whose first call a fork may meet, would leave
// the child waiting for a thread that it has not.
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] {
  forks.fetch_add(1, std::memory_order_relaxed);
});

}  // namespace

}  // namespace ringmem
