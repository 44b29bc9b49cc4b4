#include "pool/node.hpp"

namespace ringmem::pool {

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
  chunks_.push_back(std::make_unique<Line[]>(chunk));
  Line* lines = chunks_.back().get();
  for (std::size_t i = chunk; i-- > 0;) put(&lines[i].node);
}

}  // namespace ringmem::pool
