// The consuming end of a ring.
//
//   poll      slots from head on whose lines all carry the expected sequence
//   release   head
//
// One thread at a time. The producer's index is never needed: a line says itself that it is ready,
// so payload and sequence come in one read. A line that carries any other sequence than the
// expected one or the one before ends the ring (`corrupted`).
#pragma once

#include <algorithm>

#include "ring/producer.hpp"

namespace ringmem::ring {

template <class Traits = Counters>
class BasicConsumer : EndpointBase<Traits> {
  using Base = EndpointBase<Traits>;
  using typename Base::SlotState;

 public:
  using Index = typename Traits::Index;

  // Takes up where the last consumer of this ring released.
  explicit BasicConsumer(const RingView& ring) : Base(ring) {
    head_ = static_cast<Index>(load(ring.consumer->head));
    ready_ = head_;
    // A producer that closed and left messages is at its end when they are read. One that closed
    // and left none belongs to the past: the next one is waited for.
    if (this->state(head_) == SlotState::pending) past_session_ = load(ring.producer->session);
    session_ = layout::next_session(load(ring.consumer->session));
    store(this->view.consumer->session, session_);
  }

  const Geometry& geometry() const noexcept { return this->view.geometry; }
  u64 capacity() const noexcept { return this->view.geometry.capacity; }
  Index head() const noexcept { return head_; }
  bool corrupted() const noexcept { return corrupted_; }

  // Ready slots from head on, at most `max`. They stay the reader's until released.
  Runs poll(u64 max) noexcept {
    max = std::min(max, capacity());
    while (polled() < max && take_next()) {
    }
    return this->runs(head_, std::min(polled(), max));
  }
  u64 polled() const noexcept { return static_cast<Index>(ready_ - head_); }

  // Whether one message of the next `capacity` is there: a glance, while poll() counts from head on.
  bool is_ready(Index index) const noexcept { return this->state(index) == SlotState::ready; }

  // Gives the first `count` polled slots back to the producer.
  void release(u64 count) noexcept {
    head_ = static_cast<Index>(head_ + std::min(count, polled()));
    publish();
  }

  // True once waiting has an end: a message is ready, or none ever will be. Changes nothing, so
  // another thread may ask while this one sleeps.
  bool would_receive() const noexcept {
    return corrupted_ || polled() != 0 || this->state(ready_) != SlotState::pending ||
           producer_closed();
  }

  // Copies up to `max` messages out and releases them; `statuses` may be null.
  u64 receive(std::byte* records, u64 max, i32* statuses = nullptr) noexcept {
    const std::size_t nbytes = geometry().message_nbytes;
    // Room goes back in quarters of the ring, so that a producer never waits for a whole batch.
    const u64 publish_every = std::max<u64>(capacity() / 4, 1);
    u64 count = 0;
    for (u64 unpublished = 0; count < max; ++count) {
      if (polled() == 0 && !take_next()) break;
      const Line* slot = this->slot(head_);
      unpack(records, slot, nbytes);
      records += nbytes;
      if (statuses != nullptr) *statuses++ = layout::word_status(load_word(*slot));
      ++head_;
      if (++unpublished == publish_every) {
        publish();
        unpublished = 0;
      }
    }
    if (count != 0) publish();
    return count;
  }

  // Copies the first `count` polled messages out and keeps their slots.
  u64 peek(std::byte* records, u64 count) const noexcept {
    count = std::min(count, polled());
    for (u64 i = 0; i < count; ++i, records += geometry().message_nbytes) {
      unpack(records, this->slot(static_cast<Index>(head_ + i)), geometry().message_nbytes);
    }
    return count;
  }

  // Messages that wait, as the producer published them; a figure, not a promise.
  u64 depth() const noexcept {
    const Index tail = static_cast<Index>(load(this->view.producer->tail));
    const u64 waiting = static_cast<Index>(tail - head_);
    return waiting <= capacity() ? waiting : polled();
  }

  // Nothing more will be read.
  void close() noexcept { store(this->view.consumer->session, session_ + 1); }
  bool producer_closed() const noexcept {
    const u32 session = load(this->view.producer->session);
    return layout::is_closed(session) && session != past_session_;
  }
  u64 dropped() const noexcept { return load(this->view.producer->dropped); }

 private:
  bool take_next() noexcept {
    const SlotState state = this->state(ready_);
    if (state == SlotState::corrupted) corrupted_ = true;
    if (state != SlotState::ready || corrupted_) return false;
    ++ready_;
    return true;
  }
  void publish() noexcept { store(this->view.consumer->head, static_cast<u64>(head_)); }

  Index head_ = 0;   // next message to release
  Index ready_ = 0;  // up to here the slots are known to be ready
  u32 session_ = 0;       // of this end
  u32 past_session_ = 0;  // the producer's when this end was attached, if it had left nothing
  bool corrupted_ = false;
};

using Consumer = BasicConsumer<>;

}  // namespace ringmem::ring
