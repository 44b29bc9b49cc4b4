// What is not allocation: limits, trimming, figures, closing.
#include <algorithm>

#include "pool/debug.hpp"
#include "pool/pool.hpp"

namespace ringmem {

using namespace pool;

namespace {
constexpr auto relaxed = std::memory_order_relaxed;
}

// --- memory held ---------------------------------------------------------------------------------

void Pool::check_limit(std::size_t nbytes) {
  if (nbytes == unlimited) return;
  std::size_t page = 0;
  const char* failed = "";
  check([&] {
    const std::lock_guard growing(pages_.mutex());
    return pages_.find_page_bytes(&page, &failed);
  }(), failed);
  if (nbytes < page) {
    throw InvalidValue("limit is " + std::to_string(nbytes) + ": less than one page of the device, " +
                       "give at least " + std::to_string(page) + " bytes");
  }
}

void Pool::set_limit(std::size_t nbytes) {
  check_open();
  check_limit(nbytes);
  const std::size_t live = live_bytes();
  if (nbytes < live) {
    throw InvalidValue("limit is " + std::to_string(nbytes) + ": " + std::to_string(live) +
                       " bytes are allocated, give at least that");
  }
  const std::lock_guard growing(pages_.mutex());
  if (pages_.backing().is_open() && reserved() > nbytes) drain(true);
  std::size_t least = 0;
  check(pages_.set_limit(nbytes, &least), "cuMemRelease");
  // Blocks stay where they are, and so do the pages that they lie in.
  if (least) {
    throw InvalidValue("limit is " + std::to_string(nbytes) + ": the " + std::to_string(live) +
                       " bytes that are allocated lie in pages of " + std::to_string(least) +
                       " bytes, give at least that");
  }
}

std::size_t Pool::release_threshold() const noexcept { return threshold_.load(relaxed); }

void Pool::set_release_threshold(std::size_t nbytes) {
  check_open();
  threshold_.store(nbytes, relaxed);
  if (nbytes != unlimited) check(trim(nbytes), "cuMemRelease");
}

void Pool::reserve(std::size_t nbytes, StreamHandle stream) {
  check_open();
  Block block = allocate(nbytes, stream);
  // Straight to the heap: a parked block would serve this stream only.
  (void)deallocate(block, stream);
  drain(false);
}

Status Pool::trim(std::size_t keep_bytes) {
  if (foreign()) return refused_in_child();
  const std::lock_guard growing(pages_.mutex());
  if (!pages_.backing().is_open()) return Status::success;
  drain(true);
  return pages_.trim(keep_bytes);
}

int Pool::add_callback(OutOfMemoryCallback callback) {
  const std::lock_guard guard(callback_mutex_);
  callbacks_.emplace_back(next_callback_, std::move(callback));
  return next_callback_++;
}

void Pool::remove_callback(int id) {
  OutOfMemoryCallback removed;  // destroyed with no lock held
  const std::lock_guard guard(callback_mutex_);
  const auto found = std::find_if(callbacks_.begin(), callbacks_.end(),
                                  [id](const auto& entry) { return entry.first == id; });
  if (found == callbacks_.end()) return;
  removed = std::move(found->second);
  callbacks_.erase(found);
}

// --- figures -------------------------------------------------------------------------------------

// Visits, under its lock, every shard that a stream may have used.
template <class Visit>
void Pool::visit_shards(Visit visit) const {
  const auto look = [&](int slot) {
    const Shard& shard = shards_[static_cast<std::size_t>(slot)];
    const BiasedGuard guard(shard.lock);
    visit(shard);
  };
  for (int slot = 0; slot < streams_.active(); ++slot) look(slot);
  look(StreamOrder::shared_slot);
}

std::size_t Pool::live_count() const noexcept {
  std::uint64_t live = 0;
  visit_shards([&](const Shard& shard) { live += shard.allocations - shard.frees; });
  return live;
}

std::size_t Pool::live_bytes() const noexcept {
  std::int64_t live = 0;
  visit_shards([&](const Shard& shard) { live += shard.allocated.live; });
  return static_cast<std::size_t>(live);
}

PoolStatistics Pool::statistics() const {
  PoolStatistics s;
  if (foreign()) return s;
  int used = 0;
  std::int64_t requested = 0;
  std::int64_t allocated = 0;
  std::int64_t peak_requested = 0;
  std::int64_t peak_allocated = 0;
  std::uint64_t binned = 0;
  visit_shards([&](const Shard& shard) {
    used += shard.allocations != 0;
    requested += shard.requested.live;
    allocated += shard.allocated.live;
    peak_requested += shard.requested.peak;
    peak_allocated += shard.allocated.peak;
    s.allocations += shard.allocations;
    s.frees += shard.frees;
    binned += shard.binned;
  });
  if (used > 1) {
    peak_requested = std::min(peak_requested, levels_.peak_requested.load(relaxed));
    peak_allocated = std::min(peak_allocated, levels_.peak_allocated.load(relaxed));
  }
  const Backing::Counters& counters = pages_.backing().counters();
  s.requested = static_cast<std::size_t>(requested);
  s.allocated = static_cast<std::size_t>(allocated);
  s.peak_requested = static_cast<std::size_t>(std::max(peak_requested, requested));
  s.peak_allocated = static_cast<std::size_t>(std::max(peak_allocated, allocated));
  s.reserved = counters.reserved.load(relaxed);
  s.peak_reserved = counters.peak_reserved.load(relaxed);
  s.cached = s.reserved - std::min(s.reserved, s.allocated);
  s.live = s.allocations - s.frees;
  s.misses = options_.policy == PoolPolicy::best_fit ? misses_.load(relaxed)
                                                     : s.allocations - binned;
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
  const BiasedGuard guard(heap_.lock);
  for (const Space* space : {&heap_.medium, &heap_.large}) {
    if (const Node* node = space->largest()) {
      s.largest_free_block = std::max(s.largest_free_block, node->nbytes());
    }
  }
  return s;
}

void Pool::reset_peaks() {
  if (foreign()) return;
  for (Shard& shard : shards_) {
    const BiasedGuard guard(shard.lock);
    shard.settle(levels_);
    shard.requested.peak = shard.requested.live;
    shard.allocated.peak = shard.allocated.live;
  }
  levels_.peak_requested.store(levels_.requested.load(relaxed), relaxed);
  levels_.peak_allocated.store(levels_.allocated.load(relaxed), relaxed);
  pages_.backing().reset_peak();
}

std::vector<Pool::LiveBlock> Pool::live_blocks(std::size_t most) const {
  std::vector<LiveBlock> blocks;
  if (foreign()) return blocks;
  // All shards at once, so that what is seen is of one moment.
  std::array<std::unique_lock<BiasedLock>, StreamOrder::slots> guards;
  for (std::size_t i = 0; i < guards.size(); ++i) guards[i] = std::unique_lock(shards_[i].lock);
  const BiasedGuard guard(heap_.lock);
  for (const Space* space : {&heap_.medium, &heap_.large}) {
    for (Node* node = space->first(); node && blocks.size() < most; node = node->next) {
      if (node->is(NodeState::live)) blocks.push_back({address(node), node->requested});
      if (!node->is(NodeState::span)) continue;
      Span* span = node->blocks;
      for (std::uint32_t i = 0; i < span->count && blocks.size() < most; ++i) {
        if (span->blocks()[i].state() != SmallState::live) continue;
        blocks.push_back({span->ptr_of(i), span->requested(i)});
      }
    }
  }
  return blocks;
}

std::string Pool::inconsistency() const {
  if (foreign()) return {};
  const BiasedGuard guard(heap_.lock);
  for (const Space* space : {&heap_.medium, &heap_.large}) {
    if (const char* wrong = space->inconsistency()) return wrong;
  }
  return {};
}

// --- the end -------------------------------------------------------------------------------------

bool Pool::close(bool when_unused) {
  if (foreign()) return true;
  std::uint64_t open = generation_;
  const bool first = gate_.compare_exchange_strong(open, gate_closed);
  try {
    // An allocation that passed the gate before may be counted only now, or hold memory uncounted.
    if (live_count() == 0 && tear_down()) return true;
  } catch (const DriverError& error) {
    if (first && forbidden_by_capture(error.status)) gate_.store(generation_);
    throw;
  }
  if (when_unused) return true;
  if (first) gate_.store(generation_);
  return false;
}

// Nothing lives: waits for the work of what was freed, then gives all memory back. False: something
// came in between, and what it holds stays, in addresses that stay too.
bool Pool::tear_down() {
  (void)streams_.synchronize();  // blocks, with no lock held
  drain(true);
  (void)streams_.synchronize();  // what the drained spans were stamped with
  if (streams_.any_captures()) {
    throw DriverError(Status::stream_capture_unsupported, "Pool.close",
                      "it has memory that a stream freed which is being captured into a graph: "
                      "close it when that is over");
  }
  const std::lock_guard growing(pages_.mutex());
  if (!pages_.backing().is_open()) return true;
  check(pages_.trim(0), "cuMemRelease");
  pages_.sweep();
  if (reserved() != 0) return false;
  check(pages_.close(), "cuMemAddressFree");
  return true;
}

Pool::~Pool() {
  if (foreign()) {
    streams_.abandon();
    return;
  }
  try {
    debug_.reset();
    if (live_count() != 0) return;
    (void)close();
  } catch (...) {  // the process's end gives back what the driver would not take
  }
}

}  // namespace ringmem
