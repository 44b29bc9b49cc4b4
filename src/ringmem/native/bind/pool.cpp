// The pool's Python class: allocation without a parser in the way, limits, the end. Python's floor 4
// subclasses PoolBase.
#include "bind/pool.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <iterator>
#include <mutex>
#include <utility>

namespace ringmem::bind {
namespace {

// --- streams that go -----------------------------------------------------------------------------

// Pools must hear of a stream before it is destroyed. Expired entries are dropped as they are met.
std::mutex pools_mutex;
std::vector<std::weak_ptr<Pool>>& pools() {
  static auto* all = new std::vector<std::weak_ptr<Pool>>;  // never destroyed: exit has no order
  return *all;
}

void tell_pools(const NativeDevice& device, StreamHandle stream) noexcept {
  std::vector<std::shared_ptr<Pool>> told;
  std::vector<std::weak_ptr<Pool>> gone;  // may hold the last of a driver, whose end gives up the GIL
  try {
    const std::lock_guard guard(pools_mutex);
    const auto first_gone = std::partition(pools().begin(), pools().end(),
                                           [](const auto& pool) { return !pool.expired(); });
    gone.assign(std::move_iterator(first_gone), std::move_iterator(pools().end()));
    pools().erase(first_gone, pools().end());
    for (const auto& entry : pools()) {
      if (auto pool = entry.lock(); pool && pool->driver() == device.driver) {
        told.push_back(std::move(pool));
      }
    }
  } catch (...) {  // no memory for the list: the pools find out when they use the stream
  }
  for (const auto& pool : told) {
    if (pool->device() == device.ordinal && !pool->foreign()) pool->release_stream(stream);
  }
}

// --- making one ----------------------------------------------------------------------------------

PoolPolicy policy_of(const std::string& name) {
  if (name == "best_fit") return PoolPolicy::best_fit;
  if (name == "power_of_two") return PoolPolicy::power_of_two;
  if (name == "exact") return PoolPolicy::exact;
  throw InvalidValue("policy is '" + name + "': give 'best_fit', 'power_of_two' or 'exact'");
}

const char* name_of(PoolPolicy policy) noexcept {
  switch (policy) {
    case PoolPolicy::power_of_two:
      return "power_of_two";
    case PoolPolicy::exact:
      return "exact";
    default:
      return "best_fit";
  }
}

void init_pool(NativePool* self, DeviceRef device, std::optional<std::size_t> limit,
               std::optional<std::size_t> release_threshold, bool tight, const std::string& policy,
               bool debug, bool shareable, bool rdma, const std::vector<int>& peers) {
  PoolOptions options;
  options.limit = limit.value_or(unlimited);
  options.release_threshold = release_threshold.value_or(unlimited);
  options.tight = tight;
  options.policy = policy_of(policy);
  options.shareable = shareable;
  options.rdma = rdma;
  for (const int peer : peers) {
    options.peers.push_back({{LocationKind::device, peer}, Access::readwrite});
  }
  auto pool = reaped(new Pool(device->driver, device->ordinal, std::move(options)), device->driver,
                     "closing a pool");
  {
    const std::lock_guard guard(pools_mutex);
    pools().push_back(pool);
  }
  new (self) NativePool;
  self->pool = pool;
  self->allocator = pool;
  if (debug) {
    self->debug = reaped(new DebugAllocator(*pool), device->driver, "closing a pool's checks",
                         pool);
    self->allocator = self->debug;
  }
  self->device = std::move(device);
}

// --- the hot methods -----------------------------------------------------------------------------

Block allocate_aligned(Allocator& allocator, std::size_t nbytes, StreamHandle stream,
                       std::size_t alignment) {
  return static_cast<Pool&>(allocator).allocate(nbytes, stream, alignment);
}

Block allocate_aligned_checked(Allocator& allocator, std::size_t nbytes, StreamHandle stream,
                               std::size_t alignment) {
  return static_cast<DebugAllocator&>(allocator).allocate(nbytes, stream, alignment);
}

bool find_block(const NativePool& self, DevicePtr ptr, Block* block) {
  return self.debug ? self.debug->find(ptr, block) : self.pool->find(ptr, block);
}

PyObject* allocate(PyObject* self, PyObject* const* args, Py_ssize_t nargs,
                   PyObject* kwnames) noexcept {
  NativePool* native = ready<NativePool>(self);
  if (!native) [[unlikely]] return nullptr;
  const AllocationSource source{self, native->allocator.get(), native->device.get(), false,
                                native->debug ? &allocate_aligned_checked : &allocate_aligned};
  return allocate_fast(source, args, nargs, kwnames);
}

PyObject* empty(PyObject* self, PyObject* const* args, Py_ssize_t nargs,
                PyObject* kwnames) noexcept {
  NativePool* native = ready<NativePool>(self);
  if (!native) [[unlikely]] return nullptr;
  return empty_fast(MemoryKind::device, native->allocator, native->device, args, nargs, kwnames);
}

PyMethodDef allocate_method = {
    "allocate", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&allocate)),
    METH_FASTCALL | METH_KEYWORDS,
    "allocate($self, nbytes, stream=None, alignment=None)\n--\n\n"
    "Memory for work on `stream` (default: the thread's current stream), as an Allocation that\n"
    "gives it back in that stream's order when it is closed or dropped.\n\n"
    "Addresses are multiples of 256 bytes or of `alignment`, a power of two up to 2**30. Nothing\n"
    "waits, unless memory would be out otherwise. Raises OutOfMemoryError, InvalidValueError,\n"
    "InvalidDeviceError, ClosedError, DriverError."};
PyMethodDef empty_method = {
    "empty", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&empty)),
    METH_FASTCALL | METH_KEYWORDS,
    "empty($self, shape, dtype=None, stream=None)\n--\n\n"
    "A DeviceBuffer of the pool's memory, with undefined content; a buffer of size 0 takes none.\n\n"
    "Raises what allocate() raises."};

// --- what addresses alone can do -----------------------------------------------------------------

DevicePtr allocate_ptr(NativePool& self, std::size_t nbytes, nb::handle stream) {
  const StreamHandle handle = stream_of(stream, *self.device);
  Block block;
  if (!self.allocator->try_allocate(nbytes, handle, &block)) {
    ReleaseGil release;
    block = self.allocator->allocate(nbytes, handle);
  }
  return block.ptr;
}

std::string at(DevicePtr ptr) {
  char text[24];
  snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(ptr));
  return text;
}

void deallocate_ptr(NativePool& self, DevicePtr ptr, std::optional<std::size_t> nbytes,
                    nb::handle stream) {
  const StreamHandle handle = stream_of(stream, *self.device);
  Block block{ptr, nbytes.value_or(0), nullptr};
  const bool known = find_block(self, ptr, &block);
  if (!known && !self.debug) {  // debug mode says more
    raise_error("DoubleFreeError", "ptr is " + at(ptr) + ": no live block of the pool on " +
                                       self.device->name + " starts there; it was freed already, "
                                       "or never allocated here");
  }
  if (known && nbytes && *nbytes != block.nbytes) {
    throw InvalidValue("nbytes is " + std::to_string(*nbytes) + ": the block at " + at(ptr) +
                       " has " + std::to_string(block.nbytes));
  }
  const Status status = self.allocator->deallocate(block, handle);
  if (status == Status::illegal_state) {
    raise_error("DoubleFreeError", "ptr is " + at(ptr) + ": no live block of the pool starts there; "
                                       "it was freed already, or never allocated here");
  }
  check(status, "cuMemFreeAsync");
}

// --- the rest ------------------------------------------------------------------------------------

std::optional<std::size_t> none_if_unlimited(std::size_t nbytes) {
  if (nbytes == unlimited) return std::nullopt;
  return nbytes;
}

template <class Call>
auto without_gil(Call&& call) {
  ReleaseGil release;
  return call();
}

nb::dict options_of(NativePool& self) {
  const PoolOptions& options = self.pool->options();
  nb::dict d;
  d["tight"] = options.tight;
  d["policy"] = name_of(options.policy);
  d["debug"] = self.debug != nullptr;
  d["shareable"] = options.shareable;
  d["rdma"] = options.rdma;
  return d;
}

PyObject* empty_names[3];  // shape, dtype, stream; interned with the module, never freed

}  // namespace

NativePool::~NativePool() {
  if (!pool) return;
  for (const int id : callbacks) pool->remove_callback(id);
}

PyObject* empty_fast(MemoryKind kind, const std::shared_ptr<Allocator>& allocator,
                     const DeviceRef& device, PyObject* const* args, Py_ssize_t nargs,
                     PyObject* kwnames) noexcept {
  PyObject* const* const names = empty_names;
  try {
    PyObject* given[3] = {};
    if (nargs > 3) throw nb::type_error("empty() takes shape, dtype and stream");
    for (Py_ssize_t i = 0; i < nargs; ++i) given[i] = args[i];
    const Py_ssize_t named = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
    for (Py_ssize_t i = 0; i < named; ++i) {
      PyObject* name = PyTuple_GET_ITEM(kwnames, i);
      int index = 0;
      while (index < 3 && names[index] != name && PyUnicode_Compare(names[index], name) != 0) {
        ++index;
      }
      if (index == 3 || given[index]) {
        throw nb::type_error("empty() takes shape, dtype and stream, each once");
      }
      given[index] = args[nargs + i];
    }
    if (!given[0]) throw nb::type_error("empty() needs a shape");
    Spec spec = spec_of(nb::handle(given[0]), nb::handle(given[1]));
    StreamRef stream = stream_ref(nb::handle(given[2]), *device);
    Block block;
    const std::size_t nbytes = spec.nbytes;
    if (nbytes && !allocator->try_allocate(nbytes, stream.handle, &block)) [[unlikely]] {
      ReleaseGil release;
      block = allocator->allocate(nbytes, stream.handle);
    }
    return make_buffer(kind, block, allocator, std::move(spec), nb::find(*device),
                       std::move(stream))
        .release()
        .ptr();
  } catch (const nb::builtin_exception& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
  } catch (...) {
    set_python_error();
  }
  return nullptr;
}

void bind_pool_class(nb::module_& m) {
  stream_closing = &tell_pools;
  empty_names[0] = PyUnicode_InternFromString("shape");
  empty_names[1] = PyUnicode_InternFromString("dtype");
  empty_names[2] = PyUnicode_InternFromString("stream");
  nb::class_<Pool, Allocator>(m, "PoolAllocator", "A pool, as the allocator that buffers hold.");
  nb::class_<DebugAllocator, Allocator>(m, "DebugAllocator", "A pool in debug mode.");
  nb::class_<NativePool> cls(m, "PoolBase", nb::is_weak_referenceable(), nb::dynamic_attr(),
                             "A pool of device memory; base of ringmem.pool.Pool.");
  cls.def("__init__", &init_pool, nb::arg("device"), nb::arg("limit").none(),
          nb::arg("release_threshold").none(), nb::arg("tight"), nb::arg("policy"),
          nb::arg("debug"), nb::arg("shareable"), nb::arg("rdma"), nb::arg("peers"))
      .def_ro("device", &NativePool::device, "DeviceBase: where the memory is.")
      .def_prop_ro("native_allocator", [](NativePool& self) -> std::shared_ptr<Allocator> {
        return self.allocator;
      }, "Allocator: what buffers hold.")
      .def("allocate_ptr", &allocate_ptr, nb::arg("nbytes"), nb::arg("stream").none() = nb::none())
      .def("deallocate_ptr", &deallocate_ptr, nb::arg("ptr"), nb::arg("nbytes").none() = nb::none(),
           nb::arg("stream").none() = nb::none())
      .def("find", [](NativePool& self, DevicePtr ptr) -> std::optional<std::size_t> {
        Block block;
        if (!find_block(self, ptr, &block)) return std::nullopt;
        return block.nbytes;
      }, nb::arg("ptr"), "Bytes of the live block that starts at `ptr`, or None.")
      .def_prop_ro("native_limit", [](NativePool& self) {
        return none_if_unlimited(self.pool->limit());
      })
      .def("set_limit", [](NativePool& self, std::optional<std::size_t> nbytes) {
        without_gil([&] { self.pool->set_limit(nbytes.value_or(unlimited)); });
      }, nb::arg("nbytes").none())
      .def_prop_ro("native_release_threshold", [](NativePool& self) {
        return none_if_unlimited(self.pool->release_threshold());
      })
      .def("set_release_threshold", [](NativePool& self, std::optional<std::size_t> nbytes) {
        without_gil([&] { self.pool->set_release_threshold(nbytes.value_or(unlimited)); });
      }, nb::arg("nbytes").none())
      .def("native_reserve", [](NativePool& self, std::size_t nbytes, nb::handle stream) {
        const StreamHandle handle = stream_of(stream, *self.device);
        without_gil([&] { self.pool->reserve(nbytes, handle); });
      }, nb::arg("nbytes"), nb::arg("stream").none())
      .def("native_trim", [](NativePool& self, std::size_t keep_bytes) {
        check(without_gil([&] { return self.pool->trim(keep_bytes); }), "cuMemRelease");
      }, nb::arg("keep_bytes"))
      .def("native_close", [](NativePool& self, bool when_unused) {
        return without_gil([&] { return self.pool->close(when_unused); });
      }, nb::arg("when_unused"))
      .def_prop_ro("closed", [](NativePool& self) { return self.pool->closed(); },
                   "bool: close() was called and has not refused.")
      .def("native_reset_peaks", [](NativePool& self) { self.pool->reset_peaks(); })
      .def_prop_ro("reserved", [](NativePool& self) { return self.pool->reserved(); },
                   "int: bytes held from the driver now.")
      .def("inconsistency", [](NativePool& self) { return self.pool->inconsistency(); },
           "str: what is wrong with the books; empty if nothing is. For tests.")
      .def_prop_ro("options", &options_of,
                   nb::sig("def options(self) -> dict[str, bool | str]"));
  bind_pool_reports(cls);
  add_fast_method(cls, &allocate_method);
  add_fast_method(cls, &empty_method);
}

void bind_pool(nb::module_& m) {
  bind_pool_class(m);
  bind_host_pools(m);
  bind_driver_pool(m);
  bind_pool_replay(m);
  bind_pool_bench(m);
}

}  // namespace ringmem::bind
