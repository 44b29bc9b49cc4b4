// The pool's small blocks: the way through a shard's spans.
#include "pool/pool.hpp"

namespace ringmem {

using namespace pool;

namespace {
constexpr auto relaxed = std::memory_order_relaxed;
}

bool Pool::pop_small(std::size_t nbytes, int size_class, Shard& shard, Block* block) noexcept {
  const BiasedGuard guard(shard.lock);
  Span* span = shard.spans[size_class];
  if (!span) [[unlikely]] return false;
  const std::uint32_t index = span->pop(nbytes);
  if (span->free == 0) shard.unlink(span);
  shard.count_allocation(nbytes, span->block_bytes, levels_);
  *block = {span->ptr_of(index), nbytes, SmallRef(span, index).record()};
  return true;
}

// Nothing at hand: blocks that other streams held back, or a new span.
Block Pool::allocate_small(std::size_t nbytes, int slot, StreamHandle stream) {
  const int size_class = small_class(nbytes);
  Shard& shard = shards_[slot];
  for (Block block;;) {
    {
      const BiasedGuard guard(shard.lock);
      if (!shard.pending.empty()) (void)reclaim(shard, size_class, slot, stream);
    }
    if (pop_small(nbytes, size_class, shard, &block)) return block;
    Span* span = new_span(size_class, slot, stream);
    {
      const BiasedGuard guard(shard.lock);
      ++shard.changes;
      shard.link(span);
    }
    if (pop_small(nbytes, size_class, shard, &block)) return block;
  }
}

Span* Pool::new_span(int size_class, int slot, StreamHandle stream) {
  Node* node = obtain({&heap_.medium, span_units(size_class), 0, slot, stream});
  const BiasedGuard guard(heap_.lock);
  Span* span = spans_.get(size_class, node);
  span->home.store(static_cast<std::uint8_t>(slot), relaxed);
  span->base = address(node);
  node->blocks = span;
  node->become(NodeState::span);
  return span;
}

// Blocks that other streams used come back: those whose work is done or was waited for, and if
// that gives none of this class, all of it, at the price of a wait on the device.
bool Pool::reclaim(Shard& shard, int size_class, int slot, StreamHandle stream) {
  streams_.poll();
  for (const bool wait : {false, true}) {
    std::size_t kept = 0;
    for (const Shard::Pending& pending : shard.pending) {
      Span* span = pending.block.span();
      const bool wanted = wait && span->size_class == size_class;
      if (streams_.ordered(slot, pending.tag) ||
          (wanted && ok(streams_.order_after(slot, stream, pending.tag)))) {
        if (span->free == 0) shard.link(span);
        span->push(pending.block.index());
      } else {
        shard.pending[kept++] = pending;
      }
    }
    shard.pending.erase(shard.pending.begin() + static_cast<std::ptrdiff_t>(kept), shard.pending.end());
    if (shard.spans[size_class]) return true;
  }
  return false;
}

Status Pool::deallocate_small(const Block& block, StreamHandle stream) noexcept {
  const SmallRef ref(block.record);
  Span* span = ref.span();
  SmallBlock* small = &ref.block();
  __builtin_prefetch(small, 1);  // the lock is a fence: without this, its miss would follow the span's
  const int slot = streams_.slot_of(stream);
  const int home = span->home.load(relaxed);
  Shard& shard = shards_[static_cast<std::size_t>(home)];
  shard.lock.lock();
  if (small->state() != SmallState::live || span->home.load(relaxed) != home ||
      span->ptr_of(ref.index()) != block.ptr) [[unlikely]] {
    shard.lock.unlock();
    return Status::illegal_state;
  }
  shard.count_free(span->requested(ref.index()), span->block_bytes);
  if (slot != home || small->shared) [[unlikely]] {
    return deallocate_shared(shard, ref, slot, stream);
  }
  if (span->free == 0) shard.link(span);
  span->push(ref.index());
  if (span->free == span->count && (span->prev || span->next)) [[unlikely]] {
    return deallocate_span(shard, span, home);
  }
  shard.lock.unlock();
  after_free();
  return Status::success;
}

// Another stream than the span's used it: it comes back when that is in order. Entered with the
// shard's lock, which it gives up; so is the next one.
Status Pool::deallocate_shared(Shard& shard, SmallRef ref, int slot,
                               StreamHandle stream) noexcept {
  SmallBlock& small = ref.block();
  std::uint64_t others = 0;
  std::vector<StreamHandle> users;
  if (small.shared) {
    others = shard.shared.extract(ref.record()).mapped();
    if (auto entry = shard.slotless.extract(ref.record())) users = std::move(entry.mapped());
    small.shared = 0;
  }
  small.become(SmallState::pending);
  shard.pending.push_back({ref, stamp_slotless(slot, stream, others, users)});
  shard.lock.unlock();
  after_free();
  return Status::success;
}

// The span is empty now, and another of its class is there: it may go.
Status Pool::deallocate_span(Shard& shard, Span* span, int home) noexcept {
  shard.unlink(span);
  ++shard.changes;
  shard.lock.unlock();
  drop_span(span, home);
  after_free();
  return Status::success;
}

void Pool::drop_span(Span* span, int slot) noexcept {
  const Tag tag = streams_.stamp(slot);
  const BiasedGuard guard(heap_.lock);
  Node* node = span->node;
  spans_.put(span);
  (void)heap_.space_of(*node).give(node, tag);
}

// Takes the shard's empty spans, linked through `next`. Under the shard's lock.
Span* Pool::empty_spans(Shard& shard) {
  Span* empty = nullptr;
  for (Span* head : shard.spans) {
    for (Span* span = head; span;) {
      Span* next = span->next;
      if (span->free == span->count) {
        shard.unlink(span);
        ++shard.changes;
        span->next = empty;
        empty = span;
      }
      span = next;
    }
  }
  return empty;
}

}  // namespace ringmem
