// The native replay of traces, for `ringmem replay`: any native allocator, progress that another
// thread can read, and what was reserved at every event. On the device of a LateDriver, completions
// come late.
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <exception>
#include <functional>
#include <utility>

#include "bind/pool.hpp"
#include "memory/driver_pool.hpp"
#include "pool/late_driver.hpp"
#include "pool/replay.hpp"

namespace ringmem::bind {
namespace {

template <class T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::vector<TraceEvent> events_of(const Array<std::uint8_t>& kind, const Array<std::uint32_t>& id,
                                  const Array<std::uint64_t>& size,
                                  const Array<std::uint8_t>& stream) {
  const std::size_t count = kind.shape(0);
  if (id.shape(0) != count || size.shape(0) != count || stream.shape(0) != count) {
    throw InvalidValue("the arrays of the trace differ in length");
  }
  std::vector<TraceEvent> events(count);
  for (std::size_t i = 0; i < count; ++i) {
    events[i] = {static_cast<TraceKind>(kind.data()[i]), stream.data()[i], 0, id.data()[i],
                 size.data()[i]};
  }
  return events;
}

struct Cancelled : std::exception {};

// One run of a trace, in whichever thread Python calls run(); others read `position` or cancel.
class Replay {
 public:
  Replay(DeviceRef device, std::shared_ptr<Allocator> allocator, std::vector<TraceEvent> events,
         std::vector<StreamHandle> streams)
      : device_(std::move(device)), allocator_(std::move(allocator)), events_(std::move(events)),
        streams_(std::move(streams)) {}

  std::uint64_t position() const { return position_.load(); }
  void cancel() { cancelled_ = true; }

  nb::dict run(int repetitions, int threads, bool series) {
    ReplayOptions options;
    options.streams = streams_;
    options.repetitions = repetitions;
    options.threads = threads;
    measure(options, series && threads == 1);
    auto* late = dynamic_cast<LateDriver*>(device_->driver.get());
    options.tick = [this, late](std::uint64_t) {
      position_.fetch_add(1, std::memory_order_relaxed);
      if (cancelled_.load(std::memory_order_relaxed)) throw Cancelled();
      if (late) late->tick();
    };
    ReplayResult result;
    {
      ReleaseGil release;
      result = replay(*allocator_, events_, options);
    }
    return as_dict(result);
  }

 private:
  void measure(ReplayOptions& options, bool series) {
    std::function<std::size_t()> reserved;
    if (auto* pool = dynamic_cast<Pool*>(allocator_.get())) {
      reserved = [pool] { return pool->reserved(); };
      options.driver_calls = [pool] { return pool->statistics().driver_calls; };
    } else if (auto* own = dynamic_cast<DriverPool*>(allocator_.get())) {
      reserved = [own] {
        std::uint64_t nbytes = 0;
        (void)own->driver()->pool_get(own->device(), own->handle(),
                                      PoolAttribute::reserved_current, &nbytes);
        return static_cast<std::size_t>(nbytes);
      };
    }
    if (!reserved) return;
    if (!series) {
      options.reserved = std::move(reserved);
      return;
    }
    options.reserved = [this, reserved = std::move(reserved)] {
      const std::size_t nbytes = reserved();
      series_.push_back(nbytes);
      return nbytes;
    };
  }

  nb::dict as_dict(const ReplayResult& result) {
    nb::dict d;
    d["events"] = result.events;
    d["peak_live_bytes"] = result.peak_live;
    d["peak_reserved_bytes"] = result.peak_reserved;
    d["completed"] = result.completed;
    d["failed_event"] = result.failed_event;
    d["error"] = result.error;
    nb::list repetitions;
    for (const ReplayRepetition& one : result.repetitions) {
      nb::dict r;
      r["operations"] = one.operations;
      r["driver_calls"] = one.driver_calls;
      r["seconds"] = one.seconds;
      r["mean"] = one.mean_ns;
      r["p50"] = one.p50_ns;
      r["p99"] = one.p99_ns;
      r["max"] = one.max_ns;
      repetitions.append(r);
    }
    d["repetitions"] = repetitions;
    nb::list series;
    for (const std::size_t nbytes : series_) series.append(nbytes);
    d["reserved"] = series;
    return d;
  }

  DeviceRef device_;
  std::shared_ptr<Allocator> allocator_;
  std::vector<TraceEvent> events_;
  std::vector<StreamHandle> streams_;
  std::vector<std::size_t> series_;
  std::atomic<std::uint64_t> position_{0};
  std::atomic<bool> cancelled_{false};
};

}  // namespace

void bind_pool_replay(nb::module_& m) {
  nb::class_<Replay>(m, "Replay", "A replay of a trace on a native allocator.")
      .def("__init__", [](Replay* self, DeviceRef device, nb::handle allocator,
                          Array<std::uint8_t> kind, Array<std::uint32_t> id,
                          Array<std::uint64_t> size, Array<std::uint8_t> stream,
                          std::vector<StreamHandle> streams) {
        if (streams.empty()) throw InvalidValue("streams is empty: give one at least");
        auto native = allocator_of(allocator, *device);
        new (self) Replay(std::move(device), std::move(native), events_of(kind, id, size, stream),
                          std::move(streams));
      }, nb::arg("device"), nb::arg("allocator"), nb::arg("kind"), nb::arg("id"), nb::arg("size"),
           nb::arg("stream"), nb::arg("streams"))
      .def_prop_ro("position", &Replay::position, "int: events done, over all repetitions.")
      .def("cancel", &Replay::cancel, "run() ends with an error at its next event.")
      .def("run", &Replay::run, nb::arg("repetitions") = 1, nb::arg("threads") = 1,
           nb::arg("series") = false,
           nb::sig("def run(self, repetitions: int = 1, threads: int = 1, series: bool = False) "
                   "-> dict[str, object]"));
  nb::class_<LateDriver, Driver>(m, "LateDriver",
                                 "A driver whose events complete ticks of a replay later.")
      .def("__init__", [](LateDriver* self, DriverRef inner, std::uint64_t late) {
        new (self) LateDriver(std::move(inner), late);
      }, nb::arg("inner"), nb::arg("late"));
}

}  // namespace ringmem::bind
