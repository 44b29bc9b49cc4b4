// Checked arithmetic on sizes and offsets. Whatever would overflow, or is no whole number of pages
// where pages are due, is an InvalidValue that names the argument, its value and what would do.
#pragma once

#include <bit>
#include <cstddef>
#include <limits>
#include <string>

#include "driver/status.hpp"

namespace ringmem::mapping {

inline constexpr std::size_t mebibyte = std::size_t{1} << 20;
inline constexpr std::size_t gibibyte = std::size_t{1} << 30;

inline std::size_t checked_add(std::size_t a, std::size_t b, const char* argument) {
  std::size_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) {
    throw InvalidValue(std::string(argument) + ": " + std::to_string(a) + " + " +
                       std::to_string(b) + " bytes do not fit into 64 bits; use a smaller size");
  }
  return sum;
}

// The next multiple of `unit` (any positive number, not only a power of two).
inline std::size_t round_up(std::size_t nbytes, std::size_t unit, const char* argument) {
  const std::size_t rest = nbytes % unit;
  return rest == 0 ? nbytes : checked_add(nbytes, unit - rest, argument);
}

inline std::size_t round_down(std::size_t nbytes, std::size_t unit) noexcept {
  return nbytes - nbytes % unit;
}

inline void require_positive(std::size_t nbytes, const char* argument) {
  if (nbytes == 0) {
    throw InvalidValue(std::string(argument) + " is 0: ask for at least 1 byte");
  }
}

inline void require_multiple(std::size_t value, std::size_t unit, const char* argument) {
  if (value % unit != 0) {
    throw InvalidValue(std::string(argument) + " is " + std::to_string(value) +
                       ", no multiple of the page size of " + std::to_string(unit) +
                       " bytes: use " + std::to_string(round_down(value, unit)) + " or " +
                       std::to_string(round_up(value, unit, argument)));
  }
}

// [offset, offset + nbytes) must lie inside [0, limit); returns its end.
inline std::size_t require_inside(std::size_t offset, std::size_t nbytes, std::size_t limit,
                                  const char* argument) {
  const std::size_t end = checked_add(offset, nbytes, argument);
  if (end > limit) {
    throw InvalidValue(std::string(argument) + ": bytes " + std::to_string(offset) + " to " +
                       std::to_string(end) + " reach beyond the " + std::to_string(limit) +
                       " bytes that are reserved");
  }
  return end;
}

}  // namespace ringmem::mapping
