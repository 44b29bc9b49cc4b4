// Virtual memory for Python: address ranges, physical memory, mappings. Arguments are plain: a
// stream is (device ordinal, handle), an access grant (location kind, location id, access); the
// package ringmem.virtual makes these from Devices and Streams. Everything here that calls the
// driver does so without the GIL.
#include "bind/mapping.hpp"

#include "mapping/limits.hpp"

namespace ringmem::bind {
namespace {

using namespace nb::literals;

void bind_physical(nb::module_& m) {
  nb::class_<PhysicalMemory>(m, "PhysicalMemory", "Physical memory: one driver handle.")
      .def_static(
          "create",
          [](const NativeDevice& device, std::size_t nbytes, PlainLocation location,
             bool shareable, bool rdma) {
            ReleaseGil release;
            return PhysicalMemory::create(device.driver, nbytes,
                                          PhysicalProps{location_of(location), shareable, rdma});
          },
          "device"_a, "nbytes"_a, "location"_a, "shareable"_a, "rdma"_a)
      .def_static(
          "import_fd",
          [](const NativeDevice& device, int fd, std::size_t nbytes, PlainLocation location) {
            ReleaseGil release;
            return PhysicalMemory::import_fd(device.driver, fd, nbytes,
                                             PhysicalProps{location_of(location), true, false});
          },
          "device"_a, "fd"_a, "nbytes"_a, "location"_a)
      .def("export_fd", &PhysicalMemory::export_fd, nb::call_guard<ReleaseGil>())
      .def("close", &PhysicalMemory::close, nb::call_guard<ReleaseGil>())
      .def_prop_ro("handle", &PhysicalMemory::handle)
      .def_prop_ro("nbytes", &PhysicalMemory::nbytes)
      .def_prop_ro("shareable", [](const PhysicalMemory& self) { return self.props().shareable; })
      .def_prop_ro("imported", &PhysicalMemory::imported)
      .def_prop_ro("mappings", &PhysicalMemory::mappings)
      .def_prop_ro("closed", &PhysicalMemory::closed);
}

void bind_range(nb::module_& m) {
  nb::class_<AddressRange>(m, "AddressRange", "Reserved addresses.")
      .def_static(
          "reserve",
          [](const NativeDevice& device, std::size_t nbytes, std::size_t alignment) {
            ReleaseGil release;
            return AddressRange::reserve(device.driver, nbytes, alignment,
                                         PhysicalProps{Location{LocationKind::device,
                                                                device.ordinal}});
          },
          "device"_a, "nbytes"_a, "alignment"_a)
      .def(
          "map",
          [](AddressRange& self, const PhysicalRef& physical, std::size_t offset,
             const PlainGrants& grants) {
            ReleaseGil release;
            return self.map(physical, offset, grants_of(grants));
          },
          "physical"_a, "offset"_a, "grants"_a)
      .def("close", &AddressRange::close, nb::call_guard<ReleaseGil>())
      .def_prop_ro("ptr", &AddressRange::ptr)
      .def_prop_ro("nbytes", &AddressRange::nbytes)
      .def_prop_ro("granularity", &AddressRange::granularity)
      .def_prop_ro("mappings", &AddressRange::mappings)
      .def_prop_ro("closed", &AddressRange::closed);
}

void bind_mapped(nb::module_& m) {
  nb::class_<MappedRange>(m, "MappedRange", "Physical memory mapped at an address.")
      .def(
          "set_access",
          [](MappedRange& self, const PlainGrants& grants) {
            ReleaseGil release;
            self.set_access(grants_of(grants));
          },
          "grants"_a)
      .def(
          "get_access",
          [](const MappedRange& self, PlainLocation location) {
            ReleaseGil release;
            return static_cast<int>(self.get_access(location_of(location)));
          },
          "location"_a)
      .def(
          "unmap",
          [](MappedRange& self, const PlainStreams& streams, const PlainStreams& events) {
            ReleaseGil release;
            self.unmap(streams_of(streams), events_of(events));
          },
          "streams"_a, "events"_a)
      .def_prop_ro("ptr", &MappedRange::ptr)
      .def_prop_ro("nbytes", &MappedRange::nbytes)
      .def_prop_ro("offset", &MappedRange::offset)
      .def_prop_ro("closed", &MappedRange::closed);
}

std::size_t granularity(const NativeDevice& device, PlainLocation location, bool recommended) {
  const PhysicalProps props{location_of(location)};
  mapping::require_capable(*device.driver, props);
  return mapping::granularity_of(*device.driver, props, recommended);
}

}  // namespace

void bind_mapping(nb::module_& m) {
  bind_physical(m);
  bind_range(m);
  bind_mapped(m);
  bind_mapping_buffers(m);
  m.def("allocation_granularity", &granularity, "device"_a, "location"_a, "recommended"_a);
  m.def("live_mappings", &mapping::live_mappings,
        "int: mappings of the process that were made through ringmem.virtual.");
  m.def("mapping_limit",
        [](const NativeDevice& device) { return mapping::mapping_limit(*device.driver); },
        "device"_a, "int: how many there may be, 0 where no bound is known.");
  m.def("set_mapping_limit", &mapping::set_mapping_limit, "limit"_a,
        "Replaces the bound; 0 goes back to the one that is found.");
}

}  // namespace ringmem::bind
