// A driver pool (cuMemPool): pages taken from a heap, blocks given out in stream order. A freed
// block is ready for its own stream at once, and for others when the freeing point has passed.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "driver/host/heap.hpp"
#include "driver/host/page_table.hpp"
#include "driver/host/stream.hpp"
#include "driver/types.hpp"

namespace ringmem::host {

class Pool : public std::enable_shared_from_this<Pool> {
 public:
  static constexpr std::uint64_t page = 2 << 20;    // unit of what is reserved and given back
  static constexpr std::uint64_t chunk = 32 << 20;  // reserved at least, where there is room

  struct Setup {
    PoolProps props;
    int device = 0;             // where it was made; the owner when the location is a device
    PageTable* table = nullptr;
    Budget* budget = nullptr;
    Heap* heap = nullptr;             // borrowed,
    std::unique_ptr<Heap> own_heap;   // or its own when shareable or imported
    bool imported = false;
  };
  explicit Pool(Setup setup);
  ~Pool();

  // A block for work on `stream` from now on. When only a block that another stream has not passed
  // yet will do, `*wait` is set to the point that `stream` has to wait for first.
  Status allocate(std::uint64_t nbytes, const std::shared_ptr<Stream>& stream, std::uint64_t* ptr,
                  Point* wait);
  // invalid_value: no live block starts there.
  Status free(std::uint64_t ptr, Point point);
  // The live block that contains `ptr`.
  bool find(std::uint64_t ptr, Extent* block);

  // Gives free pages back until no more than `keep_bytes` are reserved.
  void trim(std::uint64_t keep_bytes);
  // What a synchronization does: keeps the release threshold, nothing when destroyed.
  void settle();
  // Its handle is gone; blocks live on.
  void destroy();
  bool destroyed() const noexcept { return destroyed_.load(std::memory_order_relaxed); }
  bool destroyed_and_empty();

  Status get(PoolAttribute attribute, std::uint64_t* value);
  Status set(PoolAttribute attribute, std::uint64_t value);
  void set_access(AccessSet readers, AccessSet writers);
  void get_access(AccessSet* readers, AccessSet* writers);

  // Its own heap's addresses belong to the driver from now until it goes.
  void claim_territory() { table_.add_territory(heap_->base(), heap_->span()); }

  // Sharing: a block as the place in the pool's file, and back. Imported blocks are released by
  // forget().
  bool shareable() const noexcept { return own_heap_ != nullptr; }
  bool imported() const noexcept { return imported_; }
  const Heap& heap() const noexcept { return *heap_; }
  Status adopt(std::uint64_t offset, std::uint64_t nbytes, std::uint64_t* ptr);
  bool forget(std::uint64_t ptr);

  const PoolProps& props() const noexcept { return props_; }
  int device() const noexcept { return device_; }

 private:
  enum class State : std::uint8_t { live, ready, pending };
  struct Block {
    std::uint64_t nbytes = 0;
    State state = State::ready;
    bool starts_piece = false;  // never joined to what lies before it
    Point freed;                // of a pending block
  };
  using Blocks = std::map<std::uint64_t, Block>;                // by address
  using BySize = std::set<std::pair<std::uint64_t, std::uint64_t>>;  // (nbytes, address)
  struct Pending {
    BySize by_size;
    std::set<std::pair<std::uint64_t, std::uint64_t>> by_sequence;  // (sequence, address)
  };
  using PendingMap = std::map<Stream*, Pending>;

  void unlist(Blocks::iterator block);
  void list(Blocks::iterator block);
  bool joinable(const Block& a, const Block& b) const;
  Blocks::iterator join(Blocks::iterator block);
  void drain();
  bool take_fitting(std::uint64_t nbytes, Stream* stream, std::uint64_t* ptr);
  bool take_waiting(std::uint64_t nbytes, std::uint64_t* ptr, Point* wait);
  void carve_block(Blocks::iterator block, std::uint64_t nbytes);
  bool grow(std::uint64_t nbytes);
  void collect(std::uint64_t keep_bytes, std::vector<Extent>* pages);
  void give_back(const std::vector<Extent>& pages);
  RegionRef make_region(std::uint64_t begin, std::uint64_t nbytes);

  const PoolProps props_;
  const int device_;
  PageTable& table_;
  Budget& budget_;
  const std::unique_ptr<Heap> own_heap_;
  Heap* const heap_;
  const bool imported_;

  std::mutex mutex_;  // guards what follows
  Blocks blocks_;
  BySize ready_;
  PendingMap pending_;
  AccessSet readers_;
  AccessSet writers_;
  std::atomic<bool> destroyed_{false};  // set under the lock
  std::uint64_t flags_[3] = {1, 1, 1};  // reuse_*: follow events, opportunistic, internal
  std::uint64_t threshold_ = 0;
  std::uint64_t reserved_ = 0, reserved_high_ = 0, used_ = 0, used_high_ = 0;
};

}  // namespace ringmem::host
