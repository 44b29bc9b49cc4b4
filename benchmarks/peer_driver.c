// What a plain C program reaches with the CUDA driver: the peer of bench_copies and bench_buffers.
//
//   cc -O2 -I CUDA_INCLUDE peer_driver.c -ldl -o peer_driver && ./peer_driver DEVICE
//
// Prints one JSON object; each entry is a list of samples. Loads the driver library by name, so it
// builds without one. Built with -shared -fPIC it gives peer_open and peer_pair_ns, which time the
// pair inside another program, batch by batch between that program's own.
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

static CUresult (*retain)(CUcontext*, CUdevice);
static CUresult (*host_alloc)(void**, size_t, unsigned);
static CUresult (*copy)(CUdeviceptr, CUdeviceptr, size_t, CUstream);
static CUresult (*stream_create)(CUstream*, unsigned);
static CUresult (*alloc)(CUdeviceptr*, size_t, CUstream);
static CUresult (*release)(CUdeviceptr, CUstream);
static CUresult (*default_pool)(CUmemoryPool*, CUdevice);
static CUresult (*pool_set)(CUmemoryPool, CUmemPool_attribute, void*);
static CUresult (*init)(unsigned);
static CUresult (*synchronize)(CUstream);
static CUresult (*push)(CUcontext);
static CUresult (*pop)(CUcontext*);
static CUcontext context;
static CUstream up, down;

static void open_device(CUdevice device) {
  library = dlopen("libcuda.so.1", RTLD_NOW);
  if (!library) {
    fprintf(stderr, "%s\n", dlerror());
    exit(2);
  }
  *(void**)&retain = symbol("cuDevicePrimaryCtxRetain");
  *(void**)&host_alloc = symbol("cuMemHostAlloc");
  *(void**)&copy = symbol("cuMemcpyAsync");
  *(void**)&stream_create = symbol("cuStreamCreate");
  *(void**)&alloc = symbol("cuMemAllocAsync");
  *(void**)&release = symbol("cuMemFreeAsync");
  *(void**)&default_pool = symbol("cuDeviceGetDefaultMemPool");
  *(void**)&pool_set = symbol("cuMemPoolSetAttribute");
  *(void**)&init = symbol("cuInit");
  *(void**)&synchronize = symbol("cuStreamSynchronize");
  *(void**)&push = symbol("cuCtxPushCurrent_v2");
  *(void**)&pop = symbol("cuCtxPopCurrent_v2");
  CALL(init, 0);
  CALL(retain, &context, device);
  CALL(push, context);
  CUmemoryPool pool;
  cuuint64_t keep_all = ~(cuuint64_t)0;
  CALL(default_pool, &pool, device);
  CALL(pool_set, pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep_all);
  CALL(stream_create, &up, CU_STREAM_NON_BLOCKING);
  CALL(stream_create, &down, CU_STREAM_NON_BLOCKING);
}

// Nanoseconds of one allocation and its release, the mean of `count` pairs in a row.
static double time_pairs(size_t nbytes, int count) {
  CUdeviceptr ptr;
  const double start = now();
  for (int i = 0; i < count; ++i) {
    CALL(alloc, &ptr, nbytes, up);
    CALL(release, ptr, up);
  }
  return 1e9 * (now() - start) / count;
}

void peer_open(int device) {
  CUcontext ours;
  open_device(device);
  CALL(pop, &ours);
}

double peer_pair_ns(size_t nbytes, int count) {
  CUcontext ours;
  CALL(push, context);
  const double ns = time_pairs(nbytes, count);
  CALL(synchronize, up);
  CALL(pop, &ours);
  return ns;
}

int main(int argc, char** argv) {
  open_device(argc > 1 ? atoi(argv[1]) : 0);
  static double samples[SAMPLES];
  printf("{\n");

  const struct { const char* name; size_t nbytes; } sizes[] = {
      {"pair 256 B", 256}, {"pair 1 MiB", (size_t)1 << 20}, {"pair 64 MiB", (size_t)64 << 20}};
  for (int s = 0; s < 3; ++s) {
    for (int i = 0; i < SAMPLES; ++i) samples[i] = time_pairs(sizes[s].nbytes, BATCH);
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
