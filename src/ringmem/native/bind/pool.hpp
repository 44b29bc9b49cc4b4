// What the binding files of the pools share.
#pragma once

#include <memory>
#include <vector>

#include "bind/allocation.hpp"
#include "bind/buffer.hpp"
#include "pool/debug.hpp"
#include "pool/pool.hpp"

namespace ringmem::bind {

// A pool behind its Python object. Buffers hold the native pool alone, so it outlives the Python
// object while they live; callbacks, which belong to the Python object, do not.
struct NativePool {
  DeviceRef device;
  std::shared_ptr<Pool> pool;
  std::shared_ptr<DebugAllocator> debug;  // only in debug mode
  std::shared_ptr<Allocator> allocator;   // what buffers hold: the one or the other
  std::vector<int> callbacks;

  NativePool() = default;
  NativePool(const NativePool&) = delete;
  NativePool& operator=(const NativePool&) = delete;
  ~NativePool();
};

// `owner.empty(shape, dtype=None, stream=None)` in the vectorcall convention.
PyObject* empty_fast(MemoryKind kind, const std::shared_ptr<Allocator>& allocator,
                     const DeviceRef& device, PyObject* const* args, Py_ssize_t nargs,
                     PyObject* kwnames) noexcept;

// The C++ object of a pool whose __init__ ran, or nullptr with a Python error set.
template <class T>
T* ready(PyObject* self) noexcept {
  if (nb::inst_ready(self)) [[likely]] return nb::inst_ptr<T>(self);
  PyErr_SetString(PyExc_RuntimeError, "the pool's __init__ was not called");
  return nullptr;
}

// Pools may wait for device work when they go, so whoever drops the last reference to an open one
// hands that to the reaper. `parent` is let go of after it.
template <class T>
std::shared_ptr<T> reaped(T* allocator, DriverRef driver, const char* what,
                          std::shared_ptr<Pool> parent = nullptr);

void bind_pool_class(nb::module_& m);
void bind_pool_reports(nb::class_<NativePool>& cls);
void bind_host_pools(nb::module_& m);
void bind_driver_pool(nb::module_& m);
void bind_pool_replay(nb::module_& m);
void bind_pool_bench(nb::module_& m);

}  // namespace ringmem::bind

#include "memory/reaper.hpp"

namespace ringmem::bind {

template <class T>
std::shared_ptr<T> reaped(T* allocator, DriverRef driver, const char* what,
                          std::shared_ptr<Pool> parent) {
  return std::shared_ptr<T>(allocator, [driver = std::move(driver), what,
                                        parent = std::move(parent)](T* last) {
    if constexpr (requires { last->closed(); }) {
      if (last->closed()) {
        delete last;
        return;
      }
    }
    try {
      ReaperJob job;
      job.driver = driver;
      job.what = what;
      job.run = [last, parent] {
        if constexpr (requires { last->close(); }) {
          try {
            if (last->statistics().live == 0) (void)last->close();
          } catch (const DriverError& error) {
            if (forbidden_by_capture(error.status)) return error.status;
          } catch (...) {  // what its end does about it, see there
          }
        }
        delete last;
        return Status::success;
      };
      Reaper::instance().post(std::move(job));
    } catch (...) {  // no memory or no thread for the job: the process's end gives it back
    }
  });
}

}  // namespace ringmem::bind
