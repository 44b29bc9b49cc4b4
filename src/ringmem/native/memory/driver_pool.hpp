// One of the driver's stream-ordered pools (cuMemPool) as an object: made here, imported from
// another process, or the device's default one, which belongs to the driver.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "memory/driver_allocators.hpp"

namespace ringmem {

class DriverPool final : public Allocator {
 public:
  // `owned`: destroy() destroys it. `imported`: its threshold and access are the exporter's.
  DriverPool(DriverRef driver, int device, PoolHandle handle, bool owned, bool imported);
  ~DriverPool() override;

  Block allocate(std::size_t nbytes, StreamHandle stream) override;
  Status deallocate(const Block& block, StreamHandle stream) noexcept override;
  Status record_stream(Block& block, StreamHandle stream) override;
  bool free_may_block(const Block& block) const noexcept override {
    return blocks_.free_may_block(block);
  }
  void forget(const Block& block) noexcept override { blocks_.forget(block); }
  Home home() const noexcept override { return {driver_.get(), device_, Place::device}; }
  StreamHandle idle_stream() const noexcept override { return per_thread_stream; }
  bool allocate_may_block() const noexcept override { return false; }

  PoolHandle handle() const;  // throws Closed
  bool owned() const noexcept { return owned_; }
  bool imported() const noexcept { return imported_; }
  bool closed() const noexcept { return closed_.load(); }

  struct Destroyed {
    bool refused = false;              // blocks live, and the pool is as it was
    Status status = Status::success;   // what the driver said
  };
  // Destroys an owned pool; lets go of the default one. With live blocks it refuses, or with
  // `when_unused` takes no more allocations and is destroyed when the last block is freed: drivers
  // allow more, but one of 580 breaks the process later when a pool goes that has live blocks.
  // Whatever the driver answers, the handle is not left behind: it is tried again. Idempotent.
  Destroyed destroy(bool when_unused = false) noexcept;
  std::size_t live() const noexcept { return live_.load(std::memory_order_relaxed); }
  std::size_t live_bytes() const noexcept { return live_bytes_.load(std::memory_order_relaxed); }
  const DriverRef& driver() const noexcept { return driver_; }
  int device() const noexcept { return device_; }

 private:
  const DriverRef driver_;
  const int device_;
  const bool owned_;
  const bool imported_;
  // Destroys the handle, once. `later`: on failure the reaper tries again.
  Status release(bool later) noexcept;

  std::atomic<PoolHandle> handle_;
  std::atomic<bool> closed_{false};
  StreamOrderedAllocator blocks_;  // allocates and frees on the handle
  std::atomic<std::size_t> live_{0};
  std::atomic<std::size_t> live_bytes_{0};
};

}  // namespace ringmem
