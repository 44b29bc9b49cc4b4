// Plain types that cross the driver waist. Handles are opaque 64-bit numbers: pointers of the CUDA
// driver, or keys into a table of the host driver. 0 is never a live handle, except
// `default_stream`, the legacy default stream of CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace ringmem {

using DevicePtr = std::uint64_t;       // an address as kernels see it
using StreamHandle = std::uint64_t;    // CUstream
using EventHandle = std::uint64_t;     // CUevent
using PhysicalHandle = std::uint64_t;  // CUmemGenericAllocationHandle
using PoolHandle = std::uint64_t;      // CUmemoryPool

inline constexpr StreamHandle default_stream = 0;
inline constexpr StreamHandle legacy_stream = 1;      // CU_STREAM_LEGACY, an alias of 0
inline constexpr StreamHandle per_thread_stream = 2;  // CU_STREAM_PER_THREAD

// Where memory lives. A device is named by its ordinal within one driver.
enum class LocationKind : std::uint8_t { device, host, host_numa };

struct Location {
  LocationKind kind = LocationKind::device;
  int id = 0;  // device ordinal or NUMA node; ignored for `host`

  friend bool operator==(const Location&, const Location&) = default;
};

// What a device may do with a mapping. Values are CUmemAccess_flags.
enum class Access : std::uint8_t { none = 0, read = 1, readwrite = 3 };

struct AccessGrant {
  Location location;
  Access access = Access::readwrite;
};

// Device attributes; values are CUdevice_attribute's.
enum class Attribute : int {
  multiprocessor_count = 16,
  integrated = 18,
  can_map_host_memory = 19,
  pci_bus_id = 33,
  pci_device_id = 34,
  l2_cache_size = 38,
  max_threads_per_multiprocessor = 39,
  async_engine_count = 40,
  unified_addressing = 41,
  pci_domain_id = 50,
  compute_capability_major = 75,
  compute_capability_minor = 76,
  managed_memory = 83,
  host_native_atomic_supported = 86,
  pageable_memory_access = 88,
  concurrent_managed_access = 89,
  can_use_host_pointer_for_registered_memory = 91,
  cooperative_launch = 95,
  host_register_supported = 99,
  pageable_memory_access_uses_host_page_tables = 100,
  direct_managed_access_from_host = 101,
  virtual_memory_management = 102,
  handle_type_posix_fd = 103,
  gpu_direct_rdma_with_vmm = 110,
  read_only_host_register = 113,
  memory_pools = 115,
  mempool_handle_types = 119,
  stream_mem_ops_64 = 122,
  dma_buf = 124,
  host_numa_id = 134,
  host_numa_virtual_memory_management = 141,
};

struct DeviceInfo {
  std::string name;
  std::string uuid;  // "GPU-xxxxxxxx-…", or "CPU-…" for a simulated device
};

struct MemoryInfo {
  std::size_t free = 0;   // bytes
  std::size_t total = 0;  // bytes
};

// Flags of cuMemHostAlloc / cuMemHostRegister.
struct HostFlags {
  bool portable = true;        // visible to every context
  bool mapped = true;          // has a device address
  bool write_combined = false; // allocation only
  bool read_only = false;      // registration only
};

enum class ManagedAttach : std::uint8_t { global = 1, host = 2, single = 4 };

enum class Advice : std::uint8_t {
  set_read_mostly = 1,
  unset_read_mostly = 2,
  set_preferred_location = 3,
  unset_preferred_location = 4,
  set_accessed_by = 5,
  unset_accessed_by = 6,
};

// Physical memory to create. Flags for export and RDMA can only be set here.
struct PhysicalProps {
  Location location;
  bool shareable = false;  // exportable as a POSIX file descriptor
  bool rdma = false;       // usable for GPUDirect RDMA
};

struct PoolProps {
  Location location;
  std::size_t max_size = 0;  // bytes; 0: unlimited
  bool shareable = false;    // exportable as a POSIX file descriptor
};

// Attributes of a driver pool; values are CUmemPool_attribute's. The `reuse_*` are booleans.
enum class PoolAttribute : int {
  reuse_follow_event_dependencies = 1,
  reuse_allow_opportunistic = 2,
  reuse_allow_internal_dependencies = 3,
  release_threshold = 4,
  reserved_current = 5,
  reserved_high = 6,  // may only be set to 0, which resets it
  used_current = 7,
  used_high = 8,      // may only be set to 0, which resets it
};

// What cuMemPoolExportPointer gives: 64 opaque bytes.
struct PoolPointerExport {
  unsigned char data[64];
};

struct StreamFlags {
  bool non_blocking = true;  // no implicit order with the legacy default stream
  int priority = 0;          // lower is more urgent; clamped by the driver
};

struct EventFlags {
  bool timing = false;
  bool blocking_sync = false;
};

// One 2-D copy; all in bytes. A pitch is the distance between the starts of two rows.
struct Copy2D {
  DevicePtr dst = 0;
  std::size_t dst_pitch = 0;
  DevicePtr src = 0;
  std::size_t src_pitch = 0;
  std::size_t width = 0;   // bytes of a row
  std::size_t height = 0;  // rows
};

enum class PointerKind : std::uint8_t { unregistered, pinned, device, managed };

struct PointerInfo {
  PointerKind kind = PointerKind::unregistered;
  int device = -1;             // ordinal of the owning device; -1 where there is none
  DevicePtr base = 0;          // start of the allocation; 0 where the driver does not say
  std::size_t nbytes = 0;      // size of the allocation; 0 where the driver does not say
  DevicePtr device_ptr = 0;    // as a kernel sees it; 0: not accessible
  std::uint64_t host_ptr = 0;  // as the host sees it; 0: not accessible
};

using HostFunction = void (*)(void* argument);

}  // namespace ringmem
