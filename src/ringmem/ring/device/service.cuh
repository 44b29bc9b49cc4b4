// The service warp: the host's wishes in, the kernel's state out.

namespace ringmem {

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
    if (launch.dead_letter_ptr != 0) {
      const BlockScratch* first = reinterpret_cast<const BlockScratch*>(launch.scratch_ptr);
      store_u64(&reinterpret_cast<RingHeader*>(launch.dead_letter_ptr)->producer.tail,
                load_u64(&first->dead_tail));
    }
    if (totals.progress != ~0ull) {
      store_u64(&reinterpret_cast<RingHeader*>(launch.output_ptr)->producer.tail, totals.progress);
    }
    write_telemetry(launch, totals, tail);  // with fences: the letters are there before their count
    store_u32(&control->error_count, static_cast<u32>(totals.errors));
    store_u32(&control->last_error, static_cast<u32>(totals.last_error));
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
