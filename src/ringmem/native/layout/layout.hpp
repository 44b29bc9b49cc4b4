// Every layout that two sides read, written once: the control block, the telemetry block and the
// ring. The host core includes this file, NVRTC compiles it into device code, and the NumPy dtypes
// are generated from the tables at its end. Size, alignment and every offset are asserted by
// whoever compiles it. It includes nothing under NVRTC.
#pragma once

#ifdef __CUDACC_RTC__
namespace ringmem::layout {
using u8 = unsigned char;
using u32 = unsigned int;
using i32 = int;
using u64 = unsigned long long;
}  // namespace ringmem::layout
#else
#include <cstdint>
namespace ringmem::layout {
using u8 = std::uint8_t;
using u32 = std::uint32_t;
using i32 = std::int32_t;
using u64 = std::uint64_t;
}  // namespace ringmem::layout
#endif

// NVRTC 13.0 knows neither __builtin_offsetof nor <cstddef>; this is its front end's own spelling.
#ifdef __CUDACC_RTC__
#define RINGMEM_OFFSETOF(structure, field) __INTADDR__(&(((structure*)0)->field))
#else
#define RINGMEM_OFFSETOF(structure, field) __builtin_offsetof(structure, field)
#endif

#ifdef __CUDACC__
#define RINGMEM_LAYOUT_FUNCTION __host__ __device__ constexpr
#else
#define RINGMEM_LAYOUT_FUNCTION constexpr
#endif

namespace ringmem::layout {

// Two neighbours of 64 bytes: x86 fetches lines in pairs, a GPU's L2 line is 128 bytes. What one
// side writes and the other reads never shares such a pair with what is written by the other.
inline constexpr u64 cache_line_aligned_nbytes = 128;

// --- control block -------------------------------------------------------------------------------
// How the host steers a ring kernel and sees where it stands. Every field has one writer, named
// behind it; both use plain aligned loads and stores of that one field.
struct alignas(128) ControlBlock {
  u32 active;            // kernel: the loop is running (0 before launch and after the end)
  u32 should_terminate;  // host: leave the loop now
  u32 has_terminated;    // kernel: the loop was left; its last store
  u32 error_count;       // kernel: messages whose handler returned a status other than 0
  u64 messages_processed;  // kernel
  u64 last_activity;       // kernel: ns of its own clock when it last handled a message
  u64 input_head_ptr;      // host, before launch, like all queue fields; addresses as the
  u64 input_tail_ptr;      //   kernel sees them
  u64 input_buffer_ptr;
  u32 input_capacity;        // slots
  u32 input_message_nbytes;
  u64 output_head_ptr;
  u64 output_tail_ptr;
  u64 output_buffer_ptr;
  u32 output_capacity;  // slots
  u32 output_message_nbytes;
  u64 heartbeat;             // host: changes as long as the host lives
  u32 should_pause;          // host: 1 asks for a pause, 0 for going on
  u32 is_paused;             // kernel: 1 while it handles nothing
  i32 last_error;            // kernel: the last status of a handler that was not 0
  u32 should_drain;          // host: finish what is in the input ring, then leave the loop
  u32 heartbeat_timeout_ms;  // host, before launch: the loop ends if `heartbeat` stands still for
                             //   so long; 0: never
  u32 end_reason;            // kernel, before has_terminated: an EndReason
};

enum class EndReason : u32 {
  none = 0,
  terminated = 1,     // should_terminate was seen
  drained = 2,        // should_drain was seen and the input ring was empty
  orphaned = 3,       // the heartbeat stood still
  corrupted = 4,      // a ring held what no correct peer writes
  faulted = 5,        // the handler itself failed (CPU only: a GPU fault ends the context)
};

// --- telemetry block -----------------------------------------------------------------------------
// Written by the kernel alone, read by anybody. `sequence` is odd while the rest is being written:
// who reads the same even value before and after has read one moment.
struct alignas(64) TelemetryBuffer {
  u64 processed;         // messages
  u64 dropped;           // replies and dead letters that found no room
  u64 latency_total_ns;  // sum over messages, from seen to answered
  u64 latency_max_ns;
  u64 latency_min_ns;  // all ones before the first message
  u32 queue_depth;     // messages waiting when the kernel last looked
  i32 last_error;      // the last status of a handler that was not 0
  u64 last_processed_ns;  // the kernel's clock at the last message
  u64 sequence;
};

// --- ring ----------------------------------------------------------------------------------------
// Header, then `capacity` slots of `slot_lines` lines. Message i (counted from 0) is in slot
// i mod capacity. The memory starts as zeros and no slot is ever cleared.
//
// A line is ready when its sequence is that of the message expected there, and one less before
// that: any other value was written by nobody who keeps the protocol. So two laps must differ and
// nothing more is asked of the counter, which may overflow.
inline constexpr u32 line_nbytes = 64;
inline constexpr u32 line_payload_nbytes = 56;
inline constexpr u64 ring_magic = 0x31676e6972676d72;  // "rmgring1", little endian

struct alignas(64) Line {
  u32 sequence;  // lap of the message + 1, modulo 2^32
  i32 status;    // of a reply or dead letter: what the handler returned; else 0. In the same
                 //   64-bit word as the sequence, and stored with it
  u8 payload[line_payload_nbytes];
};

// Written once by whoever creates the ring; endpoints check it and keep a copy.
struct alignas(64) RingDescriptor {
  u64 magic;
  u64 capacity;  // slots, a power of two
  u32 slot_lines;
  u32 message_nbytes;
  u8 reserved[40];
};

struct alignas(64) ProducerIndex {
  u64 tail;     // messages committed
  u64 dropped;  // messages given up because the ring was full
  u32 session;  // see next_session
  u32 pid;      // process of the producer; 0: none, or a device
  u32 pid_namespace;  // in which `pid` is counted
  u32 reserved_1;
  u64 started;  // when that process did, in clock ticks since the system's start; 0: not known
  u8 reserved[24];
};

struct alignas(64) ConsumerIndex {
  u64 head;     // messages released
  u32 session;  // see next_session
  u32 pid;      // process of the consumer; 0: none, or a device
  u32 pid_namespace;  // in which `pid` is counted
  u32 reserved_1;
  u64 started;  // when that process did, in clock ticks since the system's start; 0: not known
  u8 reserved[32];
};

struct alignas(128) RingHeader {
  alignas(128) RingDescriptor descriptor;
  alignas(128) ProducerIndex producer;  // the producer's line
  alignas(128) ConsumerIndex consumer;  // the consumer's line
};

// Lap counter of message `index` in a ring of 2^shift slots. `mask` keeps the counter's bits: 32,
// or what an index of fewer bits (in tests) leaves of them.
RINGMEM_LAYOUT_FUNCTION u32 sequence_of(u64 index, u32 shift, u32 mask = 0xffffffffu) {
  return static_cast<u32>((index >> shift) + 1) & mask;
}

// Sessions of one end are counted so that the peer can tell "closed" from "not there yet": 0 before
// the first, odd while an end is attached, even after it closed. One that was killed leaves it odd.
RINGMEM_LAYOUT_FUNCTION u32 next_session(u32 session) { return (session | 1u) + (session & 1u) * 2; }
RINGMEM_LAYOUT_FUNCTION bool is_closed(u32 session) { return session != 0 && (session & 1u) == 0; }

// Sequence and status as the one word in which they are stored.
RINGMEM_LAYOUT_FUNCTION u64 line_word(u32 sequence, i32 status) {
  return static_cast<u64>(sequence) | (static_cast<u64>(static_cast<u32>(status)) << 32);
}
RINGMEM_LAYOUT_FUNCTION u32 word_sequence(u64 word) { return static_cast<u32>(word); }
RINGMEM_LAYOUT_FUNCTION i32 word_status(u64 word) {
  return static_cast<i32>(static_cast<u32>(word >> 32));
}

// Lines that a message of `nbytes` takes.
RINGMEM_LAYOUT_FUNCTION u32 lines_for(u32 nbytes) {
  return nbytes == 0 ? 1 : (nbytes + line_payload_nbytes - 1) / line_payload_nbytes;
}

}  // namespace ringmem::layout

// --- tables: X(structure, field, offset) ---------------------------------------------------------
#define RINGMEM_CONTROL_BLOCK_FIELDS(X)       \
  X(ControlBlock, active, 0)                  \
  X(ControlBlock, should_terminate, 4)        \
  X(ControlBlock, has_terminated, 8)          \
  X(ControlBlock, error_count, 12)            \
  X(ControlBlock, messages_processed, 16)     \
  X(ControlBlock, last_activity, 24)          \
  X(ControlBlock, input_head_ptr, 32)         \
  X(ControlBlock, input_tail_ptr, 40)         \
  X(ControlBlock, input_buffer_ptr, 48)       \
  X(ControlBlock, input_capacity, 56)         \
  X(ControlBlock, input_message_nbytes, 60)   \
  X(ControlBlock, output_head_ptr, 64)        \
  X(ControlBlock, output_tail_ptr, 72)        \
  X(ControlBlock, output_buffer_ptr, 80)      \
  X(ControlBlock, output_capacity, 88)        \
  X(ControlBlock, output_message_nbytes, 92)  \
  X(ControlBlock, heartbeat, 96)              \
  X(ControlBlock, should_pause, 104)          \
  X(ControlBlock, is_paused, 108)             \
  X(ControlBlock, last_error, 112)            \
  X(ControlBlock, should_drain, 116)          \
  X(ControlBlock, heartbeat_timeout_ms, 120)  \
  X(ControlBlock, end_reason, 124)

#define RINGMEM_TELEMETRY_BUFFER_FIELDS(X)    \
  X(TelemetryBuffer, processed, 0)            \
  X(TelemetryBuffer, dropped, 8)              \
  X(TelemetryBuffer, latency_total_ns, 16)    \
  X(TelemetryBuffer, latency_max_ns, 24)      \
  X(TelemetryBuffer, latency_min_ns, 32)      \
  X(TelemetryBuffer, queue_depth, 40)         \
  X(TelemetryBuffer, last_error, 44)          \
  X(TelemetryBuffer, last_processed_ns, 48)   \
  X(TelemetryBuffer, sequence, 56)

#define RINGMEM_RING_DESCRIPTOR_FIELDS(X)     \
  X(RingDescriptor, magic, 0)                 \
  X(RingDescriptor, capacity, 8)              \
  X(RingDescriptor, slot_lines, 16)           \
  X(RingDescriptor, message_nbytes, 20)

#define RINGMEM_PRODUCER_INDEX_FIELDS(X)      \
  X(ProducerIndex, tail, 0)                   \
  X(ProducerIndex, dropped, 8)                \
  X(ProducerIndex, session, 16)               \
  X(ProducerIndex, pid, 20)                   \
  X(ProducerIndex, pid_namespace, 24)         \
  X(ProducerIndex, started, 32)

#define RINGMEM_CONSUMER_INDEX_FIELDS(X)      \
  X(ConsumerIndex, head, 0)                   \
  X(ConsumerIndex, session, 8)                \
  X(ConsumerIndex, pid, 12)                   \
  X(ConsumerIndex, pid_namespace, 16)         \
  X(ConsumerIndex, started, 24)

#define RINGMEM_LINE_FIELDS(X)                \
  X(Line, sequence, 0)                        \
  X(Line, status, 4)                          \
  X(Line, payload, 8)

namespace ringmem::layout {

#define RINGMEM_LAYOUT_ASSERT_OFFSET(structure, field, offset)    \
  static_assert(RINGMEM_OFFSETOF(structure, field) == (offset),   \
                #structure "." #field " is not at offset " #offset);
RINGMEM_CONTROL_BLOCK_FIELDS(RINGMEM_LAYOUT_ASSERT_OFFSET)
RINGMEM_TELEMETRY_BUFFER_FIELDS(RINGMEM_LAYOUT_ASSERT_OFFSET)
RINGMEM_RING_DESCRIPTOR_FIELDS(RINGMEM_LAYOUT_ASSERT_OFFSET)
RINGMEM_PRODUCER_INDEX_FIELDS(RINGMEM_LAYOUT_ASSERT_OFFSET)
RINGMEM_CONSUMER_INDEX_FIELDS(RINGMEM_LAYOUT_ASSERT_OFFSET)
RINGMEM_LINE_FIELDS(RINGMEM_LAYOUT_ASSERT_OFFSET)
#undef RINGMEM_LAYOUT_ASSERT_OFFSET

static_assert(sizeof(ControlBlock) == 128 && alignof(ControlBlock) == 128);
static_assert(sizeof(TelemetryBuffer) == 64 && alignof(TelemetryBuffer) == 64);
static_assert(sizeof(Line) == line_nbytes && alignof(Line) == line_nbytes);
static_assert(sizeof(Line::payload) == line_payload_nbytes);
static_assert(sizeof(RingDescriptor) == 64 && sizeof(ProducerIndex) == 64);
static_assert(sizeof(ConsumerIndex) == 64);
static_assert(sizeof(RingHeader) == 384 && alignof(RingHeader) == 128);
static_assert(RINGMEM_OFFSETOF(RingHeader, producer) == 128);
static_assert(RINGMEM_OFFSETOF(RingHeader, consumer) == 256);

}  // namespace ringmem::layout
