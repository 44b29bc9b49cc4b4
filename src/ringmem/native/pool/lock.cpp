#include "pool/lock.hpp"

#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

namespace ringmem::pool {

namespace {

enum class Membarrier { unknown, ready, refused };

// No function-local static: a fork while another thread initialized it would leave the child waiting.
std::atomic<Membarrier> membarrier_state{Membarrier::unknown};

bool call_membarrier(int command) noexcept { return syscall(SYS_membarrier, command, 0, 0) == 0; }

// Every thread of the process has passed a full memory barrier when it returns.
void barrier_on_all_threads() noexcept {
  for (int attempt = 0; attempt < 2; ++attempt) {
    if (call_membarrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED)) return;
    // A process that was restored from a checkpoint has to register again.
    if (!call_membarrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED)) break;
  }
  // A sandbox refuses it by now. Nobody owns a lock any more, and stores reach the cache within
  // nanoseconds; a thread that is switched off has made them before.
  membarrier_state.store(Membarrier::refused, std::memory_order_relaxed);
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace

void BiasedLock::prepare() noexcept {
  if (membarrier_state.load(std::memory_order_relaxed) != Membarrier::unknown) return;
  const bool ready = call_membarrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED);
  membarrier_state.store(ready ? Membarrier::ready : Membarrier::refused,
                         std::memory_order_relaxed);
}

void BiasedLock::lock_shared(std::uintptr_t me) noexcept {
  lock_.lock();
  if (owner_.load(std::memory_order_relaxed) != 0) {
    owner_.store(0, std::memory_order_relaxed);
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
  if (membarrier_state.load(std::memory_order_relaxed) != Membarrier::ready) return;
  if (thread >> address_bits != 0) return;
  for (std::size_t slot = 0; slot < slots; ++slot) {
    if (threads_[slot] != 0 && threads_[slot] != thread) continue;
    threads_[slot] = thread;
    slot_ = static_cast<std::uint8_t>(slot);
    owner_.store(thread | slot << address_bits, std::memory_order_relaxed);
    return;
  }
}

}  // namespace ringmem::pool
