// What a pool is asked to be. All values; none changes after the pool is made unless a setter of
// the pool says so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "driver/types.hpp"

namespace ringmem {

inline constexpr std::size_t unlimited = std::numeric_limits<std::size_t>::max();

struct PoolOptions {
  std::size_t limit = unlimited;              // bytes that may be reserved
  std::size_t release_threshold = unlimited;  // bytes that may stay cached after a free
  // Moves free pages before it creates new ones, always: the least memory, at the price of mapping
  // calls. Without it pages move only when the limit or the device is reached.
  bool tight = false;
  bool shareable = false;  // handles can be exported
  bool rdma = false;
  std::vector<AccessGrant> peers;  // who may use the memory besides its device
};

}  // namespace ringmem
