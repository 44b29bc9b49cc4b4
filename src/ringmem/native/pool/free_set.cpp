#include "pool/free_set.hpp"

namespace ringmem::pool {

void FreeSet::insert(Node* node) {
  if (!heads_) [[unlikely]] heads_ = std::make_unique<Node*[]>(bins);
  const std::uint32_t bin = bin_of(node->units);
  Node* head = heads_[bin];
  node->bin = static_cast<std::uint16_t>(bin);
  node->bin_prev = nullptr;
  node->bin_next = head;
  if (head) {
    head->bin_prev = node;
  } else {
    bitmap_[bin / 64] |= std::uint64_t{1} << (bin % 64);
    summary_[bin / 4096] |= std::uint64_t{1} << (bin / 64 % 64);
  }
  heads_[bin] = node;
  ++count_;
}

void FreeSet::remove(Node* node) noexcept {
  const std::uint32_t bin = node->bin;
  if (node->bin_next) node->bin_next->bin_prev = node->bin_prev;
  if (node->bin_prev) {
    node->bin_prev->bin_next = node->bin_next;
  } else {
    heads_[bin] = node->bin_next;
    if (!node->bin_next) {
      bitmap_[bin / 64] &= ~(std::uint64_t{1} << (bin % 64));
      if (!bitmap_[bin / 64]) summary_[bin / 4096] &= ~(std::uint64_t{1} << (bin / 64 % 64));
    }
  }
  node->bin = no_bin;
  --count_;
}

std::uint32_t FreeSet::next_bin(std::uint32_t from) const noexcept {
  if (from >= bins) return bins;
  std::uint32_t word = from / 64;
  if (const std::uint64_t rest = bitmap_[word] >> (from % 64)) {
    return from + static_cast<std::uint32_t>(std::countr_zero(rest));
  }
  if (++word >= words) return bins;
  std::uint32_t group = word / 64;
  std::uint64_t rest = summary_[group] >> (word % 64) << (word % 64);
  while (!rest) {
    if (++group >= summaries) return bins;
    rest = summary_[group];
  }
  word = group * 64 + static_cast<std::uint32_t>(std::countr_zero(rest));
  return word * 64 + static_cast<std::uint32_t>(std::countr_zero(bitmap_[word]));
}

Node* FreeSet::best_of(std::uint32_t bin, std::uint32_t units) const noexcept {
  Node* found = nullptr;
  int looked = 0;
  for (Node* node = heads_[bin]; node && looked < scan_limit; node = node->bin_next, ++looked) {
    if (node->units < units) continue;
    if (!found || node->units < found->units ||
        (node->units == found->units && node->ptr < found->ptr)) {
      found = node;
    }
  }
  return found;
}

Node* FreeSet::best(std::uint32_t units) const noexcept {
  if (!count_) return nullptr;
  std::uint32_t bin = next_bin(bin_of(units));
  if (bin >= bins) return nullptr;
  if (Node* node = best_of(bin, units)) return node;
  bin = next_bin(bin + 1);
  return bin < bins ? best_of(bin, units) : nullptr;
}

Node* FreeSet::largest() const noexcept {
  for (std::uint32_t group = summaries; group-- > 0;) {
    if (!summary_[group]) continue;
    const auto word = group * 64 + 63 - static_cast<std::uint32_t>(std::countl_zero(summary_[group]));
    const auto bin = word * 64 + 63 - static_cast<std::uint32_t>(std::countl_zero(bitmap_[word]));
    Node* found = heads_[bin];
    for (Node* node = found; node; node = node->bin_next) {
      if (node->units > found->units) found = node;
    }
    return found;
  }
  return nullptr;
}

}  // namespace ringmem::pool
