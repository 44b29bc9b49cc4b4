// Pools of memory that the host uses too, bound: Python's floor 4 subclasses ArenaPoolBase.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <limits>

#include "bind/pool.hpp"
#include "memory/arena_pool.hpp"

namespace ringmem::bind {
namespace {

constexpr std::size_t most = std::numeric_limits<std::size_t>::max();  // no limit

struct NativeArenaPool {
  DeviceRef device;
  std::shared_ptr<ArenaPool> pool;
  MemoryKind kind = MemoryKind::pinned;
};

void init_pool(NativeArenaPool* self, DeviceRef device, bool managed,
               std::optional<std::size_t> limit, std::size_t arena_nbytes) {
  ArenaPoolOptions options;
  if (limit) options.limit = *limit;
  options.arena_bytes = arena_nbytes;
  auto source = managed ? managed_arenas(device->driver, device->ordinal)
                        : pinned_arenas(device->driver, device->ordinal);
  auto pool = std::make_shared<ArenaPool>(device->driver, device->ordinal, std::move(source),
                                          options);
  new (self) NativeArenaPool{std::move(device), std::move(pool),
                             managed ? MemoryKind::managed : MemoryKind::pinned};
}

PyObject* allocate(PyObject* self, PyObject* const* args, Py_ssize_t nargs,
                   PyObject* kwnames) noexcept {
  NativeArenaPool* native = ready<NativeArenaPool>(self);
  if (!native) [[unlikely]] return nullptr;
  return allocate_fast({self, native->pool.get(), native->device.get(), true}, args, nargs,
                       kwnames);
}

PyObject* empty(PyObject* self, PyObject* const* args, Py_ssize_t nargs,
                PyObject* kwnames) noexcept {
  NativeArenaPool* native = ready<NativeArenaPool>(self);
  if (!native) [[unlikely]] return nullptr;
  return empty_fast(native->kind, native->pool, native->device, args, nargs, kwnames);
}

PyMethodDef allocate_method = {
    "allocate", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&allocate)),
    METH_FASTCALL | METH_KEYWORDS,
    "allocate($self, nbytes, stream=None)\n--\n\n"
    "Memory as an Allocation, which gives it back when it is closed or dropped.\n\n"
    "Without a stream, given or current, it is free for others the moment it is freed: name every\n"
    "stream whose work uses it with `stream`, close(stream) or record_stream(stream)."};
PyMethodDef empty_method = {
    "empty", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&empty)),
    METH_FASTCALL | METH_KEYWORDS,
    "empty($self, shape, dtype=None, stream=None)\n--\n\n"
    "A buffer of the pool's memory, with undefined content. Copies note their streams by\n"
    "themselves."};

nb::dict statistics(NativeArenaPool& self) {
  const ArenaPoolStatistics s = self.pool->statistics();
  nb::dict d;
  d["requested"] = s.requested;
  d["allocated"] = s.allocated;
  d["reserved"] = s.reserved;
  d["pending"] = s.pending;
  d["live"] = s.live;
  d["peak_requested"] = s.peak_requested;
  d["peak_allocated"] = s.peak_allocated;
  d["peak_reserved"] = s.peak_reserved;
  d["largest_free_block"] = s.largest_free_block;
  d["arenas"] = s.arenas;
  d["allocations"] = s.allocations;
  d["frees"] = s.frees;
  d["misses"] = s.misses;
  d["retries"] = s.retries;
  return d;
}

template <class Call>
auto without_gil(Call&& call) {
  ReleaseGil release;
  return call();
}

}  // namespace

void bind_host_pools(nb::module_& m) {
  nb::class_<ArenaPool, Allocator>(m, "ArenaAllocator", "An arena pool, as an Allocator.");
  nb::class_<NativeArenaPool> cls(m, "ArenaPoolBase", nb::is_weak_referenceable(),
                                  nb::dynamic_attr(),
                                  "A pool of host-visible memory; base of PinnedPool, UnifiedPool.");
  cls.def("__init__", &init_pool, nb::arg("device"), nb::arg("managed"), nb::arg("limit").none(),
          nb::arg("arena_nbytes"))
      .def_ro("device", &NativeArenaPool::device, "DeviceBase: whose driver has the memory.")
      .def_prop_ro("native_allocator", [](NativeArenaPool& self) -> std::shared_ptr<Allocator> {
        return self.pool;
      }, "Allocator: what buffers hold.")
      .def_prop_ro("native_limit", [](NativeArenaPool& self) -> std::optional<std::size_t> {
        const std::size_t limit = self.pool->limit();
        if (limit == most) return std::nullopt;
        return limit;
      })
      .def("set_limit", [](NativeArenaPool& self, std::optional<std::size_t> nbytes) {
        without_gil([&] { self.pool->set_limit(nbytes.value_or(most)); });
      }, nb::arg("nbytes").none())
      .def("native_reserve", [](NativeArenaPool& self, std::size_t nbytes) {
        without_gil([&] { self.pool->reserve(nbytes); });
      }, nb::arg("nbytes"))
      .def("native_trim", [](NativeArenaPool& self, std::size_t keep_bytes) {
        without_gil([&] { self.pool->trim(keep_bytes); });
      }, nb::arg("keep_bytes"))
      .def("native_close", [](NativeArenaPool& self) {
        return without_gil([&] { return self.pool->close(); });
      })
      .def_prop_ro("closed", [](NativeArenaPool& self) { return self.pool->closed(); },
                   "bool: close() was called and has not refused.")
      .def("live_blocks", [](NativeArenaPool& self) {
        nb::list blocks;
        for (const Block& block : self.pool->live_blocks()) {
          blocks.append(nb::make_tuple(block.ptr, block.nbytes));
        }
        return blocks;
      }, nb::sig("def live_blocks(self) -> list[tuple[int, int]]"),
           "(ptr, nbytes) of what is allocated.")
      .def("native_statistics", &statistics,
           nb::sig("def native_statistics(self) -> dict[str, int]"))
      .def("native_reset_peaks", [](NativeArenaPool& self) { self.pool->reset_peaks(); });
  add_fast_method(cls, &allocate_method);
  add_fast_method(cls, &empty_method);
}

}  // namespace ringmem::bind
