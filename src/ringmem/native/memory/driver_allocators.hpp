// The two allocators that are the driver itself: a stream-ordered pool of its own, and plain
// allocation. Both keep the streams recorded on a block in Block::record, and order a free after
// their work.
#pragma once

#include <atomic>
#include <mutex>
#include <vector>

#include "driver/driver.hpp"
#include "memory/stream_records.hpp"

namespace ringmem {

// Events without timing, kept for reuse: a free with recorded streams creates none when warm.
class EventCache {
 public:
  explicit EventCache(DriverRef driver) : driver_(std::move(driver)) {}
  EventCache(const EventCache&) = delete;
  EventCache& operator=(const EventCache&) = delete;
  ~EventCache();

  Status take(int device, EventHandle* event) noexcept;
  void give_back(int device, EventHandle event) noexcept;

 private:
  struct Entry {
    int device;
    EventHandle event;
  };

  DriverRef driver_;
  std::mutex mutex_;  // guards idle_; never held around a driver call
  std::vector<Entry> idle_;
};

// cuMemAllocFromPoolAsync / cuMemFreeAsync on a driver pool that belongs to this object. It is
// created at the first use and keeps what it has (release threshold: everything); the device's
// default pool, which is the whole process's, is left as it is.
class StreamOrderedAllocator final : public StreamRecords {
 public:
  StreamOrderedAllocator(DriverRef driver, int device);
  // On a pool that somebody else destroys.
  StreamOrderedAllocator(DriverRef driver, int device, PoolHandle pool);
  ~StreamOrderedAllocator() override;

  Block allocate(std::size_t nbytes, StreamHandle stream) override;
  Status deallocate(const Block& block, StreamHandle stream) noexcept override;
  Home home() const noexcept override { return {driver_.get(), device_, Place::device}; }
  StreamHandle idle_stream() const noexcept override { return per_thread_stream; }
  bool allocate_may_block() const noexcept override { return false; }

  // The driver's handle, created if need be. Throws DriverError.
  PoolHandle pool();
  // Gives back what no live block needs, down to `keep_bytes`. Nothing to do: no driver call.
  Status trim(std::size_t keep_bytes) noexcept;

 private:
  std::atomic<PoolHandle> pool_{0};
  const bool owned_ = true;
  EventCache events_;
};

// cuMemAlloc / cuMemFree. Freeing waits for the device, also for a persistent kernel: only where
// the device has no pools.
class PlainAllocator final : public StreamRecords {
 public:
  PlainAllocator(DriverRef driver, int device);
  Block allocate(std::size_t nbytes, StreamHandle stream) override;
  Status deallocate(const Block& block, StreamHandle stream) noexcept override;
  Home home() const noexcept override { return {driver_.get(), device_, Place::device}; }
  StreamHandle idle_stream() const noexcept override { return per_thread_stream; }
  bool may_block() const noexcept override { return true; }
};

}  // namespace ringmem
