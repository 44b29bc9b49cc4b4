// The two allocators that are the driver itself: its stream-ordered pool, and plain allocation.
#pragma once

#include "driver/driver.hpp"
#include "memory/allocator.hpp"

namespace ringmem {

// cuMemAllocAsync / cuMemFreeAsync on the device's current driver pool.
class StreamOrderedAllocator final : public Allocator {
 public:
  StreamOrderedAllocator(DriverRef driver, int device);
  Block allocate(std::size_t nbytes, StreamHandle stream) override;
  Status deallocate(const Block& block, StreamHandle stream) noexcept override;
  Status record_stream(Block& block, StreamHandle stream) override;

 private:
  DriverRef driver_;
  int device_;
};

// cuMemAlloc / cuMemFree. Freeing waits for the device, also for a persistent kernel: only where
// the device has no pools.
class PlainAllocator final : public Allocator {
 public:
  PlainAllocator(DriverRef driver, int device);
  Block allocate(std::size_t nbytes, StreamHandle stream) override;
  Status deallocate(const Block& block, StreamHandle stream) noexcept override;
  Status record_stream(Block& block, StreamHandle stream) override;

 private:
  DriverRef driver_;
  int device_;
};

}  // namespace ringmem
