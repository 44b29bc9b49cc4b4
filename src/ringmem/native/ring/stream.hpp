// Writing whole lines past the caches. A line that the reader had before is taken from its cache by
// an ordinary store, at 30 to 150 ns each where cores are far apart; a streamed one goes to memory
// at 3 to 8 ns, and the reader's prefetcher finds it there (2 cores of an AMD EPYC in a virtual
// machine: echo 7 -> 60 M messages/s).
//
// Streamed stores have no order and may tear. So a run of slots is streamed but for its first slot,
// then fenced, then the first is written by ordinary stores: a reader that takes messages in order
// looks at no other slot of the run before that one is ready. Readers that do not (the workers of a
// GPU kernel) must not be streamed to. A writer that dies on the way leaves slots that look ready
// behind one that is not: the next writer retracts them (EndpointBase::retract).
#pragma once

#include "ring/copy.hpp"

// ThreadSanitizer does not see the intrinsics: it checks the order by ordinary stores.
#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__)
#include <emmintrin.h>
#define RINGMEM_STREAM 1
#endif

namespace ringmem::ring {

inline constexpr u64 streamed_lines = 64;       // at most in one run
inline constexpr u64 least_streamed_slots = 8;  // shorter runs are written as usual

// Slots in a run of `slot_lines` lines each; fewer than least_streamed_slots: do not stream.
inline u64 slots_in_run(u32 slot_lines) noexcept { return streamed_lines / slot_lines; }

inline void stream_line(Line* to, const Line& from) noexcept {
#ifdef RINGMEM_STREAM
  const auto* parts = reinterpret_cast<const __m128i*>(&from);
  auto* target = reinterpret_cast<__m128i*>(to);
  for (int i = 0; i < 4; ++i) _mm_stream_si128(target + i, _mm_load_si128(parts + i));
#else
  std::memcpy(to->payload, from.payload, line_payload_nbytes);
  store_word(*to, load_word(from));
#endif
}

// Streams one message into its slot.
inline void stream_record(Line* slot, const std::byte* record, std::size_t nbytes,
                          u64 word) noexcept {
  for (;; ++slot) {
    const std::size_t part = nbytes < line_payload_nbytes ? nbytes : line_payload_nbytes;
#ifdef RINGMEM_STREAM
    if (part == line_payload_nbytes) {
      const auto load_part = [record](std::size_t at) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(record + at));
      };
      u64 first;
      std::memcpy(&first, record, sizeof first);
      auto* target = reinterpret_cast<__m128i*>(slot);
      _mm_stream_si128(target, _mm_set_epi64x(static_cast<long long>(first),
                                              static_cast<long long>(word)));
      _mm_stream_si128(target + 1, load_part(8));
      _mm_stream_si128(target + 2, load_part(24));
      _mm_stream_si128(target + 3, load_part(40));
    } else
#endif
    {
      Line line;
      std::memcpy(&line, &word, sizeof word);
      copy_payload(line.payload, record, part);
      stream_line(slot, line);
    }
    if (nbytes <= line_payload_nbytes) return;
    record += part;
    nbytes -= part;
  }
}

// What was streamed before is visible before anything stored after.
inline void stream_fence() noexcept {
#ifdef RINGMEM_STREAM
  _mm_sfence();
#endif
}

}  // namespace ringmem::ring
