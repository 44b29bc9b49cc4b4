#include "pool/late_driver.hpp"

namespace ringmem {

const char* LateDriver::platform() const noexcept { return inner_->platform(); }

// --- what is late --------------------------------------------------------------------------------

Status LateDriver::event_record(int device, EventHandle event, StreamHandle stream) noexcept {
  const Status status = inner_->event_record(device, event, stream);
  if (ok(status)) {
    const std::lock_guard guard(mutex_);
    due_[event] = now_.load(std::memory_order_relaxed) + late_;
  }
  return status;
}

Status LateDriver::event_query(int device, EventHandle event) noexcept {
  {
    const std::lock_guard guard(mutex_);
    const auto due = due_.find(event);
    if (due != due_.end() && due->second > now_.load(std::memory_order_relaxed)) {
      return Status::not_ready;
    }
  }
  return inner_->event_query(device, event);
}

// Whoever waits gives the device the time that it lacks.
Status LateDriver::event_synchronize(int device, EventHandle event) noexcept {
  {
    const std::lock_guard guard(mutex_);
    due_.erase(event);
  }
  return inner_->event_synchronize(device, event);
}

// --- all the rest is the inner driver's ----------------------------------------------------------

Status LateDriver::device_count(int* count) noexcept {
  return inner_->device_count(count);
}

Status LateDriver::driver_version(int* version) noexcept {
  return inner_->driver_version(version);
}

Status LateDriver::device_info(int device, DeviceInfo* info) noexcept {
  return inner_->device_info(device, info);
}

Status LateDriver::attribute(int device, Attribute attribute, int* value) noexcept {
  return inner_->attribute(device, attribute, value);
}

Status LateDriver::memory_info(int device, MemoryInfo* info) noexcept {
  return inner_->memory_info(device, info);
}

Status LateDriver::synchronize(int device) noexcept {
  return inner_->synchronize(device);
}

Status LateDriver::primary_context(int device, std::uint64_t* context) noexcept {
  return inner_->primary_context(device, context);
}

Status LateDriver::mem_alloc(int device, std::size_t nbytes, DevicePtr* ptr) noexcept {
  return inner_->mem_alloc(device, nbytes, ptr);
}

Status LateDriver::mem_free(int device, DevicePtr ptr) noexcept {
  return inner_->mem_free(device, ptr);
}

Status LateDriver::host_alloc(int device, std::size_t nbytes, HostFlags flags,
                              void** ptr) noexcept {
  return inner_->host_alloc(device, nbytes, flags, ptr);
}

Status LateDriver::host_free(int device, void* ptr) noexcept {
  return inner_->host_free(device, ptr);
}

Status LateDriver::host_register(int device, void* ptr, std::size_t nbytes,
                                 HostFlags flags) noexcept {
  return inner_->host_register(device, ptr, nbytes, flags);
}

Status LateDriver::host_unregister(int device, void* ptr) noexcept {
  return inner_->host_unregister(device, ptr);
}

Status LateDriver::host_device_pointer(int device, void* ptr, DevicePtr* device_ptr) noexcept {
  return inner_->host_device_pointer(device, ptr, device_ptr);
}

Status LateDriver::pointer_info(int device, DevicePtr ptr, PointerInfo* info) noexcept {
  return inner_->pointer_info(device, ptr, info);
}

Status LateDriver::managed_alloc(int device, std::size_t nbytes, ManagedAttach attach,
                                 DevicePtr* ptr) noexcept {
  return inner_->managed_alloc(device, nbytes, attach, ptr);
}

Status LateDriver::stream_attach(int device, StreamHandle stream, DevicePtr ptr, std::size_t nbytes,
                                 ManagedAttach attach) noexcept {
  return inner_->stream_attach(device, stream, ptr, nbytes, attach);
}

Status LateDriver::prefetch(int device, DevicePtr ptr, std::size_t nbytes, Location to,
                            StreamHandle stream) noexcept {
  return inner_->prefetch(device, ptr, nbytes, to, stream);
}

Status LateDriver::advise(int device, DevicePtr ptr, std::size_t nbytes, Advice advice,
                          Location location) noexcept {
  return inner_->advise(device, ptr, nbytes, advice, location);
}

Status LateDriver::discard(int device, DevicePtr ptr, std::size_t nbytes,
                           StreamHandle stream) noexcept {
  return inner_->discard(device, ptr, nbytes, stream);
}

Status LateDriver::mem_alloc_async(int device, std::size_t nbytes, StreamHandle stream,
                                   DevicePtr* ptr) noexcept {
  return inner_->mem_alloc_async(device, nbytes, stream, ptr);
}

Status LateDriver::mem_free_async(int device, DevicePtr ptr, StreamHandle stream) noexcept {
  return inner_->mem_free_async(device, ptr, stream);
}

Status LateDriver::pool_create(int device, const PoolProps& props, PoolHandle* pool) noexcept {
  return inner_->pool_create(device, props, pool);
}

Status LateDriver::pool_destroy(int device, PoolHandle pool) noexcept {
  return inner_->pool_destroy(device, pool);
}

Status LateDriver::pool_default(int device, PoolHandle* pool) noexcept {
  return inner_->pool_default(device, pool);
}

Status LateDriver::pool_current(int device, PoolHandle* pool) noexcept {
  return inner_->pool_current(device, pool);
}

Status LateDriver::pool_set_current(int device, PoolHandle pool) noexcept {
  return inner_->pool_set_current(device, pool);
}

Status LateDriver::pool_alloc_async(int device, PoolHandle pool, std::size_t nbytes,
                                    StreamHandle stream, DevicePtr* ptr) noexcept {
  return inner_->pool_alloc_async(device, pool, nbytes, stream, ptr);
}

Status LateDriver::pool_trim(int device, PoolHandle pool, std::size_t keep_bytes) noexcept {
  return inner_->pool_trim(device, pool, keep_bytes);
}

Status LateDriver::pool_get(int device, PoolHandle pool, PoolAttribute attribute,
                            std::uint64_t* value) noexcept {
  return inner_->pool_get(device, pool, attribute, value);
}

Status LateDriver::pool_set(int device, PoolHandle pool, PoolAttribute attribute,
                            std::uint64_t value) noexcept {
  return inner_->pool_set(device, pool, attribute, value);
}

Status LateDriver::pool_set_access(int device, PoolHandle pool, const AccessGrant* grants,
                                   std::size_t count) noexcept {
  return inner_->pool_set_access(device, pool, grants, count);
}

Status LateDriver::pool_get_access(int device, PoolHandle pool, Location location,
                                   Access* access) noexcept {
  return inner_->pool_get_access(device, pool, location, access);
}

Status LateDriver::pool_export(int device, PoolHandle pool, int* fd) noexcept {
  return inner_->pool_export(device, pool, fd);
}

Status LateDriver::pool_import(int device, int fd, PoolHandle* pool) noexcept {
  return inner_->pool_import(device, fd, pool);
}

Status LateDriver::pool_export_pointer(int device, DevicePtr ptr,
                                       PoolPointerExport* exported) noexcept {
  return inner_->pool_export_pointer(device, ptr, exported);
}

Status LateDriver::pool_import_pointer(int device, PoolHandle pool,
                                       const PoolPointerExport& exported, DevicePtr* ptr) noexcept {
  return inner_->pool_import_pointer(device, pool, exported, ptr);
}

Status LateDriver::granularity(const PhysicalProps& props, bool recommended,
                               std::size_t* nbytes) noexcept {
  return inner_->granularity(props, recommended, nbytes);
}

Status LateDriver::address_reserve(std::size_t nbytes, std::size_t alignment, DevicePtr hint,
                                   DevicePtr* ptr) noexcept {
  return inner_->address_reserve(nbytes, alignment, hint, ptr);
}

Status LateDriver::address_free(DevicePtr ptr, std::size_t nbytes) noexcept {
  return inner_->address_free(ptr, nbytes);
}

Status LateDriver::mem_create(std::size_t nbytes, const PhysicalProps& props,
                              PhysicalHandle* handle) noexcept {
  return inner_->mem_create(nbytes, props, handle);
}

Status LateDriver::mem_release(PhysicalHandle handle) noexcept {
  return inner_->mem_release(handle);
}

Status LateDriver::mem_map(DevicePtr ptr, std::size_t nbytes, PhysicalHandle handle) noexcept {
  return inner_->mem_map(ptr, nbytes, handle);
}

Status LateDriver::mem_unmap(DevicePtr ptr, std::size_t nbytes) noexcept {
  return inner_->mem_unmap(ptr, nbytes);
}

Status LateDriver::mem_set_access(DevicePtr ptr, std::size_t nbytes, const AccessGrant* grants,
                                  std::size_t count) noexcept {
  return inner_->mem_set_access(ptr, nbytes, grants, count);
}

Status LateDriver::mem_get_access(DevicePtr ptr, Location location, Access* access) noexcept {
  return inner_->mem_get_access(ptr, location, access);
}

Status LateDriver::mem_export(PhysicalHandle handle, int* fd) noexcept {
  return inner_->mem_export(handle, fd);
}

Status LateDriver::mem_import(int fd, PhysicalHandle* handle) noexcept {
  return inner_->mem_import(fd, handle);
}

Status LateDriver::mem_retain(DevicePtr ptr, PhysicalHandle* handle) noexcept {
  return inner_->mem_retain(ptr, handle);
}

Status LateDriver::copy_async(int device, DevicePtr dst, DevicePtr src, std::size_t nbytes,
                              StreamHandle stream) noexcept {
  return inner_->copy_async(device, dst, src, nbytes, stream);
}

Status LateDriver::copy_2d_async(int device, const Copy2D& copy, StreamHandle stream) noexcept {
  return inner_->copy_2d_async(device, copy, stream);
}

Status LateDriver::copy_peer_async(int dst_device, DevicePtr dst, int src_device, DevicePtr src,
                                   std::size_t nbytes, StreamHandle stream) noexcept {
  return inner_->copy_peer_async(dst_device, dst, src_device, src, nbytes, stream);
}

Status LateDriver::fill_async(int device, DevicePtr ptr, std::uint32_t value, int value_bytes,
                              std::size_t count, StreamHandle stream) noexcept {
  return inner_->fill_async(device, ptr, value, value_bytes, count, stream);
}

Status LateDriver::stream_create(int device, StreamFlags flags, StreamHandle* stream) noexcept {
  return inner_->stream_create(device, flags, stream);
}

Status LateDriver::stream_destroy(int device, StreamHandle stream) noexcept {
  return inner_->stream_destroy(device, stream);
}

Status LateDriver::stream_query(int device, StreamHandle stream) noexcept {
  return inner_->stream_query(device, stream);
}

Status LateDriver::stream_synchronize(int device, StreamHandle stream) noexcept {
  return inner_->stream_synchronize(device, stream);
}

Status LateDriver::stream_wait_event(int device, StreamHandle stream, EventHandle event) noexcept {
  return inner_->stream_wait_event(device, stream, event);
}

Status LateDriver::stream_capturing(int device, StreamHandle stream, bool* capturing) noexcept {
  return inner_->stream_capturing(device, stream, capturing);
}

Status LateDriver::stream_device(StreamHandle stream, int* device) noexcept {
  return inner_->stream_device(stream, device);
}

Status LateDriver::stream_wait_value(int device, StreamHandle stream, DevicePtr ptr,
                                     std::uint32_t value) noexcept {
  return inner_->stream_wait_value(device, stream, ptr, value);
}

Status LateDriver::stream_write_value(int device, StreamHandle stream, DevicePtr ptr,
                                      std::uint32_t value) noexcept {
  return inner_->stream_write_value(device, stream, ptr, value);
}

Status LateDriver::launch_host_function(int device, StreamHandle stream, HostFunction function,
                                        void* argument) noexcept {
  return inner_->launch_host_function(device, stream, function, argument);
}

Status LateDriver::event_create(int device, EventFlags flags, EventHandle* event) noexcept {
  return inner_->event_create(device, flags, event);
}

Status LateDriver::event_destroy(int device, EventHandle event) noexcept {
  return inner_->event_destroy(device, event);
}

Status LateDriver::event_elapsed(int device, EventHandle start, EventHandle end,
                                 float* milliseconds) noexcept {
  return inner_->event_elapsed(device, start, end, milliseconds);
}

Status LateDriver::peer_can_access(int device, int peer, bool* can) noexcept {
  return inner_->peer_can_access(device, peer, can);
}

Status LateDriver::peer_enable(int device, int peer) noexcept {
  return inner_->peer_enable(device, peer);
}

Status LateDriver::peer_disable(int device, int peer) noexcept {
  return inner_->peer_disable(device, peer);
}

Status LateDriver::relax_capture(bool relaxed, bool* previous) noexcept {
  return inner_->relax_capture(relaxed, previous);
}

}  // namespace ringmem
