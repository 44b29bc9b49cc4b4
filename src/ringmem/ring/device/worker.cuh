// A worker: what it waits for, when it looks, and the loops in which it takes its turns.

namespace ringmem {

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

}  // namespace ringmem
