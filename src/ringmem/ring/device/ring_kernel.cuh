// The persistent ring kernel. Grid: RINGMEM_BLOCKS blocks for each ring; block: RINGMEM_WORKERS
// worker warps and one service warp.
//
//  - Worker w of W takes the chunks w, w + W, w + 2 W, … of RINGMEM_CHUNK messages. It polls the
//    next slot of its chunk in host memory until a message is there, or reads as many as the host
//    says there are, handles them, and writes the replies, each to the slot with the message's
//    index. Workers share nothing, so replies need no order among them.
//  - The service warp alone talks to the control block: it copies the host's flags and indices into
//    shared memory, and publishes the consumer's head, telemetry and the end of the kernel.
//
// A line of 64 bytes is read, and written, by four lanes with one instruction of 16 bytes each, so
// that its sequence and its payload cross the link together (measured: facts in docs/design.md).
// Only relaxed loads and stores of system scope touch host memory; nothing there is atomic.

extern "C" __global__ void __launch_bounds__((RINGMEM_WORKERS + 1) * 32, 1)
    ringmem_ring_kernel(const ringmem::layout::KernelRing* launches) {
  using namespace ringmem;
  extern __shared__ __align__(128) u8 dynamic_memory[];
  BlockMemory& block = *reinterpret_cast<BlockMemory*>(dynamic_memory);
  constexpr u32 block_nbytes = (sizeof(BlockMemory) + 127) / 128 * 128;
  WorkerMemory* memories = reinterpret_cast<WorkerMemory*>(dynamic_memory + block_nbytes);
  const KernelRing launch = launches[blockIdx.x / ring_blocks];
  const u32 block_of_ring = blockIdx.x % ring_blocks;
  const u32 warp = threadIdx.x >> 5;

  // Where the ring stands: the first launch starts at 0, one after a restart goes on.
  const u64 head =
      load_u64(&reinterpret_cast<const RingHeader*>(launch.input_ptr)->consumer.head);
  static_assert(sizeof(BlockMemory) % 8 == 0);
  for (u32 i = threadIdx.x; i < sizeof(BlockMemory) / 8; i += blockDim.x) {
    reinterpret_cast<u64*>(&block)[i] = 0;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    block.drain_target = ~0ull;
    block.first_look = first_look_least;
    block.output_head =
        load_u64(&reinterpret_cast<const RingHeader*>(launch.output_ptr)->consumer.head);
  }
  __syncthreads();
  if (threadIdx.x < workers) {
    // The first chunk of this worker that is not wholly below `head`.
    const u64 stride = workers * ring_blocks;
    const u64 mine = block_of_ring * workers + threadIdx.x;
    const u64 at = head / chunk;
    const u64 first = at + (mine + stride - at % stride) % stride;
    WorkerReport& report = block.reports[threadIdx.x];
    report.progress = RINGMEM_MODE == RINGMEM_MODE_BLOCK || first == at ? head : first * chunk;
    report.latency_min_ns = ~0ull;
    // Counts go on where an earlier run of this kernel left them.
    if (block_of_ring == 0 && threadIdx.x == 0) continue_counts(launch, report);
  }
  __syncthreads();
  if (block_of_ring == 0 && threadIdx.x == 0) {
    store_u32(&reinterpret_cast<ControlBlock*>(launch.control_ptr)->active, 1);
  }
  if (warp == workers) {
    service_loop(launch, block, block_of_ring);
  } else if constexpr (RINGMEM_MODE == RINGMEM_MODE_BLOCK) {
    block_loop(launch, block, memories[0], warp);
  } else {
    worker_loop(launch, block, memories[warp], warp, block_of_ring);
  }
}

// Bytes of dynamic shared memory that a launch must ask for.
namespace ringmem {
constexpr unsigned shared_nbytes =
    (sizeof(BlockMemory) + 127) / 128 * 128 +
    sizeof(WorkerMemory) * (RINGMEM_MODE == RINGMEM_MODE_BLOCK ? 1 : RINGMEM_WORKERS);
#ifdef RINGMEM_SHARED_NBYTES
static_assert(shared_nbytes <= RINGMEM_SHARED_NBYTES, "the host asks for too little shared memory");
#endif
}  // namespace ringmem
extern "C" __device__ const unsigned ringmem_shared_nbytes = ringmem::shared_nbytes;
