// Raw operations on memory: plain, pinned, managed and pooled.
#include "bind/driver_call.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <utility>

namespace ringmem::bind {
namespace {

using namespace nb::literals;
using Class = nb::class_<Driver>;
using size = std::size_t;

void* host(std::uint64_t ptr) { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(ptr)); }

void bind_plain(Class& cls) {
  cls.def(
      "mem_alloc",
      [](Driver& driver, int device, size nbytes) {
        DevicePtr ptr = 0;
        RINGMEM_CALL(mem_alloc, (device, nbytes, &ptr), {"device", device}, {"nbytes", nbytes});
        return ptr;
      },
      "device"_a, "nbytes"_a);
  cls.def(
      "mem_free",
      [](Driver& driver, int device, DevicePtr ptr) {
        RINGMEM_CALL(mem_free, (device, ptr), {"device", device}, Argument::hex("ptr", ptr));
      },
      "device"_a, "ptr"_a);
  cls.def(
      "host_alloc",
      [](Driver& driver, int device, size nbytes, bool portable, bool mapped, bool combined) {
        const HostFlags flags{portable, mapped, combined, false};
        void* ptr = nullptr;
        RINGMEM_CALL(host_alloc, (device, nbytes, flags, &ptr), {"device", device},
                     {"nbytes", nbytes});
        return reinterpret_cast<std::uintptr_t>(ptr);
      },
      "device"_a, "nbytes"_a, "portable"_a = true, "mapped"_a = true, "write_combined"_a = false);
  cls.def(
      "host_free",
      [](Driver& driver, int device, std::uint64_t ptr) {
        RINGMEM_CALL(host_free, (device, host(ptr)), {"device", device},
                     Argument::hex("ptr", ptr));
      },
      "device"_a, "ptr"_a);
  cls.def(
      "host_register",
      [](Driver& driver, int device, std::uint64_t ptr, size nbytes, bool portable, bool mapped,
         bool read_only) {
        const HostFlags flags{portable, mapped, false, read_only};
        RINGMEM_CALL(host_register, (device, host(ptr), nbytes, flags), {"device", device},
                     Argument::hex("ptr", ptr), {"nbytes", nbytes});
      },
      "device"_a, "ptr"_a, "nbytes"_a, "portable"_a = true, "mapped"_a = true,
      "read_only"_a = false);
  cls.def(
      "host_unregister",
      [](Driver& driver, int device, std::uint64_t ptr) {
        RINGMEM_CALL(host_unregister, (device, host(ptr)), {"device", device},
                     Argument::hex("ptr", ptr));
      },
      "device"_a, "ptr"_a);
  cls.def(
      "host_device_pointer",
      [](Driver& driver, int device, std::uint64_t ptr) {
        DevicePtr mapped = 0;
        RINGMEM_CALL(host_device_pointer, (device, host(ptr), &mapped), {"device", device},
                     Argument::hex("ptr", ptr));
        return mapped;
      },
      "device"_a, "ptr"_a);
  cls.def(
      "pointer_info",
      [](Driver& driver, int device, DevicePtr ptr) {
        PointerInfo info;
        RINGMEM_CALL(pointer_info, (device, ptr, &info), {"device", device},
                     Argument::hex("ptr", ptr));
        return info;
      },
      "device"_a, "ptr"_a);
}

void bind_managed(Class& cls) {
  cls.def(
      "managed_alloc",
      [](Driver& driver, int device, size nbytes, ManagedAttach attach) {
        DevicePtr ptr = 0;
        RINGMEM_CALL(managed_alloc, (device, nbytes, attach, &ptr), {"device", device},
                     {"nbytes", nbytes}, {"attach", attach});
        return ptr;
      },
      "device"_a, "nbytes"_a, "attach"_a = ManagedAttach::global);
  cls.def(
      "stream_attach",
      [](Driver& driver, int device, StreamHandle stream, DevicePtr ptr, size nbytes,
         ManagedAttach attach) {
        RINGMEM_CALL(stream_attach, (device, stream, ptr, nbytes, attach), {"device", device},
                     Argument::hex("stream", stream), Argument::hex("ptr", ptr),
                     {"nbytes", nbytes}, {"attach", attach});
      },
      "device"_a, "stream"_a, "ptr"_a, "nbytes"_a, "attach"_a);
  cls.def(
      "prefetch",
      [](Driver& driver, int device, DevicePtr ptr, size nbytes, Location to,
         StreamHandle stream) {
        RINGMEM_CALL(prefetch, (device, ptr, nbytes, to, stream), {"device", device},
                     Argument::hex("ptr", ptr), {"nbytes", nbytes}, {"to", to},
                     Argument::hex("stream", stream));
      },
      "device"_a, "ptr"_a, "nbytes"_a, "to"_a, "stream"_a = default_stream);
  cls.def(
      "advise",
      [](Driver& driver, int device, DevicePtr ptr, size nbytes, Advice advice, Location at) {
        RINGMEM_CALL(advise, (device, ptr, nbytes, advice, at), {"device", device},
                     Argument::hex("ptr", ptr), {"nbytes", nbytes}, {"advice", advice},
                     {"location", at});
      },
      "device"_a, "ptr"_a, "nbytes"_a, "advice"_a, "location"_a);
  cls.def(
      "discard",
      [](Driver& driver, int device, DevicePtr ptr, size nbytes, StreamHandle stream) {
        RINGMEM_CALL(discard, (device, ptr, nbytes, stream), {"device", device},
                     Argument::hex("ptr", ptr), {"nbytes", nbytes},
                     Argument::hex("stream", stream));
      },
      "device"_a, "ptr"_a, "nbytes"_a, "stream"_a = default_stream);
}

void bind_async(Class& cls) {
  cls.def(
      "mem_alloc_async",
      [](Driver& driver, int device, size nbytes, StreamHandle stream) {
        DevicePtr ptr = 0;
        RINGMEM_CALL(mem_alloc_async, (device, nbytes, stream, &ptr), {"device", device},
                     {"nbytes", nbytes}, Argument::hex("stream", stream));
        return ptr;
      },
      "device"_a, "nbytes"_a, "stream"_a = default_stream);
  cls.def(
      "mem_free_async",
      [](Driver& driver, int device, DevicePtr ptr, StreamHandle stream) {
        RINGMEM_CALL(mem_free_async, (device, ptr, stream), {"device", device},
                     Argument::hex("ptr", ptr), Argument::hex("stream", stream));
      },
      "device"_a, "ptr"_a, "stream"_a = default_stream);
  cls.def(
      "pool_alloc_async",
      [](Driver& driver, int device, PoolHandle pool, size nbytes, StreamHandle stream) {
        DevicePtr ptr = 0;
        RINGMEM_CALL(pool_alloc_async, (device, pool, nbytes, stream, &ptr), {"device", device},
                     Argument::hex("pool", pool), {"nbytes", nbytes},
                     Argument::hex("stream", stream));
        return ptr;
      },
      "device"_a, "pool"_a, "nbytes"_a, "stream"_a = default_stream);
}

void bind_pools(Class& cls) {
  cls.def(
      "pool_create",
      [](Driver& driver, int device, const PoolProps& props) {
        PoolHandle pool = 0;
        RINGMEM_CALL(pool_create, (device, props, &pool), {"device", device},
                     {"location", props.location}, {"max_size", props.max_size},
                     {"shareable", props.shareable});
        return pool;
      },
      "device"_a, "props"_a);
  cls.def(
      "pool_destroy",
      [](Driver& driver, int device, PoolHandle pool) {
        RINGMEM_CALL(pool_destroy, (device, pool), {"device", device},
                     Argument::hex("pool", pool));
      },
      "device"_a, "pool"_a);
  cls.def(
      "pool_default",
      [](Driver& driver, int device) {
        PoolHandle pool = 0;
        RINGMEM_CALL(pool_default, (device, &pool), {"device", device});
        return pool;
      },
      "device"_a);
  cls.def(
      "pool_current",
      [](Driver& driver, int device) {
        PoolHandle pool = 0;
        RINGMEM_CALL(pool_current, (device, &pool), {"device", device});
        return pool;
      },
      "device"_a);
  cls.def(
      "pool_set_current",
      [](Driver& driver, int device, PoolHandle pool) {
        RINGMEM_CALL(pool_set_current, (device, pool), {"device", device},
                     Argument::hex("pool", pool));
      },
      "device"_a, "pool"_a);
  cls.def(
      "pool_trim",
      [](Driver& driver, int device, PoolHandle pool, size keep_bytes) {
        RINGMEM_CALL(pool_trim, (device, pool, keep_bytes), {"device", device},
                     Argument::hex("pool", pool), {"keep_bytes", keep_bytes});
      },
      "device"_a, "pool"_a, "keep_bytes"_a = 0);
  cls.def(
      "pool_get",
      [](Driver& driver, int device, PoolHandle pool, PoolAttribute attribute) {
        std::uint64_t value = 0;
        RINGMEM_CALL(pool_get, (device, pool, attribute, &value), {"device", device},
                     Argument::hex("pool", pool), {"attribute", attribute});
        return value;
      },
      "device"_a, "pool"_a, "attribute"_a);
  cls.def(
      "pool_set",
      [](Driver& driver, int device, PoolHandle pool, PoolAttribute attribute,
         std::uint64_t value) {
        RINGMEM_CALL(pool_set, (device, pool, attribute, value), {"device", device},
                     Argument::hex("pool", pool), {"attribute", attribute}, {"value", value});
      },
      "device"_a, "pool"_a, "attribute"_a, "value"_a);
  cls.def(
      "pool_set_access",
      [](Driver& driver, int device, PoolHandle pool, const Grants& grants) {
        const std::vector<AccessGrant> list = plain(grants);
        RINGMEM_CALL(pool_set_access, (device, pool, list.data(), list.size()),
                     {"device", device}, Argument::hex("pool", pool), {"grants", list.size()});
      },
      "device"_a, "pool"_a, "grants"_a);
  cls.def(
      "pool_get_access",
      [](Driver& driver, int device, PoolHandle pool, Location location) {
        Access access = Access::none;
        RINGMEM_CALL(pool_get_access, (device, pool, location, &access), {"device", device},
                     Argument::hex("pool", pool), {"location", location});
        return access;
      },
      "device"_a, "pool"_a, "location"_a);
}

void bind_pool_sharing(Class& cls) {
  cls.def(
      "pool_export",
      [](Driver& driver, int device, PoolHandle pool) {
        int fd = -1;
        RINGMEM_CALL(pool_export, (device, pool, &fd), {"device", device},
                     Argument::hex("pool", pool));
        return fd;
      },
      "device"_a, "pool"_a);
  cls.def(
      "pool_import",
      [](Driver& driver, int device, int fd) {
        PoolHandle pool = 0;
        RINGMEM_CALL(pool_import, (device, fd, &pool), {"device", device}, {"fd", fd});
        return pool;
      },
      "device"_a, "fd"_a);
  cls.def(
      "pool_export_pointer",
      [](Driver& driver, int device, DevicePtr ptr) {
        PoolPointerExport exported;
        RINGMEM_CALL(pool_export_pointer, (device, ptr, &exported), {"device", device},
                     Argument::hex("ptr", ptr));
        return nb::bytes(exported.data, sizeof exported.data);
      },
      "device"_a, "ptr"_a);
  cls.def(
      "pool_import_pointer",
      [](Driver& driver, int device, PoolHandle pool, const nb::bytes& data) {
        PoolPointerExport exported;
        if (data.size() != sizeof exported.data) {
          throw InvalidValue("data has " + std::to_string(data.size()) +
                             " bytes; pool_export_pointer gave 64");
        }
        std::memcpy(exported.data, data.data(), sizeof exported.data);
        DevicePtr ptr = 0;
        RINGMEM_CALL(pool_import_pointer, (device, pool, exported, &ptr), {"device", device},
                     Argument::hex("pool", pool));
        return ptr;
      },
      "device"_a, "pool"_a, "data"_a);
}

}  // namespace

void bind_driver_memory(Class& cls) {
  bind_plain(cls);
  bind_managed(cls);
  bind_async(cls);
  bind_pools(cls);
  bind_pool_sharing(cls);
}

}  // namespace ringmem::bind
