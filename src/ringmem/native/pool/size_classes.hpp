// Sizes. Small blocks come in classes of eight steps an octave; everything else is counted in
// units of 512 bytes.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace ringmem::pool {

inline constexpr std::size_t unit_bytes = 512;      // smallest step of a large block
inline constexpr std::size_t small_step = 256;      // what every block is aligned to at least
inline constexpr std::size_t small_limit = 32 << 10;  // largest size that has a class
inline constexpr int small_classes = 40;

// The class of `nbytes`, 1 … small_limit. Eight steps an octave waste at most 1/9 of a block above
// 2 KiB; below, the step is the alignment.
constexpr int small_class(std::size_t nbytes) noexcept {
  if (nbytes <= 2048) return static_cast<int>((nbytes + small_step - 1) / small_step) - 1;
  const auto octave = static_cast<int>(std::bit_width(nbytes - 1)) - 1;  // nbytes in (2^octave, 2^(octave + 1)]
  const auto step = static_cast<int>((nbytes - 1 - (std::size_t{1} << octave)) >> (octave - 3));
  return 8 + (octave - 11) * 8 + step;
}

constexpr std::size_t small_class_bytes(int index) noexcept {
  if (index < 8) return (static_cast<std::size_t>(index) + 1) * small_step;
  const int octave = 11 + (index - 8) / 8;
  const auto step = static_cast<std::size_t>((index - 8) % 8);
  return (std::size_t{1} << octave) + (step + 1) * (std::size_t{1} << (octave - 3));
}

static_assert(small_class(1) == 0 && small_class(2048) == 7 && small_class(2049) == 8);
static_assert(small_class(small_limit) == small_classes - 1);
static_assert(small_class_bytes(small_classes - 1) == small_limit);

constexpr std::size_t round_up(std::size_t value, std::size_t step) noexcept {
  return (value + step - 1) / step * step;
}

}  // namespace ringmem::pool
