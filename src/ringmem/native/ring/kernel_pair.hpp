// The memory of one ring pair of a ring kernel, as the host steers it: control block, telemetry,
// and the ends of both rings that belong to the kernel.
#pragma once

#include "ring/geometry.hpp"
#include "ring/words.hpp"

namespace ringmem::ring {

struct KernelPair {
  layout::ControlBlock* control = nullptr;
  layout::TelemetryBuffer* telemetry = nullptr;
  layout::RingHeader* input = nullptr;        // host -> kernel
  layout::RingHeader* output = nullptr;       // kernel -> host
  layout::RingHeader* dead_letter = nullptr;  // null: none
};

// Makes the kernel's ends count as attached, and clears what an earlier run left in the control
// and telemetry blocks. Before every launch.
inline void reset(const KernelPair& pair, u32 heartbeat_timeout_ms) noexcept {
  layout::ControlBlock& control = *pair.control;
  for (u32* flag : {&control.active, &control.should_terminate, &control.has_terminated,
                    &control.error_count, &control.should_pause, &control.is_paused,
                    &control.should_drain, &control.end_reason}) {
    store(*flag, u32{0});
  }
  store(control.messages_processed, u64{0});
  store(control.last_activity, u64{0});
  store(control.last_error, i32{0});
  store(control.heartbeat, load(control.heartbeat) + 1);
  store(control.heartbeat_timeout_ms, heartbeat_timeout_ms);
  layout::TelemetryBuffer& telemetry = *pair.telemetry;
  store(telemetry.sequence, u64{1});
  for (u64* word : {&telemetry.processed, &telemetry.dropped, &telemetry.latency_total_ns,
                    &telemetry.latency_max_ns, &telemetry.last_processed_ns}) {
    store(*word, u64{0});
  }
  store(telemetry.latency_min_ns, ~u64{0});
  store(telemetry.queue_depth, u32{0});
  store(telemetry.last_error, i32{0});
  store(telemetry.sequence, u64{2});
  for (u32* session : {&pair.output->producer.session, &pair.input->consumer.session}) {
    store(*session, layout::next_session(load(*session)));
  }
}

// After the end: who waits at the host's ends sees that nothing more comes. The kernel has stored
// its last reply before has_terminated, so nobody gives up on a reply that is there.
inline void close_kernel_ends(const KernelPair& pair) noexcept {
  for (u32* session : {&pair.output->producer.session, &pair.input->consumer.session}) {
    const u32 seen = load(*session);
    if ((seen & 1u) != 0) store(*session, seen + 1);
  }
}

}  // namespace ringmem::ring
