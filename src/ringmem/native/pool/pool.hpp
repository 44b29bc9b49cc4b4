// The pool: stream-ordered allocation on reserved addresses backed by pages that can move.
//
// Small blocks (up to 32 KiB) come from spans of their size class, everything else by best fit.
// See docs/pool-design.md for who owns what. Locks nest in this order only:
//   page mutex > shard lock > heap lock > stream order's lock.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "driver/driver.hpp"
#include "driver/fork.hpp"
#include "memory/allocator.hpp"
#include "pool/options.hpp"
#include "pool/pages.hpp"
#include "pool/shard.hpp"
#include "pool/space.hpp"
#include "pool/statistics.hpp"
#include "pool/streams.hpp"

namespace ringmem {

class DebugAllocator;

class Pool final : public Allocator {
 public:
  // Asked when memory is out, with no lock held: true asks for one more try. May use the pool.
  using OutOfMemoryCallback = std::function<bool(std::size_t requested, const PoolStatistics&)>;
  struct LiveBlock {
    DevicePtr ptr;
    std::size_t nbytes;  // requested
  };

  // Makes no driver call but to ask how large a page is, if there is a limit: the first allocation
  // does. Throws InvalidValue if the limit is below one page.
  Pool(DriverRef driver, int device, PoolOptions options = {});
  // Gives everything back if nothing lives; else leaves all as it is, for the process's end.
  ~Pool() override;

  // What users allocate from: the pool itself, or with options.debug its debug allocator.
  Allocator& front() noexcept;
  DebugAllocator* debug() noexcept { return debug_.get(); }

  // --- allocation ------------------------------------------------------------------------------
  bool try_allocate(std::size_t nbytes, StreamHandle stream, Block* block) noexcept override;
  // Throws OutOfMemory, DriverError, InvalidValue, Closed. Blocks only as the last resort before
  // OutOfMemory, when it waits for work whose memory was freed.
  Block allocate(std::size_t nbytes, StreamHandle stream) override;
  // `alignment`: a power of two, up to 1 GiB.
  Block allocate(std::size_t nbytes, StreamHandle stream, std::size_t alignment);
  // illegal_state: not a live block of this pool (a double free, a foreign pointer).
  Status deallocate(const Block& block, StreamHandle stream) noexcept override;
  Status record_stream(Block& block, StreamHandle stream) override;
  Home home() const noexcept override { return {driver_.get(), device_, Place::device}; }
  // The live block that starts at `ptr`; false if there is none.
  bool find(DevicePtr ptr, Block* block);
  // To be called before a stream that this pool has seen is destroyed.
  void release_stream(StreamHandle stream);

  // The device has no virtual memory: the pool works on plain chunks of the driver. Then nothing
  // moves, alignment ends at 256 bytes, and trimming calls cuMemFree, which waits for the device.
  // Known from the first allocation on.
  bool chunked() const noexcept { return pages_.backing().chunked(); }

  // --- memory held -----------------------------------------------------------------------------
  std::size_t limit() const noexcept { return pages_.limit(); }
  // Throws InvalidValue below one page, or the pages in which blocks live: blocks do not move, and
  // nothing has changed then. Gives back what the limit no longer allows.
  void set_limit(std::size_t nbytes);
  std::size_t release_threshold() const noexcept;
  void set_release_threshold(std::size_t nbytes);  // trims at once
  // Makes sure that one allocation of `nbytes` needs no driver call.
  void reserve(std::size_t nbytes, StreamHandle stream);
  // Gives cached memory back until no more than `keep_bytes` are cached. Never waits: what may
  // still be in use is released now and leaves the device when its work is done.
  Status trim(std::size_t keep_bytes = 0);
  int add_callback(OutOfMemoryCallback callback);
  void remove_callback(int id);

  // --- the end ---------------------------------------------------------------------------------
  // With live blocks: refuses (false, and nothing happened), or with `when_unused` closes to new
  // allocations and gives everything back when the last block is freed. Without: waits for the
  // freed blocks' work, gives all memory back and throws if the driver failed. Idempotent.
  bool close(bool when_unused = false);
  bool closed() const noexcept { return gate_.load(std::memory_order_relaxed) == gate_closed; }
  // Whether this process is a fork of the one that made it.
  bool foreign() const noexcept {
    return generation_ != fork_generation();
  }
  // In a fork child this and the figures are empty: the parent's threads may hold the locks.
  std::vector<LiveBlock> live_blocks(std::size_t most = unlimited) const;

  PoolStatistics statistics() const;
  void reset_peaks();
  // What is wrong with the pool's own books; empty if nothing is. For tests, between operations.
  std::string inconsistency() const;
  const PoolOptions& options() const noexcept { return options_; }
  int device() const noexcept { return device_; }
  const DriverRef& driver() const noexcept { return driver_; }
  std::size_t reserved() const noexcept { return pages_.backing().counters().reserved.load(); }

 private:
  struct Want {  // one allocation on its way through the slow path
    pool::Space* space;
    std::uint32_t units;
    std::size_t alignment;  // 0: that of any block
    int slot;
    StreamHandle stream;
    bool no_wait = false;  // the stream captures: it cannot wait for work outside its graph

    // What must be found so that an aligned block fits for certain.
    std::uint32_t roomy() const noexcept {
      if (alignment <= pool::unit_bytes) return units;
      return units + static_cast<std::uint32_t>(alignment / pool::unit_bytes) - 1;
    }
  };
  static constexpr std::uint64_t gate_closed = ~std::uint64_t{0};

  // pool.cpp: the fast paths
  DevicePtr address(const pool::Node* node) const noexcept {
    return pages_.backing().real(node->ptr);
  }
  // Noinline is what is not on the way of a hit: the registers it needs are then not saved there.
  enum class Parked { taken, none, other };
  Parked take_parked(std::size_t nbytes, pool::Shard& shard, Block* block) noexcept;
  [[gnu::noinline]] bool try_free_node(std::size_t nbytes, int slot, StreamHandle stream,
                                       bool parked, Block* block) noexcept;
  [[gnu::noinline]] bool try_binned(std::size_t nbytes, int slot, Block* block) noexcept;
  [[gnu::noinline]] Status deallocate_to_heap(pool::Shard& shard, pool::Node* node,
                                              pool::Tag tag) noexcept;
  [[gnu::noinline]] Status deallocate_binned(pool::Shard& shard, pool::Node* node,
                                             pool::Tag tag) noexcept;
  void unpark(pool::Shard& shard) noexcept;
  Block finish(pool::Node* node, std::size_t nbytes, int slot) noexcept;
  Block allocate_slow(std::size_t nbytes, std::size_t alignment, int slot, StreamHandle stream);
  [[gnu::noinline]] void give_back(pool::Node* node, pool::Tag tag) noexcept;
  [[gnu::noinline]] Status deallocate_slotless(pool::Shard& shard, pool::Node* node, int slot,
                             StreamHandle stream) noexcept;
  pool::Tag stamp_slotless(int slot, StreamHandle stream, std::uint64_t others,
                           const std::vector<StreamHandle>& users) noexcept;
  // A release threshold, and a pool that closes when nothing lives any more, act after a free.
  void after_free() noexcept {
    if (threshold_.load(std::memory_order_relaxed) != unlimited || closed()) [[unlikely]] {
      trim_after_free();
    }
  }
  [[gnu::noinline]] void trim_after_free() noexcept;
  void check_process(const char* operation) const;
  void check_open() const;

  // pool_small.cpp
  bool pop_small(std::size_t nbytes, int size_class, pool::Shard& shard, Block* block) noexcept;
  Block allocate_small(std::size_t nbytes, int slot, StreamHandle stream);
  pool::Span* new_span(int size_class, int slot, StreamHandle stream);
  void reclaim(pool::Shard& shard, int size_class, int slot, StreamHandle stream);
  void restore(pool::Shard& shard, pool::SmallRef block) noexcept;
  void restore_idle(pool::Shard& shard);
  Status deallocate_small(const Block& block, StreamHandle stream) noexcept;
  [[gnu::noinline]] Status deallocate_shared(pool::Shard& shard, pool::SmallRef small, int slot,
                                             StreamHandle stream) noexcept;
  [[gnu::noinline]] Status deallocate_span(pool::Shard& shard, pool::Span* span,
                                           int home) noexcept;
  void drop_span(pool::Span* span, int slot) noexcept;
  pool::Span* empty_spans(pool::Shard& shard);

  // pool_bins.cpp: the policies that keep blocks by size
  std::uint32_t units_for(std::size_t nbytes) const noexcept;
  pool::Node* take_binned(std::uint32_t units, pool::Shard& shard) noexcept;

  // pool_slow.cpp: memory that is not at hand
  pool::Node* obtain(const Want& want);
  pool::Node* search(const Want& want);
  pool::Node* search_locked(const Want& want);
  pool::Node* cut(const Want& want, pool::Node* node);
  pool::Node* grow(const Want& want);
  pool::Node* try_grow(const Want& want, Status* status, const char** operation);
  bool ask_callbacks(std::size_t nbytes);
  void drain(bool spans);
  [[noreturn]] void out_of_memory(const Want& want, Status status, const char* operation);

  // pool_admin.cpp
  template <class Visit>
  void visit_shards(Visit visit) const;
  std::size_t live_count() const noexcept;
  std::size_t live_bytes() const noexcept;
  void check_limit(std::size_t nbytes);
  bool tear_down();

  const DriverRef driver_;
  const int device_;
  const PoolOptions options_;
  const std::uint64_t generation_;    // of forks: when it was made
  std::atomic<std::uint64_t> gate_;   // allocation is open while this is the process's generation
  std::atomic<std::size_t> threshold_;
  pool::StreamOrder streams_;
  pool::Levels levels_;
  std::array<pool::Shard, pool::StreamOrder::slots> shards_;
  pool::Heap heap_;
  pool::SpanStore spans_;  // guarded by the heap lock
  pool::Pages pages_;
  std::atomic<std::uint64_t> misses_{0};
  std::atomic<std::uint64_t> retries_{0};
  std::mutex callback_mutex_;
  std::vector<std::pair<int, OutOfMemoryCallback>> callbacks_;
  int next_callback_ = 0;
  std::unique_ptr<DebugAllocator> debug_;
};

}  // namespace ringmem
