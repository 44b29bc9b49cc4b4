// A lock for sections of some tens of nanoseconds in which no driver call is made. Uncontended it
// costs one exchange; its owner may be preempted, so a waiter yields after a short spin.
#pragma once

#include <atomic>
#include <mutex>
#include <thread>

namespace ringmem::pool {

inline void relax() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

class SpinLock {
 public:
  void lock() noexcept {
    while (held_.exchange(true, std::memory_order_acquire)) [[unlikely]] wait();
  }
  bool try_lock() noexcept { return !held_.exchange(true, std::memory_order_acquire); }
  void unlock() noexcept { held_.store(false, std::memory_order_release); }

 private:
  [[gnu::noinline, gnu::cold]] void wait() noexcept {
    for (int spin = 0; held_.load(std::memory_order_relaxed); ++spin) {
      if (spin < 128) relax();
      else std::this_thread::yield();
    }
  }

  std::atomic<bool> held_{false};
};

using SpinGuard = std::lock_guard<SpinLock>;

}  // namespace ringmem::pool
