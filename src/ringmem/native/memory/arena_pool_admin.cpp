// The arena pool's own memory, its limit, its figures and its end.
#include "memory/arena_pool.hpp"

#include <algorithm>
#include <string>
#include <utility>

namespace ringmem {

namespace {

constexpr std::size_t arena_unit = std::size_t{2} << 20;  // bytes, as what follows
constexpr std::size_t largest_arena = std::size_t{1} << 30;

}  // namespace

// --- arenas --------------------------------------------------------------------------------------

std::size_t ArenaPool::next_arena(std::size_t nbytes) const {
  const std::lock_guard guard(mutex_);
  const std::size_t least = (nbytes + arena_unit - 1) / arena_unit * arena_unit;
  const std::size_t room =
      options_.limit - std::min(options_.limit, figures_.reserved);
  if (least > room) return 0;
  const std::size_t wish = std::min(largest_arena, std::max(options_.arena_bytes,
                                                            figures_.reserved));
  return std::min(std::max(least, wish / arena_unit * arena_unit),
                  room / arena_unit * arena_unit);
}

// With growth_ held. A wish that is too large is followed by one for what is needed.
bool ArenaPool::grow(std::size_t nbytes, Status* status, const char** operation) {
  {
    const std::lock_guard guard(mutex_);
    ++figures_.misses;
  }
  const std::size_t least = (nbytes + arena_unit - 1) / arena_unit * arena_unit;
  std::size_t size = next_arena(nbytes);
  *operation = "allocate";
  *status = Status::out_of_memory;
  if (size == 0) return false;
  DevicePtr ptr = 0;
  *status = source_->acquire(size, &ptr, operation);
  if (*status == Status::out_of_memory && size > least) {
    size = least;
    *status = source_->acquire(size, &ptr, operation);
  }
  if (!ok(*status)) return false;
  try {
    const std::lock_guard guard(mutex_);
    add_arena_locked(ptr, size);
  } catch (...) {
    release({ptr, size}, {}, {});
    throw;
  }
  return true;
}

void ArenaPool::add_arena_locked(DevicePtr ptr, std::size_t nbytes) {
  arenas_.reserve(arenas_.size() + 1);
  free_.insert(new_node_locked(ptr, nbytes));
  arenas_.push_back({ptr, nbytes});
  figures_.reserved += nbytes;
  figures_.peak_reserved = std::max(figures_.peak_reserved, figures_.reserved);
}

void ArenaPool::release(const Arena& arena, std::vector<Guard> guards, UsedStreams closed) {
  ReaperJob job;
  job.driver = driver_;
  job.guards = std::move(guards);
  job.closed = std::move(closed);
  job.run = source_->release_of(arena.ptr, arena.nbytes);
  job.what = std::string(source_->release_name()) + " of " + std::to_string(arena.nbytes) +
             " bytes";
  Reaper::instance().post(std::move(job));
}

std::size_t ArenaPool::unused_locked() const noexcept {
  return figures_.reserved - figures_.allocated - figures_.pending;
}

void ArenaPool::trim(std::size_t keep_bytes) {
  if (foreign()) return;
  settle(false);
  const std::lock_guard growing(growth_);
  std::vector<Arena> going;
  {
    const std::lock_guard guard(mutex_);
    flush_bins_locked();
    for (auto entry = free_.rbegin(); entry != free_.rend() && unused_locked() > keep_bytes;) {
      Node* node = *entry;
      if (node->prev || node->next) {
        ++entry;
        continue;
      }
      const Arena arena{node->ptr, node->nbytes};
      going.push_back(arena);
      std::erase_if(arenas_, [&](const Arena& other) { return other.ptr == arena.ptr; });
      figures_.reserved -= arena.nbytes;
      entry = std::make_reverse_iterator(free_.erase(std::next(entry).base()));
      drop_node_locked(node);
    }
  }
  for (const Arena& arena : going) release(arena, {}, {});
}

std::size_t ArenaPool::limit() const {
  const std::lock_guard guard(mutex_);
  return options_.limit;
}

void ArenaPool::set_limit(std::size_t nbytes) {
  check_open();
  bool over = false;
  {
    const std::lock_guard guard(mutex_);
    if (nbytes < figures_.allocated) {
      throw InvalidValue("limit is " + std::to_string(nbytes) + ": " +
                         std::to_string(figures_.allocated) +
                         " bytes are allocated, give at least that");
    }
    options_.limit = nbytes;
    over = figures_.reserved > nbytes;
  }
  if (over) trim(0);
}

void ArenaPool::reserve(std::size_t nbytes) {
  const Block block = allocate(nbytes, no_stream);
  check(deallocate(block, no_stream), "deallocate");
}

// --- the end, and figures ------------------------------------------------------------------------

bool ArenaPool::close() {
  if (foreign()) return true;
  Remains remains;
  {
    const std::lock_guard growing(growth_);
    const std::lock_guard guard(mutex_);
    if (figures_.allocations != figures_.frees) return false;
    closed_ = true;
    free_.clear();
    bins_ = {};
    figures_.reserved = figures_.pending = 0;
    remains = remains_locked();
  }
  release(std::move(remains));
  return true;
}

// Everything, once the pool is closed and nobody looks at pending blocks any more.
ArenaPool::Remains ArenaPool::remains_locked() noexcept {
  Remains remains;
  if (!closed_ || settling_ > 0) return remains;
  remains.arenas.swap(arenas_);
  remains.pending.swap(pending_);
  return remains;
}

void ArenaPool::release(Remains remains) {
  for (const Arena& arena : remains.arenas) {
    std::vector<Guard> guards;
    UsedStreams closed;
    for (Pending& entry : remains.pending) {
      if (entry.node->ptr < arena.ptr || entry.node->ptr >= arena.ptr + arena.nbytes) continue;
      guards.insert(guards.end(), entry.guards.begin(), entry.guards.end());
      for (auto& stream : entry.closed) add_stream(closed, std::move(stream));
    }
    release(arena, std::move(guards), std::move(closed));
  }
}

bool ArenaPool::closed() const {
  const std::lock_guard guard(mutex_);
  return closed_;
}

std::vector<Block> ArenaPool::live_blocks() const {
  const std::lock_guard guard(mutex_);
  std::vector<Block> blocks;
  for (const Node& node : nodes_) {
    if (node.state == State::live) blocks.push_back({node.ptr, node.requested, nullptr});
  }
  return blocks;
}

ArenaPoolStatistics ArenaPool::statistics() const {
  const std::lock_guard guard(mutex_);
  ArenaPoolStatistics f = figures_;
  f.live = f.allocations - f.frees;
  f.arenas = arenas_.size();
  if (!free_.empty()) f.largest_free_block = (*free_.rbegin())->nbytes;
  for (const Bin& bin : bins_) {
    if (bin.top) f.largest_free_block = std::max(f.largest_free_block, bin.top->nbytes);
  }
  return f;
}

void ArenaPool::reset_peaks() {
  const std::lock_guard guard(mutex_);
  figures_.peak_requested = figures_.requested;
  figures_.peak_allocated = figures_.allocated;
  figures_.peak_reserved = figures_.reserved;
}

void ArenaPool::out_of_memory(std::size_t nbytes, Status status, const char* operation) const {
  if (!ok(status) && status != Status::out_of_memory) throw DriverError(status, operation);
  const ArenaPoolStatistics now = statistics();
  Shortage shortage;
  shortage.requested = nbytes;
  MemoryInfo memory;
  if (ok(driver_->memory_info(device_, &memory))) shortage.free = memory.free;
  shortage.largest_free_block = now.largest_free_block;
  shortage.reserved = now.reserved;
  std::string detail = std::to_string(nbytes) + " bytes requested, " +
                       std::to_string(now.allocated) + " allocated, " +
                       std::to_string(now.pending) + " freed but in use by streams";
  const std::size_t most = limit();
  if (most != std::numeric_limits<std::size_t>::max()) detail += ", the pool's limit is " + std::to_string(most);
  throw OutOfMemory(operation, shortage, detail);
}

}  // namespace ringmem
