// Small blocks: spans of equal blocks, cut from one node each. A span belongs to the shard of one
// stream, whose lock guards it. The records of blocks are eight bytes each, beside each other, so a
// million live blocks cost eight megabytes to keep track of.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "pool/node.hpp"
#include "pool/size_classes.hpp"

namespace ringmem::pool {

enum class SmallState : std::uint8_t {
  free,
  live,
  pending,  // freed, but another stream than the span's may still use it
};

struct SmallBlock {
  std::uint16_t requested = 0;  // bytes, while live
  std::uint16_t next = 0;       // while free: index of the next free block
  std::uint16_t index = 0;      // in its span
  SmallState state = SmallState::free;
  bool shared = false;          // record_stream was called: the shard knows with whom
};
static_assert(sizeof(SmallBlock) == 8);

struct Span {
  static constexpr std::uint16_t none = 0xffff;

  Node* node = nullptr;
  DevicePtr base = 0;
  Span* prev = nullptr;  // in its shard's list of spans with free blocks
  Span* next = nullptr;
  std::uint32_t block_bytes = 0;
  std::uint16_t count = 0;
  std::uint16_t free = 0;
  std::uint16_t head = none;
  std::uint8_t size_class = 0;
  std::atomic<std::uint8_t> home{0};  // slot of its shard

  SmallBlock* blocks() noexcept { return reinterpret_cast<SmallBlock*>(this + 1); }
  DevicePtr ptr_of(const SmallBlock& block) const noexcept {
    return base + std::size_t{block.index} * block_bytes;
  }
  static Span* of(SmallBlock* block) noexcept {
    return reinterpret_cast<Span*>(block - block->index) - 1;
  }
  SmallBlock* pop() noexcept {
    SmallBlock* block = blocks() + head;
    head = block->next;
    --free;
    return block;
  }
  void push(SmallBlock* block) noexcept {
    block->state = SmallState::free;
    block->next = head;
    head = block->index;
    ++free;
  }
};

// How Block::record tells the two kinds of records apart.
inline bool is_small(const void* record) noexcept {
  return reinterpret_cast<std::uintptr_t>(record) & 1;
}
inline SmallBlock* small_of(void* record) noexcept {
  return reinterpret_cast<SmallBlock*>(reinterpret_cast<std::uintptr_t>(record) & ~std::uintptr_t{1});
}
inline void* record_of(SmallBlock* small) noexcept {
  return reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(small) | 1);
}

// Blocks of a span of this class: about 64 KiB, and at least eight of them.
constexpr std::uint16_t span_count(int size_class) noexcept {
  const std::size_t count = (std::size_t{64} << 10) / small_class_bytes(size_class);
  return static_cast<std::uint16_t>(count < 8 ? 8 : count);
}
constexpr std::uint32_t span_units(int size_class) noexcept {
  return static_cast<std::uint32_t>(
      round_up(small_class_bytes(size_class) * span_count(size_class), unit_bytes) / unit_bytes);
}

// The records of spans. Recycled by class and never returned before the store goes: the record of
// a block that was freed twice is still a record.
class SpanStore {
 public:
  SpanStore() = default;
  SpanStore(const SpanStore&) = delete;
  SpanStore& operator=(const SpanStore&) = delete;
  ~SpanStore();
  Span* get(int size_class, Node* node);  // all blocks free
  void put(Span* span) noexcept;

 private:
  // Records lie in huge pages: a million of them would miss the TLB at every free.
  static constexpr std::size_t chunk_bytes = std::size_t{2} << 20;
  void* carve(std::size_t nbytes);

  std::array<Span*, small_classes> spare_{};
  std::vector<void*> chunks_;
  std::size_t used_ = chunk_bytes;  // of the last chunk
};

}  // namespace ringmem::pool
