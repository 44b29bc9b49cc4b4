// The pool's way to memory that is not at hand: best fit among what streams have freed, then pages
// created or moved, then whatever waiting and asking can free, then OutOfMemory with its figures.
#include "pool/pool.hpp"

namespace ringmem {

using namespace pool;

namespace {

constexpr auto relaxed = std::memory_order_relaxed;

// An allocation made by a callback must not call the callbacks again.
thread_local bool in_callback = false;

}  // namespace

// A live node that the stream may use: found, or made by growing.
Node* Pool::obtain(const Want& wanted) {
  Want want = wanted;
  for (;;) {
    Node* node = search(want);
    if (!node) node = grow(want);
    const Tag tag = node->tag;
    const Status status = streams_.order_after(want.slot, want.stream, tag);
    if (ok(status)) return node;
    const bool captures = status == Status::stream_capture_isolation;
    if (captures && want.no_wait) {  // new pages were joined to memory in use: the host waits
      (void)streams_.synchronize();
      if (streams_.ordered(want.slot, tag)) return node;
    }
    give_back(node, tag);
    if (captures && !want.no_wait) {
      want.no_wait = true;
      streams_.record(tag);  // so that it may be done by the next time, or known to be captured
      continue;
    }
    if (status == Status::stream_capture_unsupported) continue;  // another one's: it is passed by
    // A stream in the tag is gone: the next search passes such memory by.
    if (streams_.orderable(tag)) check(status, "cuStreamWaitEvent");
  }
}

Node* Pool::search(const Want& want) {
  streams_.look_at_captures();
  // With a few streams the others' parked blocks join in: best fit then finds what it would find
  // with one. With many, leaving their locks alone is worth more.
  const int active = streams_.active();
  if (active > 1 && active <= 8) drain(false);
  const BiasedGuard guard(heap_.lock);
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
    Node* other = want.no_wait ? nullptr : space.best_foreign(want.slot, units, false);
    if (!own || (other && own->units > other->units + other->units / 32)) own = other;
  }
  if (own) return cut(want, own);
  Node* tail = space.tail();
  const bool fits = tail && tail->units >= units &&
                    (want.no_wait ? streams_.ordered(want.slot, tail->tag)
                                  : streams_.orderable(tail->tag));
  return fits ? cut(want, tail) : nullptr;
}

Node* Pool::cut(const Want& want, Node* node) {
  return want.alignment > unit_bytes ? want.space->take_aligned(node, want.units, want.alignment)
                                     : want.space->take(node, want.units);
}

// One round under the page mutex.
Node* Pool::try_grow(const Want& want, Status* status, const char** operation) {
  if (Node* node = search(want)) return node;  // somebody else has grown meanwhile
  Node* node = pages_.grow(*want.space, want.roomy(), status, operation);
  if (!node || want.roomy() == want.units) return node;
  const BiasedGuard guard(heap_.lock);
  return cut(want, want.space->give(node, node->tag));
}

// From cheap to dear: what is at hand; what streams keep for themselves; what waiting for pending
// work gives; what callbacks free.
Node* Pool::grow(const Want& want) {
  enum class Round { plain, drained, flushed, asked };
  misses_.fetch_add(1, relaxed);
  Status status = Status::success;
  const char* operation = nullptr;
  for (const Round round : {Round::plain, Round::drained, Round::flushed, Round::asked}) {
    if (round == Round::flushed) {
      retries_.fetch_add(1, relaxed);
      (void)streams_.synchronize();  // blocks, with no lock held
    }
    if (round == Round::asked && !ask_callbacks(std::size_t{want.units} * unit_bytes)) break;
    const std::lock_guard growing(pages_.mutex());
    check_open();  // whoever closed it under this lock found nothing of ours
    status = pages_.open(&operation);
    check(status, operation ? operation : "");
    drain(round != Round::plain);
    if (Node* node = try_grow(want, &status, &operation)) return node;
    if (!ok(status) && status != Status::out_of_memory) break;
  }
  out_of_memory(want, status, operation);
}

bool Pool::ask_callbacks(std::size_t nbytes) {
  if (in_callback) return false;
  std::vector<OutOfMemoryCallback> callbacks;
  {
    const std::lock_guard guard(callback_mutex_);
    for (const auto& [id, callback] : callbacks_) callbacks.push_back(callback);
  }
  if (callbacks.empty()) return false;
  struct Flag {
    Flag() { in_callback = true; }
    ~Flag() { in_callback = false; }
  } flag;
  bool again = false;
  for (const OutOfMemoryCallback& callback : callbacks) again |= callback(nbytes, statistics());
  if (again) retries_.fetch_add(1, relaxed);
  return again;
}

void Pool::out_of_memory(const Want& want, Status status, const char* operation) {
  if (!ok(status) && status != Status::out_of_memory) {
    throw DriverError(status, operation ? operation : "Pool.allocate");
  }
  const PoolStatistics now = statistics();
  MemoryInfo device;
  const bool known = ok(driver_->memory_info(device_, &device));
  Shortage shortage;
  shortage.requested = std::size_t{want.units} * unit_bytes;
  if (known) shortage.free = device.free;
  shortage.largest_free_block = now.largest_free_block;
  shortage.reserved = now.reserved;
  std::string detail = std::to_string(*shortage.requested) + " bytes requested, " +
                       std::to_string(now.allocated) + " allocated, " +
                       std::to_string(now.cached) + " cached";
  if (streams_.any_captures()) {
    detail += ", and what was freed on a stream that is being captured into a graph stays that "
              "stream's until the capture is over";
  }
  if (limit() != unlimited) detail += ", the pool's limit is " + std::to_string(limit());
  throw OutOfMemory(operation ? operation : "Pool.allocate", shortage, detail);
}

// What is parked, and with `spans` what streams keep in bins and in spans where nothing lives, goes
// to the heap.
void Pool::drain(bool spans) {
  if (spans) streams_.poll();
  for (int slot = 0; slot < streams_.active(); ++slot) {
    Shard& shard = shards_[slot];
    Node* parked = nullptr;
    Span* empty = nullptr;
    std::vector<Node*> binned;
    {
      const BiasedGuard guard(shard.lock);
      parked = shard.parked;
      shard.parked = nullptr;
      if (parked) ++shard.changes;
      shard.settle(levels_);
      if (spans) {
        for (auto& [units, bin] : shard.bins) binned.insert(binned.end(), bin.begin(), bin.end());
        shard.bins.clear();
        restore_idle(shard);
        empty = empty_spans(shard);
      }
    }
    if (parked) give_back(parked, parked->tag);
    for (Node* node : binned) give_back(node, node->tag);
    while (empty) {
      Span* next = empty->next;
      drop_span(empty, slot);
      empty = next;
    }
  }
}

}  // namespace ringmem
