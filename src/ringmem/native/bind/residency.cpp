// Tagged memory for Python: an allocator that sleeps and wakes.
#include <nanobind/stl/optional.h>

#include "bind/mapping.hpp"
#include "mapping/resident.hpp"

namespace ringmem::bind {
namespace {

using namespace nb::literals;
using mapping::ArenaSizes;
using mapping::Backup;
using mapping::Residence;
using mapping::Resident;
using mapping::ResidentOptions;

// Calls `callback(done, total)` with the GIL, from a thread that has given it up. What it raises
// goes through the native code, which undoes what it did, and out again.
Resident::Report report_to(nb::handle callback) {
  if (callback.is_none()) return {};
  return [callback](std::size_t done, std::size_t total) {
    HoldGil acquire;
    call_or_park(callback, nb::int_(done), nb::int_(total));
  };
}

std::shared_ptr<Resident> create(const NativeDevice& device, const std::string& tag, int backup,
                                 std::size_t reserve_nbytes, std::size_t min_handle_nbytes,
                                 std::size_t slot_nbytes, std::size_t piece_nbytes,
                                 unsigned builders, std::size_t wake_step_nbytes) {
  ReleaseGil release;
  return Resident::create(
      device.driver,
      ResidentOptions{tag, static_cast<Backup>(backup),
                      PhysicalProps{Location{LocationKind::device, device.ordinal}},
                      reserve_nbytes, min_handle_nbytes, ArenaSizes{slot_nbytes, piece_nbytes, builders},
                      wake_step_nbytes});
}

const char* state_of(const Resident& self) {
  switch (self.state()) {
    case Residence::awake: return "awake";
    case Residence::sleeping: return "sleeping";
    case Residence::asleep: return "asleep";
    case Residence::waking: return "waking";
    case Residence::closed: return "closed";
  }
  return "";
}

}  // namespace

void bind_residency(nb::module_& m) {
  nb::class_<Resident, Allocator>(m, "Resident", "Memory of a tag, which sleeps and wakes.")
      .def_static("create", &create, "device"_a, "tag"_a, "backup"_a, "reserve_nbytes"_a,
                  "min_handle_nbytes"_a, "slot_nbytes"_a, "piece_nbytes"_a,
                  "builders"_a = 0, "wake_step_nbytes"_a = 0)
      .def(
          "sleep",
          [](Resident& self, const PlainStreams& streams, nb::handle report) {
            const Resident::Report call = report_to(report);
            ReleaseGil release;
            self.sleep(streams_of(streams), call);
          },
          "streams"_a, "report"_a.none())
      .def(
          "wake",
          [](Resident& self, nb::handle report) {
            const Resident::Report call = report_to(report);
            ReleaseGil release;
            self.wake(call);
          },
          "report"_a.none())
      .def("trim", &Resident::trim, nb::call_guard<ReleaseGil>())
      .def("close", &Resident::close, nb::call_guard<ReleaseGil>())
      .def("drop_backup", &Resident::drop_backup, nb::call_guard<ReleaseGil>())
      .def_prop_ro("state", &state_of)
      .def_prop_ro("ptr", &Resident::ptr)
      .def_prop_ro("reserved", &Resident::reserved)
      .def_prop_ro("live_nbytes", &Resident::live_nbytes)
      .def_prop_ro("committed", &Resident::committed)
      .def_prop_ro("extent", &Resident::extent)
      .def_prop_ro("backup_nbytes", &Resident::backup_nbytes)
      .def_prop_ro("arena_nbytes", &Resident::arena_nbytes);
}

}  // namespace ringmem::bind
