// What is mapped where in one simulated machine, and which device may read or write it. Everything
// a stream does asks here when it executes.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <shared_mutex>
#include <vector>

#include "driver/types.hpp"

namespace ringmem::host {

class Pool;

// One bit a device, and one for the host.
using AccessSet = std::uint64_t;
inline constexpr AccessSet host_access = AccessSet{1} << 63;
inline constexpr AccessSet everybody = ~AccessSet{0};
constexpr AccessSet bit_of(int device) noexcept { return AccessSet{1} << device; }

enum class RegionKind : std::uint8_t {
  plain,       // mem_alloc: its device, and peers that enabled it
  pool,        // pages of a driver pool
  managed,     //
  pinned,      // host_alloc
  registered,  // host_register: the user's memory, which may vanish
  mapping,     // a physical handle in a reserved range
};

struct Region {
  std::uint64_t base = 0;
  std::uint64_t nbytes = 0;
  RegionKind kind = RegionKind::plain;
  int device = -1;                  // the owner; for host memory the device it was made for
  bool on_host = false;             // host memory behind it
  AccessSet readers = 0;            // guarded by the table's lock, as is `writers`
  AccessSet writers = 0;
  std::shared_ptr<Pool> pool;       // of a pool's pages
  std::atomic<bool> freed{false};   // claimed by a free that is under way
  std::atomic<int> pins{0};         // accesses under way

  std::uint64_t end() const noexcept { return base + nbytes; }
};
using RegionRef = std::shared_ptr<Region>;

// Keeps a region, and what is mapped there, from being taken away during an access.
class Pin {
 public:
  Pin() = default;
  explicit Pin(RegionRef region) noexcept : region_(std::move(region)) {}
  Pin(Pin&& other) noexcept : region_(std::move(other.region_)) {}
  Pin& operator=(Pin&& other) noexcept {
    std::swap(region_, other.region_);
    return *this;
  }
  ~Pin() {
    if (region_ && region_->pins.fetch_sub(1, std::memory_order_acq_rel) == 1)
      region_->pins.notify_all();
  }

 private:
  RegionRef region_;
};

// On whose behalf an access is made.
struct Requester {
  AccessSet self = 0;    // the device that executes
  AccessSet reach = 0;   // owners whose plain allocations it may touch
};

struct Resolved {
  enum class Kind { covered, pageable, illegal } kind = Kind::illegal;
  std::uint64_t nbytes = 0;  // usable from the address on; 0 when illegal
  bool vanishing = false;    // the user's own memory: copy by way of the kernel
  Pin pin;
};

class PageTable {
 public:
  // Address ranges that are the driver's: what is not mapped there is illegal, not pageable.
  void add_territory(std::uint64_t begin, std::uint64_t nbytes);
  void remove_territory(std::uint64_t begin);

  void clear() noexcept;  // regions may hold pools, and pools come back here when they go

  void insert(RegionRef region);
  void insert(const std::vector<RegionRef>& regions);
  bool insert_alone(RegionRef region);  // false: it overlaps one that is there
  RegionRef erase(std::uint64_t base) noexcept;
  void erase(const std::vector<RegionRef>& regions) noexcept;
  // Takes [begin, end) out of the one region that contains it; what is left stays.
  void carve(std::uint64_t begin, std::uint64_t end);
  void set_access(const std::vector<RegionRef>& regions, const std::vector<AccessSet>& readers,
                  const std::vector<AccessSet>& writers) noexcept;

  void set_pool_access(const Pool* pool, AccessSet readers, AccessSet writers) noexcept;

  // The region that contains `ptr`, or null.
  RegionRef find(std::uint64_t ptr) const noexcept;
  // Whether any region or territory touches [ptr, ptr + nbytes).
  bool overlaps(std::uint64_t ptr, std::uint64_t nbytes) const noexcept;
  bool overlaps_territory(std::uint64_t ptr, std::uint64_t nbytes) const noexcept;
  // True for an address that the driver knows nothing of: the host's pageable memory.
  bool is_pageable(std::uint64_t ptr) const noexcept;
  // One region's worth of an access to [ptr, ptr + nbytes), pinned.
  Resolved resolve(std::uint64_t ptr, std::uint64_t nbytes, const Requester& who,
                   bool write) const noexcept;
  // May `who` reach all of it?
  bool allows(std::uint64_t ptr, std::uint64_t nbytes, const Requester& who,
              bool write) const noexcept;

  // Waits until accesses under way have ended: they are short, and none can begin that the table
  // no longer allows.
  static void drain(const Region& region) noexcept;

 private:
  const RegionRef* containing(std::uint64_t ptr) const noexcept;
  bool in_territory(std::uint64_t ptr) const noexcept;

  mutable std::shared_mutex mutex_;
  std::map<std::uint64_t, RegionRef> regions_;            // by base
  std::map<std::uint64_t, std::uint64_t> territories_;    // begin → end
};

}  // namespace ringmem::host
