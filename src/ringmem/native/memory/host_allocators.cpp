#include "memory/host_allocators.hpp"

#include <string>
#include <utility>

#include "memory/event_order.hpp"
#include "memory/reaper.hpp"

namespace ringmem {
namespace {

// How long an allocation that failed waits for releases that are under way.
constexpr double retry_wait_s = 2.0;

// Of such memory the driver has no figures: the message says which is short.
void check_allocation(Driver& driver, int device, Status status, const char* operation,
                      std::size_t nbytes, const char* memory) {
  if (ok(status)) return;
  std::string detail = std::to_string(nbytes) + " bytes of " + memory + " requested for " +
                       driver.platform() + ":" + std::to_string(device);
  if (status != Status::out_of_memory) throw DriverError(status, operation, std::move(detail));
  Shortage shortage;
  shortage.requested = nbytes;
  throw OutOfMemory(operation, shortage, detail + ": ask for less, or close buffers of this memory");
}

void* host(DevicePtr ptr) noexcept { return reinterpret_cast<void*>(ptr); }

// Events that mark, on each stream, the work submitted so far. All of them or none. Of a closed
// stream it is its own event that does.
class Marks {
 public:
  explicit Marks(Driver& driver) : driver_(driver) {}
  Marks(const Marks&) = delete;
  Marks& operator=(const Marks&) = delete;
  ~Marks() {
    for (const Guard& guard : guards) destroy_event(driver_, guard.device, guard.event);
  }

  Status add(const std::shared_ptr<UsedStream>& stream) {
    guards.reserve(guards.size() + 1);
    if (!stream->closed()) {
      Guard guard{stream->device()};
      Status status = driver_.event_create(guard.device, EventFlags{}, &guard.event);
      if (!ok(status)) return status;
      guards.push_back(guard);
      status = stream->mark(guard);
      if (ok(status) || !stream->closed()) return status;
    }
    closed.push_back(stream);
    return Status::success;
  }

  std::vector<Guard> guards;
  UsedStreams closed;

 private:
  Driver& driver_;
};

}  // namespace

ReapedAllocator::ReapedAllocator(DriverRef driver, int device)
    : StreamRecords(std::move(driver), device) {}

Status ReapedAllocator::deallocate(const Block& block, StreamHandle stream) noexcept {
  try {
    UsedStreams streams;
    if (recorded(block)) streams = *recorded(block);
    add_stream(streams, UsedStream::of(driver_, device_, stream));
    Marks marks(*driver_);
    for (const auto& one : streams) {
      if (Status status = marks.add(one); !ok(status)) return status;
    }
    ReaperJob job;
    job.driver = driver_;
    job.run = release_of(block);
    job.what = std::string(release_name()) + " of " + std::to_string(block.nbytes) + " bytes";
    job.guards = marks.guards;
    job.closed = std::move(marks.closed);
    Reaper::instance().post(std::move(job));
    marks.guards.clear();
    delete recorded(block);
    return Status::success;
  } catch (...) {  // no memory or no thread for the job: nothing happened
    return Status::operating_system;
  }
}

Status ReapedAllocator::with_retry(const std::function<Status()>& allocate) const {
  Status status = allocate();
  if (status == Status::out_of_memory && Reaper::instance().pending() != 0) {
    Reaper::instance().flush(retry_wait_s);
    status = allocate();
  }
  return status;
}

// --- pinned --------------------------------------------------------------------------------------

PinnedAllocator::PinnedAllocator(DriverRef driver, int device, HostFlags flags)
    : ReapedAllocator(std::move(driver), device), flags_(flags) {}

Block PinnedAllocator::allocate(std::size_t nbytes, StreamHandle) {
  void* ptr = nullptr;
  Status status = with_retry([&] { return driver_->host_alloc(device_, nbytes, flags_, &ptr); });
  check_allocation(*driver_, device_, status, "cuMemHostAlloc", nbytes, "page-locked host memory");
  return {reinterpret_cast<DevicePtr>(ptr), nbytes, nullptr};
}

std::function<Status()> PinnedAllocator::release_of(const Block& block) {
  return [driver = driver_, device = device_, ptr = host(block.ptr)] {
    return driver->host_free(device, ptr);
  };
}

// --- managed -------------------------------------------------------------------------------------

ManagedAllocator::ManagedAllocator(DriverRef driver, int device, ManagedAttach attach)
    : ReapedAllocator(std::move(driver), device), attach_(attach) {}

Block ManagedAllocator::allocate(std::size_t nbytes, StreamHandle) {
  DevicePtr ptr = 0;
  // cuMemAllocManaged knows two modes; memory for a single stream starts as the host's.
  const ManagedAttach initial =
      attach_ == ManagedAttach::single ? ManagedAttach::host : attach_;
  Status status = with_retry([&] { return driver_->managed_alloc(device_, nbytes, initial, &ptr); });
  check_allocation(*driver_, device_, status, "cuMemAllocManaged", nbytes, "managed memory");
  return {ptr, nbytes, nullptr};
}

std::function<Status()> ManagedAllocator::release_of(const Block& block) {
  return [driver = driver_, device = device_, ptr = block.ptr] {
    return driver->mem_free(device, ptr);
  };
}

// --- registered ----------------------------------------------------------------------------------

RegisteredMemory::RegisteredMemory(DriverRef driver, int device, HostFlags flags,
                                   std::shared_ptr<void> owner)
    : ReapedAllocator(std::move(driver), device), flags_(flags), owner_(std::move(owner)) {}

Block RegisteredMemory::adopt(DevicePtr ptr, std::size_t nbytes) {
  check(driver_->host_register(device_, host(ptr), nbytes, flags_), "cuMemHostRegister",
        std::to_string(nbytes) + " bytes");
  return {ptr, nbytes, nullptr};
}

Block RegisteredMemory::allocate(std::size_t, StreamHandle) {
  throw DriverError(Status::not_supported, "cuMemHostRegister", "memory that exists is not given");
}

std::function<Status()> RegisteredMemory::release_of(const Block& block) {
  return [driver = driver_, device = device_, ptr = host(block.ptr), owner = owner_] {
    return driver->host_unregister(device, ptr);
  };
}

}  // namespace ringmem
