// Ownership of a buffer's memory: uses, closing, giving back, and the streams that must be done
// first.
#include "bind/buffer.hpp"

#include <algorithm>
#include <utility>

#include "bind/wait.hpp"
#include "memory/reaper.hpp"

namespace ringmem::bind {
namespace {

// From this many recorded streams on, those whose work is done are forgotten.
constexpr std::size_t many_streams = 16;

// Freeing that must wait for work which no handle names any more: the reaper waits for the device.
void free_after_everything(Buffer& buffer) {
  ReaperJob job;
  job.driver = buffer.device->driver;
  job.what = "freeing " + std::to_string(buffer.nbytes) + " bytes of a closed stream";
  job.run = [driver = job.driver, device = buffer.device->ordinal, block = buffer.block,
             allocator = buffer.allocator] {
    // A device that cannot be waited for any more has no work left that could use the memory.
    static_cast<void>(driver->synchronize(device));
    return allocator->deallocate(block, default_stream);
  };
  Reaper::instance().post(std::move(job));
}

void free_later(Buffer& buffer, StreamHandle stream) {
  ReaperJob job;
  job.driver = buffer.device->driver;
  job.what = "freeing " + std::to_string(buffer.nbytes) + " bytes";
  job.run = [block = buffer.block, allocator = buffer.allocator, stream] {
    return allocator->deallocate(block, stream);
  };
  Reaper::instance().post(std::move(job));
}

// `later` waits, on the device, for the work that `earlier` has now.
Status wait_on_device(const StreamRef& later, const StreamRef& earlier) {
  Driver& driver = *earlier.device->driver;
  EventHandle event = 0;
  Status status = driver.event_create(earlier.device->ordinal, EventFlags{}, &event);
  if (!ok(status)) return status;
  status = driver.event_record(earlier.device->ordinal, event, earlier.handle);
  if (ok(status)) status = driver.stream_wait_event(later.device->ordinal, later.handle, event);
  const Status destroyed = driver.event_destroy(earlier.device->ordinal, event);
  return ok(status) ? destroyed : status;
}

const char* free_operation(const Buffer& buffer) {
  switch (buffer.kind) {
    case MemoryKind::pinned:
      return "cuMemFreeHost";
    case MemoryKind::managed:
      return "cuMemFree";
    default:
      return buffer.allocator && buffer.allocator->may_block() ? "cuMemFree" : "cuMemFreeAsync";
  }
}

thread_local PyObject* kept_error = nullptr;  // an exception object; owned

}  // namespace

void keep_python_error() noexcept {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (value && trace) PyException_SetTraceback(value, trace);
  Py_XDECREF(type);
  Py_XDECREF(trace);
  Py_XDECREF(std::exchange(kept_error, value));
}

bool restore_python_error() noexcept {
  PyObject* error = std::exchange(kept_error, nullptr);
  if (!error) return false;
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
  Py_DECREF(error);
  return true;
}

bool StreamRef::closed() const {
  return owner.is_valid() && nb::isinstance<NativeStream>(owner) &&
         nb::inst_ptr<NativeStream>(owner)->closed.load(std::memory_order_acquire);
}

std::string describe(const Buffer& buffer) {
  std::string text = buffer_type(buffer.kind).is_valid()
                         ? nb::cast<std::string>(nb::str(buffer_type(buffer.kind).attr("__name__")))
                         : "buffer";
  text += " " + buffer.shape.text();
  if (buffer.dtype) text += " " + std::string(nb::str(buffer.dtype).c_str());
  if (buffer.device) text += " on " + buffer.device->name;
  return text;
}

// --- uses --------------------------------------------------------------------------------------

void Buffer::check_open() const {
  if (closed()) [[unlikely]] throw Closed(describe(*this) + " is closed");
}

void Buffer::add_use() {
  std::int64_t uses = uses_.load(std::memory_order_acquire);
  do {
    if (uses == closed_mark) [[unlikely]] throw Closed(describe(*this) + " is closed");
  } while (!uses_.compare_exchange_weak(uses, uses + 1, std::memory_order_acq_rel));
}

void Buffer::note_use(const StreamRef& used) {
  Buffer& target = memory();
  nb::ft_lock_guard lock(target.mutex_);
  if (used.same_as(target.stream)) {
    target.touched_ = true;
    return;
  }
  auto& others = target.others_;
  for (const StreamRef& other : others) {
    if (other.same_as(used)) return;
  }
  if (others.size() >= many_streams) {
    std::erase_if(others, [](const StreamRef& other) {
      RelaxedCapture relaxed(*other.device->driver);
      return !other.closed() &&
             ok(other.device->driver->stream_query(other.device->ordinal, other.handle));
    });
  }
  others.push_back(used);
}

std::vector<StreamRef> Buffer::streams_in_use() const {
  const Buffer& target = memory();
  nb::ft_lock_guard lock(target.mutex_);
  std::vector<StreamRef> streams = target.others_;
  // Device memory is there only after its allocation, which is in the order of its stream.
  const bool ordered = target.kind == MemoryKind::device && target.allocator;
  if (target.touched_ || ordered) streams.push_back(target.stream);
  std::erase_if(streams, [](const StreamRef& stream) { return stream.closed(); });
  return streams;
}

void Buffer::check_device_may_use() const {
  if (!memory().host_only.load(std::memory_order_acquire)) return;
  raise_error("InvalidValueError",
              describe(*this) + " is inside host(), and " + device->name +
                  " cannot use managed memory while the host does: leave the with block first");
}

// --- closing -----------------------------------------------------------------------------------

void Buffer::close(const StreamRef* free_on) {
  std::int64_t expected = 0;
  if (!uses_.compare_exchange_strong(expected, closed_mark, std::memory_order_acq_rel)) {
    if (expected == closed_mark) return;
    raise_error("InvalidValueError", describe(*this) + " has " + std::to_string(expected) +
                                         (expected == 1 ? " live view" : " live views or exports") +
                                         ": delete or close them before close()");
  }
  const Status status = release(free_on, false);
  if (ok(status)) [[likely]] return;
  uses_.store(0, std::memory_order_release);
  if (restore_python_error()) throw nb::python_error();
  throw DriverError(status, free_operation(*this), "closing " + describe(*this));
}

Status Buffer::release(const StreamRef* free_on, bool finalizing) noexcept {
  if (root) {
    Buffer* viewed = std::exchange(root, nullptr);
    viewed->drop_use();
    root_object.reset();
    return Status::success;
  }
  if (!allocator) {
    owner.reset();
    return Status::success;
  }
  try {
    const Status status = give_back(free_on ? *free_on : stream, finalizing);
    if (!ok(status)) return status;
  } catch (nb::python_error& error) {
    error.restore();
    keep_python_error();
    return Status::unknown;
  } catch (...) {
    return Status::operating_system;  // no memory or no thread for the release
  }
  allocator.reset();
  return Status::success;
}

Status Buffer::give_back(const StreamRef& last, bool finalizing) {
  bool stray = last.closed();
  auto record = [&](const StreamRef& used) {
    if (used.same_as(last)) return Status::success;
    if (used.closed()) {
      stray = true;
      return Status::success;
    }
    // An allocator knows a stream by its handle, which is no name for another device's default.
    if (used.device != device && used.handle <= per_thread_stream) {
      return wait_on_device(last, used);
    }
    return allocator->record_stream(block, used.handle);
  };
  if (Status status = record(stream); !ok(status)) return status;
  for (const StreamRef& other : others_) {
    if (Status status = record(other); !ok(status)) return status;
  }
  if (stray) [[unlikely]] {
    free_after_everything(*this);
    return Status::success;
  }
  if (!allocator->may_block()) [[likely]] return allocator->deallocate(block, last.handle);
  if (finalizing) {
    free_later(*this, last.handle);
    return Status::success;
  }
  nb::gil_scoped_release release;
  return allocator->deallocate(block, last.handle);
}

void Buffer::warn_lost(Status status) noexcept {
  if (!nb::is_alive() || status == Status::deinitialized) return;
  const nb::error_scope keep;
  try {
    std::string text = describe(*this) + " could not be freed: ";
    if (restore_python_error()) {
      const nb::python_error error;
      text += error.what();
    } else {
      text += status_name(status);
    }
    if (place) {
      text += "; allocated at " + std::string(nb::str(place[0]).c_str()) + ":" +
              nb::str(place[1]).c_str();
    }
    if (PyErr_WarnEx(PyExc_RuntimeWarning, text.c_str(), 1) < 0) PyErr_WriteUnraisable(nullptr);
  } catch (...) {  // a warning that cannot be made is not worth a crash
    PyErr_Clear();
  }
}

// Nothing can use the memory now: whoever does would hold a reference. A free that fails may be
// repeated, so it is, once.
Buffer::~Buffer() {
  if (!device || closed()) return;
  Status status = release(nullptr, true);
  if (!ok(status)) status = release(nullptr, true);
  if (!ok(status)) warn_lost(status);
}

// --- the class ---------------------------------------------------------------------------------

namespace {

void close_buffer(Buffer& self, nb::handle stream) {
  if (stream.is_none()) [[likely]] return self.close(nullptr);
  if (self.closed()) return;
  const StreamRef free_on = stream_ref(stream, *self.device);
  self.close(&free_on);
}

// With an exception on its way, a second one would hide it: what cannot be closed then is left to
// the finalizer.
void exit_buffer(Buffer& self, nb::handle type, nb::handle, nb::handle) {
  if (type.is_none()) return self.close(nullptr);
  try {
    self.close(nullptr);
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("closing a buffer");
  } catch (const DriverError&) {
  }
}

DevicePtr open_ptr(const Buffer& self) {
  self.check_open();
  return self.ptr;
}

nb::object stream_of_buffer(const Buffer& self) {
  return self.memory().stream.owner.is_valid() ? self.memory().stream.owner : nb::none();
}

nb::object owned_by(const Buffer& self) {
  if (self.root) return self.root_object;
  return self.owner.is_valid() ? self.owner : nb::none();
}

void synchronize_uses(Buffer& self) {
  Use use(self);
  const std::vector<StreamRef> streams = self.streams_in_use();
  for (const StreamRef& stream : streams) {
    Status status;
    {
      nb::gil_scoped_release release;
      RelaxedCapture relaxed(*stream.device->driver);
      status = stream.device->driver->stream_synchronize(stream.device->ordinal, stream.handle);
    }
    check(status, "cuStreamSynchronize", "for the host to read " + describe(self));
  }
}

void bind_lifetime(nb::class_<Buffer>& cls) {
  cls.def("close", &close_buffer, nb::arg("stream").none() = nb::none(),
          "Give the memory back in the order of `stream` (default: the buffer's own). Idempotent.")
      .def("__enter__", [](nb::handle_t<Buffer> self) {
        nb::inst_ptr<Buffer>(self)->check_open();
        return nb::borrow(self);
      })
      .def("__exit__", &exit_buffer, nb::arg("type").none(), nb::arg("value").none(),
           nb::arg("traceback").none())
      .def("record_stream", [](Buffer& self, nb::handle stream) {
        self.check_open();
        self.note_use(stream_ref(stream, *self.device));
      }, nb::arg("stream"),
           "Work on `stream` uses the memory too: freeing it waits for that work, on the device.")
      .def_prop_ro("closed", &Buffer::closed, "bool: `close()` was called.");
}

}  // namespace

void bind_buffer_class(nb::module_& m, nb::class_<Buffer>& cls) {
  bind_lifetime(cls);
  cls.def_prop_ro("ptr", &open_ptr, "int: the address. ClosedError after `close()`.")
      .def_ro("nbytes", &Buffer::nbytes, "int: size in bytes.")
      .def_ro("size", &Buffer::size, "int: number of elements.")
      .def_ro("itemsize", &Buffer::itemsize, "int: bytes of one element.")
      .def_prop_ro("shape", [](const Buffer& self) { return self.shape.tuple(); },
                   "tuple of int: extents.")
      .def_prop_ro("ndim", [](const Buffer& self) { return self.shape.ndim(); },
                   "int: number of dimensions.")
      .def_ro("dtype", &Buffer::dtype, "numpy.dtype: type of the elements.")
      .def_ro("device", &Buffer::device_object, "Device: whose memory it is, or who may reach it.")
      .def_ro("readonly", &Buffer::read_only, "bool: the memory must not be written.")
      .def_prop_ro("is_view", [](const Buffer& self) { return self.root != nullptr; },
                   "bool: the memory belongs to another buffer.")
      .def_prop_ro("_kind", [](const Buffer& self) { return static_cast<int>(self.kind); })
      .def_prop_ro("_owner", &owned_by)
      .def_prop_ro("_uses", &Buffer::uses)
      .def_prop_ro("_place", [](const Buffer& self) {
        return self.place ? self.place : nb::none();
      })
      .def_prop_ro("_stream_handle",
                   [](const Buffer& self) { return self.memory().stream.handle; })
      .def_prop_ro("_stream_owner", &stream_of_buffer)
      .def_prop_ro("_streams_in_use", [](const Buffer& self) {
        nb::list handles;
        for (const StreamRef& stream : self.streams_in_use()) handles.append(stream.handle);
        return handles;
      })
      .def_prop_ro("_root_ptr", [](const Buffer& self) { return self.memory().ptr; })
      .def_prop_ro("_root_nbytes", [](const Buffer& self) { return self.memory().nbytes; })
      .def_prop_rw("_host_only", [](const Buffer& self) { return self.memory().host_only.load(); },
                   [](Buffer& self, bool value) { self.memory().host_only.store(value); })
      .def("_synchronize_uses", &synchronize_uses)
      .def("_check_device_may_use", &Buffer::check_device_may_use);
  static_cast<void>(m);
}

}  // namespace ringmem::bind
