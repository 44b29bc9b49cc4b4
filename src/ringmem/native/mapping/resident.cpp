// Allocation out of tagged memory; sleep and wake are in resident_sleep.cpp.
#include "mapping/resident.hpp"

#include <algorithm>

#include "mapping/limits.hpp"
#include "mapping/plan.hpp"
#include "mapping/recycler.hpp"
#include "mapping/worker.hpp"

namespace ringmem::mapping {
namespace {

constexpr std::size_t alignment = 512;  // cudaMalloc gives 256; blocks of 512 coalesce copies

std::size_t default_reserve(Driver& driver, int device) {
  MemoryInfo info;
  check(driver.memory_info(device, &info), "cuMemGetInfo");
  return 2 * info.total;
}

const char* state_name(Residence state) {
  switch (state) {
    case Residence::awake: return "awake";
    case Residence::sleeping: return "going to sleep";
    case Residence::asleep: return "asleep";
    case Residence::waking: return "waking up";
    case Residence::closed: return "closed";
  }
  return "";
}

}  // namespace

std::shared_ptr<Resident> Resident::create(DriverRef driver, ResidentOptions options) {
  require_positive(options.min_handle_nbytes, "min_handle_nbytes");
  if (options.arena.slot_nbytes == 0 ||
      options.arena.piece_nbytes % options.arena.slot_nbytes != 0 ||
      options.arena.piece_nbytes == 0) {
    throw InvalidValue("piece_nbytes must be a multiple of slot_nbytes, and neither 0");
  }
  require_capable(*driver, options.props);
  const std::size_t reserve = options.reserve_nbytes != 0
                                  ? options.reserve_nbytes
                                  : default_reserve(*driver, options.props.location.id);
  RangeRef range = AddressRange::reserve(std::move(driver), reserve, 0, options.props);
  return std::make_shared<Resident>(std::move(range), std::move(options));
}

Resident::Resident(RangeRef range, ResidentOptions options)
    : range_(std::move(range)), options_(std::move(options)), base_(range_->ptr()),
      arena_(BackupArena::of(range_->driver(), options_.props.location.id, options_.arena)) {
  options_.min_handle_nbytes = round_up(options_.min_handle_nbytes, range_->granularity(),
                                        "min_handle_nbytes");
}

Resident::~Resident() {
  if (process_.inherited() || Worker::finished()) return;
  // Nobody closed it. What freed blocks are still used by stays mapped for good: a destructor
  // cannot wait, and unmapping what work uses would lose the device.
  const bool in_use = std::any_of(pending_.begin(), pending_.end(),
                                  [](const Pending& pending) { return !pending.guard->done(); });
  if (!in_use) unmap_from(0);
  drop_handles(0);
  if (!slots_.empty()) arena_->give_back(slots_);
  for (const StreamHandle stream : streams_) {
    if (stream != 0) insist([&] { return driver()->stream_destroy(device(), stream); });
  }
}

void Resident::require(Residence state, const char* operation) const {
  process_.require_own(operation);
  if (state_ == Residence::closed) throw Closed("the tag \"" + options_.tag + "\" is closed");
  if (state_ != state) {
    throw InvalidValue(std::string(operation) + ": the tag \"" + options_.tag + "\" is " +
                       state_name(state_) + "; it must be " + state_name(state));
  }
}

Block Resident::allocate(std::size_t nbytes, StreamHandle stream) {
  require_positive(nbytes, "nbytes");
  const std::size_t size = round_up(nbytes, alignment, "nbytes");
  std::lock_guard lock(mutex_);
  if (options_.backup != Backup::keep || state_ != Residence::asleep) {
    require(Residence::awake, "allocate");
  }
  reclaim(stream, false);
  std::size_t offset = 0;
  if (!take_free(size, &offset)) {
    reclaim(stream, true);
    if (!take_free(size, &offset)) {
      grow(size);
      take_free(size, &offset);
    }
  }
  live_.emplace(offset, Live{size, {}});
  live_nbytes_ += size;
  return Block{base_ + offset, nbytes, nullptr};
}

Status Resident::deallocate(const Block& block, StreamHandle stream) noexcept {
  if (process_.inherited()) return Status::success;
  try {
    std::lock_guard lock(mutex_);
    const std::size_t offset = block.ptr - base_;
    const auto found = live_.find(offset);
    if (block.ptr < base_ || found == live_.end()) return Status::invalid_value;
    Pending pending{offset, found->second.nbytes,
                    Guard::record(driver(), {StreamRef{device(), stream}}), stream,
                    found->second.others.empty()};
    for (const auto& other : found->second.others) pending.guard->follow(other);
    pending_.push_back(std::move(pending));
    live_nbytes_ -= found->second.nbytes;
    live_.erase(found);
    return Status::success;
  } catch (const DriverError& error) {
    return error.status;
  } catch (...) {
    return Status::out_of_memory;
  }
}

Status Resident::record_stream(Block& block, StreamHandle stream) {
  auto used = UsedStream::of(driver(), device(), stream);
  std::lock_guard lock(mutex_);
  const auto found = live_.find(block.ptr - base_);
  if (found == live_.end()) return Status::invalid_value;
  add_stream(found->second.others, std::move(used));
  return Status::success;
}

// Best fit, the rest stays free.
bool Resident::take_free(std::size_t nbytes, std::size_t* offset) {
  const auto fit = free_by_size_.lower_bound({nbytes, 0});
  if (fit == free_by_size_.end()) return false;
  const auto [size, at] = *fit;
  free_by_size_.erase(fit);
  free_.erase(at);
  if (size > nbytes) put_free(at + nbytes, size - nbytes);
  *offset = at;
  return true;
}

// Joins with free neighbours.
void Resident::put_free(std::size_t offset, std::size_t nbytes) {
  const auto next = free_.lower_bound(offset);
  if (next != free_.end() && next->first == offset + nbytes) {
    nbytes += next->second;
    free_by_size_.erase({next->second, next->first});
    free_.erase(next);
  }
  const auto after = free_.lower_bound(offset);
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      offset = before->first;
      nbytes += before->second;
      free_by_size_.erase({before->second, before->first});
      free_.erase(before);
    }
  }
  free_.emplace(offset, nbytes);
  free_by_size_.emplace(nbytes, offset);
}

// Freed blocks whose work is over become free; with `also_pending_on_it` those too that only
// `stream` used, which comes after itself.
void Resident::reclaim(StreamHandle stream, bool also_pending_on_it) {
  std::erase_if(pending_, [&](const Pending& pending) {
    const bool ordered = also_pending_on_it && pending.alone && pending.stream == stream;
    if (!ordered && !pending.guard->done()) return false;
    put_free(pending.offset, pending.nbytes);
    return true;
  });
}

// Room for a block of `nbytes` at the end: what is free there counts.
void Resident::grow(std::size_t nbytes) {
  std::size_t missing = nbytes;
  if (!free_.empty()) {
    const auto last = std::prev(free_.end());
    if (last->first + last->second == extent_) missing -= std::min(missing, last->second);
  }
  missing = std::max(round_up(missing, range_->granularity(), "nbytes"),
                     options_.min_handle_nbytes);
  if (missing > reserved() - extent_) {
    missing = round_up(nbytes, range_->granularity(), "nbytes");
    if (missing > reserved() - extent_) {
      throw DriverError(Status::out_of_memory, "cuMemMap",
                        "the tag \"" + options_.tag + "\" has " +
                            std::to_string(reserved() - extent_) + " bytes of addresses left");
    }
  }
  const std::size_t before = extent_;
  std::vector<std::size_t> sizes = plan_handles(before, missing, range_->granularity(),
                                                default_max_handle);
  // A rest below the smallest handle joins the one before it.
  if (sizes.size() > 1 && sizes.back() < options_.min_handle_nbytes) {
    sizes[sizes.size() - 2] += sizes.back();
    sizes.pop_back();
  }
  map_handles(sizes);
  put_free(before, missing);
}

// Behind what is mapped, with one access call. All or nothing.
void Resident::map_handles(const std::vector<std::size_t>& sizes) {
  Driver& d = *driver();
  MappingTicket ticket(d, sizes.size());
  const std::size_t before = handles_.size();
  const std::size_t start = extent_;
  std::size_t end = start;
  handles_.reserve(before + sizes.size());
  sizes_.reserve(before + sizes.size());
  try {
    for (const std::size_t size : sizes) {
      PhysicalRef memory = obtain(size);
      check(d.mem_map(base_ + end, size, memory->handle()), "cuMemMap");
      handles_.push_back(std::move(memory));
      end += size;
    }
    const AccessGrant grant{options_.props.location, Access::readwrite};
    check(d.mem_set_access(base_ + start, end - start, &grant, 1), "cuMemSetAccess");
  } catch (...) {
    if (end > start) {
      if (!ok(d.mem_unmap(base_ + start, end - start))) {  // one by one: some may be unmapped
        for (std::size_t at = start, i = before; i < handles_.size(); ++i) {
          const std::size_t size = handles_[i]->nbytes();
          insist([&] { return d.mem_unmap(base_ + at, size); });
          at += size;
        }
      }
      drop_handles(before);
    }
    throw;
  }
  ticket.keep();
  sizes_.insert(sizes_.end(), sizes.begin(), sizes.end());
  extent_ = end;
}

PhysicalRef Resident::obtain(std::size_t nbytes) {
  try {
    return PhysicalMemory::create_pages(driver(), nbytes, options_.props);
  } catch (const DriverError& error) {
    if (error.status != Status::out_of_memory) throw;
  }
  Recycler::drain_all(*driver());
  Worker::flush();
  Recycler::drain_all(*driver());
  return PhysicalMemory::create_pages(driver(), nbytes, options_.props);
}

// Lets go of handles that are unmapped; the first failure is told, the others are tried too.
Status Resident::drop_handles(std::size_t first) noexcept {
  Status status = Status::success;
  while (handles_.size() > first) {
    try {
      handles_.back()->close();
    } catch (const DriverError& error) {
      if (ok(status)) status = error.status;
    }
    handles_.pop_back();
  }
  return status;
}

std::size_t Resident::trim() {
  std::lock_guard lock(mutex_);
  if (state_ != Residence::awake) return 0;
  reclaim(default_stream, false);
  if (free_.empty()) return 0;
  const auto last = std::prev(free_.end());
  if (last->first + last->second != extent_) return 0;
  std::size_t keep = handles_.size();
  std::size_t end = extent_;
  while (keep > 0 && end - sizes_[keep - 1] >= last->first) end -= sizes_[--keep];
  if (keep == handles_.size()) return 0;
  check(unmap_from(keep), "cuMemUnmap");
  const std::size_t trimmed = extent_ - end;
  const auto [offset, nbytes] = *last;
  free_by_size_.erase({nbytes, offset});
  free_.erase(last);
  if (end > offset) put_free(offset, end - offset);
  extent_ = end;
  sizes_.resize(keep);
  check(drop_handles(keep), "cuMemRelease");
  return trimmed;
}

void Resident::close() {
  if (process_.inherited()) return;
  std::vector<std::shared_ptr<Guard>> guards;
  {
    std::lock_guard lock(mutex_);
    if (state_ == Residence::closed) return;
    if (!live_.empty()) {
      throw InvalidValue("close: " + std::to_string(live_.size()) + " blocks of the tag \"" +
                         options_.tag + "\" are live; drop the buffers first");
    }
    for (const Pending& pending : pending_) guards.push_back(pending.guard);
  }
  for (const auto& guard : guards) check(guard->wait(), "cuEventSynchronize");
  std::lock_guard lock(mutex_);
  if (!live_.empty() || state_ == Residence::sleeping || state_ == Residence::waking) {
    throw InvalidValue("close: the tag \"" + options_.tag + "\" is in use by another thread");
  }
  check(unmap_from(0), "cuMemUnmap");
  state_ = Residence::closed;
  arena_->give_back(slots_);
  slots_.clear();
  pending_.clear();
  const Status released = drop_handles(0);
  range_->close();
  check(released, "cuMemRelease");
}

std::string Resident::unusable() const {
  const Residence now = state();
  if (now == Residence::awake || options_.backup == Backup::keep) return {};
  return "its memory, tag '" + options_.tag + "', is " + state_name(now) +
         ": use it after residency.wake('" + options_.tag + "')";
}

Residence Resident::state() const {
  std::lock_guard lock(mutex_);
  return state_;
}

std::size_t Resident::live_nbytes() const {
  std::lock_guard lock(mutex_);
  return live_nbytes_;
}

std::size_t Resident::committed() const {
  std::lock_guard lock(mutex_);
  return handles_.empty() ? 0 : extent_;
}

std::size_t Resident::extent() const {
  std::lock_guard lock(mutex_);
  return extent_;
}

std::size_t Resident::backup_nbytes() const {
  std::lock_guard lock(mutex_);
  return slots_.size() * arena_->slot_nbytes();
}

}  // namespace ringmem::mapping
