// What a plain C program reaches with the CUDA driver: the peer of bench_copies and bench_buffers.
//
//   cc -O2 -I CUDA_INCLUDE peer_driver.c -ldl -o peer_driver && ./peer_driver DEVICE
//
// Prints one JSON object; each entry is a list of samples. Loads the driver library by name, so it
// builds without one.
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define SAMPLES 200
#define COPY_SAMPLES 30
#define BATCH 100
#define COPY_BYTES ((size_t)256 << 20)
#define SMALL_BYTES ((size_t)4096)

static void* library;

static void* symbol(const char* name) {
  void* found = dlsym(library, name);
  if (!found) {
    fprintf(stderr, "the driver has no %s\n", name);
    exit(2);
  }
  return found;
}

static void check(CUresult result, const char* what) {
  if (result != CUDA_SUCCESS) {
    fprintf(stderr, "%s failed: %d\n", what, (int)result);
    exit(2);
  }
}

#define CALL(function, ...) check(function(__VA_ARGS__), #function)

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void print(const char* name, const double* samples, int count, int last) {
  printf("\"%s\": [", name);
  for (int i = 0; i < count; ++i) printf("%s%.9g", i ? ", " : "", samples[i]);
  printf("]%s\n", last ? "" : ",");
}

int main(int argc, char** argv) {
  library = dlopen("libcuda.so.1", RTLD_NOW);
  if (!library) {
    fprintf(stderr, "%s\n", dlerror());
    return 2;
  }
  CUresult (*init)(unsigned) = (CUresult (*)(unsigned))symbol("cuInit");
  CUresult (*retain)(CUcontext*, CUdevice) =
      (CUresult (*)(CUcontext*, CUdevice))symbol("cuDevicePrimaryCtxRetain");
  CUresult (*set_current)(CUcontext) = (CUresult (*)(CUcontext))symbol("cuCtxSetCurrent");
  CUresult (*host_alloc)(void**, size_t, unsigned) =
      (CUresult (*)(void**, size_t, unsigned))symbol("cuMemHostAlloc");
  CUresult (*copy)(CUdeviceptr, CUdeviceptr, size_t, CUstream) =
      (CUresult (*)(CUdeviceptr, CUdeviceptr, size_t, CUstream))symbol("cuMemcpyAsync");
  CUresult (*stream_create)(CUstream*, unsigned) =
      (CUresult (*)(CUstream*, unsigned))symbol("cuStreamCreate");
  CUresult (*synchronize)(CUstream) = (CUresult (*)(CUstream))symbol("cuStreamSynchronize");
  CUresult (*alloc)(CUdeviceptr*, size_t, CUstream) =
      (CUresult (*)(CUdeviceptr*, size_t, CUstream))symbol("cuMemAllocAsync");
  CUresult (*release)(CUdeviceptr, CUstream) =
      (CUresult (*)(CUdeviceptr, CUstream))symbol("cuMemFreeAsync");
  CUresult (*default_pool)(CUmemoryPool*, CUdevice) =
      (CUresult (*)(CUmemoryPool*, CUdevice))symbol("cuDeviceGetDefaultMemPool");
  CUresult (*pool_set)(CUmemoryPool, CUmemPool_attribute, void*) =
      (CUresult (*)(CUmemoryPool, CUmemPool_attribute, void*))symbol("cuMemPoolSetAttribute");

  const CUdevice device = argc > 1 ? atoi(argv[1]) : 0;
  CUcontext context;
  CALL(init, 0);
  CALL(retain, &context, device);
  CALL(set_current, context);
  CUmemoryPool pool;
  cuuint64_t keep_all = ~(cuuint64_t)0;
  CALL(default_pool, &pool, device);
  CALL(pool_set, pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep_all);
  CUstream up, down;
  CALL(stream_create, &up, CU_STREAM_NON_BLOCKING);
  CALL(stream_create, &down, CU_STREAM_NON_BLOCKING);

  static double samples[SAMPLES];
  printf("{\n");

  const struct { const char* name; size_t nbytes; } sizes[] = {
      {"pair 256 B", 256}, {"pair 1 MiB", (size_t)1 << 20}, {"pair 64 MiB", (size_t)64 << 20}};
  for (int s = 0; s < 3; ++s) {
    CUdeviceptr ptr;
    for (int i = 0; i < SAMPLES; ++i) {
      const double start = now();
      for (int j = 0; j < BATCH; ++j) {
        CALL(alloc, &ptr, sizes[s].nbytes, up);
        CALL(release, ptr, up);
      }
      samples[i] = 1e9 * (now() - start) / BATCH;
    }
    CALL(synchronize, up);
    print(sizes[s].name, samples, SAMPLES, 0);
  }

  void *source, *target;
  CUdeviceptr first, second;
  CALL(host_alloc, &source, COPY_BYTES, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
  CALL(host_alloc, &target, COPY_BYTES, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
  CALL(alloc, &first, COPY_BYTES, up);
  CALL(alloc, &second, COPY_BYTES, down);
  CALL(synchronize, up);
  CALL(synchronize, down);
  const CUdeviceptr from = (CUdeviceptr)source, to = (CUdeviceptr)target;

  for (int i = 0; i < SAMPLES; ++i) {  // submission alone; a queue that is not full
    const double start = now();
    for (int j = 0; j < BATCH; ++j) CALL(copy, first, from, SMALL_BYTES, up);
    samples[i] = 1e9 * (now() - start) / BATCH;
    CALL(synchronize, up);
  }
  print("submit", samples, SAMPLES, 0);

  for (int way = 0; way < 3; ++way) {  // 0 up, 1 down, 2 both
    for (int i = -3; i < COPY_SAMPLES; ++i) {
      const double start = now();
      if (way != 1) CALL(copy, first, from, COPY_BYTES, up);
      if (way != 0) CALL(copy, to, second, COPY_BYTES, down);
      CALL(synchronize, up);
      CALL(synchronize, down);
      if (i >= 0) samples[i] = (double)COPY_BYTES / (now() - start) / 1e9;
    }
    print(way == 0 ? "up" : way == 1 ? "down" : "both", samples, COPY_SAMPLES, way == 2);
  }
  printf("}\n");
  return 0;
}
