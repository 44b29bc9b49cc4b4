// HostDriver: virtual memory management. It knows no device error: memory can be given back after
// a device has failed.
#include "driver/host/machine.hpp"

namespace ringmem {

using host::guarded;
using host::Machine;

namespace {

template <class Operation>
Status on_memory(Machine& machine, Operation&& operation) noexcept {
  return guarded(machine, [&]() -> Status {
    if (!machine.config.virtual_memory) return Status::not_supported;
    return operation(machine.virtual_memory);
  });
}

}  // namespace

Status HostDriver::granularity(const PhysicalProps& props, bool, std::size_t* nbytes) noexcept {
  return on_memory(*machine_, [&](auto& memory) {
    const Status status = memory.check_props(props);
    if (ok(status)) *nbytes = machine_->config.granularity;
    return status;
  });
}

Status HostDriver::address_reserve(std::size_t nbytes, std::size_t alignment, DevicePtr hint,
                                   DevicePtr* ptr) noexcept {
  return on_memory(*machine_,
                   [&](auto& memory) { return memory.reserve(nbytes, alignment, hint, ptr); });
}

Status HostDriver::address_free(DevicePtr ptr, std::size_t nbytes) noexcept {
  return on_memory(*machine_, [&](auto& memory) { return memory.free(ptr, nbytes); });
}

Status HostDriver::mem_create(std::size_t nbytes, const PhysicalProps& props,
                              PhysicalHandle* handle) noexcept {
  return on_memory(*machine_, [&](auto& memory) { return memory.create(nbytes, props, handle); });
}

Status HostDriver::mem_release(PhysicalHandle handle) noexcept {
  return on_memory(*machine_, [&](auto& memory) { return memory.release(handle); });
}

Status HostDriver::mem_map(DevicePtr ptr, std::size_t nbytes, PhysicalHandle handle) noexcept {
  return on_memory(*machine_, [&](auto& memory) { return memory.map(ptr, nbytes, handle); });
}

Status HostDriver::mem_unmap(DevicePtr ptr, std::size_t nbytes) noexcept {
  return on_memory(*machine_, [&](auto& memory) { return memory.unmap(ptr, nbytes); });
}

Status HostDriver::mem_set_access(DevicePtr ptr, std::size_t nbytes, const AccessGrant* grants,
                                  std::size_t count) noexcept {
  return on_memory(*machine_,
                   [&](auto& memory) { return memory.set_access(ptr, nbytes, grants, count); });
}

Status HostDriver::mem_get_access(DevicePtr ptr, Location location, Access* access) noexcept {
  return on_memory(*machine_,
                   [&](auto& memory) { return memory.get_access(ptr, location, access); });
}

Status HostDriver::mem_export(PhysicalHandle handle, int* fd) noexcept {
  return on_memory(*machine_, [&](auto& memory) { return memory.export_fd(handle, fd); });
}

Status HostDriver::mem_import(int fd, PhysicalHandle* handle) noexcept {
  return on_memory(*machine_, [&](auto& memory) { return memory.import_fd(fd, handle); });
}

Status HostDriver::mem_retain(DevicePtr ptr, PhysicalHandle* handle) noexcept {
  return on_memory(*machine_, [&](auto& memory) { return memory.retain(ptr, handle); });
}

}  // namespace ringmem
