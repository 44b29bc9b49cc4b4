// Python's side of CPU ring kernels and of the watchdog. Nothing here is on the path of a message.
#include "ring/cpu_kernel.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <tuple>
#include <vector>

#include "bind/objects.hpp"
#include "driver/fork.hpp"
#include "ring/poller.hpp"
#include "ring/watchdog.hpp"

namespace ringmem::bind {
namespace {

using ring::u64;

// (control, telemetry, input, output, dead_letter), host addresses.
using Addresses = std::tuple<u64, u64, u64, u64, u64>;

ring::KernelPair pair_at(const Addresses& addresses) {
  const auto [control, telemetry, input, output, dead_letter] = addresses;
  return {reinterpret_cast<layout::ControlBlock*>(control),
          reinterpret_cast<layout::TelemetryBuffer*>(telemetry),
          reinterpret_cast<layout::RingHeader*>(input),
          reinterpret_cast<layout::RingHeader*>(output),
          reinterpret_cast<layout::RingHeader*>(dead_letter)};
}

std::vector<ring::KernelPair> pairs_at(const std::vector<Addresses>& addresses) {
  std::vector<ring::KernelPair> pairs;
  for (const Addresses& one : addresses) pairs.push_back(pair_at(one));
  return pairs;
}

std::chrono::nanoseconds nanoseconds(double seconds) {
  if (!(seconds >= 0)) throw InvalidValue("a time must be seconds from 0 on");
  return std::chrono::nanoseconds(static_cast<std::int64_t>(std::min(seconds, 1e9) * 1e9));
}

void new_kernel(ring::CpuKernel* self, u64 handler, bool lanes, std::size_t rings,
                std::size_t state_nbytes) {
  if (handler == 0) throw InvalidValue("handler=0 is no address of a function");
  ring::CpuHandler function;
  if (lanes) function.with_lanes = reinterpret_cast<ring::CpuHandler::WithLanes>(handler);
  else function.plain = reinterpret_cast<ring::CpuHandler::Plain>(handler);
  new (self) ring::CpuKernel(function, rings, state_nbytes);
}

// A registration with the watchdog. Not held by it: forget() ends it, as does the destructor.
class Watched {
 public:
  Watched(const std::vector<Addresses>& addresses, double stall_s)
      : id_(ring::Watchdog::instance().watch(pairs_at(addresses), nanoseconds(stall_s))) {}
  Watched(const Watched&) = delete;
  Watched& operator=(const Watched&) = delete;
  ~Watched() { forget(); }

  void forget() {
    if (!open_.exchange(false)) return;
    if (generation_ == fork_generation()) ring::Watchdog::instance().forget(id_);
  }
  ring::Watchdog::Rings stalled() const {
    if (!open_ || generation_ != fork_generation()) return {};
    return ring::Watchdog::instance().stalled(id_);
  }
  std::optional<ring::Watchdog::Rings> wait_for_change(const ring::Watchdog::Rings& known,
                                                       double timeout_s) const {
    const auto timeout = nanoseconds(timeout_s);
    ReleaseGil release;
    return ring::Watchdog::instance().wait_for_change(id_, known, timeout);
  }

 private:
  ring::Watchdog::Id id_;
  std::uint64_t generation_ = fork_generation();
  std::atomic<bool> open_{true};
};

}  // namespace

void bind_ring_kernel(nb::module_& m) {
  nb::class_<ring::CpuKernel>(m, "CpuKernel", "The threads of a ring kernel on the CPU.")
      .def("__init__", &new_kernel, nb::arg("handler"), nb::arg("lanes"), nb::arg("rings"),
           nb::arg("state_nbytes"))
      .def("start",
           [](ring::CpuKernel& self, const std::vector<Addresses>& pairs, double deadline_s) {
             const std::vector<ring::KernelPair> taken = pairs_at(pairs);
             const auto deadline_ns = static_cast<u64>(nanoseconds(deadline_s).count());
             ReleaseGil release;
             self.start(taken, deadline_ns);
           },
           nb::arg("pairs"), nb::arg("deadline_s"))
      .def("ended", &ring::CpuKernel::ended)
      .def("join",
           [](ring::CpuKernel& self, double timeout_s) {
             const auto timeout = nanoseconds(timeout_s);
             ReleaseGil release;
             return self.join(timeout);
           },
           nb::arg("timeout_s"))
      .def("state_ptr",
           [](ring::CpuKernel& self, std::size_t index) {
             return reinterpret_cast<std::uintptr_t>(self.state(index));
           },
           nb::arg("ring"))
      .def("fault", &ring::CpuKernel::fault, nb::arg("ring"));

  m.def("kernel_reset",
        [](const Addresses& pair, std::uint32_t heartbeat_timeout_ms) {
          ring::reset(pair_at(pair), heartbeat_timeout_ms);
        },
        nb::arg("pair"), nb::arg("heartbeat_timeout_ms"),
        "Prepare one pair for a launch: flags and telemetry at their start, kernel ends attached.");
  m.def("kernel_close_ends",
        [](const Addresses& pair) { ring::close_kernel_ends(pair_at(pair)); }, nb::arg("pair"),
        "After the end of a kernel: who waits for it sees that nothing more comes.");

  nb::class_<Watched>(m, "KernelWatch", "Heartbeats and progress of one running kernel.")
      .def(nb::init<const std::vector<Addresses>&, double>(), nb::arg("pairs"), nb::arg("stall_s"))
      .def("stalled", &Watched::stalled)
      .def("wait_for_change", &Watched::wait_for_change, nb::arg("known"), nb::arg("timeout_s"))
      .def("forget", &Watched::forget);
  bind_ring_measure(m);
}

}  // namespace ringmem::bind
