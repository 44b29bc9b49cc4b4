// What a host gives a persistent ring kernel at launch, beside the layouts of layout.hpp.
#pragma once

#ifndef __CUDACC_RTC__
#include "layout/layout.hpp"
#endif

namespace ringmem::layout {

// One ring pair of a launch. Addresses as the kernel sees them.
struct alignas(64) KernelRing {
  u64 control_ptr;      // ControlBlock, in host memory
  u64 telemetry_ptr;    // TelemetryBuffer, in host memory
  u64 input_ptr;        // RingHeader of the ring host -> kernel
  u64 output_ptr;       // RingHeader of the ring kernel -> host
  u64 dead_letter_ptr;  // RingHeader of the messages whose handler returned a status; 0: none
  u64 state_ptr;        // device memory; 0: the handler has no state
  u64 deadline_ns;      // the kernel ends itself so long after its start, whatever happens; 0: never
  u64 scratch_ptr;      // `blocks` BlockScratch in device memory: zeros, but for `progress`,
                        //   `latency_min_ns`, `dead_tail` and `dead_head` where the rings stand
};

// What one block of a ring tells the first block of that ring.
struct alignas(128) BlockScratch {
  u64 progress;  // every message below it that is this block's was answered
  u64 processed;
  u64 dropped;
  u64 latency_total_ns;
  u64 latency_max_ns;
  u64 latency_min_ns;
  u64 last_processed_ns;
  u64 errors;
  u64 dead_tail;  // of the first block only: dead letters claimed by all blocks
  u64 dead_head;  // of the first block only: dead letters the host has taken
  i32 last_error;
  u32 paused;
  u32 ended;
  u32 corrupted;  // of the first block only: some block met a line that nobody may have written
  u32 reserved[6];
};

static_assert(sizeof(KernelRing) == 64 && sizeof(BlockScratch) == 128);

}  // namespace ringmem::layout
