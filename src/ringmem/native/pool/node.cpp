#include "pool/node.hpp"

#include <memory>

namespace ringmem::pool {

static_assert(std::is_trivially_destructible_v<Node>);

Node* NodeStore::get() {
  if (!spare_) refill();
  Node* node = spare_;
  spare_ = node->next;
  --spare_count_;
  node->next = nullptr;
  return node;
}

void NodeStore::put(Node* node) noexcept {
  node->become(NodeState::spare);
  node->bin = no_bin;
  node->tag = {};
  node->prev = nullptr;
  node->next = spare_;
  spare_ = node;
  ++spare_count_;
}

void NodeStore::reserve(std::size_t count) {
  while (spare_count_ < count) refill();
}

void NodeStore::refill() {
  const bool first = chunks_.empty();
  const std::size_t nbytes = first ? first_chunk_bytes : Chunks::huge_bytes;
  auto* nodes = static_cast<Node*>(chunks_.add(nbytes));
  const std::size_t count = nbytes / sizeof(Node);
  std::uninitialized_default_construct_n(nodes, count);
  // Given out in order, so that neighbours by address are mostly neighbours in memory. The first few
  // may each be the one node of a stream, and processors fetch lines in pairs: these are given out
  // every second one first.
  for (std::size_t i = count; i-- > 0;) {
    put(&nodes[first ? 2 * i % count + 2 * i / count : i]);
  }
}

}  // namespace ringmem::pool
