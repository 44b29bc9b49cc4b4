// What a pool is asked to be. All values; what can change later has a setter in the pool.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "driver/types.hpp"

namespace ringmem {

inline constexpr std::size_t unlimited = std::numeric_limits<std::size_t>::max();

// How sizes are rounded and which freed block serves a request.
enum class PoolPolicy : std::uint8_t {
  // Size classes with at most 12.5 % waste up to 32 KiB, steps of 512 bytes and best fit above.
  best_fit,
  // Sizes are rounded up to powers of two, and a block serves only requests of its own bucket.
  power_of_two,
  // Sizes are rounded up to 512 bytes, and a block serves only requests of exactly its size.
  exact,
};

struct PoolOptions {
  std::size_t limit = unlimited;              // bytes that may be reserved
  std::size_t release_threshold = unlimited;  // bytes that may stay cached after a free
  // Moves free pages before it creates new ones, always: the least memory, at the price of mapping
  // calls. Without it pages move only when the limit or the device is reached.
  bool tight = false;
  PoolPolicy policy = PoolPolicy::best_fit;
  bool debug = false;  // poison, red zones, an order check: Pool::front() is a DebugAllocator
  bool shareable = false;  // handles can be exported
  bool rdma = false;       // handles can be used for GPUDirect RDMA
  std::vector<AccessGrant> peers;  // who may use the memory besides its device
};

}  // namespace ringmem
