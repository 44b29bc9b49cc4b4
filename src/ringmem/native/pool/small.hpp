// Small blocks: spans of equal blocks, cut from one node each. A span belongs to the shard of one
// stream, whose lock guards it. The record of a block is two bytes, beside the others of its span:
// a million live blocks of 256 bytes are kept track of in 2.3 megabytes, which a cache still holds.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "pool/chunks.hpp"
#include "pool/node.hpp"
#include "pool/size_classes.hpp"

namespace ringmem::pool {

enum class SmallState : std::uint8_t {
  free,
  live,
  pending,  // freed, but another stream than the span's may still use it
};

struct SmallBlock {
  std::uint16_t value : 13 = 0;   // while live or pending: bytes not asked for; while free: next free block
  std::uint16_t state_ : 2 = 0;
  std::uint16_t shared : 1 = 0;   // record_stream was called: the shard knows with whom

  SmallState state() const noexcept { return static_cast<SmallState>(state_); }
  void become(SmallState which) noexcept { state_ = static_cast<std::uint8_t>(which) & 3; }
};
static_assert(sizeof(SmallBlock) == 2);

// The header shares its line with the first records; a span of few blocks is one line in all.
struct alignas(16) Span {
  static constexpr std::uint16_t none = 0x1fff;  // what fits into a record

  Node* node = nullptr;
  DevicePtr base = 0;
  Span* prev = nullptr;  // in its shard's list of spans with free blocks
  Span* next = nullptr;
  std::uint32_t block_bytes = 0;
  std::uint16_t count = 0;
  std::uint16_t free = 0;
  std::uint16_t present = 0;  // free or live: not pending
  std::uint16_t head = none;
  std::uint8_t size_class = 0;
  std::atomic<std::uint8_t> home{0};  // slot of its shard

  SmallBlock* blocks() noexcept { return reinterpret_cast<SmallBlock*>(this + 1); }
  DevicePtr ptr_of(std::uint32_t index) const noexcept {
    return base + std::size_t{index} * block_bytes;
  }
  std::size_t requested(std::uint32_t index) noexcept {
    return block_bytes - blocks()[index].value;
  }
  // Nothing lives here, but some blocks are pending.
  bool emptied() const noexcept { return free == present && present != count; }
  // The index of a free block, live from now on.
  std::uint32_t pop(std::size_t nbytes) noexcept {
    const std::uint32_t index = head;
    SmallBlock& block = blocks()[index];
    head = block.value;
    --free;
    block.value = (block_bytes - nbytes) & none;
    block.become(SmallState::live);
    return index;
  }
  void push(std::uint32_t index) noexcept {
    SmallBlock& block = blocks()[index];
    block.become(SmallState::free);
    block.value = head & none;
    head = static_cast<std::uint16_t>(index);
    ++free;
  }
};
static_assert(sizeof(Span) == 48);

// How Block::record names a small block: its span and its index there, so that header and record
// are fetched at once, and bit 0 set, which tells it from a node.
class SmallRef {
 public:
  explicit SmallRef(void* record) noexcept : bits_(reinterpret_cast<std::uintptr_t>(record)) {}
  SmallRef(Span* span, std::uint32_t index) noexcept
      : bits_(reinterpret_cast<std::uintptr_t>(span) | std::uintptr_t{index} << address_bits | 1) {}

  static bool is(const void* record) noexcept {
    return reinterpret_cast<std::uintptr_t>(record) & 1;
  }
  void* record() const noexcept { return reinterpret_cast<void*>(bits_); }
  Span* span() const noexcept { return reinterpret_cast<Span*>(bits_ & span_mask); }
  std::uint32_t index() const noexcept { return static_cast<std::uint32_t>(bits_ >> address_bits); }
  SmallBlock& block() const noexcept { return span()->blocks()[index()]; }

 private:
  // User space ends below 2^48 on x86-64 and AArch64, unless a mapping asks for more by its hint.
  static constexpr int address_bits = 48;
  static constexpr std::uintptr_t span_mask = (std::uintptr_t{1} << address_bits) - 2;

  std::uintptr_t bits_;
};
static_assert(sizeof(void*) == 8);

// Blocks of a span of this class: about 64 KiB, and at least eight of them.
constexpr std::uint16_t span_count(int size_class) noexcept {
  const std::size_t count = (std::size_t{64} << 10) / small_class_bytes(size_class);
  return static_cast<std::uint16_t>(count < 8 ? 8 : count);
}
constexpr std::uint32_t span_units(int size_class) noexcept {
  return static_cast<std::uint32_t>(
      round_up(small_class_bytes(size_class) * span_count(size_class), unit_bytes) / unit_bytes);
}

// What a live record holds, and what a free one does.
static_assert(small_class_bytes(small_classes - 1) - small_class_bytes(small_classes - 2) < Span::none);
static_assert(span_count(0) < Span::none);

// The records of spans. Recycled by class and never returned before the store goes: the record of
// a block that was freed twice is still a record.
class SpanStore {
 public:
  Span* get(int size_class, Node* node);  // all blocks free
  void put(Span* span) noexcept;

 private:
  void* carve(std::size_t nbytes);

  std::array<Span*, small_classes> spare_{};
  Chunks chunks_;
  char* chunk_ = nullptr;  // the last one
  std::size_t used_ = Chunks::huge_bytes;  // of it
};

}  // namespace ringmem::pool
