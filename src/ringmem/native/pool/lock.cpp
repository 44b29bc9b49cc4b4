#include "pool/lock.hpp"

#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

namespace ringmem::pool {

namespace {

// Whether this process may ask for barriers; a fork child inherits the answer.
bool has_membarrier() noexcept {
  static const bool registered =
      syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0) == 0;
  return registered;
}

// Every thread of the process has passed a full memory barrier when it returns.
void barrier_on_all_threads() noexcept {
  if (syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0) == 0) return;
  // Registered, it does not fail, unless a sandbox was set up since. Stores reach the cache within
  // nanoseconds; a thread that is switched off has made them before.
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace

void BiasedLock::lock_shared(std::uintptr_t me) noexcept {
  lock_.lock();
  if (owner_.load(std::memory_order_relaxed) != 0) {
    owner_.store(0, order);
    streak_needed_ = std::min(streak_needed_ * 2, longest_streak);
    barrier_on_all_threads();
    while (inside_[slot_].load(std::memory_order_acquire)) SpinLock::wait_while(inside_[slot_]);
  }
  shared_ = true;  // not before the owner is out: it reads this when it leaves
  if (last_ != me) {
    last_ = me;
    streak_ = 0;
  }
  if (++streak_ >= streak_needed_) {
    streak_ = 0;
    give_to(me);
  }
}

void BiasedLock::give_to(std::uintptr_t thread) noexcept {
  if (!has_membarrier()) return;
  for (std::size_t slot = 0; slot < slots; ++slot) {
    if (threads_[slot] != 0 && threads_[slot] != thread) continue;
    threads_[slot] = thread;
    slot_ = static_cast<std::uint8_t>(slot);
    owner_.store(thread | slot << address_bits, order);
    return;
  }
}

}  // namespace ringmem::pool
