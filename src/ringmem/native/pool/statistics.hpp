// The figures of a pool, as a value. Bytes unless a name says otherwise.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringmem {

struct PoolStatistics {
  std::size_t requested = 0;  // what callers asked for and have not freed
  std::size_t allocated = 0;  // the same with what rounding adds
  std::size_t reserved = 0;   // held from the driver: bytes in unreleased handles
  std::size_t cached = 0;     // reserved and not allocated
  std::size_t peak_requested = 0;  // since the peaks were reset; exact with one stream, else to
  std::size_t peak_allocated = 0;  // within 64 KiB and one parked block a stream
  std::size_t peak_reserved = 0;
  std::size_t largest_free_block = 0;
  std::size_t live = 0;            // blocks

  std::uint64_t allocations = 0;   // totals since the pool was made
  std::uint64_t frees = 0;
  std::uint64_t hits = 0;          // allocations that needed no memory from the driver
  std::uint64_t misses = 0;        // allocations that created or moved memory
  std::uint64_t returns = 0;       // frees that went back to the pool's cache
  std::uint64_t retries = 0;       // allocations tried again after a flush or a callback
  std::uint64_t driver_calls = 0;
  std::uint64_t device_waits = 0;  // times a stream was made to wait for another
  std::uint64_t handles_created = 0;
  std::uint64_t handles_released = 0;
  std::uint64_t remaps = 0;        // handles moved to another address
  std::size_t remapped = 0;        // bytes in them
  std::uint64_t growth_ns = 0;     // time spent on creating, moving and mapping
  std::uint64_t remap_ns = 0;      // the part of it in operations that moved handles

  // Share of allocated bytes that nobody asked for.
  double internal_fragmentation() const noexcept {
    return allocated ? 1.0 - static_cast<double>(requested) / static_cast<double>(allocated) : 0.0;
  }
  // Share of cached bytes that one allocation cannot use.
  double external_fragmentation() const noexcept {
    return cached ? 1.0 - static_cast<double>(largest_free_block) / static_cast<double>(cached)
                  : 0.0;
  }
};

}  // namespace ringmem
