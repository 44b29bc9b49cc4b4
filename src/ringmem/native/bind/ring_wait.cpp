// Waiting for the other end of a ring: for room, and for messages; and what makes that hopeless.
#include <thread>

#include "bind/ring.hpp"

namespace ringmem::bind {
namespace {

// The peer closed. Where it is a kernel, whoever ended it is about to write down why: `on_wait` is
// given a moment to say it better than `text` does.
template <class Endpoint>
[[noreturn]] void raise_end(const NativeEndpoint<Endpoint>& self, const char* text) {
  for (int look = 0; look < 100 && !self.get_on_wait().is_none(); ++look) {
    ask_on_wait(self);
    const ReleaseGil released;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  throw Closed(text);
}

}  // namespace

bool wait_for_slots(NativeProducer& self, ring::u64 wanted, ring::Clock::time_point deadline) {
  const auto& endpoint = self.endpoint;
  const auto hopeless = [&] {
    if (self.closed.load()) throw Closed("the producer was closed while it waited");
    ask_on_wait(self);
    if (endpoint.consumer_closed()) raise_end(self, "the consumer closed the ring");
    const ring::ProcessId peer = ring::signature(*self.view.consumer);
    if (ring::is_alive(peer)) return;
    throw Closed("the consumer's process " + std::to_string(peer.pid) + " ended without closing");
  };
  while (wait_for([&] { return endpoint.would_reserve(wanted); }, self.wait, deadline, hopeless)) {
    if (self.endpoint.free_slots(wanted) >= wanted) return true;
    require_sound(self, bad_head);
    hopeless();  // or it was closed, and is open again
  }
  return false;
}

bool settle(NativeConsumer& self) noexcept {
  while (self.abandoned != 0 && self.endpoint.poll(1).size() != 0) {
    self.endpoint.release(1);
    --self.abandoned;
  }
  return self.abandoned == 0;
}

bool wait_for_message(NativeConsumer& self, ring::Clock::time_point deadline) {
  const auto& endpoint = self.endpoint;
  const auto hopeless = [&] {
    if (self.closed.load()) throw Closed("the consumer was closed while it waited");
    ask_on_wait(self);
    const ring::ProcessId peer = ring::signature(*self.view.producer);
    if (ring::is_alive(peer)) return;
    throw Closed("the producer's process " + std::to_string(peer.pid) + " ended without closing");
  };
  while (wait_for([&] { return endpoint.would_receive(); }, self.wait, deadline, hopeless)) {
    // Closed is stored after the last message, so a look after it has seen that message.
    const bool closed = endpoint.producer_closed();
    if (settle(self) && self.endpoint.poll(1).size() != 0) return true;
    require_sound(self, bad_line);
    if (closed) raise_end(self, "the producer closed the ring and every message was received");
    // It was closed, and opened again meanwhile: a kernel that was restarted.
  }
  return false;
}

}  // namespace ringmem::bind
