#include "memory/driver_pool.hpp"

#include <utility>

namespace ringmem {

DriverPool::DriverPool(DriverRef driver, int device, PoolHandle handle, bool owned, bool imported)
    : driver_(std::move(driver)),
      device_(device),
      owned_(owned),
      imported_(imported),
      handle_(handle),
      blocks_(driver_, device, handle) {}

DriverPool::~DriverPool() { static_cast<void>(destroy()); }

PoolHandle DriverPool::handle() const {
  const PoolHandle handle = handle_.load(std::memory_order_acquire);
  if (handle == 0) throw Closed("the driver's pool is closed");
  return handle;
}

Block DriverPool::allocate(std::size_t nbytes, StreamHandle stream) {
  static_cast<void>(handle());
  const Block block = blocks_.allocate(nbytes, stream);
  live_.fetch_add(1, std::memory_order_relaxed);
  live_bytes_.fetch_add(nbytes, std::memory_order_relaxed);
  return block;
}

Status DriverPool::deallocate(const Block& block, StreamHandle stream) noexcept {
  const Status status = blocks_.deallocate(block, stream);
  if (!ok(status)) return status;
  live_.fetch_sub(1, std::memory_order_relaxed);
  live_bytes_.fetch_sub(block.nbytes, std::memory_order_relaxed);
  return status;
}

Status DriverPool::record_stream(Block& block, StreamHandle stream) {
  return blocks_.record_stream(block, stream);
}

Status DriverPool::destroy() noexcept {
  const PoolHandle handle = handle_.exchange(0, std::memory_order_acq_rel);
  if (handle == 0 || !owned_) return Status::success;
  return driver_->pool_destroy(device_, handle);
}

}  // namespace ringmem
