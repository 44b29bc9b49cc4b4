// How growth is cut into handles. Pure: the decision is made here and tested with no driver.
//
// Cost is per handle, not per byte (8 GiB: 210 ms in handles of 2 MiB, 9 in 32, 1.5 in 256; H200),
// but memory can only be given back in whole handles. So handles grow with the buffer: up to a
// quarter of what lies before them, at least 32 MiB where so much is asked for. 16 GiB in one step
// are 36 handles, and a shrink keeps at most a quarter more than it must.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <vector>

#include "mapping/arithmetic.hpp"

namespace ringmem::mapping {

inline constexpr std::size_t smallest_large_handle = 32 * mebibyte;
inline constexpr std::size_t default_max_handle = gibibyte;

// The largest handle that may start at `offset`; a multiple of `page`.
inline std::size_t handle_cap(std::size_t offset, std::size_t page, std::size_t max_handle) {
  const std::size_t quarter = std::bit_floor(offset / 4);
  const std::size_t cap = std::min(std::max(quarter, smallest_large_handle), max_handle);
  return std::max(round_down(cap, page), page);
}

// Sizes of the handles for the bytes [offset, offset + nbytes), in order. All are whole pages.
inline std::vector<std::size_t> plan_handles(std::size_t offset, std::size_t nbytes,
                                             std::size_t page, std::size_t max_handle) {
  std::vector<std::size_t> sizes;
  while (nbytes > 0) {
    const std::size_t size = std::min(nbytes, handle_cap(offset, page, max_handle));
    sizes.push_back(size);
    offset += size;
    nbytes -= size;
  }
  return sizes;
}

}  // namespace ringmem::mapping
