// The persistent ring kernel. Grid: RINGMEM_BLOCKS blocks for each ring; block: RINGMEM_WORKERS
// worker warps and one service warp.
//
//  - Worker w of W takes the chunks w, w + W, w + 2 W, … of RINGMEM_CHUNK messages. It polls the
//    first slots of its chunk in host memory, four loads in flight, until a message is there; then
//    it handles all that are ready and writes the replies, each to the slot with the message's
//    index. Workers share nothing, so replies need no order among them.
//  - The service warp alone talks to the control block: it copies the host's flags and indices into
//    shared memory, and publishes the consumer's head, telemetry and the end of the kernel.
//
// A line of 64 bytes is read, and written, by four lanes with one instruction of 16 bytes each, so
// that its sequence and its payload cross the link together (measured: facts in docs/design.md).
// Only relaxed loads and stores of system scope touch host memory; nothing there is atomic.
//
// Compile-time settings, all given by the host: RINGMEM_MESSAGE_NBYTES, RINGMEM_REPLY_NBYTES,
// RINGMEM_WORKERS, RINGMEM_BLOCKS, RINGMEM_CHUNK, RINGMEM_MODE (below).

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

// ---------------------------------------------------------------------------------------------
// Worker.

// Reads `count` lines of the chunk, from line `first` on, into `memory`; returns how many lines in
// a row, from the first, carry their sequence.
template <u32 max_loads>
__device__ __forceinline__ u32 read_lines(const Ring& input, u64 index, u32 count, u8* memory) {
  const u32 lane = threadIdx.x & 31;
  Part parts[max_loads];
#pragma unroll
  for (u32 i = 0; i < max_loads; ++i) {
    const u32 line = i * load_lines + (lane >> 2);
    if (line < count) {
      const u64 slot = (index + line / message_lines) & input.mask;
      const u64 at = (slot * message_lines + line % message_lines) * line_nbytes + (lane & 3) * 16;
      parts[i] = load_part(input.slots + at);
    }
  }
  u32 ready = 0;
  bool open = true;
#pragma unroll
  for (u32 i = 0; i < max_loads; ++i) {
    const u32 line = i * load_lines + (lane >> 2);
    bool match = false;
    if (line < count) {
      const u32 expected = sequence_of(index + line / message_lines, input.shift);
      match = (lane & 3) == 0 && word_sequence(parts[i].a) == expected;
      *reinterpret_cast<Part*>(memory + line * line_nbytes + (lane & 3) * 16) = parts[i];
    }
    const u32 found = __ballot_sync(full_mask, match) | 0xeeeeeeeeu;  // bits 0, 4, 8, … count
    const u32 row = found == full_mask ? load_lines : (__ffs(~found) - 1) >> 2;
    if (open) ready += row;
    open = open && row == load_lines;
  }
  __syncwarp();
  return ready;
}

// Whether the lines of message `index`, as read_lines() left them, may be what they are. By a warp.
__device__ __forceinline__ bool is_sound(const Ring& input, u64 index, const u8* memory) {
  const u32 expected = sequence_of(index, input.shift);
  bool sound = true;
  for (u32 line = threadIdx.x & 31; line < message_lines; line += 32) {
    const u32 seen = *reinterpret_cast<const u32*>(memory + line * line_nbytes);
    sound = sound && expected - seen <= input.behind;
  }
  return __all_sync(full_mask, sound);
}

// Calls the user's handler on message `i` of the chunk, with its own contiguous message and reply.
__device__ __forceinline__ i32 handle(WorkerMemory& memory, u32 i, void* state, u32 lane,
                                      u32 lanes) {
  const void* message = message_lines == 1
                            ? memory.lines + i * line_nbytes + 8
                            : memory.messages + i * message_area;
  void* reply = reply_lines == 1 ? memory.replies + i * line_nbytes + 8
                                 : memory.plain_replies + i * reply_area;
  return RINGMEM_CALL_HANDLER(message, reply, state, lane, lanes);
}

// Lines of several messages into contiguous messages; nothing to do where a message is one line.
__device__ __forceinline__ void gather_messages(WorkerMemory& memory, u32 count, u32 thread,
                                                u32 threads) {
  if constexpr (message_lines > 1) {
    for (u32 word = thread; word < count * message_lines * 7; word += threads) {
      const u32 line = word / 7;
      const u64 value =
          *reinterpret_cast<const u64*>(memory.lines + line * line_nbytes + 8 + (word % 7) * 8);
      *reinterpret_cast<u64*>(memory.messages + (line / message_lines) * message_area +
                              (line % message_lines) * line_payload_nbytes + (word % 7) * 8) = value;
    }
  }
}

__device__ __forceinline__ void scatter_replies(WorkerMemory& memory, u32 count, u32 thread,
                                                u32 threads) {
  if constexpr (reply_lines > 1) {
    for (u32 word = thread; word < count * reply_lines * 7; word += threads) {
      const u32 line = word / 7;
      const u64 value = *reinterpret_cast<const u64*>(
          memory.plain_replies + (line / reply_lines) * reply_area +
          (line % reply_lines) * line_payload_nbytes + (word % 7) * 8);
      *reinterpret_cast<u64*>(memory.replies + line * line_nbytes + 8 + (word % 7) * 8) = value;
    }
  }
}

__device__ __forceinline__ void clear_replies(WorkerMemory& memory, u32 count, u32 thread,
                                              u32 threads) {
  u64* words = reinterpret_cast<u64*>(reply_lines == 1 ? memory.replies : memory.plain_replies);
  const u32 total = count * (reply_lines == 1 ? line_nbytes : reply_area) / 8;
  for (u32 i = thread; i < total; i += threads) words[i] = 0;
}

__device__ __forceinline__ void write_replies(const Ring& output, u64 index, u32 count,
                                              WorkerMemory& memory, u32 thread, u32 threads) {
  for (u32 quarter = thread; quarter < count * reply_lines * 4; quarter += threads) {
    const u32 line = quarter >> 2;
    const u64 message = index + line / reply_lines;
    Part part = *reinterpret_cast<const Part*>(memory.replies + quarter * 16);
    if ((quarter & 3) == 0) {
      part.a = line_word(sequence_of(message, output.shift), memory.status[line / reply_lines]);
    }
    const u64 slot = message & output.mask;
    store_part(output.slots + (slot * reply_lines + line % reply_lines) * line_nbytes +
                   (quarter & 3) * 16,
               part);
  }
}

// Copies message `index` with its status to the dead letters, by one lane; false where there is no
// room. The message is read from its slot again: the handler may have changed its own copy.
__device__ bool write_dead_letter(const KernelRing& launch, u64 index, i32 status) {
  if (launch.dead_letter_ptr == 0) return true;
  const Ring input = ring_at(launch.input_ptr);
  const u8* message = input.slots + (index & input.mask) * message_lines * line_nbytes;
  const Ring letters = ring_at(launch.dead_letter_ptr);
  BlockScratch* first = reinterpret_cast<BlockScratch*>(launch.scratch_ptr);
  u64 claimed = load_u64(&first->dead_tail);
  for (;;) {
    if (claimed - load_u64(&first->dead_head) > letters.mask) return false;
    const u64 seen = atomicCAS(reinterpret_cast<unsigned long long*>(&first->dead_tail), claimed,
                               claimed + 1);
    if (seen == claimed) break;
    claimed = seen;
  }
  const u32 sequence = sequence_of(claimed, letters.shift);
  u8* slot = letters.slots + (claimed & letters.mask) * message_lines * line_nbytes;
  for (u32 line = 0; line < message_lines; ++line) {
    Part parts[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) parts[i] = load_part(message + line * line_nbytes + i * 16);
    u8* at = slot + line * line_nbytes;
    store_u64(at + 8, parts[0].b);
#pragma unroll
    for (u32 i = 1; i < 4; ++i) store_part(at + i * 16, parts[i]);
    __threadfence_system();  // one lane writes a line in five stores: the sequence goes last
    store_u64(at, line_word(sequence, status));
  }
  return true;
}

// For `count` messages from `first` on; `next` is what the worker looks at then.
__device__ void account(const KernelRing& launch, const WorkerMemory& memory, WorkerReport& report,
                        u64 first, u64 next, u32 count, bool failed, u64 seen_ns) {
  const u64 end_ns = now_ns();
  const u64 latency = end_ns - seen_ns;
  for (u32 i = 0; failed && i < count; ++i) {
    if (memory.status[i] == 0) continue;
    report.errors += 1;
    report.last_error = memory.status[i];
    if (!write_dead_letter(launch, first + i, memory.status[i])) report.dropped += 1;
  }
  report.processed += count;
  report.latency_total_ns += latency * count;
  if (latency > report.latency_max_ns) report.latency_max_ns = latency;
  if (latency < report.latency_min_ns) report.latency_min_ns = latency;
  report.last_processed_ns = end_ns;
  __threadfence_block();
  poke(report.progress, next);
}

// When a worker looks again after a reply. A look samples host memory half a trip, 0.5 us, after it
// starts. Who answers a reply at once has its next message there 0.6 us after the reply left, from
// C++, or up to 1 us, from Python; a look that misses it costs a whole trip more. So the first look
// waits, and where messages come late twice in a row, it waits a little more; where they are there,
// ever so little less. Measured, NVIDIA H200, p50 native and from Python: look at once 1.75 to 2.06
// and 2.9 us; 780 cycles after the reply 1.85 and, by the machine, 1.9 or 2.9; 980 1.97 and 1.92;
// 1180 2.07 and 2.0.
constexpr u32 first_look_least = 760;
constexpr u32 first_look_most = 3000;
constexpr u32 first_look_more = 40;
constexpr u32 first_look_less = 1;

// A worker warp and what it waits for.
struct Worker {
  const KernelRing& launch;
  BlockMemory& block;
  WorkerMemory& memory;
  WorkerReport& report;
  const u64& previous;  // progress of the worker whose chunk comes before
  Ring input, output;
  u32 idle = 0;         // looks in vain
  u32 at_once = 0;      // messages in a row that were there at the first look
  u64 looked_ns = 0;    // a moment shortly before the last look ended
  u32 late = 0;         // messages in a row that came soon after the first look
  long long answered_at = 0;  // clock64 of the last reply

  // No other worker of this block has the message before.
  static constexpr bool alone = workers == 1 || ring_blocks > 1 || RINGMEM_MODE == RINGMEM_MODE_BLOCK;

  // Nothing is asked for, and message `index` alone is waited for. One vote, for the usual case.
  __device__ __forceinline__ bool is_calm(u64 index) const {
    const u32 order = peek(block.order);
    const u32 paused = peek(report.paused);
    const u64 drain_target = peek(block.drain_target);
    const u64 tail = peek(block.input_tail);
    const u64 before = peek(previous);
    const u64 head = peek(block.output_head);
    const bool streams = (at_once >= 2) & is_awake(block);
    const bool calm = (order == run) & (paused == 0) & (drain_target == ~0ull) &
                      (tail <= index + 1) & (alone | (before >= index)) &
                      (index - head <= output.mask) & !streams;
    return message_lines <= load_lines && __all_sync(full_mask, calm);
  }

  // Whether to read as much as there may be from `index` on, rather than to wait for one message.
  // The host's index says so, but late; while messages stream in, so does it that none was waited
  // for.
  __device__ __forceinline__ bool is_backlog(u64 index) const {
    if (message_lines > load_lines) return true;  // more than wait() reads
    const bool streams = at_once >= 2 && is_awake(block);
    return __shfl_sync(full_mask, streams || peek(block.input_tail) > index + 1, 0);
  }

  // Polls message `index` alone, one load in flight. Both matter: what a warp polls besides
  // lengthens its round trip (p50 on an NVIDIA H200: one line, one load 1.9 us; two loads in flight
  // 2.9, four 5.1; four loads of eight lines each 6.0). Returns the lines that are ready, all of
  // the message's or 0. 0 means: look at the block's order again.
  __device__ __forceinline__ u32 wait(u64 index) {
    const u32 lane = threadIdx.x & 31;
    const u32 line = lane >> 2;
    const bool mine = line < message_lines;
    const u64 slot = index & input.mask;
    const u8* at = input.slots + (slot * message_lines + line) * line_nbytes + (lane & 3) * 16;
    const u32 expected = sequence_of(index, input.shift);
    const u32 first_look = peek(block.first_look);
    while (clock64() - answered_at < first_look) continue;
    __syncwarp();
    for (u32 looks = 0;; ++looks) {
      Part part;
      if (mine) part = load_part(at);
      if (looks == 0) clear_replies(memory, 1, lane, 32);  // there is time while the load is under way
      looked_ns = now_ns();
      const bool match = !mine || (lane & 3) != 0 || word_sequence(part.a) == expected;
      if (__all_sync(full_mask, match)) {
        if (mine) {
          *reinterpret_cast<Part*>(memory.lines + line * line_nbytes + (lane & 3) * 16) = part;
        }
        __syncwarp();
        idle = 0;
        at_once = looks == 0 ? at_once + 1 : 0;
        learn(looks, first_look);
        return message_lines;
      }
      const bool sound =
          !mine || (lane & 3) != 0 || expected - word_sequence(part.a) <= input.behind;
      if (!__all_sync(full_mask, sound)) {
        poke(block.corrupted, 1u);
        return 0;
      }
      const bool stay = peek(block.order) == run && peek(block.drain_target) == ~0ull &&
                        (alone || peek(previous) >= index || is_awake(block));
      if (!__shfl_sync(full_mask, stay, 0)) {
        at_once = 0;
        return 0;
      }
      rest();
    }
  }

  // A message came after so many looks in vain. Whoever learned last is right.
  __device__ __forceinline__ void learn(u32 looks, u32 first_look) {
    late = looks == 0 || looks > 2 ? 0 : late + 1;
    u32 learned = first_look;
    if (late >= 2) learned = first_look < first_look_most ? first_look + first_look_more : first_look_least;
    if (looks == 0 && first_look > first_look_least) learned = first_look - first_look_less;
    if (learned != first_look) poke(block.first_look, learned);
  }

  // Reads what is there of `wanted` lines from message `index` on; returns the lines that are ready.
  __device__ __forceinline__ u32 read(u64 index, u32 wanted) {
    constexpr u32 loads = (chunk_message_lines + load_lines - 1) / load_lines;
    const u32 ready = read_lines<loads>(input, index, wanted, memory.lines);
    looked_ns = now_ns();
    if (ready == wanted && wanted > message_lines) {
      if ((threadIdx.x & 31) == 0) keep_awake(block);
    } else if (ready < load_lines) {
      at_once = 0;
    }
    if (ready >= message_lines) {
      idle = 0;
    } else {
      at_once = 0;
      if constexpr (message_lines > load_lines) {  // such messages are never waited for in wait()
        if (!is_sound(input, index, memory.lines)) poke(block.corrupted, 1u);
        rest();
      }
    }
    return ready;
  }

  __device__ __forceinline__ u64 seen_ns() const {
    return looked_ns + (now_low_ns() - static_cast<u32>(looked_ns));
  }

  // Waits until the output ring has room for messages up to `last`; false: leave or pause first.
  __device__ __forceinline__ bool wait_for_room(u64 last) const {
    bool room = true;
    while (last - peek(block.output_head) > output.mask) {
      if (peek(block.order) != run) {
        room = false;
        break;
      }
      __nanosleep(100);
    }
    return __all_sync(full_mask, room);
  }

  // After a look in vain: the longer nothing came, the longer the pause.
  __device__ __forceinline__ void rest() {
    ++idle;
    if (idle > idle_looks) __nanosleep(idle > 16 * idle_looks ? 4000 : 500);
  }
};

__device__ void handle_batch(WorkerMemory& memory, u32 count, void* state) {
  const u32 lane = threadIdx.x & 31;
  if constexpr (RINGMEM_MODE == RINGMEM_MODE_LANE) {
    if (lane < count) memory.status[lane] = handle(memory, lane, state, 0, 1);
  } else if constexpr (RINGMEM_MODE == RINGMEM_MODE_ORDER) {
    if (lane == 0) {
      for (u32 i = 0; i < count; ++i) memory.status[i] = handle(memory, i, state, 0, 1);
    }
  } else {
    for (u32 i = 0; i < count; ++i) {
      const i32 status = handle(memory, i, state, lane, 32);
      __syncwarp();
      const u32 failed = __ballot_sync(full_mask, status != 0);
      const i32 shown = __shfl_sync(full_mask, status, failed != 0 ? __ffs(failed) - 1 : 0);
      if (lane == 0) memory.status[i] = shown;
    }
  }
  __syncwarp();
}

// What the host asks for, and whose turn it is. By a worker that is not calm.
enum Turn : u32 { mine, later, never };
__device__ Turn take_turn(Worker& worker, u64 next) {
  const u32 lane = threadIdx.x & 31;
  BlockMemory& block = worker.block;
  const u32 order = __shfl_sync(full_mask, peek(block.order), 0);
  if (order == leave) return never;
  if (order == pause) {
    __threadfence_system();
    if (lane == 0) poke(worker.report.paused, 1u);
    __nanosleep(1000);
    return later;
  }
  if (peek(worker.report.paused) != 0) {
    __threadfence_system();  // the state may have been written meanwhile: drop what L1 holds
    if (lane == 0) poke(worker.report.paused, 0u);
    __syncwarp();
  }
  if (next >= __shfl_sync(full_mask, peek(block.drain_target), 0)) return never;
  const bool frontier = Worker::alone || __shfl_sync(full_mask, peek(worker.previous), 0) >= next;
  if (!frontier && !__shfl_sync(full_mask, is_awake(block), 0)) {
    __nanosleep(200);
    return later;
  }
  return mine;
}

__device__ void worker_loop(const KernelRing& launch, BlockMemory& block, WorkerMemory& memory,
                            u32 worker_of_block, u32 block_of_ring) {
  void* state = reinterpret_cast<void*>(launch.state_ptr);
  const u32 lane = threadIdx.x & 31;
  WorkerReport& report = block.reports[worker_of_block];
  const u64& previous = block.reports[(worker_of_block + workers - 1) % workers].progress;
  const u64 stride = static_cast<u64>(chunk) * workers * ring_blocks;
  Worker worker{launch, block, memory, report, previous, ring_at(launch.input_ptr),
                ring_at(launch.output_ptr)};
  u64 next = peek(report.progress);
  u64 end = (next / chunk + 1) * chunk;  // of the chunk in work

  for (;;) {
    const bool calm = worker.is_calm(next);
    if (!calm) {
      const Turn turn = take_turn(worker, next);
      if (turn == never) break;
      if (turn == later) continue;
    }
    const bool backlog = !calm && worker.is_backlog(next);
    const u32 ready = backlog ? worker.read(next, static_cast<u32>(end - next) * message_lines)
                              : worker.wait(next);
    const u32 count = ready / message_lines;
    if (count == 0) continue;
    const u64 seen_ns = worker.seen_ns();
    if (!calm && !worker.wait_for_room(next + count - 1)) continue;
    gather_messages(memory, count, lane, 32);
    if (backlog) clear_replies(memory, count, lane, 32);
    __syncwarp();
    handle_batch(memory, count, state);
    scatter_replies(memory, count, lane, 32);
    __syncwarp();
    write_replies(worker.output, next, count, memory, lane, 32);
    worker.answered_at = clock64();
    const u64 first = next;
    next += count;
    if (next == end) {
      next += stride - chunk;
      end += stride;
    }
    const bool failed = __any_sync(full_mask, lane < count && memory.status[lane] != 0);
    if (lane == 0) account(launch, memory, report, first, next, count, failed, seen_ns);
    __syncwarp();
  }
  __threadfence_system();
  if (lane == 0) poke(report.ended, 1u);
}

// RINGMEM_MODE_BLOCK: worker 0 reads and writes, all workers handle, one message after another.
__device__ __forceinline__ void worker_barrier() {
  asm volatile("bar.sync 1, %0;" ::"r"(workers * 32) : "memory");
}

__device__ void block_loop(const KernelRing& launch, BlockMemory& block, WorkerMemory& memory,
                           u32 worker_of_block) {
  void* state = reinterpret_cast<void*>(launch.state_ptr);
  const u32 lane = threadIdx.x & 31;
  WorkerReport& report = block.reports[worker_of_block];
  u64 next = peek(block.reports[0].progress);
  Worker worker{launch, block, memory, report, report.progress, ring_at(launch.input_ptr),
                ring_at(launch.output_ptr)};
  constexpr u32 stop = 0xffffffffu;

  for (;;) {
    u64 seen_ns = 0;
    if (worker_of_block == 0) {
      u32 count = 0;
      for (;;) {
        const u32 order = __shfl_sync(full_mask, peek(block.order), 0);
        const u64 drain_target = __shfl_sync(full_mask, peek(block.drain_target), 0);
        if (order == leave || next >= drain_target) {
          count = stop;
          break;
        }
        if (order == pause) {
          __threadfence_system();
          if (lane < workers) poke(block.reports[lane].paused, 1u);
          __nanosleep(1000);
          continue;
        }
        if (peek(report.paused) != 0) {
          __threadfence_system();
          if (lane < workers) poke(block.reports[lane].paused, 0u);
          __syncwarp();
        }
        const u32 wanted = chunk_message_lines - static_cast<u32>(next % chunk) * message_lines;
        const u32 ready = worker.is_backlog(next) ? worker.read(next, wanted) : worker.wait(next);
        count = ready / message_lines;
        if (count == 0) continue;
        seen_ns = worker.seen_ns();
        if (worker.wait_for_room(next + count - 1)) break;
      }
      if (lane == 0) poke(block.block_ready, count);
      __threadfence_block();
    }
    worker_barrier();
    const u32 count = peek(block.block_ready);
    if (count == stop) break;
    __threadfence();  // the state may have been written while paused: drop what L1 holds
    gather_messages(memory, count, threadIdx.x, workers * 32);
    clear_replies(memory, count, threadIdx.x, workers * 32);
    for (u32 i = threadIdx.x; i < count; i += workers * 32) memory.status[i] = 0;
    worker_barrier();
    for (u32 i = 0; i < count; ++i) {
      const i32 status = handle(memory, i, state, threadIdx.x, workers * 32);
      if (status != 0) poke(memory.status[i], status);
      worker_barrier();
    }
    scatter_replies(memory, count, threadIdx.x, workers * 32);
    worker_barrier();
    write_replies(worker.output, next, count, memory, threadIdx.x, workers * 32);
    const u64 first = next;
    next += count;
    if (worker_of_block == 0) {
      if (lane == 0) account(launch, memory, report, first, next, count, true, seen_ns);
    } else if (lane == 0) {
      poke(report.progress, next);
    }
    worker_barrier();
  }
  __threadfence_system();
  if (lane == 0) poke(report.ended, 1u);
}

// ---------------------------------------------------------------------------------------------
// Service.

template <class T>
__device__ __forceinline__ T of_lane_beyond(T value, u32 step) {
  return __shfl_xor_sync(full_mask, value, step);
}

// Sums of the block's workers (lane w holds worker w; at most 31 workers).
__device__ void report_block(BlockMemory& block, BlockScratch* scratch) {
  const u32 lane = threadIdx.x & 31;
  WorkerReport mine = {};
  mine.progress = ~0ull;
  mine.latency_min_ns = ~0ull;
  mine.paused = 1;
  mine.ended = 1;
  if (lane < workers) {
    const WorkerReport& report = block.reports[lane];
    mine.progress = peek(report.progress);
    mine.processed = peek(report.processed);
    mine.dropped = peek(report.dropped);
    mine.errors = peek(report.errors);
    mine.latency_total_ns = peek(report.latency_total_ns);
    mine.latency_max_ns = peek(report.latency_max_ns);
    mine.latency_min_ns = peek(report.latency_min_ns);
    mine.last_processed_ns = peek(report.last_processed_ns);
    mine.last_error = peek(report.last_error);
    mine.paused = peek(report.paused);
    mine.ended = peek(report.ended);
  }
  for (u32 step = 16; step > 0; step >>= 1) {
    const u64 progress = of_lane_beyond(mine.progress, step);
    if (progress < mine.progress) mine.progress = progress;
    mine.processed += of_lane_beyond(mine.processed, step);
    mine.dropped += of_lane_beyond(mine.dropped, step);
    mine.errors += of_lane_beyond(mine.errors, step);
    mine.latency_total_ns += of_lane_beyond(mine.latency_total_ns, step);
    const u64 max = of_lane_beyond(mine.latency_max_ns, step);
    if (max > mine.latency_max_ns) mine.latency_max_ns = max;
    const u64 min = of_lane_beyond(mine.latency_min_ns, step);
    if (min < mine.latency_min_ns) mine.latency_min_ns = min;
    const u64 last = of_lane_beyond(mine.last_processed_ns, step);
    const i32 error = of_lane_beyond(mine.last_error, step);
    if (last > mine.last_processed_ns || mine.last_error == 0) mine.last_error = error != 0 ? error : mine.last_error;
    if (last > mine.last_processed_ns) mine.last_processed_ns = last;
    mine.paused &= of_lane_beyond(mine.paused, step);
    mine.ended &= of_lane_beyond(mine.ended, step);
  }
  if (lane == 0) {
    store_u64(&scratch->processed, mine.processed);
    store_u64(&scratch->dropped, mine.dropped);
    store_u64(&scratch->errors, mine.errors);
    store_u64(&scratch->latency_total_ns, mine.latency_total_ns);
    store_u64(&scratch->latency_max_ns, mine.latency_max_ns);
    store_u64(&scratch->latency_min_ns, mine.latency_min_ns);
    store_u64(&scratch->last_processed_ns, mine.last_processed_ns);
    store_u32(&scratch->last_error, static_cast<u32>(mine.last_error));
    store_u32(&scratch->paused, mine.paused);
    __threadfence();
    store_u64(&scratch->progress, mine.progress);
    store_u32(&scratch->ended, mine.ended);
  }
  __syncwarp();
}

struct Totals {
  u64 progress, processed, dropped, errors, latency_total, latency_max, latency_min, last;
  i32 last_error;
  bool paused, ended;
};

__device__ Totals sum_blocks(const BlockScratch* scratch) {
  Totals totals = {~0ull, 0, 0, 0, 0, 0, ~0ull, 0, 0, true, true};
  for (u32 b = 0; b < ring_blocks; ++b) {
    const BlockScratch& from = scratch[b];
    const u64 progress = load_u64(&from.progress);
    if (progress < totals.progress) totals.progress = progress;
    totals.processed += load_u64(&from.processed);
    totals.dropped += load_u64(&from.dropped);
    totals.errors += load_u64(&from.errors);
    totals.latency_total += load_u64(&from.latency_total_ns);
    const u64 max = load_u64(&from.latency_max_ns);
    if (max > totals.latency_max) totals.latency_max = max;
    const u64 min = load_u64(&from.latency_min_ns);
    if (min < totals.latency_min) totals.latency_min = min;
    const u64 last = load_u64(&from.last_processed_ns);
    const i32 error = static_cast<i32>(load_u32(&from.last_error));
    if (error != 0 && (totals.last_error == 0 || last > totals.last)) totals.last_error = error;
    if (last > totals.last) totals.last = last;
    totals.paused = totals.paused && load_u32(&from.paused) != 0;
    totals.ended = totals.ended && load_u32(&from.ended) != 0;
  }
  return totals;
}

__device__ void continue_counts(const KernelRing& launch, WorkerReport& report) {
  const TelemetryBuffer* telemetry = reinterpret_cast<const TelemetryBuffer*>(launch.telemetry_ptr);
  const u64 processed = load_u64(&telemetry->processed);
  if (processed == 0) return;
  report.processed = processed;
  report.dropped = load_u64(&telemetry->dropped);
  report.latency_total_ns = load_u64(&telemetry->latency_total_ns);
  report.latency_max_ns = load_u64(&telemetry->latency_max_ns);
  report.latency_min_ns = load_u64(&telemetry->latency_min_ns);
  report.last_error = static_cast<i32>(load_u32(&telemetry->last_error));
  report.errors = load_u32(
      &reinterpret_cast<const ControlBlock*>(launch.control_ptr)->error_count);
}

struct Published {
  u64 progress = ~0ull;
  u64 processed = ~0ull;
  u32 paused = 0;
  u64 telemetry_ns = 0;
};

constexpr u64 telemetry_interval_ns = 20'000;

__device__ void write_telemetry(const KernelRing& launch, const Totals& totals, u64 tail) {
  TelemetryBuffer* telemetry = reinterpret_cast<TelemetryBuffer*>(launch.telemetry_ptr);
  const u64 sequence = load_u64(&telemetry->sequence);
  store_u64(&telemetry->sequence, sequence + 1);
  __threadfence_system();
  store_u64(&telemetry->processed, totals.processed);
  store_u64(&telemetry->dropped, totals.dropped);
  store_u64(&telemetry->latency_total_ns, totals.latency_total);
  store_u64(&telemetry->latency_max_ns, totals.latency_max);
  store_u64(&telemetry->latency_min_ns, totals.latency_min);
  const u64 depth = tail > totals.progress ? tail - totals.progress : 0;
  store_u32(&telemetry->queue_depth, static_cast<u32>(depth));
  store_u32(&telemetry->last_error, static_cast<u32>(totals.last_error));
  store_u64(&telemetry->last_processed_ns, totals.last);
  __threadfence_system();
  store_u64(&telemetry->sequence, sequence + 2);
}

// By lane 0 of the first block's service warp.
__device__ void publish(const KernelRing& launch, const Totals& totals, u64 tail, u64 now,
                        bool final, Published& published) {
  ControlBlock* control = reinterpret_cast<ControlBlock*>(launch.control_ptr);
  if (totals.progress != published.progress && totals.progress != ~0ull) {
    // The worker whose chunk is next to fill stands at the first message that was not answered.
    store_u64(&reinterpret_cast<RingHeader*>(launch.input_ptr)->consumer.head, totals.progress);
    published.progress = totals.progress;
  }
  if (final || (totals.processed != published.processed &&
                now - published.telemetry_ns >= telemetry_interval_ns)) {
    store_u64(&control->messages_processed, totals.processed);
    store_u64(&control->last_activity, totals.last);
    store_u32(&control->error_count, static_cast<u32>(totals.errors));
    store_u32(&control->last_error, static_cast<u32>(totals.last_error));
    if (launch.dead_letter_ptr != 0) {
      const BlockScratch* first = reinterpret_cast<const BlockScratch*>(launch.scratch_ptr);
      store_u64(&reinterpret_cast<RingHeader*>(launch.dead_letter_ptr)->producer.tail,
                load_u64(&first->dead_tail));
    }
    if (totals.progress != ~0ull) {
      store_u64(&reinterpret_cast<RingHeader*>(launch.output_ptr)->producer.tail, totals.progress);
    }
    write_telemetry(launch, totals, tail);
    published.processed = totals.processed;
    published.telemetry_ns = now;
  }
  const u32 paused = totals.paused && !final ? 1 : 0;
  if (paused != published.paused) {
    __threadfence_system();
    store_u32(&control->is_paused, paused);
    published.paused = paused;
  }
}

__device__ void service_loop(const KernelRing& launch, BlockMemory& block, u32 block_of_ring) {
  const u32 lane = threadIdx.x & 31;
  const ControlBlock* control = reinterpret_cast<const ControlBlock*>(launch.control_ptr);
  const RingHeader* input = reinterpret_cast<const RingHeader*>(launch.input_ptr);
  const RingHeader* output = reinterpret_cast<const RingHeader*>(launch.output_ptr);
  BlockScratch* scratch = reinterpret_cast<BlockScratch*>(launch.scratch_ptr);
  const u64 start = now_ns();
  u64 beat = 0, beat_ns = start;
  u32 reason = 0;
  bool draining = false;
  Published published;

  for (;;) {
    // The whole control block in one load of the warp; the other indices beside it.
    const u32 word = load_u32(reinterpret_cast<const u32*>(control) + lane);
    const u64 tail = load_u64(&input->producer.tail);
    const u64 output_head = load_u64(&output->consumer.head);
    const auto field = [word](u32 offset) { return __shfl_sync(full_mask, word, offset / 4); };
    const u32 terminate = field(RINGMEM_OFFSETOF(ControlBlock, should_terminate));
    const u32 should_pause = field(RINGMEM_OFFSETOF(ControlBlock, should_pause));
    const u32 drain = field(RINGMEM_OFFSETOF(ControlBlock, should_drain));
    const u32 timeout_ms = field(RINGMEM_OFFSETOF(ControlBlock, heartbeat_timeout_ms));
    const u64 heartbeat = field(RINGMEM_OFFSETOF(ControlBlock, heartbeat)) |
                          static_cast<u64>(field(RINGMEM_OFFSETOF(ControlBlock, heartbeat) + 4))
                              << 32;
    const u64 now = now_ns();
    if (heartbeat != beat) {
      beat = heartbeat;
      beat_ns = now;
    }
    if (lane == 0 && peek(block.corrupted) != 0) store_u32(&scratch[0].corrupted, 1);
    __syncwarp();
    const bool corrupted = __shfl_sync(full_mask, load_u32(&scratch[0].corrupted), 0) != 0;
    const bool orphaned = timeout_ms != 0 && now - beat_ns > timeout_ms * 1'000'000ull;
    const bool expired = launch.deadline_ns != 0 && now - start > launch.deadline_ns;
    if (reason == 0) {
      if (terminate != 0) reason = static_cast<u32>(EndReason::terminated);
      else if (corrupted) reason = static_cast<u32>(EndReason::corrupted);
      else if (orphaned || expired) reason = static_cast<u32>(EndReason::orphaned);
    }
    if (lane == 0) {
      poke(block.input_tail, tail);
      poke(block.output_head, output_head);
      // A tail that was read beside the flag may be older than the flag: only the next look counts.
      if (draining) poke(block.drain_target, tail);
      poke(block.order, static_cast<u32>(reason != 0 ? leave : should_pause != 0 ? pause : run));
    }
    draining = drain != 0;
    __syncwarp();
    report_block(block, &scratch[block_of_ring]);

    bool ended;
    if (block_of_ring == 0) {
      u32 all_ended = 0;
      if (lane == 0) {
        if (launch.dead_letter_ptr != 0) {
          store_u64(&scratch[0].dead_head,
                    load_u64(&reinterpret_cast<const RingHeader*>(launch.dead_letter_ptr)->consumer.head));
        }
        const Totals totals = sum_blocks(scratch);
        all_ended = totals.ended ? 1 : 0;
        publish(launch, totals, tail, now, totals.ended, published);
      }
      ended = __shfl_sync(full_mask, all_ended, 0) != 0;
    } else {
      ended = __shfl_sync(full_mask, load_u32(&scratch[block_of_ring].ended), 0) != 0;
    }
    if (ended) {
      if (reason == 0) reason = static_cast<u32>(EndReason::drained);
      break;
    }
    // Nothing happened for a while: look less often.
    if (now - load_u64(&scratch[0].last_processed_ns) > 10'000'000ull) __nanosleep(20'000);
  }
  if (block_of_ring == 0 && lane == 0) {
    ControlBlock* out = reinterpret_cast<ControlBlock*>(launch.control_ptr);
    store_u32(&out->end_reason, reason);
    store_u32(&out->active, 0);
    __threadfence_system();
    store_u32(&out->has_terminated, 1);
  }
}

}  // namespace ringmem

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
