// The driver's own pools, bound: Python's floor 4 subclasses DriverPoolBase.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <cstring>

#include "bind/driver_call.hpp"
#include "bind/pool.hpp"
#include "memory/driver_pool.hpp"

namespace ringmem::bind {
namespace {

struct NativeDriverPool {
  DeviceRef device;
  std::shared_ptr<DriverPool> pool;
};

void adopt(NativeDriverPool* self, DeviceRef device, PoolHandle handle, bool owned,
           bool imported) {
  auto pool = std::make_shared<DriverPool>(device->driver, device->ordinal, handle, owned,
                                           imported);
  new (self) NativeDriverPool{std::move(device), std::move(pool)};
}

PyObject* allocate(PyObject* self, PyObject* const* args, Py_ssize_t nargs,
                   PyObject* kwnames) noexcept {
  NativeDriverPool* native = ready<NativeDriverPool>(self);
  if (!native) [[unlikely]] return nullptr;
  return allocate_fast({self, native->pool.get(), native->device.get()}, args, nargs, kwnames);
}

PyObject* empty(PyObject* self, PyObject* const* args, Py_ssize_t nargs,
                PyObject* kwnames) noexcept {
  NativeDriverPool* native = ready<NativeDriverPool>(self);
  if (!native) [[unlikely]] return nullptr;
  return empty_fast(MemoryKind::device, native->pool, native->device, args, nargs, kwnames);
}

PyMethodDef allocate_method = {
    "allocate", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&allocate)),
    METH_FASTCALL | METH_KEYWORDS,
    "allocate($self, nbytes, stream=None)\n--\n\n"
    "Memory for work on `stream` (default: the thread's current stream), as an Allocation."};
PyMethodDef empty_method = {
    "empty", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&empty)),
    METH_FASTCALL | METH_KEYWORDS,
    "empty($self, shape, dtype=None, stream=None)\n--\n\n"
    "A DeviceBuffer of the pool's memory, with undefined content."};

nb::bytes export_pointer(NativeDriverPool& self, DevicePtr ptr) {
  static_cast<void>(self.pool->handle());
  PoolPointerExport exported;
  check(self.pool->driver()->pool_export_pointer(self.pool->device(), ptr, &exported),
        "cuMemPoolExportPointer");
  return nb::bytes(reinterpret_cast<const char*>(exported.data), sizeof exported.data);
}

// The address lives until it is freed, as an allocation does; Python wraps it.
DevicePtr import_pointer(NativeDriverPool& self, nb::bytes data) {
  PoolPointerExport exported;
  if (data.size() != sizeof exported.data) {
    throw InvalidValue("data has " + std::to_string(data.size()) + " bytes: give the " +
                       std::to_string(sizeof exported.data) + " of export_pointer()");
  }
  std::memcpy(exported.data, data.c_str(), sizeof exported.data);
  DevicePtr ptr = 0;
  check(self.pool->driver()->pool_import_pointer(self.pool->device(), self.pool->handle(),
                                                 exported, &ptr),
        "cuMemPoolImportPointer");
  return ptr;
}

}  // namespace

void bind_driver_pool(nb::module_& m) {
  nb::class_<DriverPool, Allocator>(m, "DriverPoolAllocator", "A driver's pool, as an Allocator.");
  nb::class_<NativeDriverPool> cls(m, "DriverPoolBase", nb::is_weak_referenceable(),
                                   nb::dynamic_attr(),
                                   "A pool of the driver; base of ringmem.pool.NativePool.");
  cls.def("__init__", &adopt, nb::arg("device"), nb::arg("handle"), nb::arg("owned"),
          nb::arg("imported"))
      .def_ro("device", &NativeDriverPool::device, "DeviceBase: where the memory is.")
      .def_prop_ro("native_allocator", [](NativeDriverPool& self) -> std::shared_ptr<Allocator> {
        return self.pool;
      }, "Allocator: what buffers hold.")
      .def_prop_ro("handle", [](NativeDriverPool& self) { return self.pool->handle(); },
                   "int: the driver's handle (cudaMemPool_t). ClosedError after destroy().")
      .def_prop_ro("owned", [](NativeDriverPool& self) { return self.pool->owned(); },
                   "bool: made or imported here, so destroy() destroys it.")
      .def_prop_ro("imported", [](NativeDriverPool& self) { return self.pool->imported(); },
                   "bool: another process made it.")
      .def_prop_ro("closed", [](NativeDriverPool& self) { return self.pool->closed(); },
                   "bool: destroy() was called.")
      .def_prop_ro("live", [](NativeDriverPool& self) { return self.pool->live(); },
                   "int: blocks allocated here and not freed.")
      .def_prop_ro("live_nbytes", [](NativeDriverPool& self) { return self.pool->live_bytes(); },
                   "int: bytes in them.")
      .def("native_destroy", [](NativeDriverPool& self, bool when_unused) {
        DriverPool::Destroyed done;
        {
          ReleaseGil released;
          done = self.pool->destroy(when_unused);
        }
        return std::pair(done.refused, static_cast<int>(done.status));
      }, nb::arg("when_unused"),
      "Destroys the pool; returns whether it refused, and the driver's status.")
      .def("export_pointer", &export_pointer, nb::arg("ptr"))
      .def("native_import_pointer", &import_pointer, nb::arg("data"));
  add_fast_method(cls, &allocate_method);
  add_fast_method(cls, &empty_method);
}

}  // namespace ringmem::bind
