// What is done with messages, chunk by chunk: reading their lines, calling the handler, writing the
// replies and the dead letters, counting.

namespace ringmem {

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
  __threadfence_system();  // who sees it counted sees it
  return true;
}

// For `count` messages from `first` on; `next` is what the worker looks at then.
__device__ void account(const KernelRing& launch, const WorkerMemory& memory, WorkerReport& report,
                        u64 first, u64 next, u32 count, bool failed, u64 seen_ns) {
  const u64 end_ns = now_ns();
  const u64 latency = end_ns - seen_ns;
  for (u32 i = 0; failed && i < count; ++i) {
    if (memory.status[i] == 0) continue;
    if (!write_dead_letter(launch, first + i, memory.status[i])) report.dropped += 1;
    report.last_error = memory.status[i];
    report.errors += 1;
  }
  report.processed += count;
  report.latency_total_ns += latency * count;
  if (latency > report.latency_max_ns) report.latency_max_ns = latency;
  if (latency < report.latency_min_ns) report.latency_min_ns = latency;
  report.last_processed_ns = end_ns;
  __threadfence_block();
  poke(report.progress, next);
}

}  // namespace ringmem
