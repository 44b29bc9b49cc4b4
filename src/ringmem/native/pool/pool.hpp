// The pool: stream-ordered allocation on reserved addresses backed by pages that can move.
//
// Small blocks (up to 32 KiB) come from spans of their size class, everything else by best fit.
// See docs/pool-design.md for who owns what. Locks nest in this order only:
//   page mutex > heap lock > stream order's lock, and shard lock > stream order's lock.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "driver/driver.hpp"
#include "memory/allocator.hpp"
#include "pool/options.hpp"
#include "pool/pages.hpp"
#include "pool/shard.hpp"
#include "pool/space.hpp"
#include "pool/statistics.hpp"
#include "pool/streams.hpp"

namespace ringmem {

class Pool final : public Allocator {
 public:
  // Makes no driver call: the first allocation does.
  Pool(DriverRef driver, int device, PoolOptions options = {});
  ~Pool() override;

  Block allocate(std::size_t nbytes, StreamHandle stream) override;
  Block allocate(std::size_t nbytes, StreamHandle stream, std::size_t alignment);
  Status deallocate(const Block& block, StreamHandle stream) noexcept override;
  Status record_stream(Block& block, StreamHandle stream) override;

  PoolStatistics statistics() const;
  std::size_t reserved() const noexcept { return pages_.backing().counters().reserved.load(); }

 private:
  struct Want {  // one allocation on its way through the slow path
    pool::Space* space;
    std::uint32_t units;
    std::size_t alignment;  // 0: that of any block
    int slot;
    StreamHandle stream;

    // What must be found so that an aligned block fits for certain.
    std::uint32_t roomy() const noexcept {
      if (alignment <= pool::unit_bytes) return units;
      return units + static_cast<std::uint32_t>(alignment / pool::unit_bytes) - 1;
    }
  };

  Block allocate_small(std::size_t nbytes, int slot, StreamHandle stream);
  Block allocate_slow(std::size_t nbytes, std::size_t alignment, int slot, StreamHandle stream,
                      pool::Node* parked);
  pool::Span* new_span(int size_class, int slot, StreamHandle stream);
  bool reclaim(pool::Shard& shard, int size_class, int slot, StreamHandle stream);
  pool::Span* give_small(pool::Shard& shard, pool::Span* span, pool::SmallBlock* small) noexcept;
  Status deallocate_small(pool::SmallBlock* small, const Block& block,
                          StreamHandle stream) noexcept;
  void drop_span(pool::Span* span, int slot) noexcept;
  pool::Node* obtain(Want want);
  pool::Node* search(const Want& want);
  pool::Node* search_locked(const Want& want);
  pool::Node* cut(const Want& want, pool::Node* node);
  pool::Node* grow(const Want& want);
  void give_back(pool::Node* node, pool::Tag tag) noexcept;
  void drain(bool spans);
  [[noreturn]] void out_of_memory(std::size_t nbytes, Status status, const char* operation);

  const DriverRef driver_;
  const int device_;
  const PoolOptions options_;
  pool::StreamOrder streams_;
  pool::Levels levels_;
  std::array<pool::Shard, pool::StreamOrder::slots> shards_;
  pool::Heap heap_;
  pool::SpanStore spans_;  // guarded by the heap lock
  pool::Pages pages_;
  std::atomic<std::uint64_t> misses_{0};
  std::atomic<std::uint64_t> retries_{0};
};

}  // namespace ringmem
