// Ownership of a buffer's memory: uses, closing, giving back, and the streams that must be done
// first.
#include "bind/buffer.hpp"

#include <algorithm>
#include <memory>
#include <utility>

#include "bind/last_work.hpp"
#include "bind/wait.hpp"
#include "memory/event_order.hpp"
#include "memory/reaper.hpp"

namespace ringmem::bind {
namespace {

// From this many recorded streams on, those whose work is done are forgotten.
constexpr std::size_t many_streams = 16;

// The allocator for somebody who does not hold the buffer's device.
std::shared_ptr<Allocator> kept_allocator(const Buffer& buffer) {
  return buffer.allocator.use_count() ? buffer.allocator : buffer.device->allocator;
}

// The streams are kept until their work is done.
void free_after_everything(Buffer& buffer, const std::vector<StreamRef>& used,
                           const StreamRef& last) {
  ReaperJob job;
  job.driver = buffer.device->driver;
  job.what = "freeing " + std::to_string(buffer.nbytes) + " bytes of a closed stream";
  auto keep = std::make_shared<std::vector<StreamRef>>(used);
  keep->push_back(buffer.stream);
  if (!last.same_as(buffer.stream)) keep->push_back(last);
  std::vector<LastUse> uses;
  for (const StreamRef& stream : *keep) {
    uses.push_back({stream.device, stream.handle, stream.object()});
  }
  job.run = [block = buffer.block, allocator = kept_allocator(buffer), keep] {
    return allocator->deallocate(block, allocator->idle_stream());
  };
  release_after(uses, std::move(job));
}

// The streams that the allocator was told of are kept until it has waited for them.
void free_later(Buffer& buffer, const StreamRef& last, const std::vector<StreamRef>& used) {
  ReaperJob job;
  job.driver = buffer.device->driver;
  job.what = "freeing " + std::to_string(buffer.nbytes) + " bytes";
  auto keep = std::make_shared<std::vector<StreamRef>>(used);
  keep->push_back(buffer.stream);
  keep->push_back(last);
  job.run = [block = buffer.block, allocator = kept_allocator(buffer), keep] {
    const StreamRef& order = keep->back();
    return deallocate_later(*allocator, block, {order.device, order.handle, order.object()});
  };
  Reaper::instance().post(std::move(job));
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

std::string closed_text(const Buffer& buffer) {
  return describe(buffer) + " is closed: make another";
}

thread_local PyObject* kept_error = nullptr;  // an exception object; owned

}  // namespace

// `later` waits, on the device, for the work that `earlier` has now.
Status wait_on_device(const StreamRef& later, const StreamRef& earlier) {
  if (earlier.closed()) [[unlikely]] {
    return earlier.object()->used->order_before(later.device->ordinal, later.handle);
  }
  return order_streams(*earlier.device->driver, earlier.device->ordinal, earlier.handle,
                       later.device->ordinal, later.handle);
}

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

NativeStream* StreamRef::object() const {
  return owner.is_valid() ? nb::inst_ptr<NativeStream>(owner) : nullptr;
}

bool StreamRef::closed() const {
  const NativeStream* stream = object();
  return stream && stream->closed.load(std::memory_order_acquire);
}

StreamRef order_of(nb::handle stream, Buffer& lead) {
  if (!stream.is_none()) return stream_ref(stream, *lead.device);
  const auto [memory, keep] = lead.look();
  const StreamRef& own = memory->stream;
  if (own.closed()) [[unlikely]] {
    throw Closed("the stream of " + describe(lead) + " is closed: give another as stream");
  }
  return own;
}

std::string describe(const Buffer& buffer) {
  std::string text = buffer_type(buffer.kind).is_valid()
                         ? std::string(nb::str(buffer_type(buffer.kind).attr("__name__")).c_str())
                         : "buffer";
  text.append(" ").append(buffer.shape.text());
  if (buffer.dtype) text.append(" ").append(nb::str(buffer.dtype).c_str());
  if (buffer.device) text.append(" on ").append(buffer.device->name);
  return text;
}

// --- uses --------------------------------------------------------------------------------------

void Buffer::check_open() const {
  if (closed()) [[unlikely]] throw Closed(closed_text(*this));
}

void Buffer::add_use() {
  std::int64_t uses = uses_.load(std::memory_order_acquire);
  do {
    if (uses == closed_mark) [[unlikely]] throw Closed(closed_text(*this));
  } while (!uses_.compare_exchange_weak(uses, uses + 1, std::memory_order_acq_rel));
}

std::pair<const Buffer*, nb::object> Buffer::look() const {
  nb::ft_lock_guard lock(mutex_);
  if (!root) return {this, nb::object()};
  return {root, root_object};
}

nb::object Buffer::owner_or_none() const {
  nb::ft_lock_guard lock(mutex_);
  const nb::object& found = root ? root_object : owner;
  return found.is_valid() ? found : nb::none();
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
      if (other.closed()) return other.object()->used->done();
      Driver& driver = *other.device->driver;
      return !is_capturing(driver, other.device->ordinal, other.handle) &&
             ok(driver.stream_query(other.device->ordinal, other.handle));
    });
  }
  others.push_back(used);
}

void Buffer::follow_closed(const StreamRef& order) {
  Buffer& target = memory();
  Status status = Status::success;
  const auto follow = [&](const StreamRef& earlier) {
    if (!earlier.closed() || earlier.object()->used->done()) return;
    // Without an event there is only the device to wait for, which reading and freeing do.
    if (!earlier.object()->used->left_event()) return;
    const Status one = wait_on_device(order, earlier);
    if (ok(status)) status = one;
  };
  {
    nb::ft_lock_guard lock(target.mutex_);
    follow(target.stream);
    std::erase_if(target.others_, [](const StreamRef& other) {
      return other.closed() && other.object()->used->done();
    });
    for (const StreamRef& other : target.others_) follow(other);
  }
  if (!ok(status)) [[unlikely]] {
    check(status, "cuStreamWaitEvent", "for what a closed stream left in " + describe(*this));
  }
}

std::vector<StreamRef> Buffer::streams_in_use() const {
  const auto [memory, keep] = look();
  const Buffer& target = *memory;
  nb::ft_lock_guard lock(target.mutex_);
  std::vector<StreamRef> streams = target.others_;
  // Device memory is there only after its allocation, which is in the order of its stream.
  const bool ordered = target.kind == MemoryKind::device && target.allocator;
  if (target.touched_ || ordered) streams.push_back(target.stream);
  return streams;
}

void Buffer::check_usable() const {
  const Buffer& target = memory();
  if (!target.allocator) return;
  const std::string why = target.allocator->unusable();
  if (!why.empty()) [[unlikely]] throw InvalidValue(describe(*this) + " cannot be used: " + why);
}

void Buffer::check_device_may_use() const {
  check_usable();
  if (!memory().host_only.load(std::memory_order_acquire)) return;
  if (memory().attached.load() == ManagedAttach::host) {
    raise_error("InvalidValueError", describe(*this) + " is attached to the host, and " +
                                         device->name + " cannot use it: attach(\"global\") first, "
                                         "or use host()");
  }
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
  if (root || !allocator) {
    Buffer* viewed;
    nb::object kept;  // let go of without the lock: that may run Python
    {
      nb::ft_lock_guard lock(mutex_);
      viewed = std::exchange(root, nullptr);
      kept = std::move(viewed ? root_object : owner);
    }
    if (viewed) viewed->drop_use();
    return Status::success;
  }
  try {
    const Status status = give_back(free_on ? *free_on : stream, finalizing);
    if (!ok(status)) return status;
  } catch (nb::python_error& error) {
    error.restore();
    keep_python_error();
    return Status::unknown;
  } catch (const DriverError& error) {
    return error.status;
  } catch (...) {
    return Status::operating_system;  // no memory or no thread for the release
  }
  allocator.reset();
  return Status::success;
}

Status Buffer::give_back(const StreamRef& last, bool finalizing) {
  const auto is_closed = [](const StreamRef& used) { return used.closed(); };
  if (last.closed() || (&last != &stream && stream.closed()) ||
      std::any_of(others_.begin(), others_.end(), is_closed)) [[unlikely]] {
    Status status = Status::success;
    if (give_back_behind_closed(last, &status)) return status;
    free_after_everything(*this, others_, last);
    return Status::success;
  }
  if (Status status = tell_allocator(stream, last); !ok(status)) return status;
  for (const StreamRef& other : others_) {
    if (Status status = tell_allocator(other, last); !ok(status)) return status;
  }
  if (!allocator->free_may_block(block)) [[likely]] {
    const Status status = allocator->deallocate(block, last.handle);
    if (!finalizing || !forbidden_by_capture(status)) [[likely]] return status;
  }
  if (finalizing) {
    free_later(*this, last, others_);
    return Status::success;
  }
  ReleaseGil release;
  return allocator->deallocate(block, last.handle);
}

// At once, where every stream is closed and all that they were given is done; false if not, and
// nothing happened.
bool Buffer::give_back_behind_closed(const StreamRef& last, Status* status) {
  const auto is_done = [](const StreamRef& used) {
    return used.closed() && used.object()->used->done();
  };
  if (allocator->free_may_block(block) || !is_done(stream) || !is_done(last)) return false;
  if (!std::all_of(others_.begin(), others_.end(), is_done)) return false;
  const StreamHandle idle = allocator->idle_stream();
  if (idle <= per_thread_stream && is_capturing(*device->driver, device->ordinal, idle)) return false;
  *status = allocator->deallocate(block, idle);
  return !forbidden_by_capture(*status);  // which the reaper repeats
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
      // A name of a file need not be text that UTF-8 can say.
      const nb::object file = nb::steal(PyUnicode_AsEncodedString(
          nb::object(place[0]).ptr(), "utf-8", "backslashreplace"));
      if (!file) throw nb::python_error();
      text += std::string("; allocated at ") + PyBytes_AS_STRING(file.ptr()) + ":" +
              std::to_string(nb::cast<int>(place[1]));
    }
    warn_or_park(PyExc_RuntimeWarning, text.c_str());
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
  if (ok(status)) return;
  warn_lost(status);
  allocator->forget(block);
}

}  // namespace ringmem::bind
