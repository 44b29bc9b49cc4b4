/* A libcuda of a few functions, to test how CudaDriver loads and calls one. Compiled by
 * test_cuda_driver.py; the environment says how it behaves:
 *   FAKE_CUDA_VERSION   what cuDriverGetVersion answers (13000)
 *   FAKE_CUDA_DEVICES   number of devices (2)
 *   FAKE_CUDA_INIT      what cuInit returns (0)
 *   FAKE_CUDA_MISSING   ",cuMemCreate,": functions that cuGetProcAddress does not find
 *   FAKE_CUDA_FAIL      "cuMemAlloc": the function that returns FAKE_CUDA_STATUS
 * -DOLD_PROC_ADDRESS leaves out cuGetProcAddress_v2, -DNO_PROC_ADDRESS both forms.
 * What it was given is kept in the fake_* variables, which the tests read with ctypes. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;
typedef uint64_t Ptr;

struct Location {
  int type;
  int id;
};
struct Prop { /* CUmemAllocationProp */
  int type;
  int handle_types;
  struct Location location;
  void* win32;
  struct {
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
};
struct Access {
  struct Location location;
  int flags;
};

/* --- what the tests look at ------------------------------------------------------------------- */
int fake_retained[8], fake_released[8]; /* references of primary contexts, by device */
int fake_pushes, fake_pops;
int fake_asked_too_new;                 /* cuGetProcAddress for a version above the driver's */
int fake_asked_flags = -1;
uint64_t fake_last[8];                  /* arguments of the last call of interest */
static __thread int capture_mode = 1;   /* thread-local, as some application left it */
int fake_mode;                          /* that of the last call that frees or creates memory */
char fake_trace[256];                   /* stream and event calls: "record 5 on 0; ..." */

static int number(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text && *text ? atoi(text) : otherwise;
}

static int failing(const char* name) {
  const char* text = getenv("FAKE_CUDA_FAIL");
  return text && strcmp(text, name) == 0 ? number("FAKE_CUDA_STATUS", 999) : 0;
}
#define FAIL_IF_TOLD(name)                   \
  do {                                       \
    int told = failing(name);                \
    if (told) return told;                   \
  } while (0)

static void trace(const char* what, uintptr_t a, const char* link, uintptr_t b) {
  size_t length = strlen(fake_trace);
  if (*link) {
    snprintf(fake_trace + length, sizeof fake_trace - length, "%s %d%s%d; ", what, (int)a, link,
             (int)b);
  } else {
    snprintf(fake_trace + length, sizeof fake_trace - length, "%s %d; ", what, (int)a);
  }
}

/* --- contexts: device n has context 100 + n; a stack for each thread ---------------------------- */
static __thread uintptr_t stack[8];
static __thread int depth;

Result cuCtxGetCurrent(uintptr_t* context) {
  *context = depth ? stack[depth - 1] : 0;
  return 0;
}
Result cuCtxPushCurrent(uintptr_t context) {
  stack[depth++] = context;
  ++fake_pushes;
  return 0;
}
Result cuCtxPopCurrent(uintptr_t* context) {
  if (!depth) return 201;
  *context = stack[--depth];
  ++fake_pops;
  return 0;
}
static int current_device(void) { return depth ? (int)stack[depth - 1] - 100 : -1; }
static Result cuCtxGetDevice(int* device) {
  *device = current_device();
  return *device < 0 ? 201 : 0;
}
static Result cuCtxSynchronize(void) { return depth ? failing("cuCtxSynchronize") : 201; }
static Result cuDevicePrimaryCtxRetain(uintptr_t* context, int device) {
  FAIL_IF_TOLD("cuDevicePrimaryCtxRetain");
  ++fake_retained[device];
  *context = 100u + (uintptr_t)device;
  return 0;
}
static Result cuDevicePrimaryCtxRelease(int device) {
  ++fake_released[device];
  return 0;
}

/* --- devices ---------------------------------------------------------------------------------- */
Result cuDriverGetVersion(int* version) {
  *version = number("FAKE_CUDA_VERSION", 13000);
  return 0;
}
static Result cuInit(unsigned flags) { return flags ? 1 : number("FAKE_CUDA_INIT", 0); }
static Result cuDeviceGetCount(int* count) {
  *count = number("FAKE_CUDA_DEVICES", 2);
  return 0;
}
static Result cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
static Result cuDeviceGetName(char* name, int length, int device) {
  snprintf(name, (size_t)length, "Fake %d", device);
  return 0;
}
static Result cuDeviceGetUuid(unsigned char* uuid, int device) {
  for (int i = 0; i < 16; ++i) uuid[i] = (unsigned char)(i + 16 * device);
  return 0;
}
static Result cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = 1000 * device + attribute;
  return 0;
}

/* --- memory: an address says on which device's context it was made ------------------------------ */
static Result cuMemAlloc(Ptr* ptr, size_t nbytes) {
  *ptr = 0xbad; /* a driver may write before it fails */
  FAIL_IF_TOLD("cuMemAlloc");
  if (current_device() < 0) return 201;
  *ptr = 0x10000u * (Ptr)(current_device() + 1) + nbytes;
  return 0;
}
static Result cuMemFree(Ptr ptr) {
  FAIL_IF_TOLD("cuMemFree");
  fake_mode = capture_mode;
  fake_last[0] = ptr;
  fake_last[1] = (uint64_t)current_device();
  return 0;
}
/* 0x5000… is unknown, 0x6000… pinned, 0x7000… managed, the rest device memory. */
static Result cuPointerGetAttributes(unsigned count, const int* attributes, void** data, Ptr ptr) {
  int kind = (int)(ptr >> 12);
  for (unsigned i = 0; i < count; ++i) {
    switch (attributes[i]) {
      case 2: *(unsigned*)data[i] = kind == 5 ? 0 : kind == 6 ? 1 : 2; break;
      case 3: *(Ptr*)data[i] = kind == 5 ? 0 : ptr; break;
      case 4: *(Ptr*)data[i] = kind == 6 || kind == 7 ? ptr : 0; break;
      case 8: *(unsigned char*)data[i] = kind == 7; break;
      case 9: *(int*)data[i] = kind == 5 ? -2 : 1; break;
      default: return 1;
    }
  }
  fake_last[0] = count;
  return 0;
}
static Result cuMemGetAddressRange(Ptr* base, size_t* nbytes, Ptr ptr) {
  if (ptr >> 12 == 7) return 500;
  *base = ptr & ~(Ptr)0xfff;
  *nbytes = 4096;
  return 0;
}
static Result prefetch_to_location(Ptr ptr, size_t nbytes, struct Location to, unsigned flags,
                                   void* stream) {
  uint64_t seen[] = {2, ptr, nbytes, (uint64_t)to.type, (uint64_t)to.id, flags, (uintptr_t)stream};
  memcpy(fake_last, seen, sizeof seen);
  return 0;
}
static Result prefetch_to_device(Ptr ptr, size_t nbytes, int device, void* stream) {
  uint64_t seen[] = {1, ptr, nbytes, (uint64_t)(int64_t)device, (uintptr_t)stream};
  memcpy(fake_last, seen, sizeof seen);
  return 0;
}
static Result cuMemDiscardBatchAsync(Ptr* ptrs, size_t* sizes, size_t count,
                                     unsigned long long flags, void* stream) {
  uint64_t seen[] = {ptrs[0], sizes[0], count, flags, (uintptr_t)stream};
  if ((uintptr_t)stream < 2) return 1; /* not on the legacy default stream */
  FAIL_IF_TOLD("cuMemDiscardBatchAsync");
  memcpy(fake_last, seen, sizeof seen);
  trace("discard", (uintptr_t)ptrs[0], " on ", (uintptr_t)stream);
  return 0;
}

/* --- virtual memory: must work with no context -------------------------------------------------- */
static Result cuMemCreate(uint64_t* handle, size_t nbytes, const struct Prop* prop,
                          unsigned long long flags) {
  uint64_t seen[] = {(uint64_t)prop->type, (uint64_t)prop->handle_types,
                     (uint64_t)prop->location.type, (uint64_t)prop->location.id, prop->flags.rdma,
                     flags, (uint64_t)(int64_t)current_device()};
  memcpy(fake_last, seen, sizeof seen);
  fake_mode = capture_mode;
  *handle = nbytes;
  return failing("cuMemCreate");
}
static Result cuMemSetAccess(Ptr ptr, size_t nbytes, const struct Access* list, size_t count) {
  (void)ptr, (void)nbytes;
  fake_last[0] = count;
  for (size_t i = 0; i < count && i < 2; ++i) {
    fake_last[1 + 3 * i] = (uint64_t)list[i].location.type;
    fake_last[2 + 3 * i] = (uint64_t)list[i].location.id;
    fake_last[3 + 3 * i] = (uint64_t)list[i].flags;
  }
  return 0;
}
static Result cuMemExportToShareableHandle(int* fd, uint64_t handle, int type,
                                           unsigned long long flags) {
  *fd = (int)handle;
  return type == 1 && !flags ? 0 : 1;
}
static Result cuMemImportFromShareableHandle(uint64_t* handle, void* fd, int type) {
  *handle = (uintptr_t)fd + 1000;
  return type == 1 ? 0 : 1;
}

/* --- streams: a stream's handle is 1000 times its device, plus a number ------------------------- */
static Result cuStreamCreateWithPriority(uintptr_t* stream, unsigned flags, int priority) {
  fake_last[0] = flags;
  fake_last[1] = (uint64_t)(int64_t)priority;
  *stream = 1000u * (uintptr_t)(current_device() + 1) + 7;
  return 0;
}
static Result cuStreamDestroy(uintptr_t stream) {
  trace("destroy stream", stream, "", 0);
  return 0;
}
static Result cuEventCreate(uintptr_t* event, unsigned flags) {
  FAIL_IF_TOLD("cuEventCreate");
  *event = 5;
  return flags == 2 ? 0 : 1;
}
static Result cuEventDestroy(uintptr_t event) {
  trace("destroy event", event, "", 0);
  return 0;
}
static Result cuEventRecord(uintptr_t event, uintptr_t stream) {
  trace("record", event, " on ", stream);
  return 0;
}
static Result cuStreamWaitEvent(uintptr_t stream, uintptr_t event, unsigned flags) {
  trace("wait", event, " on ", stream);
  return (int)flags;
}
static Result cuStreamQuery(uintptr_t stream) { return stream % 2 ? 600 : 0; }
static Result cuStreamGetDevice(uintptr_t stream, int* device) {
  *device = (int)(stream / 1000) - 1;
  return 0;
}
static Result cuStreamGetCtx(uintptr_t stream, uintptr_t* context) {
  *context = 100 + stream / 1000 - 1;
  return 0;
}
static Result cuMemPoolGetAttribute(void* pool, int attribute, void* value) {
  (void)pool;
  if (attribute <= 3) {
    *(int*)value = -1; /* an int: the upper half of 64 bits stays untouched */
  } else {
    *(uint64_t*)value = 0x123456789abcull;
  }
  return 0;
}
/* As cuda.h has it: a default stream wants a current context, another one brings its own. */
static Result cuMemAllocFromPoolAsync(Ptr* ptr, size_t nbytes, void* pool, uintptr_t stream) {
  uint64_t seen[] = {nbytes, (uintptr_t)pool, stream, (uint64_t)(int64_t)current_device()};
  if (stream <= 2 && current_device() < 0) return 201;
  memcpy(fake_last, seen, sizeof seen);
  *ptr = 0x4000;
  return 0;
}
static Result cuMemAllocAsync(Ptr* ptr, size_t nbytes, uintptr_t stream) {
  return cuMemAllocFromPoolAsync(ptr, nbytes, NULL, stream);
}
static Result cuMemFreeAsync(Ptr ptr, uintptr_t stream) {
  fake_mode = capture_mode;
  uint64_t seen[] = {ptr, stream, (uint64_t)(int64_t)current_device()};
  if (stream <= 2 && current_device() < 0) return 201;
  memcpy(fake_last, seen, sizeof seen);
  return 0;
}
static Result cuStreamIsCapturing(uintptr_t stream, int* status) {
  *status = (stream & 0xffff) == 0x7fff; /* 0: none, 1: active */
  return stream == 1 ? 906 : 0;
}
Result cuThreadExchangeStreamCaptureMode(int* mode) {
  int before = capture_mode;
  capture_mode = *mode;
  *mode = before;
  return 0;
}

/* --- cuGetProcAddress --------------------------------------------------------------------------- */
struct Symbol {
  const char* name;
  int since;
  void* function;
};
#define SYMBOL(name, since) {#name, since, (void*)name}
static const struct Symbol symbols[] = {
    SYMBOL(cuInit, 2000),
    SYMBOL(cuDriverGetVersion, 2020),
    SYMBOL(cuDeviceGetCount, 2000),
    SYMBOL(cuDeviceGet, 2000),
    SYMBOL(cuDeviceGetName, 2000),
    SYMBOL(cuDeviceGetUuid, 11040),
    SYMBOL(cuDeviceGetAttribute, 2000),
    SYMBOL(cuDevicePrimaryCtxRetain, 7000),
    SYMBOL(cuDevicePrimaryCtxRelease, 11000),
    SYMBOL(cuCtxGetCurrent, 4000),
    SYMBOL(cuCtxPushCurrent, 4000),
    SYMBOL(cuCtxPopCurrent, 4000),
    SYMBOL(cuCtxGetDevice, 2000),
    SYMBOL(cuCtxSynchronize, 2000),
    SYMBOL(cuMemAlloc, 3020),
    SYMBOL(cuMemFree, 3020),
    SYMBOL(cuPointerGetAttributes, 7000),
    SYMBOL(cuMemGetAddressRange, 3020),
    {"cuMemPrefetchAsync", 8000, (void*)prefetch_to_device},
    {"cuMemPrefetchAsync", 12020, (void*)prefetch_to_location},
    SYMBOL(cuMemDiscardBatchAsync, 13000),
    SYMBOL(cuMemCreate, 10020),
    SYMBOL(cuMemSetAccess, 10020),
    SYMBOL(cuMemExportToShareableHandle, 10020),
    SYMBOL(cuMemImportFromShareableHandle, 10020),
    SYMBOL(cuStreamCreateWithPriority, 5050),
    SYMBOL(cuStreamDestroy, 4000),
    SYMBOL(cuStreamQuery, 2000),
    SYMBOL(cuStreamWaitEvent, 3020),
    SYMBOL(cuEventCreate, 2000),
    SYMBOL(cuEventDestroy, 4000),
    SYMBOL(cuEventRecord, 2000),
    SYMBOL(cuStreamGetDevice, 12080),
    SYMBOL(cuStreamGetCtx, 9020),
    SYMBOL(cuMemPoolGetAttribute, 11020),
    SYMBOL(cuMemAllocFromPoolAsync, 11020),
    SYMBOL(cuMemAllocAsync, 11020),
    SYMBOL(cuMemFreeAsync, 11020),
    SYMBOL(cuStreamIsCapturing, 10000),
    SYMBOL(cuThreadExchangeStreamCaptureMode, 10010),
};

static Result find(const char* name, void** function, int version, uint64_t flags) {
  const char* missing = getenv("FAKE_CUDA_MISSING");
  char wanted[96];
  snprintf(wanted, sizeof wanted, ",%s,", name);
  *function = NULL;
  fake_asked_flags = (int)flags;
  if (version > number("FAKE_CUDA_VERSION", 13000)) {
    ++fake_asked_too_new;
    return 1;
  }
  if (missing && strstr(missing, wanted)) return 500;
  for (size_t i = 0; i < sizeof symbols / sizeof *symbols; ++i) {
    /* The newest that is not newer than asked for. */
    if (strcmp(symbols[i].name, name) == 0 && symbols[i].since <= version) {
      *function = symbols[i].function;
    }
  }
  return *function ? 0 : 500;
}

#ifndef NO_PROC_ADDRESS
Result cuGetProcAddress(const char* name, void** function, int version, uint64_t flags) {
  return find(name, function, version, flags);
}
#ifndef OLD_PROC_ADDRESS
Result cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags,
                           int* found) {
  /* This form reports success and says in `found` that there is none. */
  Result result = find(name, function, version, flags);
  *found = result == 0 ? 0 : result == 500 ? 1 : 2;
  return result == 500 ? 0 : result;
}
#endif
#endif
