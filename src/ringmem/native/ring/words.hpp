// The only way endpoints touch memory that the other side may be writing: single aligned loads
// (acquire) and stores (release). No read-modify-write, because across a PCIe link none is atomic.
#pragma once

#include "layout/layout.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ringmem::ring {

using layout::i32;
using layout::Line;
using layout::u32;
using layout::u64;

template <class Value>
inline Value load(const Value& word) noexcept {
  return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
}

template <class Value>
inline void store(Value& word, Value value) noexcept {
  __atomic_store_n(&word, value, __ATOMIC_RELEASE);
}

// Sequence and status of a line travel as one 64-bit word.
using LineWord [[gnu::may_alias]] = u64;

inline u64 load_word(const Line& line) noexcept {
  return __atomic_load_n(reinterpret_cast<const LineWord*>(&line), __ATOMIC_ACQUIRE);
}

// Everything written to the line before is visible to whoever sees this word.
inline void store_word(Line& line, u64 word) noexcept {
  __atomic_store_n(reinterpret_cast<LineWord*>(&line), word, __ATOMIC_RELEASE);
}

inline void pause() noexcept {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

}  // namespace ringmem::ring
