// Handles, reservations and sharing. Mapping and access are in mapping.cpp.
#include "driver/host/virtual_memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "driver/host/machine.hpp"

namespace ringmem::host {
namespace {

constexpr std::uint64_t address_space = std::uint64_t{1} << 47;

bool numa_node_exists(int node) {
  if (node == 0) return true;  // also where the kernel knows of none
  if (node < 0) return false;
  return access(("/sys/devices/system/node/node" + std::to_string(node)).c_str(), F_OK) == 0;
}

// Addresses for nobody else: aligned, not accessible, costing nothing. 0 when there are none.
std::uint64_t reserve_addresses(std::uint64_t nbytes, std::uint64_t alignment,
                                std::uint64_t hint) noexcept {
  constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  if (hint != 0 && hint % alignment == 0) {
    void* at = mmap(reinterpret_cast<void*>(hint), nbytes, PROT_NONE, flags, -1, 0);
    if (at == reinterpret_cast<void*>(hint)) return hint;
    if (at != MAP_FAILED) munmap(at, nbytes);
  }
  void* at = mmap(nullptr, nbytes + alignment, PROT_NONE, flags, -1, 0);
  if (at == MAP_FAILED) return 0;
  const auto begin = reinterpret_cast<std::uint64_t>(at);
  const std::uint64_t aligned = round_up(begin, alignment);
  if (aligned > begin) munmap(at, aligned - begin);
  const std::uint64_t rest = begin + alignment - aligned;
  if (rest > 0) munmap(reinterpret_cast<void*>(aligned + nbytes), rest);
  return aligned;
}

}  // namespace

Physical::~Physical() {
  if (space) {
    space->file.punch(offset, nbytes);
    const std::lock_guard lock(space->mutex);
    space->extents.give({offset, offset + nbytes});
  }
  if (budget) budget->release(nbytes);
}

VirtualMemory::~VirtualMemory() {
  for (const auto& [begin, nbytes] : reservations_) {
    munmap(reinterpret_cast<void*>(begin), nbytes);
    release_mappings(1);
  }
  for (auto it = mappings_.begin(); it != mappings_.end();) {
    const std::size_t gaps = gaps_beside(it->first, it->second.region->nbytes);
    it = mappings_.erase(it);
    release_mappings(gaps);
  }
}

Status VirtualMemory::reserve(std::uint64_t nbytes, std::uint64_t alignment, std::uint64_t hint,
                              std::uint64_t* ptr) {
  const std::uint64_t granule = machine_.config.granularity;
  if (nbytes == 0 || nbytes % granule != 0) return Status::invalid_value;
  if (alignment != 0 && !is_power_of_two(alignment)) return Status::invalid_value;
  alignment = std::max(alignment, granule);
  if (nbytes > address_space || alignment > address_space) return Status::out_of_memory;
  if (!charge_mappings(1, machine_.config.max_mappings)) return Status::out_of_memory;
  const std::uint64_t begin = reserve_addresses(nbytes, alignment, hint);
  if (begin == 0) {
    release_mappings(1);
    return Status::out_of_memory;
  }
  const std::lock_guard lock(mutex_);
  reservations_.emplace(begin, nbytes);
  machine_.table.add_territory(begin, nbytes);
  *ptr = begin;
  return Status::success;
}

Status VirtualMemory::free(std::uint64_t ptr, std::uint64_t nbytes) {
  const std::lock_guard lock(mutex_);
  const auto it = reservations_.find(ptr);
  if (it == reservations_.end() || it->second != nbytes) return Status::invalid_value;
  const auto mapped = mappings_.lower_bound(ptr);
  if (mapped != mappings_.end() && mapped->first < ptr + nbytes) return Status::invalid_value;
  machine_.table.remove_territory(ptr);
  reservations_.erase(it);
  munmap(reinterpret_cast<void*>(ptr), nbytes);
  release_mappings(1);
  return Status::success;
}

Status VirtualMemory::check_props(const PhysicalProps& props) const {
  const HostConfig& config = machine_.config;
  if (!config.virtual_memory) return Status::not_supported;
  switch (props.location.kind) {
    case LocationKind::device:
      if (!machine_.device(props.location.id)) return Status::invalid_device;
      break;
    case LocationKind::host_numa:
      if (!config.host_numa) return Status::not_supported;
      if (!numa_node_exists(props.location.id)) return Status::invalid_value;
      break;
    case LocationKind::host:
      return Status::invalid_value;  // cuMemCreate wants a NUMA node
  }
  if (props.rdma || (props.shareable && !config.export_fd)) return Status::not_supported;
  return Status::success;
}

Status VirtualMemory::space_of(Location location, std::shared_ptr<PhysicalSpace>* space) {
  const int key = location.kind == LocationKind::device ? location.id : -1;
  const std::lock_guard lock(mutex_);
  std::shared_ptr<PhysicalSpace>& slot = spaces_[key];
  if (!slot) {
    auto made = std::make_shared<PhysicalSpace>();
    const Status status = Memfd::create("ringmem-physical", std::uint64_t{1} << 50, &made->file);
    if (!ok(status)) return status;
    slot = std::move(made);
  }
  *space = slot;
  return Status::success;
}

Status VirtualMemory::allocate(std::uint64_t nbytes, const PhysicalProps& props,
                               std::shared_ptr<Physical>* physical) {
  Device* device =
      props.location.kind == LocationKind::device ? machine_.device(props.location.id) : nullptr;
  Budget& budget = device ? device->memory : machine_.host_memory;
  auto made = std::make_shared<Physical>();
  if (!budget.charge(nbytes)) return Status::out_of_memory;
  made->budget = &budget;
  made->location = props.location;
  made->nbytes = nbytes;
  made->shareable = props.shareable;
  if (props.shareable) {
    const Status status =
        Memfd::create_shared(SharedKind::physical, props.location, nbytes, &made->own);
    if (!ok(status)) return status;
  } else {
    std::shared_ptr<PhysicalSpace> space;
    if (const Status status = space_of(props.location, &space); !ok(status)) return status;
    const std::lock_guard lock(space->mutex);
    if (!space->extents.take(nbytes, page_bytes, &made->offset)) return Status::out_of_memory;
    made->space = space;
  }
  *physical = std::move(made);
  return Status::success;
}

Status VirtualMemory::create(std::uint64_t nbytes, const PhysicalProps& props,
                             PhysicalHandle* handle) {
  if (const Status status = check_props(props); !ok(status)) return status;
  if (nbytes == 0 || nbytes % machine_.config.granularity != 0) return Status::invalid_value;
  std::shared_ptr<Physical> physical;
  if (const Status status = allocate(nbytes, props, &physical); !ok(status)) return status;
  const std::lock_guard lock(mutex_);
  if (physical->shareable) shared_slot(physical->own) = physical;
  *handle = add_entry(std::move(physical));
  return Status::success;
}

Status VirtualMemory::release(PhysicalHandle handle) {
  std::shared_ptr<Physical> dropped;  // outlives the lock
  const std::lock_guard lock(mutex_);
  Entry* entry = live(handle);
  if (!entry) return Status::invalid_value;
  if (--entry->references == 0 && entry->mappings == 0) {
    dropped = std::move(entry->physical);
    handles_.erase(handle);
  }
  return Status::success;
}

Status VirtualMemory::export_fd(PhysicalHandle handle, int* fd) {
  if (!machine_.config.export_fd) return Status::not_supported;
  const std::lock_guard lock(mutex_);
  Entry* entry = live(handle);
  if (!entry || !entry->physical->shareable) return Status::invalid_value;
  const int duplicate = entry->physical->own.duplicate();
  if (duplicate < 0) return Status::operating_system;
  *fd = duplicate;
  return Status::success;
}

Status VirtualMemory::import_fd(int fd, PhysicalHandle* handle) {
  if (!machine_.config.export_fd) return Status::not_supported;
  Trailer trailer{};
  auto made = std::make_shared<Physical>();
  const Status status = Memfd::open_shared(SharedKind::physical, fd, &trailer, &made->own);
  if (!ok(status)) return status;
  const Location location{static_cast<LocationKind>(trailer.location_kind), trailer.location_id};
  if (trailer.nbytes % machine_.config.granularity != 0) return Status::invalid_value;
  if (const Status props = check_props({location, true, false}); !ok(props)) return props;
  const std::lock_guard lock(mutex_);
  std::weak_ptr<Physical>& known = shared_slot(made->own);
  std::shared_ptr<Physical> physical = known.lock();
  if (!physical) {
    Device* device = location.kind == LocationKind::device ? machine_.device(location.id) : nullptr;
    Budget& budget = device ? device->memory : machine_.host_memory;
    if (!budget.charge(trailer.nbytes)) return Status::out_of_memory;
    made->budget = &budget;
    made->location = location;
    made->nbytes = trailer.nbytes;
    made->shareable = true;
    known = made;
    physical = std::move(made);
  }
  *handle = add_entry(std::move(physical));
  return Status::success;
}

Status VirtualMemory::retain(std::uint64_t ptr, PhysicalHandle* handle) {
  const std::lock_guard lock(mutex_);
  auto next = mappings_.upper_bound(ptr);
  if (next == mappings_.begin()) return Status::invalid_value;
  const Mapping& mapping = std::prev(next)->second;
  if (ptr >= mapping.region->end()) return Status::invalid_value;
  ++handles_.at(mapping.handle).references;
  *handle = mapping.handle;
  return Status::success;
}

std::weak_ptr<Physical>& VirtualMemory::shared_slot(const Memfd& file) {
  if (shared_.size() >= shared_purge_) {
    std::erase_if(shared_, [](const auto& entry) { return entry.second.expired(); });
    shared_purge_ = std::max<std::size_t>(64, 2 * shared_.size());
  }
  return shared_[file.identity()];
}

VirtualMemory::Entry* VirtualMemory::live(PhysicalHandle handle) {
  const auto it = handles_.find(handle);
  return it == handles_.end() || it->second.references == 0 ? nullptr : &it->second;
}

PhysicalHandle VirtualMemory::add_entry(std::shared_ptr<Physical> physical) {
  static std::atomic<std::uint32_t> serial{0};
  const PhysicalHandle handle = make_handle(HandleKind::physical, serial.fetch_add(1));
  handles_[handle] = {std::move(physical), 1, 0};
  return handle;
}

}  // namespace ringmem::host
