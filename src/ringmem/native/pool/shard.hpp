// What one stream keeps for itself: a parked block, spans of small blocks, and its counters, behind
// a lock that only its own threads contend for.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "pool/lock.hpp"
#include "pool/node.hpp"
#include "pool/pending.hpp"
#include "pool/small.hpp"

namespace ringmem::pool {

// Live bytes of all shards, kept with slack: a shard announces its level only when it rises above
// what it announced before, and with 64 KiB to spare, so that a loop of allocate and free leaves
// the shared line alone.
struct Levels {
  std::atomic<std::int64_t> requested{0};
  std::atomic<std::int64_t> allocated{0};
  std::atomic<std::int64_t> peak_requested{0};
  std::atomic<std::int64_t> peak_allocated{0};
};

struct alignas(64) Shard {
  struct Counter {
    std::int64_t live = 0;
    std::int64_t peak = 0;
    std::int64_t announced = 0;
  };
  static constexpr std::int64_t slack = 64 << 10;

  mutable BiasedLock lock;
  // The block freed last, if nothing else happened on the stream since it was allocated: then best
  // fit would find it again for the same size, and the way there is spared.
  Node* parked = nullptr;
  std::uint64_t changes = 0;  // what this stream took from the heap and gave back
  Counter requested;
  Counter allocated;
  std::uint64_t allocations = 0;
  std::uint64_t frees = 0;
  std::uint64_t binned = 0;  // allocations that a bin served
  std::array<Span*, small_classes> spans{};  // those with a free block
  PendingBlocks pending;
  // Live small blocks used by other streams too: by record.
  std::unordered_map<const void*, std::uint64_t> shared;
  // Live blocks used by streams that have no slot: by record.
  std::unordered_map<const void*, std::vector<StreamHandle>> slotless;
  std::unordered_map<std::uint32_t, std::vector<Node*>> bins;  // by units, under a binning policy

  void count_allocation(std::size_t asked, std::size_t given, Levels& levels) noexcept {
    ++allocations;
    raise(requested, static_cast<std::int64_t>(asked), levels.requested, levels.peak_requested);
    raise(allocated, static_cast<std::int64_t>(given), levels.allocated, levels.peak_allocated);
  }
  void count_free(std::size_t asked, std::size_t given) noexcept {
    ++frees;
    requested.live -= static_cast<std::int64_t>(asked);
    allocated.live -= static_cast<std::int64_t>(given);
  }
  // Brings the shared levels down to the truth.
  void settle(Levels& levels) noexcept {
    lower(requested, levels.requested);
    lower(allocated, levels.allocated);
  }

  void link(Span* span) noexcept {
    Span*& head = spans[span->size_class];
    span->prev = nullptr;
    span->next = head;
    if (head) head->prev = span;
    head = span;
  }
  void unlink(Span* span) noexcept {
    if (span->next) span->next->prev = span->prev;
    if (span->prev) span->prev->next = span->next;
    else spans[span->size_class] = span->next;
  }

 private:
  static void raise(Counter& counter, std::int64_t by, std::atomic<std::int64_t>& level,
                    std::atomic<std::int64_t>& peak) noexcept {
    counter.live += by;
    if (counter.live > counter.peak) counter.peak = counter.live;
    if (counter.live > counter.announced) [[unlikely]] announce(counter, level, peak);
  }
  [[gnu::noinline, gnu::cold]] static void announce(Counter& counter,
                                                    std::atomic<std::int64_t>& level,
                                                    std::atomic<std::int64_t>& peak) noexcept {
    const std::int64_t now = counter.live + slack;
    const std::int64_t delta = now - counter.announced;
    const std::int64_t total = level.fetch_add(delta, std::memory_order_relaxed) + delta;
    counter.announced = now;
    std::int64_t seen = peak.load(std::memory_order_relaxed);
    while (seen < total &&
           !peak.compare_exchange_weak(seen, total, std::memory_order_relaxed)) {
    }
  }
  static void lower(Counter& counter, std::atomic<std::int64_t>& level) noexcept {
    if (counter.announced <= counter.live + slack) return;
    level.fetch_sub(counter.announced - counter.live - slack, std::memory_order_relaxed);
    counter.announced = counter.live + slack;
  }
};

}  // namespace ringmem::pool
