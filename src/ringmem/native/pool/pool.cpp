#include "pool/pool.hpp"

#include <algorithm>
#include <string>

namespace ringmem {

using namespace pool;

namespace {

constexpr auto relaxed = std::memory_order_relaxed;
constexpr std::uintptr_t small_tag = 1;  // in Block::record: a SmallBlock, not a Node
constexpr std::size_t medium_limit = std::size_t{1} << 20;
constexpr std::size_t largest_request = std::size_t{1} << 40;

bool is_small(const void* record) noexcept {
  return reinterpret_cast<std::uintptr_t>(record) & small_tag;
}
SmallBlock* small_of(void* record) noexcept {
  return reinterpret_cast<SmallBlock*>(reinterpret_cast<std::uintptr_t>(record) & ~small_tag);
}
void* record_of(SmallBlock* small) noexcept {
  return reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(small) | small_tag);
}
std::uint32_t units_of(std::size_t nbytes) noexcept {
  return static_cast<std::uint32_t>((nbytes + unit_bytes - 1) / unit_bytes);
}

}  // namespace

Pool::Pool(DriverRef driver, int device, PoolOptions options)
    : driver_(std::move(driver)),
      device_(device),
      options_(std::move(options)),
      streams_(*driver_, device),
      heap_(streams_),
      pages_(*driver_, device, options_, streams_, heap_) {}

Pool::~Pool() = default;

// --- allocate ------------------------------------------------------------------------------------

Block Pool::allocate(std::size_t nbytes, StreamHandle stream) {
  const int slot = streams_.slot_of(stream);
  if (nbytes - 1 < small_limit && slot != StreamOrder::shared_slot) {
    return allocate_small(nbytes, slot, stream);
  }
  if (nbytes - 1 >= largest_request) [[unlikely]] {
    throw InvalidValue("nbytes is " + std::to_string(nbytes) + "; 1 to 2^40 would do");
  }
  const std::uint32_t units = units_of(nbytes);
  Shard& shard = shards_[slot];
  shard.lock.lock();
  Node* parked = shard.parked;
  shard.parked = nullptr;
  if (parked && parked->units == units) [[likely]] {
    parked->requested = nbytes;
    parked->tag = {0, shard.changes};
    parked->become(NodeState::live);
    shard.count_allocation(nbytes, parked->nbytes(), levels_);
    shard.lock.unlock();
    return {parked->ptr, nbytes, parked};
  }
  if (parked) shard.settle(levels_);
  shard.lock.unlock();
  return allocate_slow(nbytes, 0, slot, stream, parked);
}

Block Pool::allocate(std::size_t nbytes, StreamHandle stream, std::size_t alignment) {
  if (alignment <= small_step && std::has_single_bit(alignment)) return allocate(nbytes, stream);
  if (!std::has_single_bit(alignment) || alignment > largest_request) {
    throw InvalidValue("alignment is " + std::to_string(alignment) +
                       "; a power of two up to 2^40 would do");
  }
  if (nbytes - 1 >= largest_request) {
    throw InvalidValue("nbytes is " + std::to_string(nbytes) + "; 1 to 2^40 would do");
  }
  return allocate_slow(nbytes, alignment, streams_.slot_of(stream), stream, nullptr);
}

Block Pool::allocate_slow(std::size_t nbytes, std::size_t alignment, int slot,
                          StreamHandle stream, Node* parked) {
  if (parked) give_back(parked, parked->tag);
  Space& space = nbytes < medium_limit ? heap_.medium : heap_.large;
  Node* node = obtain({&space, units_of(nbytes), alignment, slot, stream});
  node->requested = nbytes;
  Shard& shard = shards_[slot];
  const SpinGuard guard(shard.lock);
  node->tag = {0, ++shard.changes};
  shard.count_allocation(nbytes, node->nbytes(), levels_);
  return {node->ptr, nbytes, node};
}

// A live node that the stream may use: found, or made by growing.
Node* Pool::obtain(Want want) {
  for (;;) {
    Node* node = search(want);
    if (!node) node = grow(want);
    const Tag tag = node->tag;
    node->home = static_cast<std::uint8_t>(want.slot);
    node->tag = {};
    const Status status = streams_.order_after(want.slot, want.stream, tag);
    if (ok(status)) return node;
    give_back(node, tag);
    if (streams_.orderable(tag)) check(status, "cuStreamWaitEvent");
    // A stream in the tag is gone: the next search passes such memory by.
  }
}

Node* Pool::search(const Want& want) {
  // With a few streams the others' parked blocks join in: best fit then finds what it would find
  // with one. With many, leaving their locks alone is worth more.
  const int active = streams_.active();
  if (active > 1 && active <= 8) drain(false);
  const SpinGuard guard(heap_.lock);
  return search_locked(want);
}

// The best fit, whoever freed it: a stream that has no right to it yet will wait on the device. But
// memory that needs no wait is taken if it fits within 1/32 as well.
Node* Pool::search_locked(const Want& want) {
  Space& space = *want.space;
  const std::uint32_t units = want.roomy();
  Node* own = space.best_own(want.slot, units);
  if (streams_.active() > 1 || want.slot == StreamOrder::shared_slot) {
    Node* ordered = space.best_foreign(want.slot, units, true);
    if (!own || (ordered && ordered->units < own->units)) own = ordered;
    Node* other = space.best_foreign(want.slot, units, false);
    if (!own || (other && own->units > other->units + other->units / 32)) own = other;
  }
  if (own) return cut(want, own);
  Node* tail = space.tail();
  const bool fits = tail && tail->units >= units && streams_.orderable(tail->tag);
  return fits ? cut(want, tail) : nullptr;
}

Node* Pool::cut(const Want& want, Node* node) {
  return want.alignment > unit_bytes ? want.space->take_aligned(node, want.units, want.alignment)
                                     : want.space->take(node, want.units);
}

Node* Pool::grow(const Want& want) {
  const char* operation = nullptr;
  Status status = Status::success;
  for (int attempt = 0;; ++attempt) {
    {
      const std::lock_guard growing(pages_.mutex());
      status = pages_.open(&operation);
      check(status, operation ? operation : "");
      drain(attempt > 0);
      if (Node* node = search(want)) return node;
      misses_.fetch_add(1, relaxed);
      if (Node* node = pages_.grow(*want.space, want.roomy(), want.slot, &status, &operation)) {
        if (want.roomy() == want.units) return node;
        const Tag tag = node->tag;
        const SpinGuard guard(heap_.lock);
        return cut(want, want.space->give(node, tag));
      }
    }
    if (attempt == 1) break;
    retries_.fetch_add(1, relaxed);
    (void)streams_.synchronize();
  }
  out_of_memory(std::size_t{want.units} * unit_bytes, status, operation);
}

void Pool::out_of_memory(std::size_t nbytes, Status status, const char* operation) {
  throw DriverError(ok(status) ? Status::out_of_memory : status,
                    operation ? operation : "Pool.allocate",
                    "requested " + std::to_string(nbytes) + " bytes, reserved " +
                        std::to_string(reserved()));
}

// --- deallocate ----------------------------------------------------------------------------------

Status Pool::deallocate(const Block& block, StreamHandle stream) noexcept {
  if (is_small(block.record)) return deallocate_small(small_of(block.record), block, stream);
  Node* node = static_cast<Node*>(block.record);
  const int slot = streams_.slot_of(stream);
  const int home = node->home;
  Shard& shard = shards_[home];
  shard.lock.lock();
  if (!node->is(NodeState::live) || node->ptr != block.ptr || node->home != home) [[unlikely]] {
    shard.lock.unlock();
    return Status::illegal_state;
  }
  shard.count_free(node->requested, node->nbytes());
  const Tag tag = slot == StreamOrder::shared_slot ? Tag{} : streams_.stamp(slot, node->tag.mask);
  Node* leaving = node;
  Node* parked = nullptr;
  if (slot == home && node->tag.mask == 0 && node->tag.seq == shard.changes &&
      slot != StreamOrder::shared_slot) [[likely]] {
    node->tag = tag;
    node->become(NodeState::parked);
    leaving = shard.parked;
    shard.parked = node;
  } else {
    node->become(NodeState::busy);
    parked = shard.parked;
    shard.parked = nullptr;
    ++shard.changes;
    shard.settle(levels_);
  }
  shard.lock.unlock();
  if (parked) give_back(parked, parked->tag);
  if (leaving == node) {
    Tag left = tag;
    if (slot == StreamOrder::shared_slot) {
      (void)streams_.stamp_shared(stream, node->tag.mask, &left);
    }
    give_back(node, left);
  } else if (leaving) {
    give_back(leaving, leaving->tag);
  }
  return Status::success;
}

void Pool::give_back(Node* node, Tag tag) noexcept {
  const SpinGuard guard(heap_.lock);
  (void)heap_.space_of(*node).give(node, tag);
}

Status Pool::record_stream(Block& block, StreamHandle stream) {
  const int slot = streams_.slot_of(stream);
  const std::uint64_t mask = std::uint64_t{1} << slot;
  if (is_small(block.record)) {
    SmallBlock* small = small_of(block.record);
    Shard& shard = shards_[Span::of(small)->home.load(relaxed)];
    const SpinGuard guard(shard.lock);
    shard.shared[small] |= mask;
    small->shared = true;
    return Status::success;
  }
  Node* node = static_cast<Node*>(block.record);
  const SpinGuard guard(shards_[node->home].lock);
  node->tag.mask |= mask;
  return Status::success;
}

// What is parked, and with `spans` what small blocks hold and do not use, goes back to the heap.
void Pool::drain(bool spans) {
  for (int slot = 0; slot < StreamOrder::slots; ++slot) {
    Shard& shard = shards_[slot];
    Node* parked = nullptr;
    Span* empty = nullptr;
    {
      const SpinGuard guard(shard.lock);
      parked = shard.parked;
      shard.parked = nullptr;
      shard.settle(levels_);
      for (int i = 0; spans && i < small_classes; ++i) {
        for (Span* span = shard.spans[i]; span;) {
          Span* next = span->next;
          if (span->free == span->count) {
            shard.unlink(span);
            span->next = empty;
            empty = span;
          }
          span = next;
        }
      }
    }
    if (parked) give_back(parked, parked->tag);
    while (empty) {
      Span* next = empty->next;
      drop_span(empty, slot);
      empty = next;
    }
  }
}

// --- figures -------------------------------------------------------------------------------------

PoolStatistics Pool::statistics() const {
  PoolStatistics s;
  int used = 0;
  std::int64_t requested = 0;
  std::int64_t allocated = 0;
  std::int64_t peak_requested = 0;
  std::int64_t peak_allocated = 0;
  for (const Shard& shard : shards_) {
    const SpinGuard guard(shard.lock);
    used += shard.allocations != 0;
    requested += shard.requested.live;
    allocated += shard.allocated.live;
    peak_requested += shard.requested.peak;
    peak_allocated += shard.allocated.peak;
    s.allocations += shard.allocations;
    s.frees += shard.frees;
  }
  if (used > 1) {
    peak_requested = std::min(peak_requested, levels_.peak_requested.load(relaxed));
    peak_allocated = std::min(peak_allocated, levels_.peak_allocated.load(relaxed));
  }
  const Backing::Counters& counters = pages_.backing().counters();
  s.requested = static_cast<std::size_t>(requested);
  s.allocated = static_cast<std::size_t>(allocated);
  s.peak_requested = static_cast<std::size_t>(peak_requested);
  s.peak_allocated = static_cast<std::size_t>(peak_allocated);
  s.reserved = counters.reserved.load(relaxed);
  s.peak_reserved = counters.peak_reserved.load(relaxed);
  s.cached = s.reserved - std::min(s.reserved, s.allocated);
  s.live = s.allocations - s.frees;
  s.misses = misses_.load(relaxed);
  s.hits = s.allocations - std::min(s.allocations, s.misses);
  s.returns = s.frees;
  s.retries = retries_.load(relaxed);
  s.driver_calls = counters.calls.load(relaxed) + streams_.driver_calls();
  s.device_waits = streams_.device_waits();
  s.handles_created = counters.created.load(relaxed);
  s.handles_released = counters.released.load(relaxed);
  s.remaps = counters.moved.load(relaxed);
  s.remapped = counters.moved_bytes.load(relaxed);
  s.growth_ns = pages_.growth_ns();
  s.remap_ns = pages_.remap_ns();
  {
    const SpinGuard guard(heap_.lock);
    for (const Space* space : {&heap_.medium, &heap_.large}) {
      if (const Node* node = space->largest()) {
        s.largest_free_block = std::max(s.largest_free_block, node->nbytes());
      }
    }
  }
  return s;
}

}  // namespace ringmem
