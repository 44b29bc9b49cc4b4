#include "driver/fork.hpp"

#include <pthread.h>

namespace ringmem {

std::atomic<std::uint64_t> forks{0};

namespace {

thread_local bool child_was_refused = false;

// When the module is loaded: a static of a function, whose first call a fork may meet, would leave
// the child waiting for a thread that it has not.
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] {
  forks.fetch_add(1, std::memory_order_relaxed);
});

}  // namespace

const char* const fork_explanation =
    "this process was forked from one that used the driver, which does not survive a fork; start "
    "it with the 'spawn' or 'forkserver' method";

Status refused_in_child() noexcept {
  child_was_refused = true;
  return Status::not_initialized;
}

Status no_driver() noexcept {
  child_was_refused = false;
  return Status::not_initialized;
}

const char* not_initialized_reason() noexcept {
  return child_was_refused ? fork_explanation : "there is no usable driver";
}

}  // namespace ringmem
