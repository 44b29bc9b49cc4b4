// Which parts of an address space are free: best fit with coalescing. Knows numbers only.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <utility>

namespace ringmem::host {

struct Extent {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

class Extents {
 public:
  Extents(std::uint64_t begin, std::uint64_t end) { insert({begin, end}); }

  // The smallest free extent that fits `nbytes` at a multiple of `alignment`; false: none does.
  bool take(std::uint64_t nbytes, std::uint64_t alignment, std::uint64_t* begin) {
    for (auto it = by_size_.lower_bound({nbytes, 0}); it != by_size_.end(); ++it) {
      const Extent found{it->second, it->second + it->first};
      const std::uint64_t at = (found.begin + alignment - 1) / alignment * alignment;
      if (at + nbytes > found.end) continue;
      erase(found);
      if (found.begin < at) insert({found.begin, at});
      if (at + nbytes < found.end) insert({at + nbytes, found.end});
      *begin = at;
      return true;
    }
    return false;
  }

  // Returns the free extent that the given one is part of now.
  Extent give(Extent extent) {
    auto next = by_begin_.lower_bound(extent.begin);
    if (next != by_begin_.begin()) {
      const auto previous = std::prev(next);
      if (previous->second == extent.begin) extent.begin = previous->first;
    }
    if (next != by_begin_.end() && next->first == extent.end) extent.end = next->second;
    for (auto it = by_begin_.lower_bound(extent.begin);
         it != by_begin_.end() && it->first < extent.end;) {
      by_size_.erase({it->second - it->first, it->first});
      it = by_begin_.erase(it);
    }
    insert(extent);
    return extent;
  }

 private:
  void insert(Extent extent) {
    by_begin_.emplace(extent.begin, extent.end);
    by_size_.emplace(extent.end - extent.begin, extent.begin);
  }
  void erase(Extent extent) {
    by_begin_.erase(extent.begin);
    by_size_.erase({extent.end - extent.begin, extent.begin});
  }

  std::map<std::uint64_t, std::uint64_t> by_begin_;              // begin → end
  std::set<std::pair<std::uint64_t, std::uint64_t>> by_size_;    // (size, begin)
};

}  // namespace ringmem::host
