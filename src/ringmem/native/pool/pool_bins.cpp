// The policies that keep freed blocks by size, each stream its own, and never cut or join them:
// a request is a hit if its bin has a block, and a miss otherwise.
#include <bit>

#include "pool/pool.hpp"

namespace ringmem {

using namespace pool;

std::uint32_t Pool::units_for(std::size_t nbytes) const noexcept {
  if (options_.policy == PoolPolicy::power_of_two) nbytes = std::bit_ceil(nbytes);
  return static_cast<std::uint32_t>((nbytes + unit_bytes - 1) / unit_bytes);
}

// A block from the stream's own bin: the stream itself freed it, so nothing has to be waited for.
Node* Pool::take_binned(std::uint32_t units, Shard& shard) noexcept {
  const BiasedGuard guard(shard.lock);
  const auto bin = shard.bins.find(units);
  if (bin == shard.bins.end() || bin->second.empty()) return nullptr;
  Node* node = bin->second.back();
  bin->second.pop_back();
  node->become(NodeState::live);
  ++shard.binned;
  return node;
}

}  // namespace ringmem
