// Small blocks that were freed while other streams than their span's may still use them. Blocks of
// one class and one set of streams become usable in the order in which they were freed, so each such
// queue is looked at from its front, and only as far as it is of use.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "pool/node.hpp"
#include "pool/size_classes.hpp"
#include "pool/small.hpp"

namespace ringmem::pool {

class PendingBlocks {
 public:
  struct Queue {
    struct Entry {
      SmallRef block;
      std::uint64_t seq;
    };
    std::uint64_t mask;         // of the tags of all
    std::deque<Entry> entries;  // by seq

    Tag front_tag() const noexcept { return {mask, entries.front().seq}; }
  };
  using Queues = std::vector<Queue>;

  bool empty() const noexcept { return count_ == 0; }

  // Takes the block's part in its span's books: it is not `present` until it comes back.
  void add(SmallRef block, Tag tag) {
    Span* span = block.span();
    if (!classes_) classes_ = std::make_unique<std::array<Queues, small_classes>>();
    queue_for((*classes_)[span->size_class], tag.mask).entries.push_back({block, tag.seq});
    ++count_;
    --span->present;
    note_emptied(span);
  }
  // Of one class; nullptr if there never were any.
  Queues* queues(int size_class) noexcept {
    return classes_ ? &(*classes_)[static_cast<std::size_t>(size_class)] : nullptr;
  }
  // The oldest of a queue is free again.
  SmallRef pop(Queue& queue) noexcept {
    const SmallRef block = queue.entries.front().block;
    queue.entries.pop_front();
    --count_;
    ++block.span()->present;
    return block;
  }
  // A span with nothing live, but with blocks that are kept here: take_emptied() may return those.
  void note_emptied(const Span* span) noexcept {
    if (span->emptied()) emptied_ |= std::uint64_t{1} << span->size_class;
  }
  // Calls take(block, tag) for the blocks of all such spans, which are then free.
  template <typename Take>
  void take_emptied(Take&& take) {
    for (; emptied_; emptied_ &= emptied_ - 1) {
      for (Queue& queue : (*classes_)[static_cast<std::size_t>(std::countr_zero(emptied_))]) {
        count_ -= std::erase_if(queue.entries, [&](const Queue::Entry& entry) {
          Span* span = entry.block.span();
          if (!span->emptied()) return false;
          ++span->present;
          take(entry.block, Tag{queue.mask, entry.seq});
          return true;
        });
      }
    }
  }

 private:
  static constexpr std::size_t idle_queues = 8;  // of a class that are kept though they are empty

  static Queue& queue_for(Queues& queues, std::uint64_t mask) {
    for (Queue& queue : queues) {
      if (queue.mask == mask) return queue;
    }
    if (queues.size() >= idle_queues) {
      std::erase_if(queues, [](const Queue& queue) { return queue.entries.empty(); });
    }
    return queues.emplace_back(Queue{mask, {}});
  }

  std::unique_ptr<std::array<Queues, small_classes>> classes_;
  std::size_t count_ = 0;
  std::uint64_t emptied_ = 0;  // classes that may have a span with nothing live and blocks in here
};
static_assert(small_classes <= 64);

}  // namespace ringmem::pool
