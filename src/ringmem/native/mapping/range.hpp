// Reserved addresses and what is mapped into them: the thin, owned form of the driver's own
// reserve, map, access and unmap. A mapping keeps its range and its physical memory, so release
// is leaf first in whatever order the user closes them.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "driver/driver.hpp"
#include "mapping/guard.hpp"
#include "mapping/physical.hpp"

namespace ringmem::mapping {

class MappedRange;

class AddressRange : public std::enable_shared_from_this<AddressRange> {
 public:
  // `nbytes` is rounded up to whole pages of `props`' location; `alignment` is 0 (the page size) or
  // a power of two.
  static std::shared_ptr<AddressRange> reserve(DriverRef driver, std::size_t nbytes,
                                               std::size_t alignment, const PhysicalProps& props);

  AddressRange(DriverRef driver, std::size_t nbytes, std::size_t page) noexcept
      : driver_(std::move(driver)), nbytes_(nbytes), page_(page) {}
  AddressRange(const AddressRange&) = delete;
  AddressRange& operator=(const AddressRange&) = delete;
  ~AddressRange();

  // Maps the whole of `memory` at `offset` and grants access, or does nothing.
  std::shared_ptr<MappedRange> map(const PhysicalRef& memory, std::size_t offset,
                                   const std::vector<AccessGrant>& grants);
  // Frees the addresses now, or when the last mapping goes. Throws what address_free says.
  void close();

  DevicePtr ptr() const;  // throws Closed
  std::size_t nbytes() const noexcept { return nbytes_; }
  std::size_t granularity() const noexcept { return page_; }
  std::size_t mappings() const noexcept;
  bool closed() const noexcept { return closed_.load(std::memory_order_relaxed); }
  const DriverRef& driver() const noexcept { return driver_; }

 private:
  friend class MappedRange;
  void claim(std::size_t offset, std::size_t end);       // throws on overlap and when closed
  Status yield(std::size_t offset) noexcept;             // the mapping at `offset` is gone
  Status free_locked() noexcept;

  DriverRef driver_;
  DevicePtr ptr_ = 0;  // 0 once freed
  std::size_t nbytes_;
  std::size_t page_;
  ProcessMark process_;
  mutable std::mutex mutex_;
  std::map<std::size_t, std::size_t> taken_;  // offset -> end, disjoint
  bool free_failed_ = false;
  std::atomic<bool> closed_{false};
};

using RangeRef = std::shared_ptr<AddressRange>;

class MappedRange {
 public:
  MappedRange(RangeRef range, PhysicalRef memory, DevicePtr ptr, std::size_t offset) noexcept
      : range_(std::move(range)), memory_(std::move(memory)), ptr_(ptr), offset_(offset) {}
  MappedRange(const MappedRange&) = delete;
  MappedRange& operator=(const MappedRange&) = delete;
  ~MappedRange();

  // All grants in one call; locations that are not named keep their access.
  void set_access(const std::vector<AccessGrant>& grants);
  Access get_access(Location location) const;
  // Waits for the work of `streams` and `events` on the host (blocks), then unmaps. A second call
  // does nothing. When the unmap fails the mapping is still there.
  void unmap(const std::vector<StreamRef>& streams, const std::vector<EventRef>& events);

  DevicePtr ptr() const;  // throws Closed
  std::size_t nbytes() const noexcept { return memory_->nbytes(); }
  std::size_t offset() const noexcept { return offset_; }
  bool closed() const noexcept { return closed_.load(std::memory_order_relaxed); }
  const RangeRef& range() const noexcept { return range_; }
  const PhysicalRef& memory() const noexcept { return memory_; }

 private:
  friend class AddressRange;
  Status leave_parents() noexcept;

  RangeRef range_;
  PhysicalRef memory_;
  DevicePtr ptr_;
  std::size_t offset_;
  ProcessMark process_;
  mutable std::mutex mutex_;
  std::atomic<bool> closed_{false};
  bool unmap_failed_ = false;
};

// Throws for a device that cannot access memory at `owner` (no peer access between the two).
void require_reachable(Driver& driver, Location owner, const std::vector<AccessGrant>& grants);

}  // namespace ringmem::mapping
