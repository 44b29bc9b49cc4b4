// Mapping, unmapping and access. The page table and the kernel are changed in an order in which
// nothing that runs is ever left with an address that the table allows and the kernel does not.
#include <sys/mman.h>

#include "driver/host/machine.hpp"

namespace ringmem::host {
namespace {

int protection_for(AccessSet readers, AccessSet writers) noexcept {
  if (writers != 0) return PROT_READ | PROT_WRITE;
  return readers != 0 ? PROT_READ : PROT_NONE;
}

AccessSet access_of(Location location) noexcept {
  return location.kind == LocationKind::device ? bit_of(location.id) : host_access;
}

// The kernel ran out of mappings although ours were counted, or out of memory for its own tables.
constexpr Status map_failure = Status::out_of_memory;

}  // namespace

// One mapping and the access it is to have.
struct VirtualMemory::Change {
  Mapping* mapping;
  AccessSet readers;
  AccessSet writers;
  int protection() const noexcept { return protection_for(readers, writers); }
  void apply(const AccessGrant& grant) noexcept {
    const AccessSet who = access_of(grant.location);
    readers = grant.access != Access::none ? readers | who : readers & ~who;
    writers = grant.access == Access::readwrite ? writers | who : writers & ~who;
  }
};

const std::pair<const std::uint64_t, std::uint64_t>* VirtualMemory::reservation_of(
    std::uint64_t ptr, std::uint64_t nbytes) const {
  auto next = reservations_.upper_bound(ptr);
  if (next == reservations_.begin()) return nullptr;
  const auto& found = *std::prev(next);
  const std::uint64_t offset = ptr - found.first;
  return offset < found.second && nbytes <= found.second - offset ? &found : nullptr;
}

// How many unmapped stretches of its reservation touch a mapping: with it, the kernel has that many
// mappings more than without it.
std::size_t VirtualMemory::gaps_beside(std::uint64_t ptr, std::uint64_t nbytes) const {
  const auto* reservation = reservation_of(ptr, nbytes);
  if (!reservation) return 0;
  const std::uint64_t end = ptr + nbytes;
  auto next = mappings_.lower_bound(end);
  const bool right = end != reservation->first + reservation->second &&
                     (next == mappings_.end() || next->first != end);
  auto previous = mappings_.lower_bound(ptr);
  const bool left = ptr != reservation->first &&
                    (previous == mappings_.begin() ||
                     std::prev(previous)->second.region->end() != ptr);
  return std::size_t{left} + std::size_t{right};
}

Status VirtualMemory::map(std::uint64_t ptr, std::uint64_t nbytes, PhysicalHandle handle) {
  const std::lock_guard lock(mutex_);
  Entry* entry = live(handle);
  if (!entry || nbytes != entry->physical->nbytes) return Status::invalid_value;
  if (ptr % machine_.config.granularity != 0 || !reservation_of(ptr, nbytes))
    return Status::invalid_value;
  if (machine_.table.overlaps(ptr, nbytes)) return Status::invalid_value;
  const std::size_t gaps = gaps_beside(ptr, nbytes);
  if (!charge_mappings(gaps, machine_.config.max_mappings)) return Status::out_of_memory;
  try {
    auto region = std::make_shared<Region>();
    region->base = ptr;
    region->nbytes = nbytes;
    region->kind = RegionKind::mapping;
    region->on_host = entry->physical->location.kind != LocationKind::device;
    region->device = region->on_host ? -1 : entry->physical->location.id;
    mappings_[ptr] = {region, entry->physical, handle, false, PROT_NONE};
    machine_.table.insert(std::move(region));
  } catch (...) {
    mappings_.erase(ptr);
    release_mappings(gaps);
    throw;
  }
  ++entry->mappings;
  return Status::success;
}

bool VirtualMemory::whole_mappings(std::uint64_t ptr, std::uint64_t nbytes,
                                   Mappings::iterator* first, Mappings::iterator* last) {
  *first = mappings_.find(ptr);
  std::uint64_t at = ptr;
  const std::uint64_t end = ptr + nbytes;
  if (end <= ptr) return false;
  for (*last = *first; *last != mappings_.end() && (*last)->first == at && at < end; ++*last)
    at = (*last)->second.region->end();
  return at == end;
}

Status VirtualMemory::unmap(std::uint64_t ptr, std::uint64_t nbytes) {
  std::vector<std::shared_ptr<Physical>> dropped;  // outlives the lock
  const std::lock_guard lock(mutex_);
  Mappings::iterator first, last;
  if (!whole_mappings(ptr, nbytes, &first, &last)) return Status::invalid_value;
  std::vector<RegionRef> regions;
  bool installed = false;
  for (auto it = first; it != last; ++it) {
    regions.push_back(it->second.region);
    installed |= it->second.installed;
  }
  dropped.reserve(regions.size());
  machine_.table.erase(regions);
  for (const RegionRef& region : regions) PageTable::drain(*region);
  if (installed &&
      mmap(reinterpret_cast<void*>(ptr), nbytes, PROT_NONE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) {
    machine_.table.insert(regions);
    return map_failure;
  }
  for (auto it = first; it != last;) {
    release_mappings(gaps_beside(it->first, it->second.region->nbytes));
    Entry& entry = handles_.at(it->second.handle);
    if (--entry.mappings == 0 && entry.references == 0) handles_.erase(it->second.handle);
    dropped.push_back(std::move(it->second.physical));
    it = mappings_.erase(it);
  }
  return Status::success;
}

Status VirtualMemory::check_grants(const Mapping& mapping, const AccessGrant* grants,
                                   std::size_t count) const {
  const Region& region = *mapping.region;
  for (std::size_t i = 0; i < count; ++i) {
    const Location location = grants[i].location;
    if (location.kind == LocationKind::device) {
      if (!machine_.device(location.id)) return Status::invalid_device;
      if (!region.on_host && region.device != location.id &&
          !machine_.connected(location.id, region.device)) {
        return Status::invalid_device;
      }
    } else if (!region.on_host && machine_.config.strict) {
      return Status::not_supported;  // as a GPU's memory on the far side of a link
    }
    const Access access = grants[i].access;
    if (access != Access::none && access != Access::read && access != Access::readwrite)
      return Status::invalid_value;
  }
  return Status::success;
}

Status VirtualMemory::set_access(std::uint64_t ptr, std::uint64_t nbytes,
                                 const AccessGrant* grants, std::size_t count) {
  if (!grants || count == 0) return Status::invalid_value;
  const std::lock_guard lock(mutex_);
  Mappings::iterator first, last;
  if (!whole_mappings(ptr, nbytes, &first, &last)) return Status::invalid_value;
  std::vector<Change> changes;
  std::vector<RegionRef> regions;
  std::vector<AccessSet> readers, writers;
  for (auto it = first; it != last; ++it) {
    if (const Status status = check_grants(it->second, grants, count); !ok(status)) return status;
    Change change{&it->second, it->second.region->readers, it->second.region->writers};
    for (std::size_t i = 0; i < count; ++i) change.apply(grants[i]);
    changes.push_back(change);
    regions.push_back(it->second.region);
    readers.push_back(change.readers);
    writers.push_back(change.writers);
  }
  // What is gained, the kernel learns first; what is lost, last and when nobody is at it.
  if (const Status status = install(changes); !ok(status)) return status;
  machine_.table.set_access(regions, readers, writers);
  for (Change& change : changes) {
    Mapping& mapping = *change.mapping;
    if (!mapping.installed || mapping.protection == change.protection()) continue;
    PageTable::drain(*mapping.region);
    if (mprotect(reinterpret_cast<void*>(mapping.region->base), mapping.region->nbytes,
                 change.protection()) == 0) {
      mapping.protection = change.protection();
    }
  }
  return Status::success;
}

// Lets the kernel know of every mapping that is to be reached, with no less protection than it has.
// Neighbours in address and file take one call.
Status VirtualMemory::install(std::vector<Change>& changes) {
  const auto wanted = [](const Change& change) {
    return change.mapping->protection | change.protection();
  };
  const auto offset_of = [](const Change& change) { return change.mapping->physical->offset; };
  for (std::size_t i = 0; i < changes.size();) {
    const Mapping& head = *changes[i].mapping;
    const int protection = wanted(changes[i]);
    std::size_t next = i + 1;
    if (head.protection == protection) {
      i = next;
      continue;
    }
    std::uint64_t nbytes = head.region->nbytes;
    for (; next < changes.size(); ++next) {
      const Mapping& mapping = *changes[next].mapping;
      if (wanted(changes[next]) != protection || mapping.installed != head.installed ||
          mapping.protection == protection)
        break;
      if (!head.installed && (mapping.physical->fd() != head.physical->fd() ||
                              offset_of(changes[next]) != offset_of(changes[i]) + nbytes))
        break;
      nbytes += mapping.region->nbytes;
    }
    void* at = reinterpret_cast<void*>(head.region->base);
    const bool good = head.installed
                          ? mprotect(at, nbytes, protection) == 0
                          : mmap(at, nbytes, protection, MAP_SHARED | MAP_NORESERVE | MAP_FIXED,
                                 head.physical->fd(),
                                 static_cast<off_t>(offset_of(changes[i]))) != MAP_FAILED;
    if (!good) return map_failure;
    for (; i < next; ++i) {
      changes[i].mapping->installed = true;
      changes[i].mapping->protection = protection;
    }
  }
  return Status::success;
}

Status VirtualMemory::get_access(std::uint64_t ptr, Location location, Access* access) {
  if (location.kind == LocationKind::device && !machine_.device(location.id))
    return Status::invalid_device;
  const std::lock_guard lock(mutex_);
  auto next = mappings_.upper_bound(ptr);
  if (next == mappings_.begin()) return Status::invalid_value;
  const Region& region = *std::prev(next)->second.region;
  if (ptr >= region.end()) return Status::invalid_value;
  const AccessSet who = access_of(location);
  // Changed only under this lock, so read without the table's.
  *access = (region.writers & who) ? Access::readwrite
                                   : (region.readers & who) ? Access::read : Access::none;
  return Status::success;
}

}  // namespace ringmem::host
