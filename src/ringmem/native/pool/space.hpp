// A space is one range of addresses, cut into nodes that lie side by side. Free nodes are kept by
// size in a set for each stream slot, so that what a stream freed itself is found first. Nothing
// here calls the driver; the pool's heap lock guards all of it.
//
// The free node at the end, the tail, is in no set: it is taken only when nothing else fits, as if
// it were endless. So a second run of the same program makes the same choices as the first, for
// which the tail had still to be created.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "pool/free_set.hpp"
#include "pool/node.hpp"
#include "pool/streams.hpp"

namespace ringmem::pool {

class Space {
 public:
  // Neighbours that are free are one node, unless it had more: 1.5 TiB. No request needs as much, and
  // a run that grows beyond still counts its units in 32 bits.
  static constexpr std::uint32_t most_units = std::uint32_t{3} << 30;

  Space(NodeStore& nodes, const StreamOrder& streams);

  void place(DevicePtr base, std::size_t nbytes, std::size_t page_bytes) noexcept;
  DevicePtr base() const noexcept { return base_; }
  DevicePtr end() const noexcept { return end_; }  // end of the last node
  std::size_t room() const noexcept { return base_ + nbytes_ - end_; }
  Node* first() const noexcept { return first_; }
  Node* last() const noexcept { return last_; }
  std::size_t free_bytes() const noexcept { return free_bytes_; }
  std::size_t free_nodes() const noexcept;

  // --- search: what `slot` could use, nullptr if nothing fits ----------------------------------
  Node* best_own(int slot, std::uint32_t units) const noexcept;  // usable with no wait
  Node* best_foreign(int slot, std::uint32_t units, bool ordered_only) const noexcept;
  Node* tail() const noexcept { return tail_; }
  Node* largest() const noexcept;
  // The node that `ptr` lies in, or nullptr.
  Node* covering(DevicePtr ptr) const noexcept;
  // What is wrong with the chain and the sets; nullptr if nothing is. For tests.
  const char* inconsistency() const;

  // --- changes ---------------------------------------------------------------------------------
  // Makes the first `units` of a free node live; the rest stays free.
  Node* take(Node* node, std::uint32_t units);
  // A free node starting at a multiple of `alignment` inside a free node that is large enough; what
  // is before it stays free.
  Node* take_aligned(Node* node, std::uint32_t units, std::size_t alignment);
  // A node that was live, parked or busy becomes free and joins its neighbours.
  Node* give(Node* node, Tag tag);
  // Takes a free node out of its set: busy, until give() or become_hole().
  void detach(Node* node) noexcept;
  // Cuts a busy node: it keeps the first `units`; the rest is returned, busy.
  Node* cut(Node* node, std::uint32_t units);
  // Busy neighbours become one.
  void absorb_next(Node* node) noexcept;
  // Appends addresses at the end: a busy node with no memory behind it yet.
  Node* append(std::size_t nbytes);
  // Busy becomes a hole, joins holes beside it, and is dropped at the end of the space.
  void become_hole(Node* node);
  void become_stale(Node* node) noexcept { node->become(NodeState::stale); }
  // A hole is about to be filled.
  void detach_hole(Node* node) noexcept;
  Node* holes() const noexcept { return holes_; }

  template <typename Visit>
  void for_each_free(std::uint32_t units, Visit&& visit) const;

 private:
  static constexpr int any_set = StreamOrder::slots;        // nobody uses it any more
  static constexpr int mixed_set = StreamOrder::slots + 1;  // more than one stream

  static int set_of(Tag tag) noexcept {
    if (!tag.mask) return any_set;
    return (tag.mask & (tag.mask - 1)) ? mixed_set : std::countr_zero(tag.mask);
  }
  static bool joinable(const Node& a, const Node& b) noexcept {
    return std::uint64_t{a.units} + b.units <= most_units;
  }
  void attach(Node* node);
  Tag join(Tag a, Tag b) const noexcept;
  void list_start(Node* node);
  void unlist_start(Node* node) noexcept;
  std::size_t page_of(DevicePtr ptr) const noexcept { return (ptr - base_) / page_bytes_; }

  NodeStore& nodes_;
  const StreamOrder& streams_;
  std::size_t page_bytes_ = 0;
  DevicePtr base_ = 0;
  std::size_t nbytes_ = 0;
  DevicePtr end_ = 0;
  Node* first_ = nullptr;
  Node* last_ = nullptr;
  Node* tail_ = nullptr;
  Node* holes_ = nullptr;
  std::size_t free_bytes_ = 0;
  std::array<FreeSet, StreamOrder::slots + 2> sets_;
  std::uint64_t filled_ = 0;      // slots whose set has a node
  std::vector<Node*> starts_;     // by page: the first node that starts in it
};

template <typename Visit>
void Space::for_each_free(std::uint32_t units, Visit&& visit) const {
  for (const FreeSet& set : sets_) set.for_each(units, visit);
  if (tail_ && tail_->units >= units) visit(tail_);
}

}  // namespace ringmem::pool
