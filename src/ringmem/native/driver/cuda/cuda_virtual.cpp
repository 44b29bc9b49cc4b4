// Virtual memory. None of these calls needs a context.
#include "driver/cuda/cuda_calls.hpp"

namespace ringmem {

using F = CudaFunctions;
using cuda::into;
using cuda::location;

namespace {

CUmemAllocationProp allocation_prop(const PhysicalProps& props) noexcept {
  CUmemAllocationProp result{};
  result.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  result.requestedHandleTypes =
      props.shareable ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE;
  result.location = location(props.location);
  result.allocFlags.gpuDirectRDMACapable = props.rdma ? 1 : 0;
  return result;
}

}  // namespace

Status CudaDriver::granularity(const PhysicalProps& props, bool recommended,
                               std::size_t* nbytes) noexcept {
  const AccessGrant place{props.location};
  if (Status status = check_locations(&place, 1); !ok(status)) return status;
  const CUmemAllocationProp prop = allocation_prop(props);
  return into<std::size_t>(nbytes, [&](std::size_t* out) {
    return plain(&F::MemGetAllocationGranularity, out, &prop,
                 recommended ? CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
                             : CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  });
}

Status CudaDriver::address_reserve(std::size_t nbytes, std::size_t alignment, DevicePtr hint,
                                   DevicePtr* ptr) noexcept {
  return into<CUdeviceptr>(ptr, [&](CUdeviceptr* out) {
    return plain(&F::MemAddressReserve, out, nbytes, alignment, CUdeviceptr{hint}, 0ull);
  });
}

Status CudaDriver::address_free(DevicePtr ptr, std::size_t nbytes) noexcept {
  return plain(&F::MemAddressFree, CUdeviceptr{ptr}, nbytes);
}

Status CudaDriver::mem_create(std::size_t nbytes, const PhysicalProps& props,
                              PhysicalHandle* handle) noexcept {
  const AccessGrant place{props.location};
  if (Status status = check_locations(&place, 1); !ok(status)) return status;
  const CUmemAllocationProp prop = allocation_prop(props);
  return into<CUmemGenericAllocationHandle>(handle, [&](CUmemGenericAllocationHandle* out) {
    return plain(&F::MemCreate, out, nbytes, &prop, 0ull);
  });
}

Status CudaDriver::mem_release(PhysicalHandle handle) noexcept {
  return plain(&F::MemRelease, CUmemGenericAllocationHandle{handle});
}

Status CudaDriver::mem_map(DevicePtr ptr, std::size_t nbytes, PhysicalHandle handle) noexcept {
  return plain(&F::MemMap, CUdeviceptr{ptr}, nbytes, std::size_t{0},
               CUmemGenericAllocationHandle{handle}, 0ull);
}

Status CudaDriver::mem_unmap(DevicePtr ptr, std::size_t nbytes) noexcept {
  return plain(&F::MemUnmap, CUdeviceptr{ptr}, nbytes);
}

Status CudaDriver::mem_set_access(DevicePtr ptr, std::size_t nbytes, const AccessGrant* grants,
                                  std::size_t count) noexcept {
  if (Status status = check_locations(grants, count); !ok(status)) return status;
  const auto list = cuda::access_list(grants, count);
  if (!list) return Status::out_of_memory;
  return plain(&F::MemSetAccess, CUdeviceptr{ptr}, nbytes, list.get(), count);
}

Status CudaDriver::mem_get_access(DevicePtr ptr, Location at, Access* access) noexcept {
  const AccessGrant place{at};
  if (Status status = check_locations(&place, 1); !ok(status)) return status;
  const CUmemLocation cu_location = location(at);
  return into<unsigned long long>(access, [&](unsigned long long* out) {
    return plain(&F::MemGetAccess, out, &cu_location, CUdeviceptr{ptr});
  });
}

Status CudaDriver::mem_export(PhysicalHandle handle, int* fd) noexcept {
  return into<int>(fd, [&](void* out) {
    return plain(&F::MemExportToShareableHandle, out, CUmemGenericAllocationHandle{handle},
                 CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0ull);
  });
}

Status CudaDriver::mem_import(int fd, PhysicalHandle* handle) noexcept {
  if (fd < 0) return Status::invalid_value;
  return into<CUmemGenericAllocationHandle>(handle, [&](CUmemGenericAllocationHandle* out) {
    return plain(&F::MemImportFromShareableHandle, out, cuda::descriptor(fd),
                 CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  });
}

Status CudaDriver::mem_retain(DevicePtr ptr, PhysicalHandle* handle) noexcept {
  return into<CUmemGenericAllocationHandle>(handle, [&](CUmemGenericAllocationHandle* out) {
    return plain(&F::MemRetainAllocationHandle, out, cuda::pointer(ptr));
  });
}

}  // namespace ringmem
