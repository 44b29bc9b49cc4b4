// HostDriver: one or more devices simulated in host memory, with the answers of a CUDA driver.
// Device memory is sparse memfd space, streams are queues run by threads, and a page table decides
// what a device may touch: a violation is a sticky illegal_address, never a crash.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "driver/driver.hpp"

namespace ringmem {

namespace host {
class Machine;
}

struct HostConfig {
  int devices = 1;                                 // 1 to 32
  std::size_t capacity = std::size_t{64} << 30;    // bytes of each device
  bool all_peers = true;                           // every pair is connected; else only `peers`
  std::vector<std::pair<int, int>> peers;          // connected pairs of ordinals, both ways
  double latency_s = 0;                            // each asynchronous task completes that late
  bool strict = false;                             // the host is not shown device memory
  std::size_t granularity = std::size_t{2} << 20;  // minimum and recommended, of physical memory
  std::string name = "ringmem simulated device";
  std::size_t max_mappings = 0;                    // kernel mappings; 0: what the system allows

  // Capabilities.
  bool virtual_memory = true;
  bool export_fd = true;  // sharing by POSIX file descriptor; written `export` in a string
  bool pools = true;
  bool managed = true;
  bool concurrent_managed_access = true;
  bool stream_mem_ops = true;
  bool host_register = true;
  bool cooperative_launch = true;
  bool host_numa = true;  // physical memory on the host (HOST_NUMA)
};

// Reads "devices=2,capacity=8GiB,latency_s=0.05,peers=none|all|0-1+1-2,virtual_memory=0,…": the
// fields of HostConfig by name, separated by commas. Throws InvalidValue naming key, value and
// what would do.
HostConfig parse_host_config(const std::string& text);

class HostDriver final : public Driver {
 public:
  // Throws InvalidValue for a configuration that makes no sense. Reserves nothing yet.
  explicit HostDriver(const HostConfig& config);
  // Finishes what can finish without waiting for anybody (a stream that waits for a value that
  // never comes is abandoned), then gives everything back.
  ~HostDriver() override;

  const HostConfig& config() const noexcept;

  // Whether `device` may read (or write) all of [ptr, ptr + nbytes) now: success, or
  // illegal_address. What runs on a simulated device outside a stream asks this before it starts.
  Status check_access(int device, DevicePtr ptr, std::size_t nbytes, bool write) const noexcept;

  const char* platform() const noexcept override;

  // --- devices ---------------------------------------------------------------------------------
  Status device_count(int* count) noexcept override;
  Status driver_version(int* version) noexcept override;
  Status device_info(int device, DeviceInfo* info) noexcept override;
  Status attribute(int device, Attribute attribute, int* value) noexcept override;
  Status memory_info(int device, MemoryInfo* info) noexcept override;
  Status synchronize(int device) noexcept override;
  Status primary_context(int device, std::uint64_t* context) noexcept override;

  // --- memory ----------------------------------------------------------------------------------
  Status mem_alloc(int device, std::size_t nbytes, DevicePtr* ptr) noexcept override;
  Status mem_free(int device, DevicePtr ptr) noexcept override;
  Status host_alloc(int device, std::size_t nbytes, HostFlags flags, void** ptr) noexcept override;
  Status host_free(int device, void* ptr) noexcept override;
  Status host_register(int device, void* ptr, std::size_t nbytes,
                       HostFlags flags) noexcept override;
  Status host_unregister(int device, void* ptr) noexcept override;
  Status host_device_pointer(int device, void* ptr, DevicePtr* device_ptr) noexcept override;
  Status pointer_info(int device, DevicePtr ptr, PointerInfo* info) noexcept override;

  // --- managed memory --------------------------------------------------------------------------
  Status managed_alloc(int device, std::size_t nbytes, ManagedAttach attach,
                       DevicePtr* ptr) noexcept override;
  Status stream_attach(int device, StreamHandle stream, DevicePtr ptr, std::size_t nbytes,
                       ManagedAttach attach) noexcept override;
  Status prefetch(int device, DevicePtr ptr, std::size_t nbytes, Location to,
                  StreamHandle stream) noexcept override;
  Status advise(int device, DevicePtr ptr, std::size_t nbytes, Advice advice,
                Location location) noexcept override;
  Status discard(int device, DevicePtr ptr, std::size_t nbytes,
                 StreamHandle stream) noexcept override;

  // --- the driver's own stream-ordered pools ---------------------------------------------------
  Status mem_alloc_async(int device, std::size_t nbytes, StreamHandle stream,
                         DevicePtr* ptr) noexcept override;
  Status mem_free_async(int device, DevicePtr ptr, StreamHandle stream) noexcept override;
  Status pool_create(int device, const PoolProps& props, PoolHandle* pool) noexcept override;
  Status pool_destroy(int device, PoolHandle pool) noexcept override;
  Status pool_default(int device, PoolHandle* pool) noexcept override;
  Status pool_current(int device, PoolHandle* pool) noexcept override;
  Status pool_set_current(int device, PoolHandle pool) noexcept override;
  Status pool_alloc_async(int device, PoolHandle pool, std::size_t nbytes,
                          StreamHandle stream, DevicePtr* ptr) noexcept override;
  Status pool_trim(int device, PoolHandle pool, std::size_t keep_bytes) noexcept override;
  Status pool_get(int device, PoolHandle pool, PoolAttribute attribute,
                  std::uint64_t* value) noexcept override;
  Status pool_set(int device, PoolHandle pool, PoolAttribute attribute,
                  std::uint64_t value) noexcept override;
  Status pool_set_access(int device, PoolHandle pool, const AccessGrant* grants,
                         std::size_t count) noexcept override;
  Status pool_get_access(int device, PoolHandle pool, Location location,
                         Access* access) noexcept override;
  Status pool_export(int device, PoolHandle pool, int* fd) noexcept override;
  Status pool_import(int device, int fd, PoolHandle* pool) noexcept override;
  Status pool_export_pointer(int device, DevicePtr ptr,
                             PoolPointerExport* exported) noexcept override;
  Status pool_import_pointer(int device, PoolHandle pool, const PoolPointerExport& exported,
                             DevicePtr* ptr) noexcept override;

  // --- virtual memory --------------------------------------------------------------------------
  Status granularity(const PhysicalProps& props, bool recommended,
                     std::size_t* nbytes) noexcept override;
  Status address_reserve(std::size_t nbytes, std::size_t alignment, DevicePtr hint,
                         DevicePtr* ptr) noexcept override;
  Status address_free(DevicePtr ptr, std::size_t nbytes) noexcept override;
  Status mem_create(std::size_t nbytes, const PhysicalProps& props,
                    PhysicalHandle* handle) noexcept override;
  Status mem_release(PhysicalHandle handle) noexcept override;
  Status mem_map(DevicePtr ptr, std::size_t nbytes, PhysicalHandle handle) noexcept override;
  Status mem_unmap(DevicePtr ptr, std::size_t nbytes) noexcept override;
  Status mem_set_access(DevicePtr ptr, std::size_t nbytes, const AccessGrant* grants,
                        std::size_t count) noexcept override;
  Status mem_get_access(DevicePtr ptr, Location location, Access* access) noexcept override;
  Status mem_export(PhysicalHandle handle, int* fd) noexcept override;
  Status mem_import(int fd, PhysicalHandle* handle) noexcept override;
  Status mem_retain(DevicePtr ptr, PhysicalHandle* handle) noexcept override;

  // --- copies and fills ------------------------------------------------------------------------
  Status copy_async(int device, DevicePtr dst, DevicePtr src, std::size_t nbytes,
                    StreamHandle stream) noexcept override;
  Status copy_2d_async(int device, const Copy2D& copy, StreamHandle stream) noexcept override;
  Status copy_peer_async(int dst_device, DevicePtr dst, int src_device, DevicePtr src,
                         std::size_t nbytes, StreamHandle stream) noexcept override;
  Status fill_async(int device, DevicePtr ptr, std::uint32_t value, int value_bytes,
                    std::size_t count, StreamHandle stream) noexcept override;

  // --- streams and events ----------------------------------------------------------------------
  Status stream_create(int device, StreamFlags flags, StreamHandle* stream) noexcept override;
  Status stream_destroy(int device, StreamHandle stream) noexcept override;
  Status stream_query(int device, StreamHandle stream) noexcept override;
  Status stream_synchronize(int device, StreamHandle stream) noexcept override;
  Status stream_wait_event(int device, StreamHandle stream, EventHandle event) noexcept override;
  Status stream_device(StreamHandle stream, int* device) noexcept override;
  Status stream_capturing(int device, StreamHandle stream, bool* capturing) noexcept override;
  Status stream_wait_value(int device, StreamHandle stream, DevicePtr ptr,
                           std::uint32_t value) noexcept override;
  Status stream_write_value(int device, StreamHandle stream, DevicePtr ptr,
                            std::uint32_t value) noexcept override;
  Status launch_host_function(int device, StreamHandle stream, HostFunction function,
                              void* argument) noexcept override;
  Status event_create(int device, EventFlags flags, EventHandle* event) noexcept override;
  Status event_destroy(int device, EventHandle event) noexcept override;
  Status event_record(int device, EventHandle event, StreamHandle stream) noexcept override;
  Status event_query(int device, EventHandle event) noexcept override;
  Status event_synchronize(int device, EventHandle event) noexcept override;
  Status event_elapsed(int device, EventHandle start, EventHandle end,
                       float* milliseconds) noexcept override;

  // --- peers -----------------------------------------------------------------------------------
  Status peer_can_access(int device, int peer, bool* can) noexcept override;
  Status peer_enable(int device, int peer) noexcept override;
  Status peer_disable(int device, int peer) noexcept override;

  Status relax_capture(bool relaxed, bool* previous) noexcept override;

 private:
  std::shared_ptr<host::Machine> machine_;
};

// The same behind the waist.
DriverRef make_host_driver(const HostConfig& config);

}  // namespace ringmem
