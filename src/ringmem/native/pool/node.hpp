// A node describes one piece of a space's address range: a live block, free memory, or a hole with
// no memory behind it. Nodes are the boundary tags, kept beside device memory and never in it.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "driver/types.hpp"
#include "pool/chunks.hpp"
#include "pool/size_classes.hpp"

namespace ringmem::pool {

// Who may still be using free memory: the streams in `mask` (a bit a stream slot), up to what they
// were given in epoch `seq`. An empty mask: nobody.
struct Tag {
  std::uint64_t mask = 0;
  std::uint64_t seq = 0;

  friend bool operator==(const Tag&, const Tag&) = default;
};

inline Tag joined(Tag a, Tag b) noexcept {
  return {a.mask | b.mask, a.seq > b.seq ? a.seq : b.seq};
}

enum class NodeState : std::uint8_t {
  spare,   // not in use: waits in the store
  live,    // given to a user
  span,    // the home of a span of small blocks
  parked,  // freed; kept aside by a shard in case the same size is asked for next
  free,    // in a free set, or the tail of its space
  hole,    // addresses with no memory behind them, ready to be filled
  stale,   // a hole whose old mapping waits for the work that may still use it
  busy,    // part of a driver operation that runs without the lock
};

inline constexpr std::uint16_t no_bin = 0xffff;

struct Span;

struct Node {
  DevicePtr ptr = 0;
  Node* prev = nullptr;  // neighbours by address
  Node* next = nullptr;
  union {
    Node* bin_prev;         // while in a free set or a list of holes
    std::size_t requested;  // while live, in bytes
  };
  union {
    Node* bin_next;
    Span* blocks;  // while the home of a span
  };
  Tag tag;  // while free: who may use it still. While live: `mask` is who else used it.
  std::uint32_t units = 0;
  std::uint16_t bin = no_bin;
  std::atomic<std::uint8_t> home{0};  // while live: the slot of the stream it was allocated on
  std::atomic<NodeState> state{NodeState::spare};

  Node() noexcept : bin_prev(nullptr), bin_next(nullptr) {}
  std::size_t nbytes() const noexcept { return std::size_t{units} * unit_bytes; }
  DevicePtr end() const noexcept { return ptr + nbytes(); }
  bool is(NodeState which) const noexcept {
    return state.load(std::memory_order_relaxed) == which;
  }
  void become(NodeState which) noexcept { state.store(which, std::memory_order_relaxed); }
};
static_assert(sizeof(Node) == 64, "one cache line");

// Nodes are recycled and never returned before the store goes, so that a stale pointer from a
// double free still points to a node.
class NodeStore {
 public:
  Node* get();
  void put(Node* node) noexcept;
  // Makes sure that the next `count` calls of get() cannot fail.
  void reserve(std::size_t count);

 private:
  static constexpr std::size_t first_chunk_bytes = std::size_t{64} << 10;  // most pools need no more
  void refill();

  Chunks chunks_;
  Node* spare_ = nullptr;
  std::size_t spare_count_ = 0;
};

}  // namespace ringmem::pool
