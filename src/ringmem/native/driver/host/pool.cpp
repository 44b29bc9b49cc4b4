#include "driver/host/pool.hpp"

#include <algorithm>
#include <tuple>

#include "driver/host/process.hpp"

namespace ringmem::host {

Pool::Pool(Setup setup)
    : props_(setup.props),
      device_(setup.device),
      table_(*setup.table),
      budget_(*setup.budget),
      own_heap_(std::move(setup.own_heap)),
      heap_(own_heap_ ? own_heap_.get() : setup.heap),
      imported_(setup.imported) {
  const bool on_device = props_.location.kind == LocationKind::device;
  readers_ = writers_ = host_access | (on_device ? bit_of(device_) : 0);
}

// By now nothing is mapped for it: regions hold the pool, so none is left.
Pool::~Pool() {
  if (own_heap_) table_.remove_territory(heap_->base());
}

RegionRef Pool::make_region(std::uint64_t begin, std::uint64_t nbytes) {
  auto region = std::make_shared<Region>();
  region->base = begin;
  region->nbytes = nbytes;
  region->kind = RegionKind::pool;
  region->on_host = props_.location.kind != LocationKind::device;
  region->device = device_;
  region->readers = readers_;
  region->writers = writers_;
  region->pool = shared_from_this();
  return region;
}

void Pool::list(Blocks::iterator block) {
  const auto& [ptr, info] = *block;
  if (info.state == State::ready) {
    ready_.emplace(info.nbytes, ptr);
  } else {
    Pending& pending = pending_[info.freed.stream.get()];
    pending.by_size.emplace(info.nbytes, ptr);
    pending.by_sequence.emplace(info.freed.sequence, ptr);
  }
}

void Pool::unlist(Blocks::iterator block) {
  const auto& [ptr, info] = *block;
  if (info.state == State::ready) {
    ready_.erase({info.nbytes, ptr});
    return;
  }
  const auto it = pending_.find(info.freed.stream.get());
  it->second.by_size.erase({info.nbytes, ptr});
  it->second.by_sequence.erase({info.freed.sequence, ptr});
  if (it->second.by_size.empty()) pending_.erase(it);
}

bool Pool::joinable(const Block& a, const Block& b) const {
  if (b.starts_piece || a.state != b.state || a.state == State::live) return false;
  return a.state == State::ready || a.freed.stream == b.freed.stream;
}

// Joins a free block that is in no list with its free neighbours, which are. In no list afterwards.
Pool::Blocks::iterator Pool::join(Blocks::iterator block) {
  const auto absorb = [this](Blocks::iterator left, Blocks::iterator right) {
    left->second.nbytes += right->second.nbytes;
    std::uint64_t& sequence = left->second.freed.sequence;
    sequence = std::max(sequence, right->second.freed.sequence);
    blocks_.erase(right);
  };
  if (const auto next = std::next(block);
      next != blocks_.end() && joinable(block->second, next->second)) {
    unlist(next);
    absorb(block, next);
  }
  if (block != blocks_.begin()) {
    if (const auto previous = std::prev(block); joinable(previous->second, block->second)) {
      unlist(previous);
      absorb(previous, block);
      return previous;
    }
  }
  return block;
}

// Pending blocks whose freeing point has passed become ready.
void Pool::drain() {
  for (auto it = pending_.begin(); it != pending_.end();) {
    Stream* const stream = it->first;
    ++it;  // unlist() erases the entry when it becomes empty
    for (;;) {
      const auto found = pending_.find(stream);
      if (found == pending_.end()) break;
      const auto [sequence, ptr] = *found->second.by_sequence.begin();
      if (!stream->done(sequence)) break;
      const auto block = blocks_.find(ptr);
      unlist(block);
      block->second.state = State::ready;
      const Point gone = std::exchange(block->second.freed, {});  // may be the stream's last
      list(join(block));
      if (pending_.find(stream) == pending_.end()) break;
    }
  }
}

// Makes a free block that is in no list a live one of `nbytes`; the rest stays free.
void Pool::carve_block(Blocks::iterator block, std::uint64_t nbytes) {
  Block& info = block->second;
  if (info.nbytes > nbytes) {
    Block rest = info;
    rest.nbytes = info.nbytes - nbytes;
    rest.starts_piece = false;
    list(blocks_.emplace_hint(std::next(block), block->first + nbytes, std::move(rest)));
  }
  info.nbytes = nbytes;
  info.state = State::live;
  info.freed = {};
  used_ += nbytes;
  used_high_ = std::max(used_high_, used_);
}

// The tighter of the best ready block and the best that this stream itself has freed.
bool Pool::take_fitting(std::uint64_t nbytes, Stream* stream, std::uint64_t* ptr) {
  const BySize::key_type wanted{nbytes, 0};
  const auto ready = ready_.lower_bound(wanted);
  std::uint64_t best = 0, best_size = ~std::uint64_t{0};
  if (ready != ready_.end()) std::tie(best_size, best) = *ready;
  if (const auto own = pending_.find(stream); own != pending_.end()) {
    const auto it = own->second.by_size.lower_bound(wanted);
    if (it != own->second.by_size.end() && it->first <= best_size)
      std::tie(best_size, best) = *it;
  }
  if (best == 0) return false;
  const auto block = blocks_.find(best);
  unlist(block);
  carve_block(block, nbytes);
  *ptr = best;
  return true;
}

bool Pool::take_waiting(std::uint64_t nbytes, std::uint64_t* ptr, Point* wait) {
  for (auto& [stream, pending] : pending_) {
    const auto it = pending.by_size.lower_bound({nbytes, 0});
    if (it == pending.by_size.end()) continue;
    const auto block = blocks_.find(it->second);
    *wait = block->second.freed;
    *ptr = block->first;
    unlist(block);
    carve_block(block, nbytes);
    return true;
  }
  return false;
}

bool Pool::grow(std::uint64_t nbytes) {
  const std::uint64_t least = round_up(nbytes, page);
  for (const std::uint64_t piece : {std::max(least, chunk), least}) {
    if (props_.max_size != 0 && reserved_ + piece > round_up(props_.max_size, page)) continue;
    if (!budget_.charge(piece)) continue;
    std::uint64_t begin = 0;
    if (!ok(heap_->take(piece, page, &begin))) {
      budget_.release(piece);
      continue;
    }
    table_.insert(make_region(begin, piece));
    list(blocks_.emplace(begin, Block{piece, State::ready, true, {}}).first);
    reserved_ += piece;
    reserved_high_ = std::max(reserved_high_, reserved_);
    return true;
  }
  return false;
}

Status Pool::allocate(std::uint64_t nbytes, const std::shared_ptr<Stream>& stream,
                      std::uint64_t* ptr, Point* wait) {
  if (nbytes == 0 || imported_) return Status::invalid_value;
  if (nbytes > budget_.limit()) return Status::out_of_memory;
  nbytes = round_up(nbytes, Heap::alignment);
  std::vector<Extent> pages;
  {
    const std::lock_guard lock(mutex_);
    if (!pending_.empty() && flags_[1]) drain();
    if (take_fitting(nbytes, stream.get(), ptr)) return Status::success;
    if (grow(nbytes)) return take_fitting(nbytes, stream.get(), ptr) ? Status::success
                                                                     : Status::unknown;
    collect(0, &pages);
  }
  // No room: the free pages go back, and come again in one piece.
  give_back(pages);
  const std::lock_guard lock(mutex_);
  if ((take_fitting(nbytes, stream.get(), ptr)) ||
      (grow(nbytes) && take_fitting(nbytes, stream.get(), ptr)))
    return Status::success;
  if (flags_[2] && take_waiting(nbytes, ptr, wait)) return Status::success;
  return Status::out_of_memory;
}

Status Pool::free(std::uint64_t ptr, Point point) {
  const std::lock_guard lock(mutex_);
  const auto block = blocks_.find(ptr);
  if (block == blocks_.end() || block->second.state != State::live) return Status::invalid_value;
  used_ -= block->second.nbytes;
  if (point.done()) {
    block->second.state = State::ready;
  } else {
    block->second.state = State::pending;
    block->second.freed = std::move(point);
  }
  list(join(block));
  return Status::success;
}

bool Pool::find(std::uint64_t ptr, Extent* block) {
  const std::lock_guard lock(mutex_);
  auto next = blocks_.upper_bound(ptr);
  if (next == blocks_.begin()) return false;
  const auto& [begin, info] = *std::prev(next);
  if (ptr >= begin + info.nbytes || info.state != State::live) return false;
  *block = {begin, begin + info.nbytes};
  return true;
}

// Takes whole free pages out of the pool, largest blocks first.
void Pool::collect(std::uint64_t keep_bytes, std::vector<Extent>* pages) {
  if (reserved_ <= keep_bytes) return;
  drain();
  for (auto it = ready_.end(); it != ready_.begin() && reserved_ > keep_bytes;) {
    --it;
    const std::uint64_t begin = it->second, end = begin + it->first;
    if (it->first < page) break;
    const std::uint64_t first = round_up(begin, page);
    std::uint64_t last = round_down(end, page);
    if (first >= last) continue;
    last = first + std::min(last - first, round_up(reserved_ - keep_bytes, page));
    const auto block = blocks_.find(begin);
    const bool starts_piece = block->second.starts_piece;
    it = ready_.erase(it);
    blocks_.erase(block);
    if (begin < first)
      list(blocks_.emplace(begin, Block{first - begin, State::ready, starts_piece, {}}).first);
    if (last < end) list(blocks_.emplace(last, Block{end - last, State::ready, true, {}}).first);
    // What follows the pages now starts a piece, free or live.
    if (const auto next = blocks_.find(last); next != blocks_.end())
      next->second.starts_piece = true;
    table_.carve(first, last);
    reserved_ -= last - first;
    pages->push_back({first, last});
    it = ready_.lower_bound({end - begin, begin});
  }
}

void Pool::give_back(const std::vector<Extent>& pages) {
  for (const Extent& extent : pages) {
    heap_->give(extent.begin, extent.end - extent.begin);
    budget_.release(extent.end - extent.begin);
  }
}

void Pool::trim(std::uint64_t keep_bytes) {
  std::vector<Extent> pages;
  {
    const std::lock_guard lock(mutex_);
    collect(keep_bytes, &pages);
  }
  give_back(pages);
}

void Pool::settle() {
  std::uint64_t keep = 0;
  {
    const std::lock_guard lock(mutex_);
    if (!pending_.empty()) drain();
    if (!destroyed_) keep = threshold_;
    if (reserved_ <= keep || ready_.empty()) return;
  }
  trim(keep);
}

void Pool::destroy() {
  {
    const std::lock_guard lock(mutex_);
    destroyed_ = true;
  }
  trim(0);
}

bool Pool::destroyed_and_empty() {
  const std::lock_guard lock(mutex_);
  return destroyed_ && blocks_.empty();
}

Status Pool::get(PoolAttribute attribute, std::uint64_t* value) {
  const std::lock_guard lock(mutex_);
  switch (attribute) {
    case PoolAttribute::reuse_follow_event_dependencies:
    case PoolAttribute::reuse_allow_opportunistic:
    case PoolAttribute::reuse_allow_internal_dependencies:
      *value = flags_[static_cast<int>(attribute) - 1];
      return Status::success;
    case PoolAttribute::release_threshold: *value = threshold_; return Status::success;
    case PoolAttribute::reserved_current: *value = reserved_; return Status::success;
    case PoolAttribute::reserved_high: *value = reserved_high_; return Status::success;
    case PoolAttribute::used_current: *value = used_; return Status::success;
    case PoolAttribute::used_high: *value = used_high_; return Status::success;
  }
  return Status::invalid_value;
}

Status Pool::set(PoolAttribute attribute, std::uint64_t value) {
  const std::lock_guard lock(mutex_);
  switch (attribute) {
    case PoolAttribute::reuse_follow_event_dependencies:
    case PoolAttribute::reuse_allow_opportunistic:
    case PoolAttribute::reuse_allow_internal_dependencies:
      flags_[static_cast<int>(attribute) - 1] = value != 0;
      return Status::success;
    case PoolAttribute::release_threshold:
      threshold_ = value;
      return Status::success;
    case PoolAttribute::reserved_high:
      if (value != 0) return Status::invalid_value;
      reserved_high_ = reserved_;
      return Status::success;
    case PoolAttribute::used_high:
      if (value != 0) return Status::invalid_value;
      used_high_ = used_;
      return Status::success;
    case PoolAttribute::reserved_current:
    case PoolAttribute::used_current:
      break;  // read only
  }
  return Status::invalid_value;
}

void Pool::get_access(AccessSet* readers, AccessSet* writers) {
  const std::lock_guard lock(mutex_);
  *readers = readers_;
  *writers = writers_;
}

void Pool::set_access(AccessSet readers, AccessSet writers) {
  const std::lock_guard lock(mutex_);
  readers_ = readers;
  writers_ = writers;
  table_.set_pool_access(this, readers, writers);
}

// Imported blocks lie where the exporter put them; only their regions make them reachable.
Status Pool::adopt(std::uint64_t offset, std::uint64_t nbytes, std::uint64_t* ptr) {
  if (!imported_ || nbytes == 0 || offset > heap_->span() || nbytes > heap_->span() - offset)
    return Status::invalid_value;
  const std::lock_guard lock(mutex_);
  const std::uint64_t begin = heap_->base() + offset;
  if (table_.overlaps(begin, nbytes)) return Status::invalid_value;
  table_.insert(make_region(begin, nbytes));
  blocks_.emplace(begin, Block{nbytes, State::live, true, {}});
  *ptr = begin;
  return Status::success;
}

bool Pool::forget(std::uint64_t ptr) {
  const std::lock_guard lock(mutex_);
  const auto block = blocks_.find(ptr);
  if (block == blocks_.end()) return false;
  blocks_.erase(block);
  table_.erase(ptr);
  return true;
}

}  // namespace ringmem::host
