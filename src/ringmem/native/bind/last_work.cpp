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

Status deallocate_later(Allocator& allocator, const Block& block, const LastUse& last) noexcept {
  if (!last.object || !last.object->closed.load(std::memory_order_acquire)) {
    return allocator.deallocate(block, last.handle);
  }
  UsedStream& used = *last.object->used;
  const Status status = used.left_event() ? used.query() : used.wait();
  const bool later = status == Status::not_ready || forbidden_by_capture(status);
  return later ? status : allocator.deallocate(block, allocator.idle_stream());
}

void release_after(const std::vector<LastUse>& uses, ReaperJob&& job) {
  std::vector<int> devices;
  try {
    for (const LastUse& use : uses) {
      if (use.device->driver != job.driver) continue;
      const int device = use.device->ordinal;
      if (use.object && use.object->closed.load(std::memory_order_acquire)) {
        job.closed.push_back(use.object->used);
      } else if (!mark(*job.driver, use, &job.guards)) {
        if (std::find(devices.begin(), devices.end(), device) == devices.end()) {
          devices.push_back(device);
        }
      }
    }
    job.run = [driver = job.driver, devices, release = std::move(job.run)] {
      // A device that cannot be waited for has no work left that could use the memory.
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
