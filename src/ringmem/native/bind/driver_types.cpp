// The plain types of the driver waist in Python: enumerations with the CUDA driver's values, and
// small value types.
#include "bind/driver_call.hpp"

#include <nanobind/operators.h>
#include <nanobind/stl/string.h>

#include "driver/types.hpp"

namespace ringmem::bind {
namespace {

using namespace nb::literals;

void bind_status(nb::module_& m) {
  nb::enum_<Status> status(m, "Status", nb::is_arithmetic(), "What a driver call returned.");
  for (Status value :
       {Status::success, Status::invalid_value, Status::out_of_memory, Status::not_initialized,
        Status::deinitialized, Status::stub_library, Status::call_requires_newer_driver,
        Status::no_device, Status::invalid_device, Status::invalid_context, Status::map_failed,
        Status::unmap_failed, Status::already_mapped, Status::not_mapped,
        Status::peer_access_unsupported, Status::file_not_found,
        Status::shared_object_symbol_not_found, Status::operating_system, Status::invalid_handle,
        Status::illegal_state, Status::not_found, Status::not_ready, Status::illegal_address,
        Status::peer_access_already_enabled, Status::peer_access_not_enabled,
        Status::context_is_destroyed, Status::host_memory_already_registered,
        Status::host_memory_not_registered, Status::misaligned_address, Status::launch_failed,
        Status::not_permitted, Status::not_supported, Status::system_not_ready,
        Status::stream_capture_unsupported, Status::stream_capture_implicit, Status::timeout,
        Status::unknown}) {
    // CUDA_ERROR_OUT_OF_MEMORY is Status.out_of_memory, CUDA_SUCCESS is Status.success.
    std::string name = status_name(value);
    name.erase(0, value == Status::success ? 5 : 11);
    for (char& c : name) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
    status.value(name.c_str(), value);
  }
}

void bind_attributes(nb::module_& m) {
  nb::enum_<Attribute>(m, "Attribute", nb::is_arithmetic(), "Device attributes.")
      .value("multiprocessor_count", Attribute::multiprocessor_count)
      .value("integrated", Attribute::integrated)
      .value("can_map_host_memory", Attribute::can_map_host_memory)
      .value("pci_bus_id", Attribute::pci_bus_id)
      .value("pci_device_id", Attribute::pci_device_id)
      .value("l2_cache_size", Attribute::l2_cache_size)
      .value("max_threads_per_multiprocessor", Attribute::max_threads_per_multiprocessor)
      .value("async_engine_count", Attribute::async_engine_count)
      .value("unified_addressing", Attribute::unified_addressing)
      .value("pci_domain_id", Attribute::pci_domain_id)
      .value("compute_capability_major", Attribute::compute_capability_major)
      .value("compute_capability_minor", Attribute::compute_capability_minor)
      .value("managed_memory", Attribute::managed_memory)
      .value("host_native_atomic_supported", Attribute::host_native_atomic_supported)
      .value("pageable_memory_access", Attribute::pageable_memory_access)
      .value("concurrent_managed_access", Attribute::concurrent_managed_access)
      .value("can_use_host_pointer_for_registered_memory",
             Attribute::can_use_host_pointer_for_registered_memory)
      .value("cooperative_launch", Attribute::cooperative_launch)
      .value("host_register_supported", Attribute::host_register_supported)
      .value("pageable_memory_access_uses_host_page_tables",
             Attribute::pageable_memory_access_uses_host_page_tables)
      .value("direct_managed_access_from_host", Attribute::direct_managed_access_from_host)
      .value("virtual_memory_management", Attribute::virtual_memory_management)
      .value("handle_type_posix_fd", Attribute::handle_type_posix_fd)
      .value("gpu_direct_rdma_with_vmm", Attribute::gpu_direct_rdma_with_vmm)
      .value("read_only_host_register", Attribute::read_only_host_register)
      .value("memory_pools", Attribute::memory_pools)
      .value("mempool_handle_types", Attribute::mempool_handle_types)
      .value("stream_mem_ops_64", Attribute::stream_mem_ops_64)
      .value("dma_buf", Attribute::dma_buf)
      .value("host_numa_id", Attribute::host_numa_id)
      .value("host_numa_virtual_memory_management",
             Attribute::host_numa_virtual_memory_management);
}

void bind_enumerations(nb::module_& m) {
  nb::enum_<LocationKind>(m, "LocationKind", "Where memory lives.")
      .value("device", LocationKind::device)
      .value("host", LocationKind::host)
      .value("host_numa", LocationKind::host_numa);
  nb::enum_<Access>(m, "Access", "What a device may do with a mapping.")
      .value("none", Access::none)
      .value("read", Access::read)
      .value("readwrite", Access::readwrite);
  nb::enum_<Advice>(m, "Advice", "What is said about managed memory in advance.")
      .value("set_read_mostly", Advice::set_read_mostly)
      .value("unset_read_mostly", Advice::unset_read_mostly)
      .value("set_preferred_location", Advice::set_preferred_location)
      .value("unset_preferred_location", Advice::unset_preferred_location)
      .value("set_accessed_by", Advice::set_accessed_by)
      .value("unset_accessed_by", Advice::unset_accessed_by);
  nb::enum_<ManagedAttach>(m, "ManagedAttach", "Who may touch managed memory.")
      .value("global_", ManagedAttach::global)
      .value("host", ManagedAttach::host)
      .value("single", ManagedAttach::single);
  nb::enum_<PoolAttribute>(m, "PoolAttribute", "Attributes of a driver pool.")
      .value("reuse_follow_event_dependencies", PoolAttribute::reuse_follow_event_dependencies)
      .value("reuse_allow_opportunistic", PoolAttribute::reuse_allow_opportunistic)
      .value("reuse_allow_internal_dependencies",
             PoolAttribute::reuse_allow_internal_dependencies)
      .value("release_threshold", PoolAttribute::release_threshold)
      .value("reserved_current", PoolAttribute::reserved_current)
      .value("reserved_high", PoolAttribute::reserved_high)
      .value("used_current", PoolAttribute::used_current)
      .value("used_high", PoolAttribute::used_high);
  nb::enum_<PointerKind>(m, "PointerKind", "What an address points to.")
      .value("unregistered", PointerKind::unregistered)
      .value("pinned", PointerKind::pinned)
      .value("device", PointerKind::device)
      .value("managed", PointerKind::managed);
}

const char* name_of(LocationKind kind) {
  static constexpr const char* names[] = {"device", "host", "host_numa"};
  return names[static_cast<int>(kind)];
}

nb::str repr(const Location& at) {
  return nb::str("Location({!r}, {})").format(name_of(at.kind), at.id);
}

void bind_values(nb::module_& m) {
  nb::class_<Location>(m, "Location", "Where memory lives: a device's ordinal, the host, or a "
                                      "NUMA node of it.")
      .def(nb::init<LocationKind, int>(), "kind"_a = LocationKind::device, "id"_a = 0)
      .def_ro("kind", &Location::kind)
      .def_ro("id", &Location::id)
      .def(nb::self == nb::self, nb::sig("def __eq__(self, arg: object, /) -> bool"))
      .def("__hash__", [](const Location& at) { return static_cast<int>(at.kind) * 1021 + at.id; })
      .def("__repr__", &repr);

  nb::class_<PhysicalProps>(m, "PhysicalProps", "Physical memory to create.")
      .def(
          "__init__",
          [](PhysicalProps* self, Location location, bool shareable, bool rdma) {
            new (self) PhysicalProps{location, shareable, rdma};
          },
          "location"_a = Location{}, "shareable"_a = false, "rdma"_a = false)
      .def_ro("location", &PhysicalProps::location)
      .def_ro("shareable", &PhysicalProps::shareable)
      .def_ro("rdma", &PhysicalProps::rdma);

  nb::class_<PoolProps>(m, "PoolProps", "A driver pool to create; `max_size` in bytes, 0 for none.")
      .def(
          "__init__",
          [](PoolProps* self, Location location, std::size_t max_size, bool shareable) {
            new (self) PoolProps{location, max_size, shareable};
          },
          "location"_a = Location{}, "max_size"_a = 0, "shareable"_a = false)
      .def_ro("location", &PoolProps::location)
      .def_ro("max_size", &PoolProps::max_size)
      .def_ro("shareable", &PoolProps::shareable);

  nb::class_<DeviceInfo>(m, "DeviceInfo")
      .def_ro("name", &DeviceInfo::name)
      .def_ro("uuid", &DeviceInfo::uuid);

  nb::class_<MemoryInfo>(m, "MemoryInfo", "Bytes of a device's memory.")
      .def_ro("free", &MemoryInfo::free)
      .def_ro("total", &MemoryInfo::total)
      .def("__repr__", [](const MemoryInfo& info) {
        return nb::str("MemoryInfo(free={}, total={})").format(info.free, info.total);
      });

  nb::class_<PointerInfo>(m, "PointerInfo", "What the driver knows about an address.")
      .def_ro("kind", &PointerInfo::kind)
      .def_ro("device", &PointerInfo::device)
      .def_ro("base", &PointerInfo::base)
      .def_ro("nbytes", &PointerInfo::nbytes)
      .def_ro("device_ptr", &PointerInfo::device_ptr)
      .def_ro("host_ptr", &PointerInfo::host_ptr)
      .def("__repr__", [](const PointerInfo& info) {
        return nb::str("PointerInfo(kind={}, device={}, base={:#x}, nbytes={}, device_ptr={:#x}, "
                       "host_ptr={:#x})")
            .format(nb::cast(info.kind), info.device, info.base, info.nbytes, info.device_ptr,
                    info.host_ptr);
      });
}

}  // namespace

void bind_driver_types(nb::module_& m) {
  bind_status(m);
  bind_attributes(m);
  bind_enumerations(m);
  bind_values(m);
}

}  // namespace ringmem::bind
