#include "mapping/growable.hpp"

#include <algorithm>

#include "mapping/arithmetic.hpp"
#include "mapping/limits.hpp"

namespace ringmem::mapping {

std::shared_ptr<Growable> Growable::create(DriverRef driver, GrowableOptions options) {
  require_positive(options.max_nbytes, "max_nbytes");
  require_positive(options.max_handle_nbytes, "max_handle_nbytes");
  require_reachable(*driver, options.props.location, options.grants);
  RangeRef range = AddressRange::reserve(driver, options.max_nbytes, 0, options.props);
  return std::make_shared<Growable>(std::move(range), std::move(options));
}

std::shared_ptr<Growable> Growable::adopt(std::vector<PhysicalRef> memories,
                                          std::vector<AccessGrant> grants) {
  if (memories.empty()) throw InvalidValue("memories is empty: there is nothing to attach");
  GrowableOptions options;
  options.props = memories.front()->props();
  options.grants = std::move(grants);
  std::vector<std::size_t> sizes;
  for (const PhysicalRef& memory : memories) {
    sizes.push_back(memory->nbytes());
    options.max_nbytes = checked_add(options.max_nbytes, memory->nbytes(), "nbytes");
  }
  auto growable = create(memories.front()->driver(), std::move(options));
  std::lock_guard layout(growable->layout_);
  growable->map_more(sizes, memories.data());
  growable->nbytes_ = growable->mapped_;
  return growable;
}

Growable::Growable(RangeRef range, GrowableOptions options)
    : range_(std::move(range)), options_(std::move(options)),
      recycler_(Recycler::of(range_->driver(), options_.props)) {}

Growable::~Growable() {
  if (process_.inherited() || Worker::finished() || life_ == Life::closed) return;
  // Nobody is left to try again, so this does.
  if (!release_all().unmapped) release_all();
}

void Growable::resize(std::size_t nbytes, const std::vector<StreamRef>& streams) {
  if (resize_in_place(nbytes)) return;
  if (nbytes < this->nbytes()) shrink(nbytes, streams);
  else grow(nbytes);
}

void Growable::require_reserved(std::size_t nbytes) const {
  if (nbytes <= reserved()) return;
  throw InvalidValue("nbytes: " + std::to_string(nbytes) + " bytes are more than the " +
                     std::to_string(reserved()) +
                     " that are reserved; make the buffer with a larger maximum");
}

// Growth into what is mapped: a step of the books, and a word to the mapping thread when what is
// mapped ahead gets low. False when there is more to do.
bool Growable::resize_in_place(std::size_t nbytes) {
  process_.require_own("resize");
  require_reserved(nbytes);
  bool low = false;
  {
    std::lock_guard lock(state_);
    require_open_locked();
    if (nbytes < nbytes_ || nbytes > mapped_) return false;
    nbytes_ = nbytes;
    low = ahead_is_low_locked();
  }
  if (low) wake();
  return true;
}

void Growable::grow(std::size_t nbytes) {
  process_.require_own("grow");
  require_reserved(nbytes);
  std::lock_guard layout(layout_);
  const std::size_t target = whole_pages(nbytes);
  {
    std::lock_guard state(state_);
    require_open_locked();
  }
  if (target > mapped_) map_up_to(target);
  bool low = false;
  {
    std::lock_guard state(state_);
    require_open_locked();
    nbytes_ = std::max(nbytes_, nbytes);
    low = ahead_is_low_locked();
  }
  if (low) wake();
}

void Growable::shrink(std::size_t nbytes, const std::vector<StreamRef>& streams) {
  std::shared_ptr<Guard> guard = Guard::record(driver(), streams);
  {
    std::lock_guard layout(layout_);
    std::lock_guard state(state_);
    require_open_locked();
    if (!pins_.empty() && nbytes < pins_.rbegin()->first) {
      throw InvalidValue("nbytes: " + std::to_string(nbytes) + " bytes would cut off a live view " +
                         "of the first " + std::to_string(pins_.rbegin()->first) +
                         "; drop the view first");
    }
    const std::size_t keep = whole_pages(nbytes);
    for (auto segment = segments_.rbegin();
         segment != segments_.rend() && segment->offset >= keep; ++segment) {
      // What lies beyond the old size was not in use, or has an older guard of its own.
      if (segment->offset < nbytes_) segment->guard = guard;
    }
    nbytes_ = nbytes;
  }
  wake();
}

void Growable::map_up_to(std::size_t target) {
  map_more(plan_handles(mapped_, target - mapped_, granularity(), options_.max_handle_nbytes),
           nullptr);
}

// Maps handles of these sizes behind what is mapped: memory that is `ready`, or new. One access
// call. All of it or nothing.
void Growable::map_more(const std::vector<std::size_t>& sizes, const PhysicalRef* ready) {
  Driver& driver = *range_->driver();
  check(clear_limbo(), "cuMemUnmap", "of pages that an earlier call could not unmap");
  const std::size_t start = mapped_;
  MappingTicket ticket(driver, sizes.size());
  if (segments_.size() + sizes.size() > segments_.capacity()) {
    segments_.reserve(2 * segments_.size() + sizes.size());  // push_back below cannot throw
  }
  const std::size_t before = segments_.size();
  const DevicePtr base = range_->ptr();
  try {
    for (const std::size_t size : sizes) {
      PhysicalRef memory = ready ? *ready++ : obtain(size);
      check(driver.mem_map(base + end(), size, memory->handle()), "cuMemMap");
      segments_.push_back(Segment{end(), size, std::move(memory), nullptr});
    }
    if (!options_.grants.empty()) {
      check(driver.mem_set_access(base + start, end() - start, options_.grants.data(),
                                  options_.grants.size()),
            "cuMemSetAccess");
    }
  } catch (...) {
    ticket.keep();
    return_mappings(sizes.size() - (segments_.size() - before));
    if (!ok(unmap_from(before))) clear_limbo();
    throw;
  }
  ticket.keep();
  std::lock_guard state(state_);
  mapped_ = end();
}

PhysicalRef Growable::obtain(std::size_t nbytes) {
  if (PhysicalRef memory = recycler_->take(nbytes)) return memory;
  try {
    return PhysicalMemory::create_pages(driver(), nbytes, options_.props);
  } catch (const DriverError& error) {
    if (error.status != Status::out_of_memory) throw;
  }
  // What is kept for reuse goes first, and what shrinks gave up and no work needs any more.
  Recycler::drain_all(*driver());
  Worker::flush();
  Recycler::drain_all(*driver());
  return PhysicalMemory::create_pages(driver(), nbytes, options_.props);
}

void Growable::reserve_ahead(std::size_t nbytes) {
  process_.require_own("reserve_ahead");
  {
    std::lock_guard state(state_);
    require_open_locked();
    ahead_ = round_up(std::min(nbytes, reserved()), granularity(), "nbytes");
  }
  wake();
}

void Growable::set_access(const std::vector<AccessGrant>& grants) {
  process_.require_own("cuMemSetAccess");
  require_reachable(*driver(), options_.props.location, grants);
  if (grants.empty()) return;
  std::lock_guard layout(layout_);
  {
    std::lock_guard state(state_);
    require_open_locked();
  }
  std::vector<AccessGrant> merged = options_.grants;
  for (const AccessGrant& grant : grants) {
    std::erase_if(merged, [&](const AccessGrant& old) { return old.location == grant.location; });
    if (grant.access != Access::none) merged.push_back(grant);
  }
  if (mapped_ > 0) {
    check(driver()->mem_set_access(range_->ptr(), mapped_, grants.data(), grants.size()),
          "cuMemSetAccess");
  }
  options_.grants = std::move(merged);
}

void Growable::pin(std::size_t nbytes) {
  std::lock_guard state(state_);
  require_open_locked();
  if (nbytes > nbytes_) {
    throw InvalidValue("nbytes: a view of " + std::to_string(nbytes) + " bytes is larger than the " +
                       "buffer's " + std::to_string(nbytes_) + "; resize first");
  }
  ++pins_[nbytes];
}

void Growable::unpin(std::size_t nbytes) noexcept {
  if (process_.inherited()) return;
  std::lock_guard state(state_);
  const auto found = pins_.find(nbytes);
  if (found != pins_.end() && --found->second == 0) pins_.erase(found);
}

DevicePtr Growable::ptr() const {
  std::lock_guard state(state_);
  require_open_locked();
  return range_->ptr();
}

std::size_t Growable::nbytes() const {
  std::lock_guard state(state_);
  return nbytes_;
}

std::size_t Growable::committed() const {
  std::lock_guard state(state_);
  return mapped_ + limbo_;
}

std::size_t Growable::handles() const {
  std::lock_guard layout(layout_);
  return segments_.size();
}

Status Growable::worker_status() const {
  std::lock_guard state(state_);
  return worker_status_;
}

bool Growable::closed() const {
  std::lock_guard state(state_);
  return life_ != Life::open;
}

std::vector<PhysicalRef> Growable::memories() const {
  process_.require_own("share");
  std::lock_guard layout(layout_);
  std::lock_guard state(state_);
  require_open_locked();
  std::vector<PhysicalRef> memories;
  for (const Segment& segment : segments_) {
    if (segment.offset < nbytes_) memories.push_back(segment.memory);
  }
  return memories;
}

std::size_t Growable::keep_locked() const noexcept {
  const std::size_t used = whole_pages(nbytes_);
  return ahead_ > reserved() - used ? reserved() : used + ahead_;
}

// Half of what is wanted ahead is used up: the mapping thread has time to follow.
bool Growable::ahead_is_low_locked() const noexcept {
  return ahead_ != 0 && mapped_ < reserved() && mapped_ < whole_pages(nbytes_) + ahead_ / 2;
}

void Growable::require_open_locked() const {
  if (life_ != Life::open) throw Closed("the growable buffer is closed");
}

// Never overflows: sizes are at most what is reserved, which is whole pages.
std::size_t Growable::whole_pages(std::size_t nbytes) const noexcept {
  const std::size_t page = granularity();
  return (nbytes + page - 1) / page * page;
}

void Growable::wake() noexcept { Worker::post(shared_from_this()); }

}  // namespace ringmem::mapping
