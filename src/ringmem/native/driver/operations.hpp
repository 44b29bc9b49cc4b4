// The operations of Driver by name, each with the CUDA driver's call behind it. Error messages,
// FaultyDriver's rules and counters, and the tests that want "every operation" use this one list.
#pragma once

#include <cstddef>
#include <string_view>

// X(operation, name of the CUDA call)
#define RINGMEM_DRIVER_OPERATIONS(X)                          \
  X(device_count, "cuDeviceGetCount")                         \
  X(driver_version, "cuDriverGetVersion")                     \
  X(device_info, "cuDeviceGetName")                           \
  X(attribute, "cuDeviceGetAttribute")                        \
  X(memory_info, "cuMemGetInfo")                              \
  X(synchronize, "cuCtxSynchronize")                          \
  X(primary_context, "cuDevicePrimaryCtxRetain")              \
  X(mem_alloc, "cuMemAlloc")                                  \
  X(mem_free, "cuMemFree")                                    \
  X(host_alloc, "cuMemHostAlloc")                             \
  X(host_free, "cuMemFreeHost")                               \
  X(host_register, "cuMemHostRegister")                       \
  X(host_unregister, "cuMemHostUnregister")                   \
  X(host_device_pointer, "cuMemHostGetDevicePointer")         \
  X(pointer_info, "cuPointerGetAttributes")                   \
  X(managed_alloc, "cuMemAllocManaged")                       \
  X(stream_attach, "cuStreamAttachMemAsync")                  \
  X(prefetch, "cuMemPrefetchAsync")                           \
  X(advise, "cuMemAdvise")                                    \
  X(discard, "cuMemDiscardBatchAsync")                        \
  X(mem_alloc_async, "cuMemAllocAsync")                       \
  X(mem_free_async, "cuMemFreeAsync")                         \
  X(pool_create, "cuMemPoolCreate")                           \
  X(pool_destroy, "cuMemPoolDestroy")                         \
  X(pool_default, "cuDeviceGetDefaultMemPool")                \
  X(pool_current, "cuDeviceGetMemPool")                       \
  X(pool_set_current, "cuDeviceSetMemPool")                   \
  X(pool_alloc_async, "cuMemAllocFromPoolAsync")              \
  X(pool_trim, "cuMemPoolTrimTo")                             \
  X(pool_get, "cuMemPoolGetAttribute")                        \
  X(pool_set, "cuMemPoolSetAttribute")                        \
  X(pool_set_access, "cuMemPoolSetAccess")                    \
  X(pool_get_access, "cuMemPoolGetAccess")                    \
  X(pool_export, "cuMemPoolExportToShareableHandle")          \
  X(pool_import, "cuMemPoolImportFromShareableHandle")        \
  X(pool_export_pointer, "cuMemPoolExportPointer")            \
  X(pool_import_pointer, "cuMemPoolImportPointer")            \
  X(granularity, "cuMemGetAllocationGranularity")             \
  X(address_reserve, "cuMemAddressReserve")                   \
  X(address_free, "cuMemAddressFree")                         \
  X(mem_create, "cuMemCreate")                                \
  X(mem_release, "cuMemRelease")                              \
  X(mem_map, "cuMemMap")                                      \
  X(mem_unmap, "cuMemUnmap")                                  \
  X(mem_set_access, "cuMemSetAccess")                         \
  X(mem_get_access, "cuMemGetAccess")                         \
  X(mem_export, "cuMemExportToShareableHandle")               \
  X(mem_import, "cuMemImportFromShareableHandle")             \
  X(mem_retain, "cuMemRetainAllocationHandle")                \
  X(copy_async, "cuMemcpyAsync")                              \
  X(copy_2d_async, "cuMemcpy2DAsync")                         \
  X(copy_peer_async, "cuMemcpyPeerAsync")                     \
  X(fill_async, "cuMemsetAsync")                              \
  X(stream_create, "cuStreamCreateWithPriority")              \
  X(stream_destroy, "cuStreamDestroy")                        \
  X(stream_query, "cuStreamQuery")                            \
  X(stream_synchronize, "cuStreamSynchronize")                \
  X(stream_wait_event, "cuStreamWaitEvent")                   \
  X(stream_device, "cuStreamGetDevice")                       \
  X(stream_capturing, "cuStreamIsCapturing")                  \
  X(stream_wait_value, "cuStreamWaitValue32")                 \
  X(stream_write_value, "cuStreamWriteValue32")               \
  X(launch_host_function, "cuLaunchHostFunc")                 \
  X(event_create, "cuEventCreate")                            \
  X(event_destroy, "cuEventDestroy")                          \
  X(event_record, "cuEventRecord")                            \
  X(event_query, "cuEventQuery")                              \
  X(event_synchronize, "cuEventSynchronize")                  \
  X(event_elapsed, "cuEventElapsedTime")                      \
  X(peer_can_access, "cuDeviceCanAccessPeer")                 \
  X(peer_enable, "cuCtxEnablePeerAccess")                     \
  X(peer_disable, "cuCtxDisablePeerAccess")                   \
  X(relax_capture, "cuThreadExchangeStreamCaptureMode")

namespace ringmem {

#define RINGMEM_ENUMERATOR(operation, cuda) operation,
enum class Operation : unsigned char { RINGMEM_DRIVER_OPERATIONS(RINGMEM_ENUMERATOR) };
#undef RINGMEM_ENUMERATOR

// Indexed by Operation.
#define RINGMEM_NAME(operation, cuda) #operation,
inline constexpr const char* operation_names[] = {RINGMEM_DRIVER_OPERATIONS(RINGMEM_NAME)};
#undef RINGMEM_NAME
#define RINGMEM_CUDA_NAME(operation, cuda) cuda,
inline constexpr const char* cuda_names[] = {RINGMEM_DRIVER_OPERATIONS(RINGMEM_CUDA_NAME)};
#undef RINGMEM_CUDA_NAME

inline constexpr std::size_t operation_count = sizeof(operation_names) / sizeof(*operation_names);

constexpr const char* cuda_name(Operation operation) noexcept {
  return cuda_names[static_cast<std::size_t>(operation)];
}

// The operation of that name, or -1.
constexpr int find_operation(std::string_view name) noexcept {
  for (std::size_t i = 0; i < operation_count; ++i) {
    if (name == operation_names[i]) return static_cast<int>(i);
  }
  return -1;
}

}  // namespace ringmem
