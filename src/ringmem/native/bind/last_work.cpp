#include "bind/last_work.hpp"

#include <algorithm>
#include <utility>

namespace ringmem::bind {
namespace {

// Puts an event behind what an open stream has now; false where the driver will not.
bool mark(Driver& driver, const LastUse& use, std::vector<Guard>* guards) {
  Guard guard{use.device->ordinal};
  guards->reserve(guards->size() + 1);
  if (!ok(driver.event_create(guard.device, EventFlags{}, &guard.event))) return false;
  const Status status = mark_stream(driver, use.handle, guard);
  if (ok(status)) {
    guards->push_back(guard);
    return true;
  }
  destroy_event(driver, guard.device, guard.event);
  // Waiting for the device would spoil the capture.
  if (status == Status::stream_capture_unsupported) throw DriverError(status, "cuEventRecord");
  return false;
}

}  // namespace

Status wait_for_closed(NativeStream& stream) noexcept {
  if (stream.finished.load(std::memory_order_acquire)) return Status::success;
  Driver& driver = *stream.device->driver;
  const EventHandle event = stream.last_work.load(std::memory_order_acquire);
  const Status status = event ? driver.event_synchronize(stream.device->ordinal, event)
                              : driver.synchronize(stream.device->ordinal);
  if (ok(status)) stream.finished.store(true, std::memory_order_release);
  return status;
}

Status order_after_closed(NativeStream& stream, int device, StreamHandle later) noexcept {
  if (closed_and_done(stream)) return Status::success;
  Driver& driver = *stream.device->driver;
  if (is_capturing(driver, device, later)) return Status::stream_capture_isolation;
  const EventHandle event = stream.last_work.load(std::memory_order_acquire);
  return event ? driver.stream_wait_event(device, later, event) : wait_for_closed(stream);
}

bool closed_and_done(NativeStream& stream) noexcept {
  if (stream.finished.load(std::memory_order_acquire)) return true;
  const EventHandle event = stream.last_work.load(std::memory_order_acquire);
  if (!event || !ok(stream.device->driver->event_query(stream.device->ordinal, event))) return false;
  stream.finished.store(true, std::memory_order_release);
  return true;
}

Status deallocate_later(Allocator& allocator, const Block& block, const LastUse& last) noexcept {
  if (!last.object || !last.object->closed.load(std::memory_order_acquire)) {
    return allocator.deallocate(block, last.handle);
  }
  const Status status = wait_for_closed(*last.object);
  return forbidden_by_capture(status) ? status
                                      : allocator.deallocate(block, allocator.idle_stream());
}

void release_after(const std::vector<LastUse>& uses, ReaperJob&& job) {
  std::vector<Guard> last;  // events that the closed streams keep
  std::vector<int> devices;
  try {
    for (const LastUse& use : uses) {
      if (use.device->driver != job.driver) continue;
      const int device = use.device->ordinal;
      const bool closed = use.object && use.object->closed.load(std::memory_order_acquire);
      const EventHandle event = closed ? use.object->last_work.load(std::memory_order_acquire) : 0;
      if (event) {
        last.push_back({device, event});
      } else if (closed || !mark(*job.driver, use, &job.guards)) {
        if (std::find(devices.begin(), devices.end(), device) == devices.end()) {
          devices.push_back(device);
        }
      }
    }
    job.run = [driver = job.driver, last, devices, release = std::move(job.run)] {
      // What cannot be waited for any more has no work left that could use the memory.
      for (const Guard& guard : last) {
        static_cast<void>(driver->event_synchronize(guard.device, guard.event));
      }
      for (const int device : devices) {
        const Status status = driver->synchronize(device);
        if (forbidden_by_capture(status)) return status;
      }
      return release();
    };
    Reaper::instance().post(std::move(job));
  } catch (...) {
    for (const Guard& guard : job.guards) destroy_event(*job.driver, guard.device, guard.event);
    throw;
  }
}

}  // namespace ringmem::bind
