// Locks for sections of some tens of nanoseconds. Their owner may be preempted, so a waiter yields
// after a short spin. No section takes one of them twice, nor runs Python.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
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

// Uncontended it costs one exchange.
class SpinLock {
 public:
  void lock() noexcept {
    while (held_.exchange(true, std::memory_order_acquire)) [[unlikely]] wait_while(held_);
  }
  void unlock() noexcept { held_.store(false, std::memory_order_release); }

  [[gnu::noinline, gnu::cold]] static void wait_while(const std::atomic<bool>& flag) noexcept {
    for (int spin = 0; flag.load(std::memory_order_relaxed); ++spin) {
      if (spin < 128) relax();
      else std::this_thread::yield();
    }
  }

 private:
  std::atomic<bool> held_{false};
};

using SpinGuard = std::lock_guard<SpinLock>;

// A lock for what one thread uses nearly always: for that thread, its owner, it costs two plain
// stores and no exchange. Anyone else takes the spin lock inside and then the ownership, by a
// barrier on all processors (membarrier, some microseconds): after it, either the owner saw that
// it is none any more, or the other sees it inside and waits. A streak of sections of one thread
// makes it the owner; after every loss it takes a longer one.
// Where the kernel has no membarrier it is a spin lock. Its protocol: tests/model/lock.pml.
class alignas(64) BiasedLock {
 public:
  void lock() noexcept {
    const std::uintptr_t me = this_thread();
    const std::uintptr_t owner = owner_.load(std::memory_order_relaxed);
    if (const std::uintptr_t slot = owner ^ me; slot << slot_bits == 0) [[likely]] {
      std::atomic<bool>& inside = inside_[slot >> address_bits];
      inside.store(true, std::memory_order_relaxed);
      std::atomic_signal_fence(std::memory_order_seq_cst);  // the other fence is membarrier's
      if (owner_.load(std::memory_order_relaxed) == owner) [[likely]] return;
      inside.store(false, std::memory_order_release);
    }
    lock_shared(me);
  }
  void unlock() noexcept {
    if (!shared_) [[likely]] return inside_[slot_].store(false, std::memory_order_release);
    shared_ = false;
    lock_.unlock();
  }
  // Asks the kernel for its barriers, once in a process: before the first lock that may be owned,
  // and with none held, for where there are other threads it takes up to 20 ms.
  static void prepare() noexcept;
  // Whether a thread owns it now. For tests.
  bool owned() const noexcept { return owner_.load(std::memory_order_relaxed) != 0; }

 private:
  // User space ends below 2^48 on x86-64 and AArch64, unless a mapping asks for more: above is room
  // for the owner's slot.
  static constexpr int address_bits = 48;
  static constexpr int slot_bits = 16;
  // A thread that was preempted in lock() may store into its flag long after it lost the lock, so no
  // two threads have the same one. Threads beyond this many never own the lock.
  static constexpr std::size_t slots = 32;
  // How many sections in a row make an owner, at first and at most: the saving of some thousand
  // pays for a barrier.
  static constexpr std::uint32_t first_streak = 64, longest_streak = 8192;

  // A number that no other living thread has.
  static std::uintptr_t this_thread() noexcept {
#if __has_builtin(__builtin_thread_pointer)
    return reinterpret_cast<std::uintptr_t>(__builtin_thread_pointer());
#else
    static thread_local char here;
    return reinterpret_cast<std::uintptr_t>(&here);
#endif
  }
  [[gnu::noinline]] void lock_shared(std::uintptr_t me) noexcept;
  void give_to(std::uintptr_t thread) noexcept;

  std::atomic<std::uintptr_t> owner_{0};           // the thread, and above it its slot
  std::array<std::atomic<bool>, slots> inside_{};  // each written by its slot's thread alone
  // What follows is guarded by the lock itself.
  bool shared_ = false;    // it is held through lock_
  std::uint8_t slot_ = 0;  // of the last owner
  SpinLock lock_;
  std::uint32_t streak_ = 0;  // sections of `last_` since another had one
  std::uint32_t streak_needed_ = first_streak;
  std::uintptr_t last_ = 0;
  std::array<std::uintptr_t, slots> threads_{};  // by slot
};

using BiasedGuard = std::lock_guard<BiasedLock>;

}  // namespace ringmem::pool
