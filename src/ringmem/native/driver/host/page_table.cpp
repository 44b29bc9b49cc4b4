#include "driver/host/page_table.hpp"

#include <algorithm>
#include <limits>
#include <mutex>

namespace ringmem::host {
namespace {

bool permitted(const Region& region, const Requester& who, bool write) noexcept {
  if (region.kind == RegionKind::plain) return (bit_of(region.device) & who.reach) != 0;
  return ((write ? region.writers : region.readers) & who.self) != 0;
}

template <class Map>
bool touches(const Map& map, std::uint64_t begin, std::uint64_t end, auto end_of) noexcept {
  auto next = map.lower_bound(begin);
  if (next != map.end() && next->first < end) return true;
  return next != map.begin() && end_of(*std::prev(next)) > begin;
}

}  // namespace

void PageTable::add_territory(std::uint64_t begin, std::uint64_t nbytes) {
  const std::lock_guard lock(mutex_);
  territories_.emplace(begin, begin + nbytes);
}

void PageTable::remove_territory(std::uint64_t begin) {
  const std::lock_guard lock(mutex_);
  territories_.erase(begin);
}

void PageTable::clear() noexcept {
  std::map<std::uint64_t, RegionRef> gone;  // outlives the lock
  const std::lock_guard lock(mutex_);
  gone.swap(regions_);
}

void PageTable::insert(RegionRef region) {
  const std::lock_guard lock(mutex_);
  regions_.emplace(region->base, std::move(region));
}

void PageTable::insert(const std::vector<RegionRef>& regions) {
  for (const RegionRef& region : regions) insert(region);
}

bool PageTable::insert_alone(RegionRef region) {
  const std::lock_guard lock(mutex_);
  if (touches(regions_, region->base, region->end(),
              [](const auto& entry) { return entry.second->end(); }))
    return false;
  regions_.emplace(region->base, std::move(region));
  return true;
}

RegionRef PageTable::erase(std::uint64_t base) noexcept {
  const std::lock_guard lock(mutex_);
  const auto it = regions_.find(base);
  if (it == regions_.end()) return nullptr;
  RegionRef region = std::move(it->second);
  regions_.erase(it);
  return region;
}

void PageTable::erase(const std::vector<RegionRef>& regions) noexcept {
  const std::lock_guard lock(mutex_);
  for (const RegionRef& region : regions) regions_.erase(region->base);
}

void PageTable::carve(std::uint64_t begin, std::uint64_t end) {
  const std::lock_guard lock(mutex_);
  const RegionRef* found = containing(begin);
  if (!found) return;
  const RegionRef whole = *found;
  const auto remnant = [&](std::uint64_t from, std::uint64_t to) {
    auto part = std::make_shared<Region>();
    part->base = from;
    part->nbytes = to - from;
    part->kind = whole->kind;
    part->device = whole->device;
    part->on_host = whole->on_host;
    part->readers = whole->readers;
    part->writers = whole->writers;
    part->pool = whole->pool;
    return part;
  };
  const RegionRef left = whole->base < begin ? remnant(whole->base, begin) : nullptr;
  const RegionRef right = end < whole->end() ? remnant(end, whole->end()) : nullptr;
  regions_.erase(whole->base);
  if (left) regions_.emplace(left->base, left);
  if (right) regions_.emplace(right->base, right);
}

void PageTable::set_access(const std::vector<RegionRef>& regions,
                           const std::vector<AccessSet>& readers,
                           const std::vector<AccessSet>& writers) noexcept {
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < regions.size(); ++i) {
    regions[i]->readers = readers[i];
    regions[i]->writers = writers[i];
  }
}

void PageTable::set_pool_access(const Pool* pool, AccessSet readers, AccessSet writers) noexcept {
  const std::lock_guard lock(mutex_);
  for (const auto& [base, region] : regions_) {
    if (region->pool.get() != pool) continue;
    region->readers = readers;
    region->writers = writers;
  }
}

RegionRef PageTable::find(std::uint64_t ptr) const noexcept {
  const std::shared_lock lock(mutex_);
  const RegionRef* region = containing(ptr);
  return region ? *region : nullptr;
}

bool PageTable::overlaps(std::uint64_t ptr, std::uint64_t nbytes) const noexcept {
  const std::shared_lock lock(mutex_);
  return touches(regions_, ptr, ptr + nbytes, [](const auto& e) { return e.second->end(); });
}

bool PageTable::overlaps_territory(std::uint64_t ptr, std::uint64_t nbytes) const noexcept {
  const std::shared_lock lock(mutex_);
  return touches(territories_, ptr, ptr + nbytes, [](const auto& e) { return e.second; });
}

bool PageTable::is_pageable(std::uint64_t ptr) const noexcept {
  const std::shared_lock lock(mutex_);
  return !containing(ptr) && !in_territory(ptr);
}

Resolved PageTable::resolve(std::uint64_t ptr, std::uint64_t nbytes, const Requester& who,
                            bool write) const noexcept {
  Resolved result;
  const std::shared_lock lock(mutex_);
  const RegionRef* found = containing(ptr);
  if (!found) {
    if (in_territory(ptr)) return result;
    result.kind = Resolved::Kind::pageable;
    result.nbytes = nbytes;
    return result;
  }
  const Region& region = **found;
  if (!permitted(region, who, write)) return result;
  result.kind = Resolved::Kind::covered;
  result.nbytes = std::min(nbytes, region.end() - ptr);
  result.vanishing = region.kind == RegionKind::registered;
  (*found)->pins.fetch_add(1, std::memory_order_relaxed);
  result.pin = Pin(*found);
  return result;
}

bool PageTable::allows(std::uint64_t ptr, std::uint64_t nbytes, const Requester& who,
                       bool write) const noexcept {
  if (nbytes > std::numeric_limits<std::uint64_t>::max() - ptr) return false;
  const std::shared_lock lock(mutex_);
  const std::uint64_t end = ptr + nbytes;
  while (ptr < end) {
    const RegionRef* region = containing(ptr);
    if (!region || !permitted(**region, who, write)) return false;
    ptr = (*region)->end();
  }
  return true;
}

void PageTable::drain(const Region& region) noexcept {
  for (int pins = region.pins.load(std::memory_order_acquire); pins != 0;
       pins = region.pins.load(std::memory_order_acquire)) {
    region.pins.wait(pins, std::memory_order_acquire);
  }
}

const RegionRef* PageTable::containing(std::uint64_t ptr) const noexcept {
  auto next = regions_.upper_bound(ptr);
  if (next == regions_.begin()) return nullptr;
  const RegionRef& region = std::prev(next)->second;
  return ptr < region->end() ? &region : nullptr;
}

bool PageTable::in_territory(std::uint64_t ptr) const noexcept {
  auto next = territories_.upper_bound(ptr);
  return next != territories_.begin() && ptr < std::prev(next)->second;
}

}  // namespace ringmem::host
