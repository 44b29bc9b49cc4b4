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
      if (!shard.pending.empty()) reclaim(shard, size_class, slot, stream);
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
  node->tag = {};  // from here on: who else may still use blocks that are free in it
  node->become(NodeState::span);
  return span;
}

// Blocks of a class that other streams used come back: those whose work is done or was waited for,
// and if there are none, the oldest at the price of a wait on the device, which others share. Not
// more at once than is soon used up.
void Pool::reclaim(Shard& shard, int size_class, int slot, StreamHandle stream) {
  constexpr int most = 1024;
  PendingBlocks::Queues* queues = shard.pending.queues(size_class);
  if (!queues) return;
  streams_.poll();
  int taken = 0;
  for (const bool wait : {false, true}) {
    for (PendingBlocks::Queue& queue : *queues) {
      if (queue.entries.empty() || taken == most) continue;
      if (wait && !ok(streams_.order_after(slot, stream, queue.front_tag()))) continue;
      while (!queue.entries.empty() && taken < most && streams_.ordered(slot, queue.front_tag())) {
        restore(shard, shard.pending.pop(queue));
        ++taken;
      }
      if (wait && taken) return;
    }
    if (taken) return;
  }
}

// A block that was pending is free in its span.
void Pool::restore(Shard& shard, SmallRef block) noexcept {
  Span* span = block.span();
  if (span->free == 0) shard.link(span);
  span->push(block.index());
}

// Pending blocks whose work is done come back, and so do those of spans where nothing lives: they
// keep the order they need in the span's tag. Under the shard's lock, right before empty_spans().
void Pool::restore_idle(Shard& shard) {
  if (shard.pending.empty()) return;
  for (int size_class = 0; size_class < small_classes; ++size_class) {
    for (PendingBlocks::Queue& queue : *shard.pending.queues(size_class)) {
      while (!queue.entries.empty() && streams_.complete(queue.front_tag())) {
        restore(shard, shard.pending.pop(queue));
      }
    }
  }
  shard.pending.take_emptied([&](SmallRef block, Tag tag) {
    restore(shard, block);
    block.span()->node->tag = joined(block.span()->node->tag, tag);
  });
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
  if (span->free == span->present && (span->prev || span->next || span->emptied())) [[unlikely]] {
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
  shard.pending.add(ref, stamp_slotless(slot, stream, others, users));
  shard.lock.unlock();
  after_free();
  return Status::success;
}

// Nothing lives in the span now. If all of it is free and another of its class is there, it may go.
Status Pool::deallocate_span(Shard& shard, Span* span, int home) noexcept {
  if (span->emptied()) {
    shard.pending.note_emptied(span);
    shard.lock.unlock();
    after_free();
    return Status::success;
  }
  shard.unlink(span);
  ++shard.changes;
  shard.lock.unlock();
  drop_span(span, home);
  after_free();
  return Status::success;
}

void Pool::drop_span(Span* span, int slot) noexcept {
  Node* node = span->node;
  const Tag tag = joined(streams_.stamp_own(slot), node->tag);
  const BiasedGuard guard(heap_.lock);
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
