// One ring pair as Python calls it: a message in, its reply out.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "bind/numpy_scalar.hpp"
#include "bind/ring.hpp"

namespace ringmem::bind {

// A call that waits longer than this gives the GIL away. Giving it away and taking it back costs
// about 0.1 µs where nobody wants it, and up to 5 ms where somebody does; a GPU answers in 2 µs.
inline constexpr std::chrono::nanoseconds gil_hold{5'000};

// Both host ends of one ring pair. Calls from several threads take turns.
struct CallChannel {
  CallChannel(nb::object producer_object, nb::object consumer_object)
      : producer(nb::cast<NativeProducer*>(producer_object)),
        consumer(nb::cast<NativeConsumer*>(consumer_object)),
        message(producer->message),
        reply(consumer->message),
        keep_producer(std::move(producer_object)),
        keep_consumer(std::move(consumer_object)),
        scratch(reply.nbytes()) {}

  // Messages whose replies nobody has taken yet, beside the ones given up by calls in vain.
  // A figure where another thread is at work on either end: never below none.
  std::uint64_t unread() const {
    const std::uint64_t abandoned = consumer->abandoned;
    const auto answers =
        static_cast<std::uint64_t>(producer->endpoint.tail() - consumer->endpoint.head());
    return answers - std::min(answers, abandoned);
  }

  NativeProducer* producer;
  NativeConsumer* consumer;
  RecordFormat message, reply;
  nb::object keep_producer, keep_consumer;
  std::vector<std::byte> scratch;  // one reply
  std::timed_mutex turn;
  std::atomic<pthread_t> caller{};  // whose turn it is
};

// The number of a ring, of so many; throws InvalidValue.
inline std::size_t ring_index(PyObject* ring, std::size_t rings) {
  const Py_ssize_t index = PyNumber_AsSsize_t(ring, nullptr);  // clips
  if (index == -1 && PyErr_Occurred()) PyErr_Clear();          // which is no ring either
  if (index >= 0 && static_cast<std::size_t>(index) < rings) [[likely]] {
    return static_cast<std::size_t>(index);
  }
  throw InvalidValue("ring=" + std::string(nb::repr(nb::handle(ring)).c_str()) + " must be 0 to " +
                     std::to_string(rings - 1));
}

}  // namespace ringmem::bind
