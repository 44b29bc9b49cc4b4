// HostDriver: construction, devices, attributes and peers.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <thread>

#include "driver/host/machine.hpp"

namespace ringmem {

using host::Device;
using host::guarded;
using host::Machine;
using host::on_device;

HostDriver::HostDriver(const HostConfig& config) {
  host::validate(config);
  machine_ = std::make_shared<Machine>(config);
}

HostDriver::~HostDriver() {
  if (machine_->foreign()) {
    // The threads and the files are the parent's: forget them without touching anything.
    (void)new std::shared_ptr<Machine>(std::move(machine_));
    return;
  }
  const bool own_thread = std::any_of(
      machine_->devices.begin(), machine_->devices.end(), [](const auto& device) {
        const std::lock_guard lock(device->mutex);
        return std::any_of(device->streams.begin(), device->streams.end(),
                           [](const auto& stream) { return stream->runs_on_this_thread(); });
      });
  // A host function dropped the last reference: its thread cannot wait for itself.
  if (own_thread)
    std::thread([machine = std::move(machine_)]() mutable { machine.reset(); }).detach();
}

const HostConfig& HostDriver::config() const noexcept { return machine_->config; }

const char* HostDriver::platform() const noexcept { return "cpu"; }

DriverRef make_host_driver(const HostConfig& config) {
  return std::make_shared<HostDriver>(config);
}

Status HostDriver::device_count(int* count) noexcept {
  return guarded(*machine_, [&] {
    *count = machine_->config.devices;
    return Status::success;
  });
}

Status HostDriver::driver_version(int* version) noexcept {
  return guarded(*machine_, [&] {
    *version = 13000;  // the driver whose answers these are
    return Status::success;
  });
}

Status HostDriver::device_info(int device, DeviceInfo* info) noexcept {
  return guarded(*machine_, [&] {
    if (!machine_->device(device)) return Status::invalid_device;
    char uuid[64];
    std::snprintf(uuid, sizeof uuid, "CPU-72696e67-6d65-6d00-8000-%012x", device);
    const HostConfig& config = machine_->config;
    *info = {config.devices == 1 ? config.name : config.name + " " + std::to_string(device), uuid};
    return Status::success;
  });
}

namespace {

int cache_bytes() {
  const long bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
  return bytes > 0 ? static_cast<int>(bytes) : 1 << 20;
}

int value_of(Attribute attribute, int device, const HostConfig& config, bool* known) {
  *known = true;
  const bool sharing = config.export_fd;
  switch (attribute) {
    case Attribute::multiprocessor_count:
      return static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
    case Attribute::integrated: return !config.strict;  // in the host's own memory
    case Attribute::can_map_host_memory: return 1;
    case Attribute::pci_bus_id: return device;
    case Attribute::pci_device_id: return 0;
    case Attribute::pci_domain_id: return 0;
    case Attribute::l2_cache_size: return cache_bytes();
    case Attribute::max_threads_per_multiprocessor: return 1;
    case Attribute::async_engine_count: return 2;
    case Attribute::unified_addressing: return 1;
    case Attribute::compute_capability_major: return 0;
    case Attribute::compute_capability_minor: return 0;
    case Attribute::managed_memory: return config.managed;
    case Attribute::host_native_atomic_supported: return 1;
    case Attribute::pageable_memory_access: return 0;
    case Attribute::concurrent_managed_access:
      return config.managed && config.concurrent_managed_access;
    case Attribute::can_use_host_pointer_for_registered_memory: return config.host_register;
    case Attribute::cooperative_launch: return config.cooperative_launch;
    case Attribute::host_register_supported: return config.host_register;
    case Attribute::pageable_memory_access_uses_host_page_tables: return 0;
    case Attribute::direct_managed_access_from_host: return config.managed && !config.strict;
    case Attribute::virtual_memory_management: return config.virtual_memory;
    case Attribute::handle_type_posix_fd: return config.virtual_memory && sharing;
    case Attribute::gpu_direct_rdma_with_vmm: return 0;
    case Attribute::read_only_host_register: return config.host_register;
    case Attribute::memory_pools: return config.pools;
    case Attribute::mempool_handle_types: return config.pools && sharing;  // bit 0: descriptors
    case Attribute::stream_mem_ops_64: return config.stream_mem_ops;
    case Attribute::dma_buf: return 0;
    case Attribute::host_numa_id: return 0;
    case Attribute::host_numa_virtual_memory_management:
      return config.virtual_memory && config.host_numa;
  }
  *known = false;
  return 0;
}

}  // namespace

Status HostDriver::attribute(int device, Attribute attribute, int* value) noexcept {
  return guarded(*machine_, [&] {
    if (!machine_->device(device)) return Status::invalid_device;
    bool known = false;
    const int found = value_of(attribute, device, machine_->config, &known);
    if (!known) return Status::invalid_value;
    *value = found;
    return Status::success;
  });
}

Status HostDriver::memory_info(int device, MemoryInfo* info) noexcept {
  return on_device(*machine_, device, [&](Device& d) {
    *info = {d.memory.free(), d.memory.limit()};
    return Status::success;
  });
}

Status HostDriver::synchronize(int device) noexcept {
  return on_device(*machine_, device, [&](Device& d) { return machine_->synchronize(d); });
}

Status HostDriver::primary_context(int device, std::uint64_t* context) noexcept {
  return guarded(*machine_, [&] {
    if (!machine_->device(device)) return Status::invalid_device;
    *context = 0;
    return Status::success;
  });
}

Status HostDriver::peer_can_access(int device, int peer, bool* can) noexcept {
  return guarded(*machine_, [&] {
    if (!machine_->device(device) || !machine_->device(peer)) return Status::invalid_device;
    *can = machine_->connected(device, peer);
    return Status::success;
  });
}

Status HostDriver::peer_enable(int device, int peer) noexcept {
  return on_device(*machine_, device, [&](Device& d) {
    if (!machine_->device(peer) || peer == device) return Status::invalid_device;
    if (!machine_->connected(device, peer)) return Status::peer_access_unsupported;
    const host::AccessSet before = d.reach.fetch_or(host::bit_of(peer));
    return before & host::bit_of(peer) ? Status::peer_access_already_enabled : Status::success;
  });
}

Status HostDriver::peer_disable(int device, int peer) noexcept {
  return on_device(*machine_, device, [&](Device& d) {
    if (!machine_->device(peer) || peer == device) return Status::invalid_device;
    const host::AccessSet before = d.reach.fetch_and(~host::bit_of(peer));
    return before & host::bit_of(peer) ? Status::success : Status::peer_access_not_enabled;
  });
}

Status HostDriver::relax_capture(bool relaxed, bool* previous) noexcept {
  return guarded(*machine_, [&] {
    thread_local bool mode = false;  // nothing is ever captured here: only the answer counts
    *previous = std::exchange(mode, relaxed);
    return Status::success;
  });
}

}  // namespace ringmem
