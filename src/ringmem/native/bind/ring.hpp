// What the ring's binding files share: Python's side of the endpoints, and waiting without the GIL.
#pragma once

#include <atomic>
#include <chrono>
#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>

#include "bind/numpy_array.hpp"
#include "bind/objects.hpp"
#include "driver/fork.hpp"
#include "ring/consumer.hpp"
#include "ring/process.hpp"
#include "ring/producer.hpp"
#include "ring/wait.hpp"

namespace ringmem::bind {

// The time given was up: ringmem.native.errors.TimeoutError.
class TimedOut : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// An object that serves one thread at a time was used from a second one: RingmemError.
class InUse : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Spins without the GIL for `spin_us`, then parks. Not to be called with the GIL released.
struct WaitSettings {
  std::atomic<double> spin_us{50};  // < 0: never park
  ring::WaitPolicy policy() const {
    const double us = spin_us.load(std::memory_order_relaxed);
    if (us < 0) return {std::chrono::nanoseconds::max()};
    return {std::chrono::nanoseconds(static_cast<std::int64_t>(us * 1000))};
  }
};

inline double checked_spin_us(double spin_us) {
  if (std::isnan(spin_us) || spin_us > 1e9) {
    throw InvalidValue("spin_us=" + std::to_string(spin_us) +
                       " must be microseconds up to 1e9, or negative to spin for good");
  }
  return spin_us;
}

inline ring::Clock::time_point deadline_of(std::optional<double> timeout_s) {
  if (!timeout_s.has_value()) return ring::Clock::time_point::max();
  if (std::isnan(*timeout_s) || *timeout_s < 0) {
    throw InvalidValue("timeout_s=" + std::to_string(*timeout_s) +
                       " must be seconds from 0 on, or None to wait for good");
  }
  if (*timeout_s > 1e9) return ring::Clock::time_point::max();
  return ring::Clock::now() + std::chrono::nanoseconds(static_cast<std::int64_t>(*timeout_s * 1e9));
}

// Waits without the GIL. Every 20 ms it comes back for signals (Ctrl-C), and calls
// `still_worth_it()` with the GIL, which throws if the wait can never end.
// True: ready; false: the deadline passed.
template <class Ready, class StillWorthIt>
bool wait_for(const Ready& ready, const WaitSettings& settings, ring::Clock::time_point deadline,
              const StillWorthIt& still_worth_it) {
  if (ready()) return true;
  ring::WaitPolicy policy = settings.policy();
  for (;;) {
    const auto now = ring::Clock::now();
    if (now >= deadline) return false;
    const auto slice = std::min(deadline, now + std::chrono::milliseconds(20));
    bool got = false;
    {
      ReleaseGil release;
      got = ring::wait_until(ready, policy, slice);
    }
    if (got) return true;
    if (or_park([] { return PyErr_CheckSignals(); }) != 0) throw nb::python_error();
    try {
      still_worth_it();
    } catch (...) {
      if (ready()) return true;  // what was waited for came just before the end
      throw;
    }
    if (settings.spin_us >= 0) policy.spin = std::chrono::nanoseconds(0);
  }
}

// A number that one thread at a time writes and any may read, at the cost of a plain one.
class Count {
 public:
  operator std::uint64_t() const noexcept { return value_.load(std::memory_order_relaxed); }
  Count& operator=(std::uint64_t value) noexcept {
    value_.store(value, std::memory_order_relaxed);
    return *this;
  }
  Count& operator+=(std::uint64_t by) noexcept { return *this = *this + by; }
  Count& operator++() noexcept { return *this += 1; }
  Count& operator--() noexcept { return *this = *this - 1; }

 private:
  std::atomic<std::uint64_t> value_{0};
};

// One end of a ring, with what Python adds: the owner of the memory, the dtype of its messages,
// one thread at a time, close(), and the fork check.
template <class Endpoint>
struct NativeEndpoint {
  NativeEndpoint(const ring::RingView& view, nb::object memory_owner, nb::object message_dtype)
      : endpoint(view), view(view), owner(std::move(memory_owner)), message(std::move(message_dtype)) {}
  ~NativeEndpoint() { close(); }

  // Idempotent, and what the destructor does: the peer sees the end. A fork's copy only forgets.
  void close() noexcept {
    if (closed.exchange(true) || generation != fork_generation()) return;
    endpoint.close();
    if constexpr (std::is_same_v<Endpoint, ring::Producer>) ring::sign(*view.producer, {});
    else ring::sign(*view.consumer, {});
  }

  Endpoint endpoint;
  ring::RingView view;
  nb::object owner;
  nb::object message;  // numpy.dtype of one message
  // Called every 20 ms of a wait; raises what makes it hopeless.
  nb::object get_on_wait() const {
    const nb::ft_lock_guard lock(on_wait_mutex_);
    return on_wait_;
  }
  void set_on_wait(nb::object on_wait) {
    const nb::ft_lock_guard lock(on_wait_mutex_);
    std::swap(on_wait_, on_wait);
  }

  WaitSettings wait;
  // Of a consumer: the oldest replies, which nobody waits for any more, and those that an event loop
  // waits for. Written by whoever has the endpoint, read by others too.
  Count abandoned;
  Count awaited;
  // Of a consumer: slots from the head on that the last poll() showed and nobody released yet.
  Count shown;
  // Of a producer: messages of an event loop that wait for room. Nothing may go ahead of them.
  Count queued;
  // Of a producer: whether somebody is there who answers.
  std::atomic<bool> takes_calls{true};
  std::uint64_t generation = fork_generation();
  std::atomic<bool> busy{false};
  std::atomic<bool> closed{false};

 private:
  nb::object on_wait_ = nb::none();
  mutable nb::ft_mutex on_wait_mutex_;  // nothing with a GIL
};

using NativeProducer = NativeEndpoint<ring::Producer>;
using NativeConsumer = NativeEndpoint<ring::Consumer>;

template <class Endpoint>
void require_process(const NativeEndpoint<Endpoint>& native) {
  if (native.generation != fork_generation()) {
    throw Closed("the endpoint belongs to the parent process; a fork must attach one of its own");
  }
}

// Holds an endpoint for the time of one call.
template <class Endpoint>
class Use {
 public:
  explicit Use(NativeEndpoint<Endpoint>& native) : native_(native) {
    if (native.closed.load(std::memory_order_relaxed)) throw Closed("the endpoint is closed");
    require_process(native);
    if (native.busy.exchange(true, std::memory_order_acquire)) {
      throw InUse("another thread is using this endpoint; it serves one thread at a time");
    }
    if (native.closed.load(std::memory_order_relaxed)) [[unlikely]] {  // since the first look
      native.busy.store(false, std::memory_order_release);
      throw Closed("the endpoint is closed");
    }
  }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;
  ~Use() { native_.busy.store(false, std::memory_order_release); }

 private:
  NativeEndpoint<Endpoint>& native_;
};

template <class Endpoint>
void ask_on_wait(const NativeEndpoint<Endpoint>& native) {
  if (const nb::object on_wait = native.get_on_wait(); !on_wait.is_none()) {
    or_park([&] { on_wait(); });
  }
}

inline constexpr const char* bad_head = "the consumer's index is impossible";
inline constexpr const char* bad_line = "a line carries a sequence that does not belong there";

template <class Endpoint>
void require_sound(const NativeEndpoint<Endpoint>& native, const char* what) {
  if (native.endpoint.corrupted()) [[unlikely]] {
    throw ring::Corrupted(std::string("the ring's memory is damaged: ") + what +
                          "; no message beyond it can be trusted");
  }
}

// A call that waits for room has its place in the order already.
inline void require_nothing_queued(const NativeProducer& native) {
  if (native.queued == 0) [[likely]] return;
  ask_on_wait(native);  // which gives up the calls of a loop that was closed
  if (native.queued == 0) return;
  throw InvalidValue(std::to_string(native.queued) + " awaited calls of an event loop wait for room "
                     "on this ring, and nothing may go ahead of them; await them first, send on "
                     "another ring, or give them up with kernel.aio.close()");
}

// Replies that an event loop waits for are not for others.
inline void require_not_awaited(const NativeConsumer& native) {
  if (native.awaited == 0) [[likely]] return;
  ask_on_wait(native);
  if (native.awaited == 0) return;
  throw InvalidValue("an event loop waits for " + std::to_string(native.awaited) + " replies of this "
                     "ring; use another ring, or give these up with kernel.aio.close()");
}

// Who asks for the answer of a kernel that was told to end would wait for the next one's.
inline void require_takes_calls(const NativeProducer& native) {
  if (native.takes_calls.load(std::memory_order_relaxed)) [[likely]] return;
  ask_on_wait(native);  // knows better where the kernel failed or ended
  throw Closed("the kernel is not up yet, or was told to end; it takes no calls");
}

// The records behind `batch`: a C-contiguous array of the message dtype as it is, anything else
// through the Python converter, which raises the typed error for a batch that does not fit.
struct Records {
  std::byte* data = nullptr;
  std::uint64_t size = 0;
  nb::object keep;
};
Records records_of(nb::handle batch, nb::handle message);
Records writable_records_of(nb::handle array, nb::handle message, const char* name = "out");

// As set_python_error, with the exceptions of rings too.
void set_ring_error() noexcept;

// Waits for `wanted` free slots; throws what makes that hopeless. False: timed out.
bool wait_for_slots(NativeProducer& self, ring::u64 wanted, ring::Clock::time_point deadline);
// Drops the replies that nobody waits for any more, as far as they are there; they are the oldest.
// True: none is to come, and what is there is for the reader.
bool settle(NativeConsumer& self) noexcept;
// Waits for one message for the reader. False: timed out. Throws Closed when the producer closed and
// none is left.
bool wait_for_message(NativeConsumer& self, ring::Clock::time_point deadline);

}  // namespace ringmem::bind
