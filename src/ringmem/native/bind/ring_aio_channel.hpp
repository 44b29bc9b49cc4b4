// The awaited calls of one ring pair: what was sent and waits for its reply, and what waits for room.
// Message i of a ring is answered by reply i, so both are lines in order.
#pragma once

#include <deque>
#include <vector>

#include "bind/ring_aio.hpp"
#include "bind/ring_call.hpp"

namespace ringmem::bind {

using Replies = std::vector<ReplyObject*>;  // owned

class AsyncChannel {
 public:
  AsyncChannel(nb::object producer, nb::object consumer)
      : ends_(std::move(producer), std::move(consumer)) {}
  AsyncChannel(const AsyncChannel&) = delete;
  AsyncChannel& operator=(const AsyncChannel&) = delete;
  ~AsyncChannel();

  // Of one message: the bytes of the record, or of what it converts to, which `slow` keeps.
  const std::byte* record_of(PyObject* message, Records* slow);
  // Sends, or waits for room, and keeps `reply` until it is answered. No Python runs meanwhile: the
  // message and its reply take the same place in both lines.
  void post(const std::byte* record, ReplyObject* reply);
  // Takes the replies that are there into `finished`; returns whether there were any.
  bool take_replies(Replies& finished);
  // Everybody who waits gets the error, but for those whose replies came before it.
  void fail(nb::handle error, Replies& finished);

  std::size_t pending() const noexcept { return pending_.size(); }
  bool waits_for_room() const noexcept {
    return !waiting_.empty() && ends_.producer->takes_calls.load();
  }
  // Calls wait whose replies nobody will write.
  bool at_its_end() const noexcept {
    return !pending_.empty() && ends_.consumer->endpoint.producer_closed();
  }
  const ring::Consumer& reader() const noexcept { return ends_.consumer->endpoint; }
  const ring::Producer& writer() const noexcept { return ends_.producer->endpoint; }

 private:
  std::size_t sent() const noexcept { return pending_.size() - waiting_.size(); }
  void send(const std::byte* record);
  void send_waiting();
  void finish(const layout::Line* slot, ReplyObject* reply);

  CallChannel ends_;
  std::deque<ReplyObject*> pending_;  // owned; oldest first; sent, then the ones of `waiting_`
  std::deque<std::vector<std::byte>> waiting_;  // messages that found the ring full
};

// The Python error in flight, which is none any more; normalized. A new reference.
PyObject* take_error() noexcept;

}  // namespace ringmem::bind
