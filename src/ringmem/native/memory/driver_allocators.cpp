#include "memory/driver_allocators.hpp"

#include <cstdint>
#include <new>
#include <string>

#include "memory/event_order.hpp"

namespace ringmem {
namespace {

// Whether `used` is the open stream that a block of `device` is freed on.
bool is_same(const UsedStream& used, int device, StreamHandle stream) noexcept {
  return !used.closed() && used.handle() == stream && used.device() == device;
}

// `later` waits, on the device, for what `earlier` has to do now.
Status order(Driver& driver, EventCache& events, UsedStream& earlier, int device,
             StreamHandle later) noexcept {
  if (earlier.closed()) return earlier.order_before(device, later);
  Guard guard{earlier.device()};
  Status status = events.take(guard.device, &guard.event);
  if (!ok(status)) return status;
  status = earlier.record_before(device, later, guard);
  const bool marked = ok(status);
  if (marked) status = driver.stream_wait_event(device, later, guard.event);
  events.give_back(guard.device, guard.event);  // a wait that is queued keeps what it waits for
  return !marked && earlier.closed() ? earlier.order_before(device, later) : status;
}

void check_allocation(Driver& driver, int device, Status status, const char* operation,
                      std::size_t nbytes) {
  if (ok(status)) return;
  std::string detail = std::to_string(nbytes) + " bytes requested on " + driver.platform() + ":" +
                       std::to_string(device);
  if (status != Status::out_of_memory) throw DriverError(status, operation, std::move(detail));
  Shortage shortage;
  shortage.requested = nbytes;
  MemoryInfo info;
  if (ok(driver.memory_info(device, &info))) {
    shortage.free = info.free;
    detail += ", " + std::to_string(info.free) + " of " + std::to_string(info.total) + " free";
  }
  throw OutOfMemory(operation, shortage, detail + ": ask for less, or close buffers of the device");
}

void check_request(std::size_t nbytes) {
  if (nbytes == 0) throw InvalidValue("nbytes is 0: allocate at least one byte");
}

}  // namespace

// --- EventCache --------------------------------------------------------------------------------

EventCache::~EventCache() {
  for (const Entry& entry : idle_) driver_->event_destroy(entry.device, entry.event);
}

Status EventCache::take(int device, EventHandle* event) noexcept {
  {
    std::lock_guard lock(mutex_);
    for (std::size_t i = idle_.size(); i-- > 0;) {
      if (idle_[i].device != device) continue;
      *event = idle_[i].event;
      idle_[i] = idle_.back();
      idle_.pop_back();
      return Status::success;
    }
  }
  return driver_->event_create(device, EventFlags{}, event);
}

void EventCache::give_back(int device, EventHandle event) noexcept {
  try {
    std::lock_guard lock(mutex_);
    idle_.push_back({device, event});
    return;
  } catch (const std::bad_alloc&) {
  }
  driver_->event_destroy(device, event);
}

// --- StreamOrderedAllocator --------------------------------------------------------------------

StreamOrderedAllocator::StreamOrderedAllocator(DriverRef driver, int device)
    : StreamRecords(std::move(driver), device), events_(driver_) {}

StreamOrderedAllocator::StreamOrderedAllocator(DriverRef driver, int device, PoolHandle pool)
    : StreamRecords(std::move(driver), device), pool_(pool), owned_(false), events_(driver_) {}

StreamOrderedAllocator::~StreamOrderedAllocator() {
  if (!owned_) return;
  // Returns at once; blocks still on their way back are released when they arrive.
  if (PoolHandle pool = pool_.load()) driver_->pool_destroy(device_, pool);
}

PoolHandle StreamOrderedAllocator::pool() {
  PoolHandle pool = pool_.load(std::memory_order_acquire);
  if (pool) [[likely]] return pool;
  PoolProps props;
  props.location = {LocationKind::device, device_};
  check(driver_->pool_create(device_, props, &pool), "cuMemPoolCreate");
  Status status = driver_->pool_set(device_, pool, PoolAttribute::release_threshold, UINT64_MAX);
  if (!ok(status)) {
    driver_->pool_destroy(device_, pool);
    throw DriverError(status, "cuMemPoolSetAttribute", "setting the release threshold");
  }
  PoolHandle expected = 0;
  if (pool_.compare_exchange_strong(expected, pool)) return pool;
  driver_->pool_destroy(device_, pool);  // another thread was first
  return expected;
}

Block StreamOrderedAllocator::allocate(std::size_t nbytes, StreamHandle stream) {
  check_request(nbytes);
  Block block;
  block.nbytes = nbytes;
  Status status = driver_->pool_alloc_async(device_, pool(), nbytes, stream, &block.ptr);
  check_allocation(*driver_, device_, status, "cuMemAllocFromPoolAsync", nbytes);
  return block;
}

Status StreamOrderedAllocator::deallocate(const Block& block, StreamHandle stream) noexcept {
  UsedStreams* streams = recorded(block);
  if (streams) {
    for (const auto& used : *streams) {
      if (is_same(*used, device_, stream)) continue;
      Status status = order(*driver_, events_, *used, device_, stream);
      if (!ok(status)) return status;
    }
  }
  Status status = driver_->mem_free_async(device_, block.ptr, stream);
  if (ok(status)) delete streams;
  return status;
}

Status StreamOrderedAllocator::trim(std::size_t keep_bytes) noexcept {
  PoolHandle pool = pool_.load(std::memory_order_acquire);
  return pool ? driver_->pool_trim(device_, pool, keep_bytes) : Status::success;
}

// --- PlainAllocator ----------------------------------------------------------------------------

PlainAllocator::PlainAllocator(DriverRef driver, int device)
    : StreamRecords(std::move(driver), device) {}

Block PlainAllocator::allocate(std::size_t nbytes, StreamHandle) {
  check_request(nbytes);
  Block block;
  block.nbytes = nbytes;
  Status status = driver_->mem_alloc(device_, nbytes, &block.ptr);
  check_allocation(*driver_, device_, status, "cuMemAlloc", nbytes);
  return block;
}

Status PlainAllocator::deallocate(const Block& block, StreamHandle stream) noexcept {
  // mem_free waits for the block's own device; recorded streams may be another one's.
  UsedStreams* streams = recorded(block);
  Status status = driver_->stream_synchronize(device_, stream);
  if (streams) {
    for (const auto& used : *streams) {
      if (!ok(status)) break;
      status = used->finish();
    }
  }
  if (ok(status)) status = driver_->mem_free(device_, block.ptr);
  if (ok(status)) delete streams;
  return status;
}

}  // namespace ringmem
