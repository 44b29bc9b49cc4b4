// Ownership of a buffer's memory: uses, closing, giving back, and the streams that must be done
// first.
#include "bind/buffer.hpp"

#include <algorithm>
#include <memory>
#include <utility>

#include "bind/wait.hpp"
#include "memory/event_order.hpp"
#include "memory/reaper.hpp"

namespace ringmem::bind {
namespace {

// From this many recorded streams on, those whose work is done are forgotten.
constexpr std::size_t many_streams = 16;

// Freeing that must wait for work which no handle names any more: the reaper waits for the devices.
void free_after_everything(Buffer& buffer, const std::vector<StreamRef>& used) {
  ReaperJob job;
  job.driver = buffer.device->driver;
  job.what = "freeing " + std::to_string(buffer.nbytes) + " bytes of a closed stream";
  std::vector<int> devices{buffer.device->ordinal};
  for (const StreamRef& stream : used) {
    if (stream.device->driver == job.driver) devices.push_back(stream.device->ordinal);
  }
  std::sort(devices.begin(), devices.end());
  devices.erase(std::unique(devices.begin(), devices.end()), devices.end());
  job.run = [driver = job.driver, devices, block = buffer.block, allocator = buffer.allocator] {
    // A device that cannot be waited for any more has no work left that could use the memory.
    for (int device : devices) static_cast<void>(driver->synchronize(device));
    return allocator->deallocate(block, default_stream);
  };
  Reaper::instance().post(std::move(job));
}

// The streams that the allocator was told of are kept until it has waited for them.
void free_later(Buffer& buffer, StreamHandle stream, const std::vector<StreamRef>& used) {
  ReaperJob job;
  job.driver = buffer.device->driver;
  job.what = "freeing " + std::to_string(buffer.nbytes) + " bytes";
  auto keep = std::make_shared<std::vector<StreamRef>>(used);
  keep->push_back(buffer.stream);
  job.run = [block = buffer.block, allocator = buffer.allocator, stream, keep] {
    return allocator->deallocate(block, stream);
  };
  Reaper::instance().post(std::move(job));
}

// `later` waits, on the device, for the work that `earlier` has now.
Status wait_on_device(const StreamRef& later, const StreamRef& earlier) {
  return order_streams(*earlier.device->driver, earlier.device->ordinal, earlier.handle,
                       later.device->ordinal, later.handle);
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

StreamRef order_of(nb::handle stream, Buffer& lead) {
  if (!stream.is_none()) return stream_ref(stream, *lead.device);
  const StreamRef& own = lead.memory().stream;
  if (own.closed()) [[unlikely]] {
    throw Closed("the stream of " + describe(lead) + " is closed: give another as stream");
  }
  return own;
}

std::string describe(const Buffer& buffer) {
  std::string text = buffer_type(buffer.kind).is_valid()
                         ? std::string(nb::str(buffer_type(buffer.kind).attr("__name__")).c_str())
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
  const auto is_closed = [](const StreamRef& used) { return used.closed(); };
  if (last.closed() || stream.closed() ||
      std::any_of(others_.begin(), others_.end(), is_closed)) [[unlikely]] {
    free_after_everything(*this, others_);
    return Status::success;
  }
  if (Status status = tell_allocator(stream, last); !ok(status)) return status;
  for (const StreamRef& other : others_) {
    if (Status status = tell_allocator(other, last); !ok(status)) return status;
  }
  if (!allocator->may_block()) [[likely]] return allocator->deallocate(block, last.handle);
  if (finalizing) {
    free_later(*this, last.handle, others_);
    return Status::success;
  }
  nb::gil_scoped_release release;
  return allocator->deallocate(block, last.handle);
}

// Work on `used` comes before the memory is given to others, which happens in the order of `last`.
Status Buffer::tell_allocator(const StreamRef& used, const StreamRef& last) {
  if (used.same_as(last)) return Status::success;
  // An allocator knows a stream by its handle, which is no name for another device's default.
  if (used.device != device && used.handle <= per_thread_stream) return wait_on_device(last, used);
  return allocator->record_stream(block, used.handle);
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
      const nb::object file = place[0], line = place[1];
      text += "; allocated at " + std::string(nb::str(file).c_str()) + ":" +
              nb::str(line).c_str();
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
  } catch (const nb::python_error&) {
  } catch (const DriverError&) {
  }
}

DevicePtr open_ptr(const Buffer& self) {
  self.check_open();
  return self.ptr;
}

nb::tuple stream_pair(const StreamRef& stream) {
  return nb::make_tuple(stream.handle, stream.owner.is_valid() ? stream.owner : nb::none());
}

nb::object owner_of(const Buffer& self) {
  if (self.root) return self.root_object;
  return self.owner.is_valid() ? self.owner : nb::none();
}

nb::list uses_of(const Buffer& self) {
  nb::list streams;
  for (const StreamRef& stream : self.streams_in_use()) {
    streams.append(nb::make_tuple(stream.device->ordinal, stream.handle));
  }
  return streams;
}

// A consumer's stream waits, on the device, for all work on the buffer so far.
void let_wait(Buffer& self, NativeDevice& device, StreamHandle handle) {
  Use use(self);
  StreamRef consumer;
  consumer.handle = handle;
  consumer.device = &device;
  for (const StreamRef& stream : self.streams_in_use()) {
    if (!stream.same_as(consumer)) check(wait_on_device(consumer, stream), "cuStreamWaitEvent");
  }
}

void note_stream(Buffer& self, nb::handle_t<NativeStream> stream) {
  NativeStream& native = *nb::inst_ptr<NativeStream>(stream);
  StreamRef used;
  used.handle = native.handle;
  used.owner = nb::borrow(stream);
  used.device = native.device.get();
  self.note_use(used);
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
    if (!ok(status)) check(status, "cuStreamSynchronize", "for the host to read " + describe(self));
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
      }, nb::arg("stream").none(),
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
                   "bool: the memory belongs to another buffer.");
  m.def("buffer_kind", [](const Buffer& self) { return static_cast<int>(self.kind); },
        nb::arg("buffer"), "0 device, 1 pinned, 2 managed, 3 pageable memory of somebody else.");
  m.def("buffer_owner", &owner_of, nb::arg("buffer"), "What keeps a view or borrowed memory.");
  m.def("buffer_uses", &Buffer::uses, nb::arg("buffer"), "Live views and exports; -1 when closed.");
  m.def("buffer_place", [](const Buffer& self) { return self.place ? self.place : nb::none(); },
        nb::arg("buffer"), "(file, line) of the allocation when tracking is on, else None.");
  m.def("buffer_stream", [](const Buffer& self) { return stream_pair(self.memory().stream); },
        nb::arg("buffer"), "(handle, Stream or None): where allocation and free are ordered.");
  m.def("buffer_order", [](Buffer& self, nb::handle stream) {
    return stream_pair(order_of(stream, self));
  }, nb::arg("buffer"), nb::arg("stream").none(), "(handle, Stream or None) for work on the buffer.");
  m.def("buffer_streams_in_use", &uses_of, nb::arg("buffer"),
        "(device ordinal, handle) of streams whose work may touch the memory.");
  m.def("buffer_root", [](const Buffer& self) {
    return nb::make_tuple(self.memory().ptr, self.memory().nbytes);
  }, nb::arg("buffer"), "(ptr, nbytes) of the memory that a view is a part of.");
  m.def("buffer_note_use", &note_stream, nb::arg("buffer"), nb::arg("stream"),
        "Work on a stream of any device uses the memory: freeing waits for it.");
  m.def("buffer_synchronize", &synchronize_uses, nb::arg("buffer"),
        "Blocks until all work on the buffer is done.");
  m.def("buffer_let_wait", &let_wait, nb::arg("buffer"), nb::arg("device"), nb::arg("handle"),
        "The stream waits, on the device, for all work on the buffer so far.");
  m.def("buffer_host_only", [](const Buffer& self) { return self.memory().host_only.load(); },
        nb::arg("buffer"));
  m.def("buffer_set_host_only", [](Buffer& self, bool on) { self.memory().host_only.store(on); },
        nb::arg("buffer"), nb::arg("on"), "Device work on the buffer is refused while on.");
  m.def("buffer_check_device_may_use", &Buffer::check_device_may_use, nb::arg("buffer"));
}

}  // namespace ringmem::bind
