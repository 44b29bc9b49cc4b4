// Python's side of the bridge's movers: addresses come in, and the GIL is released while copies run.
#include "ring/mover.hpp"

#include <cmath>
#include <string>

#include "bind/objects.hpp"

namespace ringmem::bind {
namespace {

using ring::Mover;
using ring::MoverThread;
using ring::u64;

void new_mover(Mover* self, NativeStream& stream, nb::object /*memory*/, u64 ring, u64 header,
               u64 device_header, u64 host_slots, u64 device_slots, u64 word, u64 capacity,
               u64 slot_nbytes, bool to_device, bool mapped, bool waits) {
  const ring::MoverPlaces places{reinterpret_cast<layout::RingHeader*>(ring),
                                 reinterpret_cast<layout::RingHeader*>(header),
                                 device_header,
                                 host_slots,
                                 device_slots,
                                 reinterpret_cast<u64*>(word),
                                 capacity,
                                 slot_nbytes,
                                 to_device,
                                 mapped,
                                 waits};
  new (self) Mover(stream.device->driver, stream.device->ordinal, stream.handle, places);
}

void new_thread(MoverThread* self, Mover& in, Mover& out, double interval_us) {
  if (!(interval_us >= 1) || interval_us > 1e12) {
    throw InvalidValue("interval_us=" + std::to_string(interval_us) + " must be 1 to 1e12");
  }
  const auto interval = std::chrono::nanoseconds(static_cast<std::int64_t>(interval_us * 1e3));
  new (self) MoverThread(in, out, interval);
}

}  // namespace

void bind_ring_bridge(nb::module_& m) {
  using released = nb::call_guard<ReleaseGil>;
  nb::enum_<ring::Index>(m, "RingIndex")
      .value("TAIL", ring::Index::tail)
      .value("HEAD", ring::Index::head);
  nb::class_<Mover>(m, "BridgeMover", "One direction of a bridge that copies.")
      .def("__init__", &new_mover, nb::arg("stream"), nb::arg("memory"), nb::arg("ring"),
           nb::arg("header"), nb::arg("device_header"), nb::arg("host_slots"),
           nb::arg("device_slots"), nb::arg("word"), nb::arg("capacity"), nb::arg("slot_nbytes"),
           nb::arg("to_device"), nb::arg("mapped"), nb::arg("waits"), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
      .def("flush", &Mover::flush, released())
      .def("device_index", &Mover::device_index, nb::arg("index"), released())
      .def("take_back", &Mover::take_back, released())
      .def("tell_head", &Mover::tell_head, nb::arg("head"), released())
      .def_prop_ro("moved", &Mover::moved);
  nb::class_<MoverThread>(m, "BridgeMoverThread", "Pushes and pulls at an interval.")
      .def("__init__", &new_thread, nb::arg("inward"), nb::arg("outward"), nb::arg("interval_us"),
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
      .def("check", &MoverThread::check)
      .def("stop", &MoverThread::stop, released());
}

}  // namespace ringmem::bind
