// The pool's small blocks: the way through a shard's spans.
#include "pool/pool.hpp"

namespace ringmem {

using namespace pool;

namespace {
constexpr auto relaxed = std::memory_order_relaxed;
}

Block Pool::allocate_small(std::size_t nbytes, int slot, StreamHandle stream) {
  const int size_class = small_class(nbytes);
  Shard& shard = shards_[slot];
  shard.lock.lock();
  Span* span = shard.spans[size_class];
  if (!span) [[unlikely]] {
    bool reclaimed = false;
    if (!shard.pending.empty()) reclaimed = reclaim(shard, size_class, slot, stream);
    if (!reclaimed) {
      shard.lock.unlock();
      span = new_span(size_class, slot, stream);
      shard.lock.lock();
      shard.link(span);
    }
    span = shard.spans[size_class];
  }
  SmallBlock* small = span->pop();
  if (span->free == 0) shard.unlink(span);
  small->state = SmallState::live;
  small->requested = static_cast<std::uint16_t>(nbytes);
  shard.count_allocation(nbytes, span->block_bytes, levels_);
  const Block block{span->ptr_of(*small), nbytes,
                    reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(small) | 1)};
  shard.lock.unlock();
  return block;
}

Span* Pool::new_span(int size_class, int slot, StreamHandle stream) {
  Node* node = obtain({&heap_.medium, span_units(size_class), 0, slot, stream});
  const SpinGuard guard(heap_.lock);
  Span* span = spans_.get(size_class, node);
  span->home.store(static_cast<std::uint8_t>(slot), relaxed);
  node->span = span;
  return span;
}

// Blocks that other streams used come back: those whose work is done or was waited for, and if
// that gives none of this class, all, at the price of a wait on the device.
bool Pool::reclaim(Shard& shard, int size_class, int slot, StreamHandle stream) {
  streams_.poll();
  for (const bool wait : {false, true}) {
    std::size_t kept = 0;
    for (const Shard::Pending& pending : shard.pending) {
      Span* span = Span::of(pending.block);
      const bool wanted = wait && span->size_class == size_class;
      if (streams_.ordered(slot, pending.tag) ||
          (wanted && ok(streams_.order_after(slot, stream, pending.tag)))) {
        if (span->free == 0) shard.link(span);
        span->push(pending.block);
      } else {
        shard.pending[kept++] = pending;
      }
    }
    shard.pending.resize(kept);
    if (shard.spans[size_class]) return true;
  }
  return false;
}

// Returns the span if it is empty now and another of its class is there: it may go.
Span* Pool::give_small(Shard& shard, Span* span, SmallBlock* small) noexcept {
  if (span->free == 0) shard.link(span);
  span->push(small);
  if (span->free < span->count || (!span->prev && !span->next)) return nullptr;
  shard.unlink(span);
  return span;
}

Status Pool::deallocate_small(SmallBlock* small, const Block& block,
                              StreamHandle stream) noexcept {
  Span* span = Span::of(small);
  const int slot = streams_.slot_of(stream);
  const int home = span->home.load(relaxed);
  Shard& shard = shards_[home];
  Span* empty = nullptr;
  {
    const SpinGuard guard(shard.lock);
    if (small->state != SmallState::live || span->home.load(relaxed) != home ||
        span->ptr_of(*small) != block.ptr) [[unlikely]] {
      return Status::illegal_state;
    }
    shard.count_free(small->requested, span->block_bytes);
    if (slot == home && !small->shared) [[likely]] {
      empty = give_small(shard, span, small);
    } else {
      std::uint64_t others = 0;
      if (small->shared) {
        const auto entry = shard.shared.find(small);
        others = entry->second;
        shard.shared.erase(entry);
        small->shared = false;
      }
      Tag tag;
      if (slot == StreamOrder::shared_slot) (void)streams_.stamp_shared(stream, others, &tag);
      else tag = streams_.stamp(slot, others);
      small->state = SmallState::pending;
      shard.pending.push_back({small, tag});
    }
  }
  if (empty) drop_span(empty, home);
  return Status::success;
}

void Pool::drop_span(Span* span, int slot) noexcept {
  const Tag tag = streams_.stamp(slot);
  const SpinGuard guard(heap_.lock);
  Node* node = span->node;
  spans_.put(span);
  (void)heap_.space_of(*node).give(node, tag);
}

}  // namespace ringmem
