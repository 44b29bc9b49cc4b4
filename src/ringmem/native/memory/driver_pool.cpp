#include "memory/driver_pool.hpp"

#include <utility>

#include "memory/reaper.hpp"

namespace ringmem {

DriverPool::DriverPool(DriverRef driver, int device, PoolHandle handle, bool owned, bool imported)
    : driver_(std::move(driver)),
      device_(device),
      owned_(owned),
      imported_(imported),
      handle_(handle),
      blocks_(driver_, device, handle) {}

DriverPool::~DriverPool() { static_cast<void>(release(false)); }

PoolHandle DriverPool::handle() const {
  if (closed()) throw Closed("the driver's pool is closed");
  return handle_.load();
}

// Counted before the gate is looked at, so that destroy() either sees the block or shuts it out.
Block DriverPool::allocate(std::size_t nbytes, StreamHandle stream) {
  live_.fetch_add(1);
  try {
    static_cast<void>(handle());
    const Block block = blocks_.allocate(nbytes, stream);
    live_bytes_.fetch_add(nbytes, std::memory_order_relaxed);
    return block;
  } catch (...) {
    if (live_.fetch_sub(1) == 1 && closed()) static_cast<void>(release(true));
    throw;
  }
}

Status DriverPool::deallocate(const Block& block, StreamHandle stream) noexcept {
  const Status status = blocks_.deallocate(block, stream);
  if (!ok(status)) return status;
  live_bytes_.fetch_sub(block.nbytes, std::memory_order_relaxed);
  if (live_.fetch_sub(1) == 1 && closed()) static_cast<void>(release(true));
  return status;
}

Status DriverPool::record_stream(Block& block, StreamHandle stream) {
  return blocks_.record_stream(block, stream);
}

DriverPool::Destroyed DriverPool::destroy(bool when_unused) noexcept {
  if (owned_ && !when_unused && !closed() && live_.load() != 0) return {true, Status::success};
  closed_.store(true);
  // An allocation that came in between keeps the pool until it is freed.
  if (owned_ && live_.load() != 0) return {};
  return {false, release(true)};
}

Status DriverPool::release(bool later) noexcept {
  const PoolHandle handle = handle_.exchange(0);
  if (handle == 0 || !owned_) return Status::success;
  const auto destroy = [driver = driver_, device = device_, handle] {
    return driver->pool_destroy(device, handle);
  };
  const Status first = destroy();
  if (ok(first)) return first;
  // It may be gone all the same, and then says that it is not valid.
  const auto again = [destroy] {
    const Status status = destroy();
    const bool gone = status == Status::invalid_value || status == Status::invalid_handle;
    return gone ? Status::success : status;
  };
  if (ok(again()) || !later) return first;
  try {
    Reaper::instance().post({driver_, {}, again, "cuMemPoolDestroy"});
  } catch (...) {  // then the process's end gives it back
  }
  return first;
}

}  // namespace ringmem
