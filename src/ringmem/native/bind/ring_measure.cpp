// Python's side of the verified echo figures.
#include "ring/measure.hpp"

#include <nanobind/stl/tuple.h>

#include <tuple>

#include "bind/ring.hpp"

namespace ringmem::bind {
namespace {

using ring::u64;

struct Ends {
  Ends(NativeProducer& producer, NativeConsumer& consumer) : sending(producer), receiving(consumer) {
    const auto nbytes = producer.endpoint.geometry().message_nbytes;
    if (nbytes % 8 != 0 || nbytes != consumer.endpoint.geometry().message_nbytes) {
      throw InvalidValue("an echo has messages and replies of the same number of 8-byte words");
    }
    if (producer.endpoint.tail() != consumer.endpoint.head()) {
      throw InvalidValue("replies of earlier messages are unread; recv() them first");
    }
  }
  Use<ring::Producer> sending;
  Use<ring::Consumer> receiving;
};

void require_complete(const ring::EchoResult& result, u64 count) {
  if (result.complete) return;
  throw TimedOut("the echo stopped after " + std::to_string(result.messages) + " of " +
                 std::to_string(count) + " messages");
}

// (times in ns as bytes of uint32, wrong words)
nb::tuple round_trips(NativeProducer& producer, NativeConsumer& consumer, u64 count) {
  const Ends ends(producer, consumer);
  std::vector<ring::u32> times;
  ring::EchoResult result;
  {
    ReleaseGil release;
    result = ring::measure_round_trips(producer.endpoint, consumer.endpoint, count, times);
  }
  require_complete(result, count);
  return nb::make_tuple(nb::bytes(reinterpret_cast<const char*>(times.data()), times.size() * 4),
                        result.wrong_words);
}

// (seconds, wrong words)
std::tuple<double, u64> stream(NativeProducer& producer, NativeConsumer& consumer, u64 count,
                               u64 batch, bool in_place) {
  const Ends ends(producer, consumer);
  if (batch == 0 || batch > producer.endpoint.capacity()) {
    throw InvalidValue("batch=" + std::to_string(batch) + " must be 1 to the ring's capacity");
  }
  ring::EchoResult result;
  {
    ReleaseGil release;
    const auto measure = in_place ? ring::measure_stream : ring::measure_copies;
    result = measure(producer.endpoint, consumer.endpoint, count, batch);
  }
  require_complete(result, count);
  return {static_cast<double>(result.seconds_ns) * 1e-9, result.wrong_words};
}

}  // namespace

void bind_ring_measure(nb::module_& m) {
  m.def("echo_handler",
        [](u64 words) { return reinterpret_cast<std::uintptr_t>(ring::echo_handler(words)); },
        nb::arg("words"), "Address of the echo of the figures on the CPU; 0 for other sizes.");
  m.def("measure_round_trips", &round_trips, nb::arg("producer"), nb::arg("consumer"),
        nb::arg("count"));
  m.def("measure_stream", &stream, nb::arg("producer"), nb::arg("consumer"), nb::arg("count"),
        nb::arg("batch"), nb::arg("in_place") = true);
}

}  // namespace ringmem::bind
