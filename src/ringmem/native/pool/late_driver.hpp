// A driver around another one whose events complete a stated number of ticks later than they were
// recorded: how a replay shows an allocator a device that lags behind, on any device.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "driver/driver.hpp"

namespace ringmem {

class LateDriver final : public Driver {
 public:
  LateDriver(DriverRef inner, std::uint64_t late) : inner_(std::move(inner)), late_(late) {}

  void tick() noexcept { now_.fetch_add(1, std::memory_order_relaxed); }

#include "driver/overrides.inc"

 private:
  const DriverRef inner_;
  const std::uint64_t late_;
  std::atomic<std::uint64_t> now_{0};
  std::mutex mutex_;
  std::unordered_map<EventHandle, std::uint64_t> due_;  // of events recorded, the tick
};

}  // namespace ringmem
