#include "memory/driver_allocators.hpp"

#include <cstdint>
#include <new>
#include <string>

#include "memory/event_order.hpp"

namespace ringmem {
namespace {

// One recorded stream. Events belong to the device of the stream they are recorded on, which need
// not be the block's (a peer copy).
struct Recorded {
  int device;
  StreamHandle stream;
};
using RecordedStreams = std::vector<Recorded>;

RecordedStreams* recorded(const Block& block) noexcept {
  return static_cast<RecordedStreams*>(block.record);
}

// The default streams exist on every device and belong to the one that is asked.
bool is_default(StreamHandle stream) noexcept { return stream <= per_thread_stream; }

Status record(Driver& driver, int device, Block& block, StreamHandle stream) {
  int owner = device;
  if (!is_default(stream)) {
    Status status = driver.stream_device(stream, &owner);
    if (status == Status::not_supported) owner = device;  // old drivers: the usual case
    else if (!ok(status)) return status;
  }
  if (!block.record) block.record = new RecordedStreams;
  for (const Recorded& entry : *recorded(block)) {
    if (entry.stream == stream && entry.device == owner) return Status::success;
  }
  recorded(block)->push_back({owner, stream});
  return Status::success;
}

// `later` waits, on the device, for what `earlier` has to do now.
Status order(Driver& driver, EventCache& events, const Recorded& earlier, int device,
             StreamHandle later) noexcept {
  if (capture_between(driver, earlier.device, earlier.stream, device, later)) {
    return Status::stream_capture_isolation;
  }
  EventHandle event = 0;
  Status status = events.take(earlier.device, &event);
  if (!ok(status)) return status;
  status = driver.event_record(earlier.device, event, earlier.stream);
  if (ok(status)) status = driver.stream_wait_event(device, later, event);
  events.give_back(earlier.device, event);  // a wait that is queued keeps what it waits for
  return status;
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
    : driver_(std::move(driver)), device_(device), events_(driver_) {}

StreamOrderedAllocator::StreamOrderedAllocator(DriverRef driver, int device, PoolHandle pool)
    : driver_(std::move(driver)), device_(device), pool_(pool), owned_(false), events_(driver_) {}

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
  RecordedStreams* streams = recorded(block);
  if (streams) {
    for (const Recorded& entry : *streams) {
      if (entry.stream == stream && entry.device == device_) continue;
      Status status = order(*driver_, events_, entry, device_, stream);
      if (!ok(status)) return status;
    }
  }
  Status status = driver_->mem_free_async(device_, block.ptr, stream);
  if (ok(status)) delete streams;
  return status;
}

Status StreamOrderedAllocator::record_stream(Block& block, StreamHandle stream) {
  return record(*driver_, device_, block, stream);
}

Status StreamOrderedAllocator::trim(std::size_t keep_bytes) noexcept {
  PoolHandle pool = pool_.load(std::memory_order_acquire);
  return pool ? driver_->pool_trim(device_, pool, keep_bytes) : Status::success;
}

// --- PlainAllocator ----------------------------------------------------------------------------

PlainAllocator::PlainAllocator(DriverRef driver, int device)
    : driver_(std::move(driver)), device_(device) {}

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
  RecordedStreams* streams = recorded(block);
  Status status = driver_->stream_synchronize(device_, stream);
  if (streams) {
    for (const Recorded& entry : *streams) {
      if (!ok(status)) break;
      status = driver_->stream_synchronize(entry.device, entry.stream);
    }
  }
  if (ok(status)) status = driver_->mem_free(device_, block.ptr);
  if (ok(status)) delete streams;
  return status;
}

Status PlainAllocator::record_stream(Block& block, StreamHandle stream) {
  return record(*driver_, device_, block, stream);
}

}  // namespace ringmem
