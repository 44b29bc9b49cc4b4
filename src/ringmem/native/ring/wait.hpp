// Waiting for a condition that another thread, process or device makes true by a plain store.
// Nobody can be woken by a GPU, so there are two tiers: spin here, or park and let the one poller
// thread look (poller.hpp).
#pragma once

#include <chrono>
#include <functional>

#include "ring/poller.hpp"
#include "ring/words.hpp"

namespace ringmem::ring {

using Clock = std::chrono::steady_clock;

// How a wait spends its time. Spinning answers in well under a microsecond and takes a core; a
// parked wait takes none and answers after up to the poller's interval and a thread wake-up.
struct WaitPolicy {
  std::chrono::nanoseconds spin{50'000};  // before parking; max(): never park
};

// Looks until `ready` or the deadline; true: ready. The clock is read once in 64 looks.
template <class Ready>
bool spin_until(const Ready& ready, Clock::time_point deadline) noexcept {
  for (;;) {
    for (int look = 0; look < 64; ++look) {
      if (ready()) return true;
      pause();
    }
    if (Clock::now() >= deadline) return ready();
  }
}

// Spins, then parks. `ready` must change nothing: the poller calls it from its own thread.
template <class Ready>
bool wait_until(const Ready& ready, const WaitPolicy& policy, Clock::time_point deadline) {
  const auto now = Clock::now();
  const bool park = policy.spin < deadline - now;
  if (spin_until(ready, park ? now + policy.spin : deadline)) return true;
  if (!park) return false;
  return Poller::instance().wait(std::cref(ready), deadline);
}

}  // namespace ringmem::ring
