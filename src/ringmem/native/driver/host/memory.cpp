// HostDriver: plain, pinned and registered memory, and what a pointer is.
#include <vector>

#include "driver/host/machine.hpp"

namespace ringmem {

using host::Device;
using host::Extent;
using host::Heap;
using host::Machine;
using host::on_device;
using host::RegionKind;
using host::RegionRef;

namespace {

// Takes memory from a heap and enters it into the page table.
Status take_region(Machine& machine, Heap& heap, host::Budget& budget, std::size_t nbytes,
                   RegionRef region) {
  if (nbytes > budget.limit()) return Status::out_of_memory;
  const std::uint64_t rounded = host::round_up(nbytes, Heap::alignment);
  if (!budget.charge(rounded)) return Status::out_of_memory;
  if (const Status status = heap.take(rounded, Heap::alignment, &region->base); !ok(status)) {
    budget.release(rounded);
    return status;
  }
  region->nbytes = nbytes;
  machine.table.insert(std::move(region));
  return Status::success;
}

void give_region(Machine& machine, Heap& heap, host::Budget& budget, const RegionRef& region) {
  machine.table.erase(region->base);
  const std::uint64_t rounded = host::round_up(region->nbytes, Heap::alignment);
  heap.give(region->base, rounded);
  budget.release(rounded);
}

// The region that starts at `ptr`, claimed for freeing: nobody else gets it.
RegionRef claim(Machine& machine, std::uint64_t ptr, RegionKind kind) {
  RegionRef region = machine.table.find(ptr);
  if (!region || region->base != ptr || region->kind != kind) return nullptr;
  return region->freed.exchange(true) ? nullptr : region;
}

// Host memory may be in use on every device.
Status synchronize_all(Machine& machine) {
  Status result = Status::success;
  for (const auto& device : machine.devices) {
    const Status status = machine.synchronize(*device);
    if (ok(result)) result = status;
  }
  return result;
}

Heap& heap_of(Machine& machine, const RegionRef& region) {
  Heap* heap = nullptr;  // made long ago: the region came from it
  if (region->kind == RegionKind::plain) {
    (void)machine.device_heap(*machine.device(region->device), &heap);
  } else {
    (void)machine.host_heap(&heap);
  }
  return *heap;
}

host::Budget& budget_of(Machine& machine, const RegionRef& region) {
  return region->kind == RegionKind::plain ? machine.device(region->device)->memory
                                           : machine.host_memory;
}

}  // namespace

Status HostDriver::mem_alloc(int device, std::size_t nbytes, DevicePtr* ptr) noexcept {
  return on_device(*machine_, device, [&](Device& d) {
    if (nbytes == 0) return Status::invalid_value;
    Heap* heap = nullptr;
    if (const Status status = machine_->device_heap(d, &heap); !ok(status)) return status;
    auto region = std::make_shared<host::Region>();
    region->kind = RegionKind::plain;
    region->device = device;
    Status status = take_region(*machine_, *heap, d.memory, nbytes, region);
    if (status == Status::out_of_memory) {
      machine_->settle_pools(d);  // pools hold no more than they may, then once again
      status = take_region(*machine_, *heap, d.memory, nbytes, region);
    }
    if (ok(status)) *ptr = region->base;
    return status;
  });
}

Status HostDriver::mem_free(int device, DevicePtr ptr) noexcept {
  return on_device(*machine_, device, [&](Device&) {
    RegionRef region = machine_->table.find(ptr);
    if (!region) return Status::invalid_value;
    if (region->kind == RegionKind::pool) {
      Extent block;
      if (!region->pool->find(ptr, &block) || block.begin != ptr) return Status::invalid_value;
      if (const Status status = synchronize_all(*machine_); !ok(status)) return status;
      return host::free_pool_block(*machine_, region->pool, ptr, {});
    }
    if (region->kind != RegionKind::plain && region->kind != RegionKind::managed)
      return Status::invalid_value;
    region = claim(*machine_, ptr, region->kind);
    if (!region) return Status::invalid_value;
    const Status status = region->kind == RegionKind::plain
                              ? machine_->synchronize(*machine_->device(region->device))
                              : synchronize_all(*machine_);
    if (!ok(status)) return status;
    give_region(*machine_, heap_of(*machine_, region), budget_of(*machine_, region), region);
    return Status::success;
  });
}

Status host::free_plain_async(Machine& machine, const RegionRef& found, Stream& stream) {
  RegionRef region = claim(machine, found->base, RegionKind::plain);
  if (!region) return Status::invalid_value;
  const Status status = machine.submit(stream, [&machine, region] {
    give_region(machine, heap_of(machine, region), budget_of(machine, region), region);
    return Status::success;
  });
  if (!ok(status)) region->freed = false;
  return status;
}

Status host::alloc_on_host(Machine& machine, Device& device, std::size_t nbytes, RegionKind kind,
                           AccessSet access, std::uint64_t* ptr) {
  if (nbytes == 0) return Status::invalid_value;
  Heap* heap = nullptr;
  if (const Status status = machine.host_heap(&heap); !ok(status)) return status;
  auto region = std::make_shared<Region>();
  region->kind = kind;
  region->device = device.ordinal;
  region->on_host = true;
  region->readers = region->writers = access;
  const Status status = take_region(machine, *heap, machine.host_memory, nbytes, region);
  if (ok(status)) *ptr = region->base;
  return status;
}

Status HostDriver::host_alloc(int device, std::size_t nbytes, HostFlags, void** ptr) noexcept {
  // With unified addressing all pinned memory is portable and mapped; write-combining is a hint.
  return on_device(*machine_, device, [&](Device& d) {
    std::uint64_t address = 0;
    const Status status = host::alloc_on_host(*machine_, d, nbytes, RegionKind::pinned,
                                              host::everybody, &address);
    if (ok(status)) *ptr = reinterpret_cast<void*>(address);
    return status;
  });
}

Status HostDriver::host_free(int device, void* ptr) noexcept {
  return on_device(*machine_, device, [&](Device&) {
    const RegionRef region =
        claim(*machine_, reinterpret_cast<std::uint64_t>(ptr), RegionKind::pinned);
    if (!region) return Status::invalid_value;
    if (const Status status = synchronize_all(*machine_); !ok(status)) return status;
    give_region(*machine_, heap_of(*machine_, region), machine_->host_memory, region);
    return Status::success;
  });
}

Status HostDriver::host_register(int device, void* ptr, std::size_t nbytes,
                                 HostFlags flags) noexcept {
  return on_device(*machine_, device, [&](Device&) {
    if (!machine_->config.host_register) return Status::not_supported;
    const auto begin = reinterpret_cast<std::uint64_t>(ptr);
    if (!ptr || nbytes == 0 || begin + nbytes < begin) return Status::invalid_value;
    auto region = std::make_shared<host::Region>();
    region->base = begin;
    region->nbytes = nbytes;
    region->kind = RegionKind::registered;
    region->device = device;
    region->on_host = true;
    region->readers = host::everybody;
    region->writers = flags.read_only ? host::host_access : host::everybody;
    if (machine_->table.overlaps_territory(begin, nbytes)) {
      const RegionRef found = machine_->table.find(begin);
      return found && found->kind == RegionKind::pinned ? Status::host_memory_already_registered
                                                        : Status::invalid_value;
    }
    if (!host::is_mapped(ptr, nbytes)) return Status::invalid_value;
    return machine_->table.insert_alone(std::move(region)) ? Status::success
                                                           : Status::host_memory_already_registered;
  });
}

Status HostDriver::host_unregister(int device, void* ptr) noexcept {
  return on_device(*machine_, device, [&](Device&) {
    const RegionRef region =
        claim(*machine_, reinterpret_cast<std::uint64_t>(ptr), RegionKind::registered);
    if (!region) return Status::host_memory_not_registered;
    if (const Status status = synchronize_all(*machine_); !ok(status)) return status;
    machine_->table.erase(region->base);
    return Status::success;
  });
}

Status HostDriver::host_device_pointer(int device, void* ptr, DevicePtr* device_ptr) noexcept {
  return on_device(*machine_, device, [&](Device&) {
    const auto address = reinterpret_cast<std::uint64_t>(ptr);
    const RegionRef region = machine_->table.find(address);
    if (!region || (region->kind != RegionKind::pinned && region->kind != RegionKind::registered))
      return Status::invalid_value;
    *device_ptr = address;
    return Status::success;
  });
}

Status HostDriver::pointer_info(int device, DevicePtr ptr, PointerInfo* info) noexcept {
  return on_device(*machine_, device, [&](Device& d) {
    PointerInfo found;
    const RegionRef region = machine_->table.find(ptr);
    Extent extent = region ? Extent{region->base, region->end()} : Extent{};
    const bool known = region && (!region->pool || region->pool->find(ptr, &extent));
    if (known) {
      const bool on_host = region->on_host;
      found.kind = region->kind == RegionKind::managed ? PointerKind::managed
                   : on_host                           ? PointerKind::pinned
                                                       : PointerKind::device;
      found.device = region->device;
      found.base = extent.begin;
      found.nbytes = extent.end - extent.begin;
      const host::Requester who{host::bit_of(device), d.reach.load()};
      if (machine_->table.allows(ptr, 1, who, false)) found.device_ptr = ptr;
      const bool shown = on_host || !machine_->config.strict;
      const bool reachable =
          region->kind != RegionKind::mapping ||
          machine_->table.allows(ptr, 1, {host::everybody, 0}, false);
      if (shown && reachable) found.host_ptr = ptr;
    }
    *info = found;
    return Status::success;
  });
}

Status HostDriver::check_access(int device, DevicePtr ptr, std::size_t nbytes,
                                bool write) const noexcept {
  return on_device(*machine_, device, [&](Device& d) {
    const host::Requester who{host::bit_of(device), d.reach.load()};
    return machine_->table.allows(ptr, nbytes, who, write) ? Status::success
                                                           : Status::illegal_address;
  });
}

}  // namespace ringmem
