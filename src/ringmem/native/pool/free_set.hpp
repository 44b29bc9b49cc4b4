// Free nodes by size: bins of 256 steps an octave (exact up to 128 KiB, 0.4 % apart above), found
// through two levels of bitmaps. Insert and remove are a handful of instructions, best fit a few
// more, whatever the number of nodes.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <memory>

#include "pool/node.hpp"

namespace ringmem::pool {

class FreeSet {
 public:
  bool empty() const noexcept { return count_ == 0; }
  std::uint32_t count() const noexcept { return count_; }
  void insert(Node* node);
  void remove(Node* node) noexcept;
  // The smallest node of at least `units`, the lowest address among equals; nullptr if none. Looks
  // at no more than `scan_limit` nodes of a bin, so it may miss the best by one step of a bin.
  Node* best(std::uint32_t units) const noexcept;
  Node* largest() const noexcept;
  // Calls visit(node) for every node of at least `units`, smallest bins first.
  template <typename Visit>
  void for_each(std::uint32_t units, Visit&& visit) const;

 private:
  static constexpr int step_bits = 8;
  static constexpr std::uint32_t steps = 1u << step_bits;
  static constexpr std::uint32_t bins = (32 - step_bits) * steps + steps;
  static constexpr std::uint32_t words = bins / 64;
  static constexpr std::uint32_t summaries = (words + 63) / 64;
  static constexpr int scan_limit = 24;

  static std::uint32_t bin_of(std::uint32_t units) noexcept {
    if (units < steps) return units;
    const int shift = std::bit_width(units) - 1 - step_bits;
    return (static_cast<std::uint32_t>(shift) << step_bits) + (units >> shift);
  }
  std::uint32_t next_bin(std::uint32_t from) const noexcept;  // `bins` if none
  Node* best_of(std::uint32_t bin, std::uint32_t units) const noexcept;

  std::unique_ptr<Node*[]> heads_;  // made with the first node
  std::array<std::uint64_t, words> bitmap_{};
  std::array<std::uint64_t, summaries> summary_{};
  std::uint32_t count_ = 0;
};

template <typename Visit>
void FreeSet::for_each(std::uint32_t units, Visit&& visit) const {
  if (!count_) return;
  for (std::uint32_t bin = next_bin(bin_of(units)); bin < bins; bin = next_bin(bin + 1)) {
    for (Node* node = heads_[bin]; node; node = node->bin_next) {
      if (node->units >= units) visit(node);
    }
  }
}

}  // namespace ringmem::pool
