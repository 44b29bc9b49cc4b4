// What a driver has handed out and not got back, by kind: how FaultyDriver proves that nothing is
// lost. Keys are handles or addresses; a physical handle counts once for each reference.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace ringmem {

enum class LiveKind : std::uint8_t {
  device_memory,
  pinned,
  registered,
  managed,
  async_block,
  pool,
  address_range,
  physical,
  mapping,
  stream,
  event,
  peer_link,
};

inline constexpr const char* live_kind_names[] = {
    "device_memory", "pinned",   "registered", "managed", "async_block", "pool",
    "address_range", "physical", "mapping",    "stream",  "event",       "peer_link",
};
inline constexpr std::size_t live_kind_count = sizeof(live_kind_names) / sizeof(*live_kind_names);

class LiveObjects {
 public:
  using Taken = std::vector<std::pair<LiveKind, std::uint64_t>>;

  void add(LiveKind kind, std::uint64_t key) {
    std::lock_guard lock(mutex_);
    ++references_[index(kind)][key];
  }

  // Takes one reference of every key of these kinds in [first, first + length). Taken before the
  // releasing call, since another thread may be given the same key right after it; put back if
  // the call fails.
  Taken take(std::initializer_list<LiveKind> kinds, std::uint64_t first, std::uint64_t length = 1) {
    Taken taken;
    std::lock_guard lock(mutex_);
    for (LiveKind kind : kinds) {
      auto& keys = references_[index(kind)];
      auto at = keys.lower_bound(first);
      while (at != keys.end() && at->first - first < length) {
        taken.emplace_back(kind, at->first);
        at = --at->second == 0 ? keys.erase(at) : std::next(at);
      }
    }
    return taken;
  }

  void put_back(const Taken& taken) {
    for (const auto& [kind, key] : taken) add(kind, key);
  }

  std::array<std::size_t, live_kind_count> counts() const {
    std::array<std::size_t, live_kind_count> result{};
    std::lock_guard lock(mutex_);
    for (std::size_t kind = 0; kind < live_kind_count; ++kind) {
      for (const auto& [key, references] : references_[kind]) result[kind] += references;
    }
    return result;
  }

 private:
  static std::size_t index(LiveKind kind) { return static_cast<std::size_t>(kind); }

  mutable std::mutex mutex_;
  std::array<std::map<std::uint64_t, std::size_t>, live_kind_count> references_;
};

}  // namespace ringmem
