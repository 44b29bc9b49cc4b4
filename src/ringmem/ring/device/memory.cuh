// What a ring kernel's warps load, store and share: access to host memory, the geometry of a kernel,
// and the block's shared memory.
//
// Compile-time settings, all given by the host: RINGMEM_MESSAGE_NBYTES, RINGMEM_REPLY_NBYTES,
// RINGMEM_WORKERS, RINGMEM_BLOCKS, RINGMEM_CHUNK, RINGMEM_MODE (one of these).

#define RINGMEM_MODE_LANE 0    // each lane handles a message of its own (no state)
#define RINGMEM_MODE_ORDER 1   // one worker, one lane: messages in order (state, one lane)
#define RINGMEM_MODE_WARP 2    // the lanes of a warp handle a message together
#define RINGMEM_MODE_BLOCK 3   // all workers of the one block handle a message together

namespace ringmem {

using namespace layout;

// ---------------------------------------------------------------------------------------------
// Access to memory that the other side reads or writes meanwhile.

struct Part {  // a quarter of a line
  u64 a, b;
};

__device__ __forceinline__ Part load_part(const void* at) {
  Part part;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(part.a), "=l"(part.b)
               : "l"(at)
               : "memory");
  return part;
}
__device__ __forceinline__ void store_part(void* at, Part part) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(at), "l"(part.a), "l"(part.b)
               : "memory");
}
__device__ __forceinline__ u64 load_u64(const void* at) {
  u64 value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}
__device__ __forceinline__ u32 load_u32(const void* at) {
  u32 value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
__device__ __forceinline__ void store_u64(void* at, u64 value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
__device__ __forceinline__ void store_u32(void* at, u32 value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
__device__ __forceinline__ u64 now_ns() {
  u64 value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
  return value;
}
__device__ __forceinline__ u32 now_low_ns() {  // one instruction, where now_ns() is a loop
  u32 value;
  asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(value));
  return value;
}
template <class T>
__device__ __forceinline__ T peek(const T& shared_word) {
  return *const_cast<const volatile T*>(&shared_word);
}
template <class T>
__device__ __forceinline__ void poke(T& shared_word, T value) {
  *const_cast<volatile T*>(&shared_word) = value;
}

// ---------------------------------------------------------------------------------------------
// Geometry.

constexpr u32 message_lines = lines_for(RINGMEM_MESSAGE_NBYTES);
constexpr u32 reply_lines = lines_for(RINGMEM_REPLY_NBYTES);
constexpr u32 workers = RINGMEM_WORKERS;
constexpr u32 ring_blocks = RINGMEM_BLOCKS;
constexpr u32 chunk = RINGMEM_CHUNK;
constexpr u32 load_lines = 8;  // lines of one warp-wide load
constexpr u32 full_mask = 0xffffffffu;

constexpr u32 chunk_message_lines = chunk * message_lines;
constexpr u32 chunk_reply_lines = chunk * reply_lines;
constexpr u32 message_area =  // of the handler's contiguous view; in place where one line is enough
    message_lines == 1 ? 0 : message_lines * line_payload_nbytes;
constexpr u32 reply_area = reply_lines == 1 ? 0 : reply_lines * line_payload_nbytes;

struct alignas(16) WorkerMemory {
  u8 lines[chunk_message_lines * line_nbytes];
  u8 replies[chunk_reply_lines * line_nbytes];
  u8 messages[chunk * message_area + 16];
  u8 plain_replies[chunk * reply_area + 16];
  i32 status[chunk];
};

struct WorkerReport {
  u64 progress;
  u64 processed, dropped, errors;
  u64 latency_total_ns, latency_max_ns, latency_min_ns, last_processed_ns;
  i32 last_error;
  u32 paused, ended;
};

enum Order : u32 { run = 0, pause = 1, leave = 2 };

struct BlockMemory {
  u64 input_tail;    // as the service warp saw it last
  u64 output_head;
  u64 drain_target;  // all ones: no drain asked for
  u32 order;
  u32 workers_ready;
  u32 block_ready;   // RINGMEM_MODE_BLOCK: messages in block_lines
  u32 corrupted;     // a line carried a sequence that no correct producer writes
  u32 first_look;    // cycles from a reply to the next look
  long long awake_until;  // clock64 of this multiprocessor
  WorkerReport reports[workers];
};

// While messages stream in, every worker polls; otherwise only the one whose chunk is next to fill.
constexpr long long awake_cycles = 40'000;  // about 20 us
constexpr u32 idle_looks = 16'384;          // about 20 ms of looking in vain, then with pauses
__device__ __forceinline__ bool is_awake(const BlockMemory& block) {
  return clock64() < peek(block.awake_until);
}
__device__ __forceinline__ void keep_awake(BlockMemory& block) {
  poke(block.awake_until, clock64() + awake_cycles);
}

struct Ring {
  u8* slots;
  u64 mask;
  u32 shift;
  u32 behind;  // how many laps at most a slot may lag behind what a worker expects of it
};

__device__ __forceinline__ Ring ring_at(u64 header) {
  const RingDescriptor* descriptor = &reinterpret_cast<const RingHeader*>(header)->descriptor;
  const u64 capacity = load_u64(&descriptor->capacity);
  Ring ring;
  ring.slots = reinterpret_cast<u8*>(header) + sizeof(RingHeader);
  ring.mask = capacity - 1;
  ring.shift = 63 - __clzll(static_cast<long long>(capacity));
  // One lap, and those that a worker looks ahead while all poll.
  ring.behind = ((chunk * workers * ring_blocks) >> ring.shift) + 2;
  return ring;
}

}  // namespace ringmem
