#include "mapping/range.hpp"

#include <bit>

#include "mapping/arithmetic.hpp"
#include "mapping/limits.hpp"

namespace ringmem::mapping {
namespace {

std::string describe(std::size_t offset, std::size_t end) {
  return std::to_string(offset) + " to " + std::to_string(end);
}

}  // namespace

void require_reachable(Driver& driver, Location owner, const std::vector<AccessGrant>& grants) {
  for (const AccessGrant& grant : grants) {
    const bool peers = grant.location.kind == LocationKind::device &&
                       owner.kind == LocationKind::device && grant.location.id != owner.id;
    if (!peers || grant.access == Access::none) continue;
    bool can = false;
    check(driver.peer_can_access(grant.location.id, owner.id, &can), "cuDeviceCanAccessPeer");
    if (!can) {
      throw DriverError(Status::peer_access_unsupported, "cuMemSetAccess",
                        "device " + std::to_string(grant.location.id) +
                            " cannot access memory of device " + std::to_string(owner.id));
    }
  }
}

std::shared_ptr<AddressRange> AddressRange::reserve(DriverRef driver, std::size_t nbytes,
                                                    std::size_t alignment,
                                                    const PhysicalProps& props) {
  require_positive(nbytes, "nbytes");
  if (alignment != 0 && !std::has_single_bit(alignment)) {
    throw InvalidValue("alignment is " + std::to_string(alignment) +
                       ": use 0 (the page size) or a power of two");
  }
  require_capable(*driver, props);
  const std::size_t page = granularity_of(*driver, props);
  auto range = std::make_shared<AddressRange>(driver, round_up(nbytes, page, "nbytes"), page);
  check(driver->address_reserve(range->nbytes_, alignment, 0, &range->ptr_),
        "cuMemAddressReserve", "for " + std::to_string(range->nbytes_) + " bytes");
  return range;
}

AddressRange::~AddressRange() {
  if (ptr_ == 0 || process_.inherited()) return;
  insist([this] { return driver_->address_free(ptr_, nbytes_); });
}

std::shared_ptr<MappedRange> AddressRange::map(const PhysicalRef& memory, std::size_t offset,
                                               const std::vector<AccessGrant>& grants) {
  process_.require_own("cuMemMap");
  require_multiple(offset, page_, "offset");
  if (memory->driver() != driver_) {
    throw InvalidValue("physical: the memory belongs to another driver than the address range");
  }
  const std::size_t nbytes = memory->nbytes();
  const std::size_t end = require_inside(offset, nbytes, nbytes_, "offset");
  require_reachable(*driver_, memory->props().location, grants);
  MappingTicket ticket(*driver_, 1);
  claim(offset, end);
  const DevicePtr at = ptr_ + offset;
  std::shared_ptr<MappedRange> mapped;
  PhysicalHandle handle = 0;
  try {
    mapped = std::make_shared<MappedRange>(shared_from_this(), memory, at, offset);
    handle = memory->enter();
  } catch (...) {
    if (mapped) mapped->closed_.store(true);
    yield(offset);
    throw;
  }
  const char* operation = "cuMemMap";
  Status status = driver_->mem_map(at, nbytes, handle);
  const bool in_place = ok(status);
  if (in_place && !grants.empty()) {
    operation = "cuMemSetAccess";
    status = driver_->mem_set_access(at, nbytes, grants.data(), grants.size());
  }
  if (ok(status)) {
    ticket.keep();
    return mapped;
  }
  Status undone = in_place ? driver_->mem_unmap(at, nbytes) : Status::success;
  if (!ok(undone) && gone(driver_->mem_unmap(at, nbytes))) undone = Status::success;
  if (ok(undone)) {
    mapped->closed_.store(true);
    undone = mapped->leave_parents();
  } else {
    ticket.keep();  // still mapped: the destructor of `mapped` tries once more
  }
  throw DriverError(status, operation,
                    ok(undone) ? "" : "and undoing it failed with " + status_name(undone));
}

void AddressRange::claim(std::size_t offset, std::size_t end) {
  std::lock_guard lock(mutex_);
  if (closed()) throw Closed("the address range is closed");
  auto next = taken_.lower_bound(offset);
  const bool hits_next = next != taken_.end() && next->first < end;
  const bool hits_previous = next != taken_.begin() && std::prev(next)->second > offset;
  if (hits_next || hits_previous) {
    const auto& other = hits_next ? *next : *std::prev(next);
    throw InvalidValue("offset: bytes " + describe(offset, end) + " overlap the mapping at " +
                       describe(other.first, other.second) + "; unmap that first");
  }
  taken_.emplace_hint(next, offset, end);
}

Status AddressRange::yield(std::size_t offset) noexcept {
  std::lock_guard lock(mutex_);
  taken_.erase(offset);
  return closed() && taken_.empty() ? free_locked() : Status::success;
}

void AddressRange::close() {
  if (process_.inherited()) return;
  std::lock_guard lock(mutex_);
  closed_.store(true, std::memory_order_relaxed);
  if (taken_.empty()) check(free_locked(), "cuMemAddressFree");
}

Status AddressRange::free_locked() noexcept {
  if (ptr_ == 0) return Status::success;
  Status status = driver_->address_free(ptr_, nbytes_);
  if (free_failed_ && gone(status)) status = Status::success;
  free_failed_ = !ok(status);
  if (ok(status)) ptr_ = 0;
  return status;
}

DevicePtr AddressRange::ptr() const {
  if (closed()) throw Closed("the address range is closed");
  return ptr_;
}

std::size_t AddressRange::mappings() const noexcept {
  std::lock_guard lock(mutex_);
  return taken_.size();
}

MappedRange::~MappedRange() {
  if (closed() || process_.inherited()) return;
  Driver& driver = *range_->driver();
  // Nobody is left to try again, so this does.
  if (ok(driver.mem_unmap(ptr_, nbytes())) || gone(driver.mem_unmap(ptr_, nbytes()))) {
    return_mappings(1);
    leave_parents();
  }
}

void MappedRange::set_access(const std::vector<AccessGrant>& grants) {
  process_.require_own("cuMemSetAccess");
  if (grants.empty()) return;
  require_reachable(*range_->driver(), memory_->props().location, grants);
  std::lock_guard lock(mutex_);
  if (closed()) throw Closed("the mapping is unmapped");
  check(range_->driver()->mem_set_access(ptr_, nbytes(), grants.data(), grants.size()),
        "cuMemSetAccess");
}

Access MappedRange::get_access(Location location) const {
  process_.require_own("cuMemGetAccess");
  std::lock_guard lock(mutex_);
  if (closed()) throw Closed("the mapping is unmapped");
  Access access = Access::none;
  check(range_->driver()->mem_get_access(ptr_, location, &access), "cuMemGetAccess");
  return access;
}

void MappedRange::unmap(const std::vector<StreamRef>& streams,
                        const std::vector<EventRef>& events) {
  if (closed() || process_.inherited()) return;
  wait_for(range_->driver(), streams, events);
  std::lock_guard lock(mutex_);
  if (closed()) return;
  Status status = range_->driver()->mem_unmap(ptr_, nbytes());
  if (unmap_failed_ && gone(status)) status = Status::success;
  unmap_failed_ = !ok(status);
  check(status, "cuMemUnmap");
  closed_.store(true, std::memory_order_relaxed);
  return_mappings(1);
  check(leave_parents(), "cuMemRelease", "after the mapping was unmapped");
}

// Physical memory first, addresses last; both are tried, the first failure is told.
Status MappedRange::leave_parents() noexcept {
  const Status memory = memory_->leave();
  const Status range = range_->yield(offset_);
  return ok(memory) ? range : memory;
}

DevicePtr MappedRange::ptr() const {
  if (closed()) throw Closed("the mapping is unmapped");
  return ptr_;
}

}  // namespace ringmem::mapping
