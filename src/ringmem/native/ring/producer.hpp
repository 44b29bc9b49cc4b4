// The producing end of a ring.
//
//   reserve   tail + n - head <= capacity, the peer's head read only when the ring looks full
//   commit    the sequence of each line, then tail
//
// One thread at a time. Everything but `published` is private: a peer that writes nonsense can make
// the producer stop (`corrupted`), not write outside the slots.
#pragma once

#include <algorithm>
#include <cstddef>

#include "ring/copy.hpp"
#include "ring/geometry.hpp"
#include "ring/stream.hpp"
#include "ring/words.hpp"

namespace ringmem::ring {

// Slots in a row, and their continuation at the start of the ring.
struct Run {
  Line* lines = nullptr;
  u64 slots = 0;
};
struct Runs {
  Run first, second;
  u64 size() const noexcept { return first.slots + second.slots; }
};

// Free-running counters. Tests use short ones, which overflow in the first second.
struct Counters {
  using Index = u64;
  static constexpr u32 index_bits = 64;
};
template <class Small>
struct ShortCounters {
  using Index = Small;
  static constexpr u32 index_bits = 8 * sizeof(Small);
};

// What both ends know of their ring.
template <class Traits>
struct EndpointBase {
  using Index = typename Traits::Index;

  explicit EndpointBase(const RingView& ring)
      : view(ring),
        slot_mask(ring.geometry.capacity - 1),
        // The lap must overflow when the index does, so it keeps only the bits the index has.
        sequence_mask(Traits::index_bits - ring.geometry.shift >= 32
                          ? ~u32{0}
                          : (u32{1} << (Traits::index_bits - ring.geometry.shift)) - 1) {}

  Line* slot(Index index) const noexcept {
    return view.slots + (static_cast<u64>(index) & slot_mask) * view.geometry.slot_lines;
  }
  u32 sequence(Index index) const noexcept {
    return layout::sequence_of(static_cast<u64>(index), view.geometry.shift, sequence_mask);
  }
  Runs runs(Index from, u64 count) const noexcept {
    const u64 start = static_cast<u64>(from) & slot_mask;
    const u64 straight = view.geometry.capacity - start;
    if (count <= straight) return {{slot(from), count}, {view.slots, 0}};
    return {{slot(from), straight}, {view.slots, count - straight}};
  }

  enum class SlotState { pending, ready, corrupted };

  // A slot is ready when all its lines are.
  SlotState state(Index index) const noexcept {
    const Line* line = slot(index);
    const u32 expected = sequence(index);
    const u32 before = (expected - 1) & sequence_mask;
    SlotState result = SlotState::ready;
    for (u32 i = 0; i < view.geometry.slot_lines; ++i) {
      const u32 seen = layout::word_sequence(load_word(line[i]));
      if (seen == expected) continue;
      if (seen != before) return SlotState::corrupted;
      result = SlotState::pending;
    }
    return result;
  }

  // Makes lines of the `count` slots from `from` on that look ready pending again. For a writer
  // that takes over, before it writes: `from` is pending, so no reader has looked beyond.
  void retract(Index from, u64 count) const noexcept {
    for (u64 i = 0; i < count; ++i, ++from) {
      const u32 expected = sequence(from);
      const u64 before = layout::line_word((expected - 1) & sequence_mask, 0);
      for (u32 line = 0; line < view.geometry.slot_lines; ++line) {
        Line& at = slot(from)[line];
        if (layout::word_sequence(load_word(at)) == expected) store_word(at, before);
      }
    }
  }

  RingView view;
  u64 slot_mask;
  u32 sequence_mask;
};

template <class Traits = Counters>
class BasicProducer : EndpointBase<Traits> {
  using Base = EndpointBase<Traits>;
  using typename Base::SlotState;

 public:
  using Index = typename Traits::Index;

  // Takes up where the last producer of this ring stopped, also if it was killed between a slot
  // and its index.
  explicit BasicProducer(const RingView& ring) : Base(ring) {
    head_ = static_cast<Index>(load(ring.consumer->head));
    tail_ = static_cast<Index>(load(ring.producer->tail));
    dropped_ = load(ring.producer->dropped);
    const Index lead = static_cast<Index>(head_ - tail_);
    if (lead != 0 && lead <= capacity()) tail_ = head_;  // consumed before tail was published
    if (static_cast<Index>(tail_ - head_) > capacity()) corrupted_ = true;
    while (!corrupted_ && static_cast<Index>(tail_ - head_) < capacity()) {
      const SlotState state = this->state(tail_);
      if (state != SlotState::ready) break;  // damage beyond is overwritten before it is read
      ++tail_;
    }
    if (!corrupted_) {
      this->retract(tail_, std::min<u64>(capacity() - static_cast<Index>(tail_ - head_),
                                         streamed_lines));
    }
    store(this->view.producer->tail, static_cast<u64>(tail_));
    // A consumer that closed before this end came is not waited upon, the next one is.
    past_session_ = load(this->view.consumer->session);
    session_ = layout::next_session(load(this->view.producer->session));
    store(this->view.producer->session, session_);
  }

  const Geometry& geometry() const noexcept { return this->view.geometry; }
  u64 capacity() const noexcept { return this->view.geometry.capacity; }
  Index tail() const noexcept { return tail_; }
  bool corrupted() const noexcept { return corrupted_; }
  u64 dropped() const noexcept { return dropped_; }

  // Whether send() may write past the caches (stream.hpp): only to a consumer that takes messages
  // in order. Off by default.
  void allow_streaming(bool allowed) noexcept {
    const u64 slots = slots_in_run(geometry().slot_lines);
    run_ = allowed && slots >= least_streamed_slots ? slots : 0;
  }

  // Free slots, at least `wanted` of them if there are so many.
  u64 free_slots(u64 wanted) noexcept {
    u64 free = capacity() - static_cast<Index>(tail_ - head_);
    if (free < wanted && !corrupted_) {
      const Index seen = static_cast<Index>(load(this->view.consumer->head));
      // The consumer moves forward and never past what was committed.
      if (static_cast<Index>(seen - head_) > static_cast<Index>(tail_ - head_)) {
        corrupted_ = true;
        return 0;
      }
      head_ = seen;
      free = capacity() - static_cast<Index>(tail_ - head_);
    }
    return corrupted_ ? 0 : free;
  }

  // True once waiting has an end: `wanted` slots are free, or they never will be. Changes nothing,
  // so another thread may ask while this one sleeps.
  bool would_reserve(u64 wanted) const noexcept {
    const Index seen = static_cast<Index>(load(this->view.consumer->head));
    if (static_cast<Index>(seen - head_) > static_cast<Index>(tail_ - head_)) return true;
    return corrupted_ || consumer_closed() ||
           capacity() - static_cast<Index>(tail_ - seen) >= wanted;
  }

  // Up to `count` free slots to write into; nothing is visible before commit().
  Runs reserve(u64 count) noexcept {
    const u64 free = free_slots(count);
    reserved_ = count < free ? count : free;
    return this->runs(tail_, reserved_);
  }
  u64 reserved() const noexcept { return reserved_; }

  // Makes the first `count` reserved slots ready, in order. The rest is given back.
  void commit(u64 count, i32 status = 0) noexcept {
    if (count > reserved_) count = reserved_;
    for (u64 i = 0; i < count; ++i, ++tail_) {
      Line* lines = this->slot(tail_);
      const u64 word = layout::line_word(this->sequence(tail_), status);
      for (u32 line = 0; line < geometry().slot_lines; ++line) store_word(lines[line], word);
    }
    reserved_ = 0;
    publish();
  }

  // Copies up to `count` contiguous records of the message size in; returns how many fitted. None
  // while slots are reserved: they are the same ones.
  u64 send(const std::byte* records, u64 count, i32 status = 0) noexcept {
    if (reserved_ != 0) [[unlikely]] return 0;
    const u64 free = free_slots(count);
    if (count > free) count = free;
    u64 left = count;
    while (run_ != 0 && left >= least_streamed_slots) {
      const u64 slots = std::min(left, run_);
      stream_run(records, slots, status);
      records += slots * geometry().message_nbytes;
      left -= slots;
    }
    for (; left != 0; --left, ++tail_, records += geometry().message_nbytes) {
      write(tail_, records, status);
    }
    if (count != 0) publish();
    return count;
  }

  void drop(u64 count) noexcept {
    dropped_ += count;
    store(this->view.producer->dropped, dropped_);
  }

  // Nothing more will come.
  void close() noexcept { store(this->view.producer->session, session_ + 1); }
  bool consumer_closed() const noexcept {
    const u32 session = load(this->view.consumer->session);
    return layout::is_closed(session) && session != past_session_;
  }

 private:
  void write(Index index, const std::byte* record, i32 status) noexcept {
    pack(this->slot(index), record, geometry().message_nbytes,
         layout::line_word(this->sequence(index), status));
  }
  // The first slot goes last, by ordinary stores.
  void stream_run(const std::byte* records, u64 slots, i32 status) noexcept {
    const std::size_t nbytes = geometry().message_nbytes;
    for (u64 i = 1; i < slots; ++i) {
      const auto index = static_cast<Index>(tail_ + i);
      stream_record(this->slot(index), records + i * nbytes, nbytes,
                    layout::line_word(this->sequence(index), status));
    }
    stream_fence();
    write(tail_, records, status);
    tail_ = static_cast<Index>(tail_ + slots);
  }
  void publish() noexcept { store(this->view.producer->tail, static_cast<u64>(tail_)); }

  Index tail_ = 0;      // next message to write
  Index head_ = 0;      // the consumer's index as last seen
  u64 run_ = 0;         // slots streamed at a time; 0: none
  u64 reserved_ = 0;    // slots from tail_ on that the user may be writing
  u64 dropped_ = 0;
  u32 session_ = 0;       // of this end
  u32 past_session_ = 0;  // the consumer's when this end was attached
  bool corrupted_ = false;
};

using Producer = BasicProducer<>;

}  // namespace ringmem::ring
