// The waist. Everything above stands on this interface; three classes implement it: CudaDriver,
// HostDriver and FaultyDriver.
//
// Contract of every operation
//  - noexcept; the result is a Status, outputs are written only on success.
//  - callable from any thread; the caller's current CUDA context is the same before and after.
//  - `device` is an ordinal of this driver; a bad one is Status::invalid_device.
//  - an operation or capability that is missing is Status::not_supported; no driver at all is
//    Status::not_initialized.
//  - "blocks" below means: may wait for device work. The caller must hold neither a lock of ours
//    nor the GIL around it. All others return promptly, also beside a kernel that never ends.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "driver/status.hpp"
#include "driver/types.hpp"

namespace ringmem {

class Driver {
 public:
  Driver() = default;
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;
  virtual ~Driver() = default;

  // "cuda" or "cpu": the first half of a device's name, "cuda:0".
  virtual const char* platform() const noexcept = 0;

  // --- devices ---------------------------------------------------------------------------------
  virtual Status device_count(int* count) noexcept = 0;
  virtual Status driver_version(int* version) noexcept = 0;  // 13000 for 13.0
  virtual Status device_info(int device, DeviceInfo* info) noexcept = 0;
  virtual Status attribute(int device, Attribute attribute, int* value) noexcept = 0;
  virtual Status memory_info(int device, MemoryInfo* info) noexcept = 0;
  virtual Status synchronize(int device) noexcept = 0;  // blocks, also on persistent kernels
  // The device's primary context as a number (CUcontext), for interoperability. 0 on the CPU.
  virtual Status primary_context(int device, std::uint64_t* context) noexcept = 0;

  // --- memory ----------------------------------------------------------------------------------
  virtual Status mem_alloc(int device, std::size_t nbytes, DevicePtr* ptr) noexcept = 0;
  virtual Status mem_free(int device, DevicePtr ptr) noexcept = 0;  // device or managed; blocks
  virtual Status host_alloc(int device, std::size_t nbytes, HostFlags flags, void** ptr) noexcept = 0;
  virtual Status host_free(int device, void* ptr) noexcept = 0;  // blocks
  virtual Status host_register(int device, void* ptr, std::size_t nbytes,
                               HostFlags flags) noexcept = 0;
  virtual Status host_unregister(int device, void* ptr) noexcept = 0;  // blocks
  virtual Status host_device_pointer(int device, void* ptr, DevicePtr* device_ptr) noexcept = 0;
  virtual Status pointer_info(int device, DevicePtr ptr, PointerInfo* info) noexcept = 0;

  // --- managed memory --------------------------------------------------------------------------
  virtual Status managed_alloc(int device, std::size_t nbytes, ManagedAttach attach,
                               DevicePtr* ptr) noexcept = 0;
  virtual Status stream_attach(int device, StreamHandle stream, DevicePtr ptr, std::size_t nbytes,
                               ManagedAttach attach) noexcept = 0;
  virtual Status prefetch(int device, DevicePtr ptr, std::size_t nbytes, Location to,
                          StreamHandle stream) noexcept = 0;
  virtual Status advise(int device, DevicePtr ptr, std::size_t nbytes, Advice advice,
                        Location location) noexcept = 0;
  virtual Status discard(int device, DevicePtr ptr, std::size_t nbytes,
                         StreamHandle stream) noexcept = 0;

  // --- the driver's own stream-ordered pools ---------------------------------------------------
  virtual Status mem_alloc_async(int device, std::size_t nbytes, StreamHandle stream,
                                 DevicePtr* ptr) noexcept = 0;
  virtual Status mem_free_async(int device, DevicePtr ptr, StreamHandle stream) noexcept = 0;
  virtual Status pool_create(int device, const PoolProps& props, PoolHandle* pool) noexcept = 0;
  virtual Status pool_destroy(int device, PoolHandle pool) noexcept = 0;
  virtual Status pool_default(int device, PoolHandle* pool) noexcept = 0;
  virtual Status pool_current(int device, PoolHandle* pool) noexcept = 0;
  virtual Status pool_set_current(int device, PoolHandle pool) noexcept = 0;
  virtual Status pool_alloc_async(int device, PoolHandle pool, std::size_t nbytes,
                                  StreamHandle stream, DevicePtr* ptr) noexcept = 0;
  virtual Status pool_trim(int device, PoolHandle pool, std::size_t keep_bytes) noexcept = 0;
  virtual Status pool_get(int device, PoolHandle pool, PoolAttribute attribute,
                          std::uint64_t* value) noexcept = 0;
  virtual Status pool_set(int device, PoolHandle pool, PoolAttribute attribute,
                          std::uint64_t value) noexcept = 0;
  virtual Status pool_set_access(int device, PoolHandle pool, const AccessGrant* grants,
                                 std::size_t count) noexcept = 0;
  virtual Status pool_get_access(int device, PoolHandle pool, Location location,
                                 Access* access) noexcept = 0;
  // The descriptor belongs to the caller. Importing leaves the descriptor with the caller.
  virtual Status pool_export(int device, PoolHandle pool, int* fd) noexcept = 0;
  virtual Status pool_import(int device, int fd, PoolHandle* pool) noexcept = 0;
  virtual Status pool_export_pointer(int device, DevicePtr ptr,
                                     PoolPointerExport* exported) noexcept = 0;
  virtual Status pool_import_pointer(int device, PoolHandle pool, const PoolPointerExport& exported,
                                     DevicePtr* ptr) noexcept = 0;

  // --- virtual memory: none of these needs a context, none blocks -------------------------------
  virtual Status granularity(const PhysicalProps& props, bool recommended,
                             std::size_t* nbytes) noexcept = 0;
  virtual Status address_reserve(std::size_t nbytes, std::size_t alignment, DevicePtr hint,
                                 DevicePtr* ptr) noexcept = 0;
  virtual Status address_free(DevicePtr ptr, std::size_t nbytes) noexcept = 0;
  virtual Status mem_create(std::size_t nbytes, const PhysicalProps& props,
                            PhysicalHandle* handle) noexcept = 0;
  virtual Status mem_release(PhysicalHandle handle) noexcept = 0;
  // Maps a whole handle: `nbytes` is its size.
  virtual Status mem_map(DevicePtr ptr, std::size_t nbytes, PhysicalHandle handle) noexcept = 0;
  // May cover several whole mappings, never a part of one.
  virtual Status mem_unmap(DevicePtr ptr, std::size_t nbytes) noexcept = 0;
  virtual Status mem_set_access(DevicePtr ptr, std::size_t nbytes, const AccessGrant* grants,
                                std::size_t count) noexcept = 0;
  virtual Status mem_get_access(DevicePtr ptr, Location location, Access* access) noexcept = 0;
  // The descriptor belongs to the caller. Importing leaves the descriptor with the caller.
  virtual Status mem_export(PhysicalHandle handle, int* fd) noexcept = 0;
  virtual Status mem_import(int fd, PhysicalHandle* handle) noexcept = 0;
  // The handle mapped at `ptr`, with one more reference: release it.
  virtual Status mem_retain(DevicePtr ptr, PhysicalHandle* handle) noexcept = 0;

  // --- copies and fills ------------------------------------------------------------------------
  // Any mix of device, pinned, managed and pageable addresses. With pageable memory on a side the
  // call may block; then the source may be reused when it returns.
  virtual Status copy_async(int device, DevicePtr dst, DevicePtr src, std::size_t nbytes,
                            StreamHandle stream) noexcept = 0;
  virtual Status copy_2d_async(int device, const Copy2D& copy, StreamHandle stream) noexcept = 0;
  virtual Status copy_peer_async(int dst_device, DevicePtr dst, int src_device, DevicePtr src,
                                 std::size_t nbytes, StreamHandle stream) noexcept = 0;
  // `count` elements of 1, 2 or 4 bytes at an address aligned to that.
  virtual Status fill_async(int device, DevicePtr ptr, std::uint32_t value, int value_bytes,
                            std::size_t count, StreamHandle stream) noexcept = 0;

  // --- streams and events ----------------------------------------------------------------------
  virtual Status stream_create(int device, StreamFlags flags, StreamHandle* stream) noexcept = 0;
  virtual Status stream_destroy(int device, StreamHandle stream) noexcept = 0;
  // not_ready while work is pending; both: stream_capture_unsupported while the stream captures.
  virtual Status stream_query(int device, StreamHandle stream) noexcept = 0;
  virtual Status stream_synchronize(int device, StreamHandle stream) noexcept = 0;  // blocks
  virtual Status stream_wait_event(int device, StreamHandle stream, EventHandle event) noexcept = 0;
  virtual Status stream_device(StreamHandle stream, int* device) noexcept = 0;
  // Whether work given to the stream is captured into a graph instead of run. An event recorded
  // there must not be queried or waited for by the host: that spoils the capture; and a stream that
  // waits for it joins the capture.
  virtual Status stream_capturing(int device, StreamHandle stream, bool* capturing) noexcept = 0;
  // The stream waits until *ptr >= value (cyclic), or writes it. 32-bit, aligned.
  virtual Status stream_wait_value(int device, StreamHandle stream, DevicePtr ptr,
                                   std::uint32_t value) noexcept = 0;
  virtual Status stream_write_value(int device, StreamHandle stream, DevicePtr ptr,
                                    std::uint32_t value) noexcept = 0;
  // `function` runs on a driver thread in stream order and must make no driver call.
  virtual Status launch_host_function(int device, StreamHandle stream, HostFunction function,
                                      void* argument) noexcept = 0;
  virtual Status event_create(int device, EventFlags flags, EventHandle* event) noexcept = 0;
  virtual Status event_destroy(int device, EventHandle event) noexcept = 0;
  virtual Status event_record(int device, EventHandle event, StreamHandle stream) noexcept = 0;
  virtual Status event_query(int device, EventHandle event) noexcept = 0;  // or not_ready
  virtual Status event_synchronize(int device, EventHandle event) noexcept = 0;  // blocks
  virtual Status event_elapsed(int device, EventHandle start, EventHandle end,
                               float* milliseconds) noexcept = 0;

  // --- peers -----------------------------------------------------------------------------------
  virtual Status peer_can_access(int device, int peer, bool* can) noexcept = 0;
  virtual Status peer_enable(int device, int peer) noexcept = 0;   // device may access peer's memory
  virtual Status peer_disable(int device, int peer) noexcept = 0;

  // Switches the calling thread to the relaxed capture mode (true) or back (false), in which no
  // call spoils the capture of a graph elsewhere in the process. For calls that do not come through
  // here: those that do switch by themselves. Returns what was set before.
  virtual Status relax_capture(bool relaxed, bool* previous) noexcept = 0;
};

using DriverRef = std::shared_ptr<Driver>;

// Whether work given to a stream is captured into a graph; a stream that cannot tell runs it.
inline bool is_capturing(Driver& driver, int device, StreamHandle stream) noexcept {
  bool capturing = false;
  return ok(driver.stream_capturing(device, stream, &capturing)) && capturing;
}

}  // namespace ringmem
