// Replays a recorded trace of allocations against an allocator and measures it: time an operation,
// memory held at its peak, driver calls a repetition.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "driver/types.hpp"
#include "memory/allocator.hpp"

namespace ringmem {

enum class TraceKind : std::uint8_t { allocate = 1, free_requested = 2, free_completed = 3 };

// One event of a trace, as tests/native/export_trace.py writes it.
struct TraceEvent {
  TraceKind kind;
  std::uint8_t stream;
  std::uint16_t unused;
  std::uint32_t id;
  std::uint64_t size;  // bytes requested, at `allocate`; else 0
};
static_assert(sizeof(TraceEvent) == 16);

struct ReplayOptions {
  // The streams to spread allocations over, by their number in the trace, or by id where the trace
  // knows only one stream and there are more here. At least one.
  std::vector<StreamHandle> streams{default_stream};
  int repetitions = 1;  // what still lives at the end is freed before the next one
  int threads = 1;      // each takes every n-th allocation and uses every n-th stream
  // Called before every event: moves a clock on, or counts progress.
  std::function<void(std::uint64_t event)> tick;
  // Bytes that the allocator holds from the driver now; and driver calls made so far.
  std::function<std::size_t()> reserved;
  std::function<std::uint64_t()> driver_calls;
};

struct ReplayRepetition {
  std::uint64_t operations = 0;  // allocations and frees
  std::uint64_t driver_calls = 0;
  double seconds = 0;  // in the allocator
  double mean_ns = 0;  // an operation, net of the clock
  double p50_ns = 0;
  double p99_ns = 0;
  double max_ns = 0;
};

struct ReplayResult {
  std::uint64_t events = 0;  // of the trace, once
  std::size_t peak_live = 0;
  std::size_t peak_reserved = 0;
  bool completed = true;
  std::uint64_t failed_event = 0;  // where memory ran out
  std::string error;
  std::vector<ReplayRepetition> repetitions;
};

// Peak of the bytes requested and not yet freed, of the trace itself.
std::size_t peak_live_of(std::span<const TraceEvent> trace);

// Runs the trace. Memory that runs out ends it and is told in the result; other errors are thrown.
ReplayResult replay(Allocator& allocator, std::span<const TraceEvent> trace,
                    const ReplayOptions& options);

}  // namespace ringmem
