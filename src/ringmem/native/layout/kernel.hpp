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

}  // namespace ringmem::layout

// --- tables: X(structure, field, offset) ---------------------------------------------------------
#define RINGMEM_KERNEL_RING_FIELDS(X) \
  X(KernelRing, control_ptr, 0)       \
  X(KernelRing, telemetry_ptr, 8)     \
  X(KernelRing, input_ptr, 16)        \
  X(KernelRing, output_ptr, 24)       \
  X(KernelRing, dead_letter_ptr, 32)  \
  X(KernelRing, state_ptr, 40)        \
  X(KernelRing, deadline_ns, 48)      \
  X(KernelRing, scratch_ptr, 56)

#define RINGMEM_BLOCK_SCRATCH_FIELDS(X)   \
  X(BlockScratch, progress, 0)            \
  X(BlockScratch, processed, 8)           \
  X(BlockScratch, dropped, 16)            \
  X(BlockScratch, latency_total_ns, 24)   \
  X(BlockScratch, latency_max_ns, 32)     \
  X(BlockScratch, latency_min_ns, 40)     \
  X(BlockScratch, last_processed_ns, 48)  \
  X(BlockScratch, errors, 56)             \
  X(BlockScratch, dead_tail, 64)          \
  X(BlockScratch, dead_head, 72)          \
  X(BlockScratch, last_error, 80)         \
  X(BlockScratch, paused, 84)             \
  X(BlockScratch, ended, 88)              \
  X(BlockScratch, corrupted, 92)

namespace ringmem::layout {

#define RINGMEM_LAYOUT_ASSERT_OFFSET(structure, field, offset)  \
  static_assert(RINGMEM_OFFSETOF(structure, field) == (offset), \
                #structure "." #field " is not at offset " #offset);
RINGMEM_KERNEL_RING_FIELDS(RINGMEM_LAYOUT_ASSERT_OFFSET)
RINGMEM_BLOCK_SCRATCH_FIELDS(RINGMEM_LAYOUT_ASSERT_OFFSET)
#undef RINGMEM_LAYOUT_ASSERT_OFFSET

static_assert(sizeof(KernelRing) == 64 && sizeof(BlockScratch) == 128);

}  // namespace ringmem::layout
