// HostDriver: managed memory. It is one memory for the host and every device, so that prefetching
// moves nothing; what is checked and ordered is what CUDA checks and orders.
#include <cstring>

#include "driver/host/machine.hpp"

namespace ringmem {

using host::Device;
using host::on_device;
using host::on_stream;
using host::RegionKind;
using host::RegionRef;

namespace {

constexpr int poison = 0xDD;  // what discarded memory reads as, where it had been touched

// The managed allocation that holds all of [ptr, ptr + nbytes), or null.
RegionRef managed_region(host::Machine& machine, DevicePtr ptr, std::size_t nbytes) {
  RegionRef region = machine.table.find(ptr);
  if (!region || region->kind != RegionKind::managed || nbytes == 0) return nullptr;
  return nbytes <= region->end() - ptr ? region : nullptr;
}

Status check_location(host::Machine& machine, Location location) {
  if (location.kind == LocationKind::host_numa && location.id < 0) return Status::invalid_value;
  if (location.kind != LocationKind::device) return Status::success;
  const bool usable = machine.device(location.id) && machine.config.concurrent_managed_access;
  return usable ? Status::success : Status::invalid_device;
}

// Poisons pages that hold something. Untouched ones stay holes, so that discarding costs no memory.
void poison_range(const host::Heap& heap, std::uint64_t ptr, std::uint64_t nbytes) {
  std::uint64_t at = ptr - heap.base();
  const std::uint64_t end = at + nbytes;
  std::uint64_t length = 0;
  while (at < end && heap.file().next_data(&at, end, &length)) {
    std::memset(reinterpret_cast<void*>(heap.base() + at), poison, length);
    at += length;
  }
}

}  // namespace

Status HostDriver::managed_alloc(int device, std::size_t nbytes, ManagedAttach attach,
                                 DevicePtr* ptr) noexcept {
  return on_device(*machine_, device, [&](Device& d) {
    if (!machine_->config.managed) return Status::not_supported;
    if (attach == ManagedAttach::single) return Status::invalid_value;
    const bool host_only =
        attach == ManagedAttach::host && !machine_->config.concurrent_managed_access;
    return host::alloc_on_host(*machine_, d, nbytes, RegionKind::managed,
                               host_only ? host::host_access : host::everybody, ptr);
  });
}

Status HostDriver::stream_attach(int device, StreamHandle stream, DevicePtr ptr,
                                 std::size_t nbytes, ManagedAttach attach) noexcept {
  return on_stream(*machine_, device, stream, [&](Device&, const auto& queue) {
    if (!machine_->config.managed) return Status::not_supported;
    const RegionRef region = managed_region(*machine_, ptr, 1);
    if (!region || region->base != ptr || (nbytes != 0 && nbytes != region->nbytes))
      return Status::invalid_value;
    const bool named = stream != default_stream && stream != legacy_stream;
    if (attach == ManagedAttach::single && !named) return Status::invalid_value;
    const bool host_only =
        attach == ManagedAttach::host && !machine_->config.concurrent_managed_access;
    const host::AccessSet access = host_only ? host::host_access : host::everybody;
    return machine_->submit(*queue, [&table = machine_->table, region, access] {
      table.set_access({region}, {access}, {access});
      return Status::success;
    });
  });
}

Status HostDriver::prefetch(int device, DevicePtr ptr, std::size_t nbytes, Location to,
                            StreamHandle stream) noexcept {
  return on_stream(*machine_, device, stream, [&](Device&, const auto& queue) {
    if (!machine_->config.managed) return Status::not_supported;
    if (!managed_region(*machine_, ptr, nbytes)) return Status::invalid_value;
    if (const Status status = check_location(*machine_, to); !ok(status)) return status;
    return machine_->submit(*queue, {});
  });
}

Status HostDriver::advise(int device, DevicePtr ptr, std::size_t nbytes, Advice advice,
                          Location location) noexcept {
  return on_device(*machine_, device, [&](Device&) {
    if (!machine_->config.managed) return Status::not_supported;
    if (!managed_region(*machine_, ptr, nbytes)) return Status::invalid_value;
    switch (advice) {
      case Advice::set_read_mostly:
      case Advice::unset_read_mostly:
      case Advice::unset_preferred_location:
        return Status::success;  // the location is ignored
      case Advice::set_preferred_location:
        return check_location(*machine_, location);
      case Advice::set_accessed_by:
      case Advice::unset_accessed_by:
        if (location.kind == LocationKind::host_numa) return Status::invalid_value;
        return check_location(*machine_, location);
    }
    return Status::invalid_value;
  });
}

Status HostDriver::discard(int device, DevicePtr ptr, std::size_t nbytes,
                           StreamHandle stream) noexcept {
  return on_stream(*machine_, device, stream, [&](Device&, const auto& queue) {
    if (!machine_->config.managed || !machine_->config.concurrent_managed_access)
      return Status::not_supported;
    if (!managed_region(*machine_, ptr, nbytes)) return Status::invalid_value;
    host::Heap* heap = nullptr;
    if (const Status status = machine_->host_heap(&heap); !ok(status)) return status;
    return machine_->submit(*queue, [machine = machine_.get(), heap, ptr, nbytes] {
      if (!managed_region(*machine, ptr, nbytes)) return Status::illegal_address;
      poison_range(*heap, ptr, nbytes);
      return Status::success;
    });
  });
}

}  // namespace ringmem
