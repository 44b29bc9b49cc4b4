// A value that takes Python to find, found at its first use.
#pragma once

#include <atomic>

namespace ringmem::bind {

// In place of a function's static, whose initializer runs under a lock: whoever finds the value may
// give up the GIL, or stop for the collector, while another thread waits for that lock with the GIL
// in its hand, and both wait for ever. Here several threads may search at the same time; they find
// the same, and what each of them finds is never freed.
template <class T>
class Lazily {
 public:
  template <class Find>
  T get(Find find) {
    if (known_.load(std::memory_order_acquire)) [[likely]] {
      return value_.load(std::memory_order_relaxed);
    }
    const T value = find();
    value_.store(value, std::memory_order_relaxed);
    known_.store(true, std::memory_order_release);
    return value;
  }

 private:
  std::atomic<T> value_{};
  std::atomic<bool> known_{false};
};

}  // namespace ringmem::bind
