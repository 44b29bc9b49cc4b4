// Raw operations on virtual memory: address ranges, physical memory, mappings and their access.
#include "bind/driver_call.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

namespace ringmem::bind {
namespace {

using namespace nb::literals;
using Class = nb::class_<Driver>;
using size = std::size_t;

void bind_ranges(Class& cls) {
  cls.def(
      "granularity",
      [](Driver& driver, const PhysicalProps& props, bool recommended) {
        size nbytes = 0;
        RINGMEM_CALL(granularity, (props, recommended, &nbytes), {"location", props.location});
        return nbytes;
      },
      "props"_a, "recommended"_a = false);
  cls.def(
      "address_reserve",
      [](Driver& driver, size nbytes, size alignment, DevicePtr hint) {
        DevicePtr ptr = 0;
        RINGMEM_CALL(address_reserve, (nbytes, alignment, hint, &ptr), {"nbytes", nbytes},
                     {"alignment", alignment}, Argument::hex("hint", hint));
        return ptr;
      },
      "nbytes"_a, "alignment"_a = 0, "hint"_a = 0);
  cls.def(
      "address_free",
      [](Driver& driver, DevicePtr ptr, size nbytes) {
        RINGMEM_CALL(address_free, (ptr, nbytes), Argument::hex("ptr", ptr), {"nbytes", nbytes});
      },
      "ptr"_a, "nbytes"_a);
  cls.def(
      "mem_map",
      [](Driver& driver, DevicePtr ptr, size nbytes, PhysicalHandle handle) {
        RINGMEM_CALL(mem_map, (ptr, nbytes, handle), Argument::hex("ptr", ptr),
                     {"nbytes", nbytes}, Argument::hex("handle", handle));
      },
      "ptr"_a, "nbytes"_a, "handle"_a);
  cls.def(
      "mem_unmap",
      [](Driver& driver, DevicePtr ptr, size nbytes) {
        RINGMEM_CALL(mem_unmap, (ptr, nbytes), Argument::hex("ptr", ptr), {"nbytes", nbytes});
      },
      "ptr"_a, "nbytes"_a);
  cls.def(
      "mem_set_access",
      [](Driver& driver, DevicePtr ptr, size nbytes, const Grants& grants) {
        const std::vector<AccessGrant> list = plain(grants);
        RINGMEM_CALL(mem_set_access, (ptr, nbytes, list.data(), list.size()),
                     Argument::hex("ptr", ptr), {"nbytes", nbytes}, {"grants", list.size()});
      },
      "ptr"_a, "nbytes"_a, "grants"_a);
  cls.def(
      "mem_get_access",
      [](Driver& driver, DevicePtr ptr, Location location) {
        Access access = Access::none;
        RINGMEM_CALL(mem_get_access, (ptr, location, &access), Argument::hex("ptr", ptr),
                     {"location", location});
        return access;
      },
      "ptr"_a, "location"_a);
}

void bind_physical(Class& cls) {
  cls.def(
      "mem_create",
      [](Driver& driver, size nbytes, const PhysicalProps& props) {
        PhysicalHandle handle = 0;
        RINGMEM_CALL(mem_create, (nbytes, props, &handle), {"nbytes", nbytes},
                     {"location", props.location}, {"shareable", props.shareable},
                     {"rdma", props.rdma});
        return handle;
      },
      "nbytes"_a, "props"_a);
  cls.def(
      "mem_release",
      [](Driver& driver, PhysicalHandle handle) {
        RINGMEM_CALL(mem_release, (handle), Argument::hex("handle", handle));
      },
      "handle"_a);
  cls.def(
      "mem_export",
      [](Driver& driver, PhysicalHandle handle) {
        int fd = -1;
        RINGMEM_CALL(mem_export, (handle, &fd), Argument::hex("handle", handle));
        return fd;
      },
      "handle"_a);
  cls.def(
      "mem_import",
      [](Driver& driver, int fd) {
        PhysicalHandle handle = 0;
        RINGMEM_CALL(mem_import, (fd, &handle), {"fd", fd});
        return handle;
      },
      "fd"_a);
  cls.def(
      "mem_retain",
      [](Driver& driver, DevicePtr ptr) {
        PhysicalHandle handle = 0;
        RINGMEM_CALL(mem_retain, (ptr, &handle), Argument::hex("ptr", ptr));
        return handle;
      },
      "ptr"_a);
}

}  // namespace

void bind_driver_virtual(Class& cls) {
  bind_ranges(cls);
  bind_physical(cls);
}

}  // namespace ringmem::bind
