// Plain, pinned and managed memory; the driver's own pools.
#include <algorithm>

#include "driver/cuda/cuda_calls.hpp"

namespace ringmem {

using F = CudaFunctions;
using cuda::descriptor;
using cuda::into;
using cuda::location;
using cuda::pool;
using cuda::stream;

// --- plain and pinned ----------------------------------------------------------------------------

Status CudaDriver::mem_alloc(int device, std::size_t nbytes, DevicePtr* ptr) noexcept {
  return into<CUdeviceptr>(
      ptr, [&](CUdeviceptr* out) { return within(device, &F::MemAlloc, out, nbytes); });
}

Status CudaDriver::mem_free(int device, DevicePtr ptr) noexcept {
  return within(device, &F::MemFree, CUdeviceptr{ptr});
}

Status CudaDriver::host_alloc(int device, std::size_t nbytes, HostFlags flags,
                              void** ptr) noexcept {
  const unsigned bits = (flags.portable ? CU_MEMHOSTALLOC_PORTABLE : 0u) |
                        (flags.mapped ? CU_MEMHOSTALLOC_DEVICEMAP : 0u) |
                        (flags.write_combined ? CU_MEMHOSTALLOC_WRITECOMBINED : 0u);
  return into<void*>(
      ptr, [&](void** out) { return within(device, &F::MemHostAlloc, out, nbytes, bits); });
}

Status CudaDriver::host_free(int device, void* ptr) noexcept {
  return within(device, &F::MemFreeHost, ptr);
}

Status CudaDriver::host_register(int device, void* ptr, std::size_t nbytes,
                                 HostFlags flags) noexcept {
  const unsigned bits = (flags.portable ? CU_MEMHOSTREGISTER_PORTABLE : 0u) |
                        (flags.mapped ? CU_MEMHOSTREGISTER_DEVICEMAP : 0u) |
                        (flags.read_only ? CU_MEMHOSTREGISTER_READ_ONLY : 0u);
  return within(device, &F::MemHostRegister, ptr, nbytes, bits);
}

Status CudaDriver::host_unregister(int device, void* ptr) noexcept {
  return within(device, &F::MemHostUnregister, ptr);
}

Status CudaDriver::host_device_pointer(int device, void* ptr, DevicePtr* device_ptr) noexcept {
  return into<CUdeviceptr>(device_ptr, [&](CUdeviceptr* out) {
    return within(device, &F::MemHostGetDevicePointer, out, ptr, 0u);
  });
}

// One call for all attributes: it answers zeros, not an error, for an address it does not know.
Status CudaDriver::pointer_info(int device, DevicePtr ptr, PointerInfo* info) noexcept {
  // Wide and zeroed, since the attributes have sizes from one to eight bytes.
  std::uint64_t type = 0;
  std::uint64_t managed = 0;
  std::uint64_t ordinal = 0;
  std::uint64_t device_ptr = 0;
  std::uint64_t host_ptr = 0;
  CUpointer_attribute attributes[] = {
      CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED,
      CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
      CU_POINTER_ATTRIBUTE_HOST_POINTER};
  void* values[] = {&type, &managed, &ordinal, &device_ptr, &host_ptr};
  const Status status = within(device, &F::PointerGetAttributes, 5u, &attributes[0], &values[0],
                               CUdeviceptr{ptr});
  if (!ok(status)) return status;

  *info = PointerInfo{};
  if (type == 0) return Status::success;
  info->kind = managed ? PointerKind::managed
               : type == CU_MEMORYTYPE_HOST ? PointerKind::pinned
                                            : PointerKind::device;
  const auto count = static_cast<int>(state_->library.devices.size());
  const auto owner = static_cast<int>(static_cast<std::uint32_t>(ordinal));
  info->device = owner >= 0 && owner < count ? owner : -1;
  info->device_ptr = device_ptr;
  info->host_ptr = host_ptr;
  CUdeviceptr base = 0;
  std::size_t nbytes = 0;
  if (ok(within(device, &F::MemGetAddressRange, &base, &nbytes, CUdeviceptr{ptr}))) {
    info->base = base;
    info->nbytes = nbytes;
  }
  return Status::success;
}

// --- managed -------------------------------------------------------------------------------------

Status CudaDriver::managed_alloc(int device, std::size_t nbytes, ManagedAttach attach,
                                 DevicePtr* ptr) noexcept {
  return into<CUdeviceptr>(ptr, [&](CUdeviceptr* out) {
    return within(device, &F::MemAllocManaged, out, nbytes, static_cast<unsigned>(attach));
  });
}

Status CudaDriver::stream_attach(int device, StreamHandle handle, DevicePtr ptr,
                                 std::size_t nbytes, ManagedAttach attach) noexcept {
  return within(device, &F::StreamAttachMemAsync, stream(handle), CUdeviceptr{ptr}, nbytes,
                static_cast<unsigned>(attach));
}

namespace {

// The target in the older signatures of prefetch and advise, which know no NUMA node.
bool older_target(Location at, CUdevice* target) noexcept {
  if (at.kind == LocationKind::host_numa) return false;
  *target = at.kind == LocationKind::host ? CU_DEVICE_CPU : at.id;
  return true;
}

}  // namespace

Status CudaDriver::prefetch(int device, DevicePtr ptr, std::size_t nbytes, Location to,
                            StreamHandle handle) noexcept {
  const AccessGrant target{to};
  if (Status status = check_locations(&target, 1); !ok(status)) return status;
  if (state_->library.functions.MemPrefetchAsync) {
    return within(device, &F::MemPrefetchAsync, CUdeviceptr{ptr}, nbytes, location(to), 0u,
                  stream(handle));
  }
  CUdevice older = 0;
  if (!older_target(to, &older)) return Status::not_supported;
  return within(device, &F::MemPrefetchAsyncOld, CUdeviceptr{ptr}, nbytes, older, stream(handle));
}

Status CudaDriver::advise(int device, DevicePtr ptr, std::size_t nbytes, Advice advice,
                          Location at) noexcept {
  const AccessGrant target{at};
  if (Status status = check_locations(&target, 1); !ok(status)) return status;
  const auto cu_advice = static_cast<CUmem_advise>(advice);
  if (state_->library.functions.MemAdvise) {
    return within(device, &F::MemAdvise, CUdeviceptr{ptr}, nbytes, cu_advice, location(at));
  }
  CUdevice older = 0;
  if (!older_target(at, &older)) return Status::not_supported;
  return within(device, &F::MemAdviseOld, CUdeviceptr{ptr}, nbytes, cu_advice, older);
}

// The driver refuses the legacy default stream here (cuda.h): a stream of our own does it between
// what the default stream did so far and what it does next.
Status CudaDriver::discard(int device, DevicePtr ptr, std::size_t nbytes,
                           StreamHandle handle) noexcept {
  if (handle != default_stream && handle != legacy_stream) {
    CUdeviceptr cu_ptr = ptr;
    return within(device, &F::MemDiscardBatchAsync, &cu_ptr, &nbytes, std::size_t{1}, 0ull,
                  stream(handle));
  }
  StreamHandle aside = 0;
  EventHandle order = 0;
  if (Status s = stream_create(device, {}, &aside); !ok(s)) return s;
  Status status = event_create(device, {}, &order);
  if (ok(status)) {
    status = event_record(device, order, handle);
    if (ok(status)) status = stream_wait_event(device, aside, order);
    if (ok(status)) status = discard(device, ptr, nbytes, aside);
    if (ok(status)) status = event_record(device, order, aside);
    if (ok(status)) status = stream_wait_event(device, handle, order);
    (void)event_destroy(device, order);
  }
  (void)stream_destroy(device, aside);  // returns at once; what was submitted completes
  return status;
}

// --- pools ---------------------------------------------------------------------------------------

// cuda.h on the three calls that allocate and free in a stream's order: CUDA_ERROR_INVALID_CONTEXT
// means "default stream specified with no current context". Any other stream needs none, which
// saves two to six driver calls a pair.

Status CudaDriver::mem_alloc_async(int device, std::size_t nbytes, StreamHandle handle,
                                   DevicePtr* ptr) noexcept {
  if (nbytes == 0) return Status::invalid_value;  // driver 580 takes it, older ones do not
  return into<CUdeviceptr>(ptr, [&](CUdeviceptr* out) {
    return ordered(device, handle, &F::MemAllocAsync, out, nbytes, stream(handle));
  });
}

Status CudaDriver::mem_free_async(int device, DevicePtr ptr, StreamHandle handle) noexcept {
  return ordered(device, handle, &F::MemFreeAsync, CUdeviceptr{ptr}, stream(handle));
}

Status CudaDriver::pool_create(int device, const PoolProps& props, PoolHandle* result) noexcept {
  const AccessGrant place{props.location};
  if (Status status = check_locations(&place, 1); !ok(status)) return status;
  CUmemPoolProps cu_props{};
  cu_props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  cu_props.handleTypes =
      props.shareable ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE;
  cu_props.location = location(props.location);
  cu_props.maxSize = props.max_size;
  return into<CUmemoryPool>(result, [&](CUmemoryPool* out) {
    return within(device, &F::MemPoolCreate, out, &cu_props);
  });
}

Status CudaDriver::pool_destroy(int device, PoolHandle handle) noexcept {
  // Destroying the default pool breaks the context of driver 580 (later calls never return).
  PoolHandle standard = 0;
  if (Status status = pool_default(device, &standard); !ok(status)) return status;
  if (handle == standard) return Status::invalid_value;
  return within(device, &F::MemPoolDestroy, pool(handle));
}

Status CudaDriver::pool_default(int device, PoolHandle* result) noexcept {
  if (Status status = check_device(device); !ok(status)) return status;
  const CUdevice cu_device = state_->library.devices[static_cast<std::size_t>(device)];
  return into<CUmemoryPool>(result, [&](CUmemoryPool* out) {
    return within(device, &F::DeviceGetDefaultMemPool, out, cu_device);
  });
}

Status CudaDriver::pool_current(int device, PoolHandle* result) noexcept {
  if (Status status = check_device(device); !ok(status)) return status;
  const CUdevice cu_device = state_->library.devices[static_cast<std::size_t>(device)];
  return into<CUmemoryPool>(result, [&](CUmemoryPool* out) {
    return within(device, &F::DeviceGetMemPool, out, cu_device);
  });
}

Status CudaDriver::pool_set_current(int device, PoolHandle handle) noexcept {
  if (Status status = check_device(device); !ok(status)) return status;
  const CUdevice cu_device = state_->library.devices[static_cast<std::size_t>(device)];
  return within(device, &F::DeviceSetMemPool, cu_device, pool(handle));
}

Status CudaDriver::pool_alloc_async(int device, PoolHandle handle, std::size_t nbytes,
                                    StreamHandle on, DevicePtr* ptr) noexcept {
  if (nbytes == 0) return Status::invalid_value;
  return into<CUdeviceptr>(ptr, [&](CUdeviceptr* out) {
    return ordered(device, on, &F::MemAllocFromPoolAsync, out, nbytes, pool(handle), stream(on));
  });
}

Status CudaDriver::pool_trim(int device, PoolHandle handle, std::size_t keep_bytes) noexcept {
  return within(device, &F::MemPoolTrimTo, pool(handle), keep_bytes);
}

namespace {

// The reuse attributes are an int for the driver, the others 64 bits.
bool is_flag(PoolAttribute attribute) noexcept {
  return attribute <= PoolAttribute::reuse_allow_internal_dependencies;
}

}  // namespace

Status CudaDriver::pool_get(int device, PoolHandle handle, PoolAttribute attribute,
                            std::uint64_t* value) noexcept {
  const auto cu_attribute = static_cast<CUmemPool_attribute>(attribute);
  const auto get = [&](void* out) {
    return within(device, &F::MemPoolGetAttribute, pool(handle), cu_attribute, out);
  };
  if (is_flag(attribute)) return into<int>(value, get);
  return into<cuuint64_t>(value, get);
}

Status CudaDriver::pool_set(int device, PoolHandle handle, PoolAttribute attribute,
                            std::uint64_t value) noexcept {
  int flag = value != 0;
  cuuint64_t number = value;
  void* in = is_flag(attribute) ? static_cast<void*>(&flag) : &number;
  return within(device, &F::MemPoolSetAttribute, pool(handle),
                static_cast<CUmemPool_attribute>(attribute), in);
}

Status CudaDriver::pool_set_access(int device, PoolHandle handle, const AccessGrant* grants,
                                   std::size_t count) noexcept {
  if (Status status = check_locations(grants, count); !ok(status)) return status;
  const auto list = cuda::access_list(grants, count);
  if (!list) return Status::out_of_memory;
  return within(device, &F::MemPoolSetAccess, pool(handle), list.get(), count);
}

Status CudaDriver::pool_get_access(int device, PoolHandle handle, Location at,
                                   Access* access) noexcept {
  const AccessGrant place{at};
  if (Status status = check_locations(&place, 1); !ok(status)) return status;
  CUmemLocation cu_location = location(at);
  return into<CUmemAccess_flags>(access, [&](CUmemAccess_flags* out) {
    return within(device, &F::MemPoolGetAccess, out, pool(handle), &cu_location);
  });
}

Status CudaDriver::pool_export(int device, PoolHandle handle, int* fd) noexcept {
  return into<int>(fd, [&](void* out) {
    return within(device, &F::MemPoolExportToShareableHandle, out, pool(handle),
                  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0ull);
  });
}

Status CudaDriver::pool_import(int device, int fd, PoolHandle* result) noexcept {
  if (fd < 0) return Status::invalid_value;
  return into<CUmemoryPool>(result, [&](CUmemoryPool* out) {
    return within(device, &F::MemPoolImportFromShareableHandle, out, descriptor(fd),
                  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0ull);
  });
}

Status CudaDriver::pool_export_pointer(int device, DevicePtr ptr,
                                       PoolPointerExport* exported) noexcept {
  CUmemPoolPtrExportData data{};
  static_assert(sizeof data.reserved == sizeof exported->data);
  const Status status = within(device, &F::MemPoolExportPointer, &data, CUdeviceptr{ptr});
  if (ok(status)) std::copy_n(data.reserved, sizeof data.reserved, exported->data);
  return status;
}

Status CudaDriver::pool_import_pointer(int device, PoolHandle handle,
                                       const PoolPointerExport& exported,
                                       DevicePtr* ptr) noexcept {
  CUmemPoolPtrExportData data{};
  std::copy_n(exported.data, sizeof data.reserved, data.reserved);
  return into<CUdeviceptr>(ptr, [&](CUdeviceptr* out) {
    return within(device, &F::MemPoolImportPointer, out, pool(handle), &data);
  });
}

}  // namespace ringmem
