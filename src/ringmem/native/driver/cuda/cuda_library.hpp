// The CUDA driver library: found at run time, every function asked for with the version whose
// signature is called. Nothing links to CUDA.
#pragma once

#include <cudaTypedefs.h>

#include <string>
#include <vector>

#include "driver/status.hpp"

#if CUDA_VERSION < 13000
#error "cuda.h of CUDA 13.0 or newer is needed to build: pip install 'nvidia-cuda-runtime>=13.0'"
#endif

namespace ringmem {

// The oldest driver that works: CUDA 12.0 (R525).
inline constexpr int oldest_cuda_driver = 12000;

// X(name without "cu", version): the version is the one in which the signature called here came
// in, as cudaTypedefs.h lists it. Never CUDA_VERSION: drivers refuse to answer for a newer version
// than their own, and for some names a newer version is another signature.
#define RINGMEM_CUDA_FUNCTIONS(X)       \
  X(Init, 2000)                         \
  X(DriverGetVersion, 2020)             \
  X(DeviceGetCount, 2000)               \
  X(DeviceGet, 2000)                    \
  X(DeviceGetName, 2000)                \
  X(DeviceGetUuid, 11040)               \
  X(DeviceGetAttribute, 2000)           \
  X(DevicePrimaryCtxRetain, 7000)       \
  X(DevicePrimaryCtxRelease, 11000)     \
  X(CtxGetCurrent, 4000)                \
  X(CtxPushCurrent, 4000)               \
  X(CtxPopCurrent, 4000)                \
  X(CtxGetDevice, 2000)                 \
  X(CtxSynchronize, 2000)               \
  X(MemGetInfo, 3020)                   \
  X(MemAlloc, 3020)                     \
  X(MemFree, 3020)                      \
  X(MemHostAlloc, 2020)                 \
  X(MemFreeHost, 2000)                  \
  X(MemHostRegister, 6050)              \
  X(MemHostUnregister, 4000)            \
  X(MemHostGetDevicePointer, 3020)      \
  X(PointerGetAttributes, 7000)         \
  X(MemGetAddressRange, 3020)           \
  X(MemAllocManaged, 6000)              \
  X(StreamAttachMemAsync, 6000)         \
  X(MemDiscardBatchAsync, 13000)        \
  X(MemAllocAsync, 11020)               \
  X(MemFreeAsync, 11020)                \
  X(MemPoolCreate, 11020)               \
  X(MemPoolDestroy, 11020)              \
  X(DeviceGetDefaultMemPool, 11020)     \
  X(DeviceGetMemPool, 11020)            \
  X(DeviceSetMemPool, 11020)            \
  X(MemAllocFromPoolAsync, 11020)       \
  X(MemPoolTrimTo, 11020)               \
  X(MemPoolGetAttribute, 11020)         \
  X(MemPoolSetAttribute, 11020)         \
  X(MemPoolSetAccess, 11020)            \
  X(MemPoolGetAccess, 11020)            \
  X(MemPoolExportToShareableHandle, 11020)   \
  X(MemPoolImportFromShareableHandle, 11020) \
  X(MemPoolExportPointer, 11020)        \
  X(MemPoolImportPointer, 11020)        \
  X(MemGetAllocationGranularity, 10020) \
  X(MemAddressReserve, 10020)           \
  X(MemAddressFree, 10020)              \
  X(MemCreate, 10020)                   \
  X(MemRelease, 10020)                  \
  X(MemMap, 10020)                      \
  X(MemUnmap, 10020)                    \
  X(MemSetAccess, 10020)                \
  X(MemGetAccess, 10020)                \
  X(MemExportToShareableHandle, 10020)  \
  X(MemImportFromShareableHandle, 10020) \
  X(MemRetainAllocationHandle, 11000)   \
  X(MemcpyAsync, 4000)                  \
  X(Memcpy2DAsync, 3020)                \
  X(MemcpyPeerAsync, 4000)              \
  X(MemsetD8Async, 3020)                \
  X(MemsetD16Async, 3020)               \
  X(MemsetD32Async, 3020)               \
  X(StreamCreateWithPriority, 5050)     \
  X(StreamDestroy, 4000)                \
  X(StreamQuery, 2000)                  \
  X(StreamSynchronize, 2000)            \
  X(StreamWaitEvent, 3020)              \
  X(StreamGetDevice, 12080)             \
  X(StreamGetCtx, 9020)                 \
  X(StreamIsCapturing, 10000)           \
  X(StreamWaitValue32, 11070)           \
  X(StreamWriteValue32, 11070)          \
  X(LaunchHostFunc, 10000)              \
  X(EventCreate, 2000)                  \
  X(EventDestroy, 4000)                 \
  X(EventRecord, 2000)                  \
  X(EventQuery, 2000)                   \
  X(EventSynchronize, 2000)             \
  X(EventElapsedTime, 2000)             \
  X(DeviceCanAccessPeer, 4000)          \
  X(CtxEnablePeerAccess, 4000)          \
  X(CtxDisablePeerAccess, 4000)         \
  X(ThreadExchangeStreamCaptureMode, 10010)

// Names that have two signatures in the field, the newer one first: X(name, version, older).
#define RINGMEM_CUDA_FUNCTION_PAIRS(X) \
  X(MemPrefetchAsync, 12020, 8000)     \
  X(MemAdvise, 12020, 8000)

// The functions; null where the driver does not have them.
struct CudaFunctions {
#define RINGMEM_MEMBER(name, version) PFN_cu##name##_v##version name = nullptr;
#define RINGMEM_MEMBERS(name, version, older)    \
  PFN_cu##name##_v##version name = nullptr;      \
  PFN_cu##name##_v##older name##Old = nullptr;
  RINGMEM_CUDA_FUNCTIONS(RINGMEM_MEMBER)
  RINGMEM_CUDA_FUNCTION_PAIRS(RINGMEM_MEMBERS)
#undef RINGMEM_MEMBER
#undef RINGMEM_MEMBERS
};

// The library, initialized (cuInit), or why it cannot be used.
struct CudaLibrary {
  std::string path;   // as given to dlopen
  std::string error;  // empty: usable
  int version = 0;    // 13000 for 13.0
  std::vector<CUdevice> devices;  // by ordinal
  CudaFunctions functions;
};

// Loads libcuda.so.1, or the file that RINGMEM_CUDA_LIBRARY names.
CudaLibrary load_cuda_library();

}  // namespace ringmem
