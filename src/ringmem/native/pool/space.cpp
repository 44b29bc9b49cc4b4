#include "pool/space.hpp"

namespace ringmem::pool {

Space::Space(NodeStore& nodes, const StreamOrder& streams) : nodes_(nodes), streams_(streams) {}

void Space::place(DevicePtr base, std::size_t nbytes, std::size_t page_bytes) noexcept {
  page_bytes_ = page_bytes;
  base_ = end_ = base;
  nbytes_ = nbytes;
}

// --- search --------------------------------------------------------------------------------------

Node* Space::best_own(int slot, std::uint32_t units) const noexcept {
  Node* any = sets_[any_set].best(units);
  if (slot == StreamOrder::shared_slot) return any;
  Node* own = sets_[slot].best(units);
  if (!own || !any) return own ? own : any;
  return any->units < own->units ? any : own;
}

Node* Space::best_foreign(int slot, std::uint32_t units, bool ordered_only) const noexcept {
  Node* found = nullptr;
  const auto consider = [&](const FreeSet& set) {
    Node* node = set.best(units);
    if (!node || (found && node->units >= found->units)) return;
    if (ordered_only ? streams_.ordered(slot, node->tag) : streams_.orderable(node->tag)) {
      found = node;
    }
  };
  for (std::uint64_t rest = filled_; rest; rest &= rest - 1) {
    const int other = std::countr_zero(rest);
    if (other != slot || slot == StreamOrder::shared_slot) consider(sets_[other]);
  }
  consider(sets_[mixed_set]);
  return found;
}

std::size_t Space::free_nodes() const noexcept {
  std::size_t count = tail_ ? 1 : 0;
  for (const FreeSet& set : sets_) count += set.count();
  return count;
}

Node* Space::largest() const noexcept {
  Node* found = tail_;
  for (const FreeSet& set : sets_) {
    Node* node = set.empty() ? nullptr : set.largest();
    if (node && (!found || node->units > found->units)) found = node;
  }
  return found;
}

Node* Space::covering(DevicePtr ptr) const noexcept {
  if (ptr < base_ || ptr >= end_) return nullptr;
  std::size_t page = page_of(ptr);
  while (page > 0 && (!starts_[page] || starts_[page]->ptr > ptr)) --page;
  Node* node = starts_[page];
  while (node && node->end() <= ptr) node = node->next;
  return node;
}

const char* Space::inconsistency() const {
  DevicePtr at = base_;
  std::size_t free = 0;
  std::size_t listed = 0;
  const Node* before = nullptr;
  for (const Node* node = first_; node; node = node->next) {
    if (node->ptr != at) return "a gap or an overlap between nodes";
    if (node->prev != before) return "a broken back link";
    if (node->units == 0) return "an empty node";
    if (covering(node->ptr) != node) return "a node that is not found by its address";
    if (node->is(NodeState::free)) {
      if (before && before->is(NodeState::free) && joinable(*before, *node)) {
        return "free neighbours that were not joined";
      }
      free += node->nbytes();
      ++listed;
      if ((node == tail_) != (node == last_)) return "a tail that is not the last node";
      if (node != tail_ && node->bin == no_bin) return "a free node in no set";
    } else if (node->is(NodeState::spare)) {
      return "a spare node in the chain";
    }
    at = node->end();
    before = node;
  }
  if (at != end_ || before != last_) return "a wrong end";
  if (free != free_bytes_) return "free bytes that do not add up";
  if (listed != free_nodes()) return "sets that hold other nodes";
  return nullptr;
}

// --- where nodes start -----------------------------------------------------------------------------

void Space::list_start(Node* node) {
  Node*& start = starts_[page_of(node->ptr)];
  if (!start || node->ptr < start->ptr) start = node;
}

void Space::unlist_start(Node* node) noexcept {
  Node*& start = starts_[page_of(node->ptr)];
  if (start != node) return;
  Node* next = node->next;
  start = next && page_of(next->ptr) == page_of(node->ptr) ? next : nullptr;
}

// --- free nodes ------------------------------------------------------------------------------------

void Space::attach(Node* node) {
  node->become(NodeState::free);
  free_bytes_ += node->nbytes();
  if (node == last_) {
    tail_ = node;
    return;
  }
  const int set = set_of(node->tag);
  sets_[set].insert(node);
  if (set < StreamOrder::slots) filled_ |= std::uint64_t{1} << set;
}

void Space::detach(Node* node) noexcept {
  free_bytes_ -= node->nbytes();
  node->become(NodeState::busy);
  if (node == tail_) {
    tail_ = nullptr;
    return;
  }
  const int set = set_of(node->tag);
  sets_[set].remove(node);
  if (set < StreamOrder::slots && sets_[set].empty()) filled_ &= ~(std::uint64_t{1} << set);
}

Node* Space::cut(Node* node, std::uint32_t units) {
  Node* rest = nodes_.get();
  rest->ptr = node->ptr + std::size_t{units} * unit_bytes;
  rest->units = node->units - units;
  rest->tag = node->tag;
  rest->become(NodeState::busy);
  rest->prev = node;
  rest->next = node->next;
  if (rest->next) rest->next->prev = rest;
  else last_ = rest;
  node->next = rest;
  node->units = units;
  list_start(rest);
  return rest;
}

void Space::absorb_next(Node* node) noexcept {
  Node* next = node->next;
  unlist_start(next);
  node->units += next->units;
  node->next = next->next;
  if (node->next) node->next->prev = node;
  else last_ = node;
  nodes_.put(next);
}

Node* Space::take(Node* node, std::uint32_t units) {
  detach(node);
  if (node->units > units) attach(cut(node, units));
  node->become(NodeState::live);
  return node;
}

Node* Space::take_aligned(Node* node, std::uint32_t units, std::size_t alignment) {
  const std::size_t before = round_up(node->ptr, alignment) - node->ptr;
  if (before == 0) return take(node, units);
  detach(node);
  Node* rest = cut(node, static_cast<std::uint32_t>(before / unit_bytes));
  attach(node);
  attach(rest);
  return take(rest, units);
}

Tag Space::join(Tag a, Tag b) const noexcept {
  if (a.mask == b.mask) return joined(a, b);
  return joined(streams_.pending(a), streams_.pending(b));
}

Node* Space::give(Node* node, Tag tag) {
  node->tag = tag;
  if (Node* next = node->next; next && next->is(NodeState::free) && joinable(*node, *next)) {
    detach(next);
    node->tag = join(tag, next->tag);
    absorb_next(node);
  }
  if (Node* prev = node->prev; prev && prev->is(NodeState::free) && joinable(*prev, *node)) {
    detach(prev);
    prev->tag = join(prev->tag, node->tag);
    absorb_next(prev);
    node = prev;
  }
  attach(node);
  return node;
}

// --- holes -----------------------------------------------------------------------------------------

Node* Space::append(std::size_t nbytes) {
  if (Node* old = tail_) {  // no longer at the end: into its set
    detach(old);
    Node* node = append(nbytes);
    attach(old);
    return node;
  }
  starts_.resize(page_of(end_ + nbytes - 1) + 1);
  Node* node = nodes_.get();
  node->ptr = end_;
  node->units = static_cast<std::uint32_t>(nbytes / unit_bytes);
  node->tag = {};
  node->become(NodeState::busy);
  node->prev = last_;
  node->next = nullptr;
  if (last_) last_->next = node;
  else first_ = node;
  last_ = node;
  end_ += nbytes;
  list_start(node);
  return node;
}

void Space::detach_hole(Node* node) noexcept {
  if (node->bin_next) node->bin_next->bin_prev = node->bin_prev;
  if (node->bin_prev) node->bin_prev->bin_next = node->bin_next;
  else holes_ = node->bin_next;
  node->become(NodeState::busy);
}

void Space::become_hole(Node* node) {
  if (node->next && node->next->is(NodeState::hole) && joinable(*node, *node->next)) {
    detach_hole(node->next);
    absorb_next(node);
  }
  if (node->prev && node->prev->is(NodeState::hole) && joinable(*node->prev, *node)) {
    node = node->prev;
    detach_hole(node);
    absorb_next(node);
  }
  node->tag = {};
  if (node == last_) {  // addresses at the end are given up
    unlist_start(node);
    last_ = node->prev;
    end_ = node->ptr;
    if (last_) last_->next = nullptr;
    else first_ = nullptr;
    nodes_.put(node);
    if (last_ && last_->is(NodeState::hole)) {
      detach_hole(last_);
      become_hole(last_);
    } else if (last_ && last_->is(NodeState::free)) {
      Node* before = last_;
      const int set = set_of(before->tag);
      sets_[set].remove(before);
      if (set < StreamOrder::slots && sets_[set].empty()) filled_ &= ~(std::uint64_t{1} << set);
      tail_ = before;
    }
    return;
  }
  node->become(NodeState::hole);
  node->bin_prev = nullptr;
  node->bin_next = holes_;
  if (holes_) holes_->bin_prev = node;
  holes_ = node;
}

}  // namespace ringmem::pool
