// Growable and sparse buffers for Python, and the switches of the mapping thread.
#include "bind/mapping.hpp"
#include "mapping/recycler.hpp"
#include "mapping/worker.hpp"

namespace ringmem::bind {
namespace {

using namespace nb::literals;
using mapping::Growable;
using mapping::GrowableOptions;
using mapping::PageRun;
using mapping::Recycler;
using mapping::Sparse;
using mapping::SparseOptions;
using mapping::Worker;

using PlainRuns = std::vector<std::pair<std::size_t, std::size_t>>;  // first page, pages

std::vector<PageRun> runs_of(const PlainRuns& plain) {
  std::vector<PageRun> runs;
  for (const auto& [first, count] : plain) runs.push_back({first, count});
  return runs;
}

PhysicalProps props_of(const NativeDevice& device, bool shareable) {
  return PhysicalProps{Location{LocationKind::device, device.ordinal}, shareable, false};
}

void bind_growable(nb::module_& m) {
  nb::class_<Growable>(m, "Growable", "Memory that grows in place, in bytes.")
      .def_static(
          "create",
          [](const NativeDevice& device, std::size_t max_nbytes, const PlainGrants& grants,
             bool shareable, std::size_t max_handle_nbytes) {
            ReleaseGil release;
            return Growable::create(device.driver,
                                    GrowableOptions{max_nbytes, props_of(device, shareable),
                                                    grants_of(grants), max_handle_nbytes});
          },
          "device"_a, "max_nbytes"_a, "grants"_a, "shareable"_a, "max_handle_nbytes"_a)
      .def_static(
          "attach",
          [](const NativeDevice& device, const std::vector<std::pair<int, std::size_t>>& parts,
             const PlainGrants& grants) {
            ReleaseGil release;
            std::vector<PhysicalRef> memories;
            for (const auto& [fd, nbytes] : parts) {
              memories.push_back(
                  PhysicalMemory::import_fd(device.driver, fd, nbytes, props_of(device, true)));
            }
            return Growable::adopt(std::move(memories), grants_of(grants));
          },
          "device"_a, "parts"_a, "grants"_a)
      // A step of the books that waits for nothing, so it keeps the GIL.
      .def("resize_in_place", &Growable::resize_in_place, "nbytes"_a)
      .def(
          "resize",
          [](Growable& self, std::size_t nbytes, const PlainStreams& streams) {
            ReleaseGil release;
            self.resize(nbytes, streams_of(streams));
          },
          "nbytes"_a, "streams"_a)
      .def("grow", &Growable::grow, "nbytes"_a, nb::call_guard<ReleaseGil>())
      .def("reserve_ahead", &Growable::reserve_ahead, "nbytes"_a,
           nb::call_guard<ReleaseGil>())
      .def(
          "set_access",
          [](Growable& self, const PlainGrants& grants) {
            ReleaseGil release;
            self.set_access(grants_of(grants));
          },
          "grants"_a)
      .def("settle", &Growable::settle, nb::call_guard<ReleaseGil>())
      .def("pin", &Growable::pin, "nbytes"_a)
      .def("unpin", &Growable::unpin, "nbytes"_a)
      .def(
          "close",
          [](Growable& self, const PlainStreams& streams) {
            ReleaseGil release;
            self.close(streams_of(streams));
          },
          "streams"_a)
      .def(
          "abandon",
          [](Growable& self, const PlainStreams& streams) {
            ReleaseGil release;
            self.abandon(streams_of(streams));
          },
          "streams"_a)
      .def("memories", &Growable::memories, nb::call_guard<ReleaseGil>())
      .def_prop_ro("ptr", &Growable::ptr)
      .def_prop_ro("nbytes", &Growable::nbytes)
      .def_prop_ro("committed", &Growable::committed)
      .def_prop_ro("reserved", &Growable::reserved)
      .def_prop_ro("granularity", &Growable::granularity)
      .def_prop_ro("handles", &Growable::handles, nb::call_guard<ReleaseGil>())
      .def_prop_ro("worker_status",
                   [](const Growable& self) { return static_cast<int>(self.worker_status()); })
      .def_prop_ro("closed", &Growable::closed);
}

void bind_sparse(nb::module_& m) {
  nb::class_<Sparse>(m, "Sparse", "Memory with holes, in pages.")
      .def_static(
          "create",
          [](const NativeDevice& device, std::size_t nbytes, std::size_t page_nbytes,
             const PlainGrants& grants, bool shareable, bool read_zero, std::size_t cache_nbytes) {
            ReleaseGil release;
            return Sparse::create(device.driver,
                                  SparseOptions{nbytes, page_nbytes, props_of(device, shareable),
                                                grants_of(grants), read_zero, cache_nbytes});
          },
          "device"_a, "nbytes"_a, "page_nbytes"_a, "grants"_a, "shareable"_a, "read_zero"_a,
          "cache_nbytes"_a)
      .def(
          "map",
          [](Sparse& self, const PlainRuns& runs) {
            ReleaseGil release;
            self.map(runs_of(runs));
          },
          "runs"_a)
      .def(
          "unmap",
          [](Sparse& self, const PlainRuns& runs, const PlainStreams& streams) {
            ReleaseGil release;
            self.unmap(runs_of(runs), streams_of(streams));
          },
          "runs"_a, "streams"_a)
      .def("settle", &Sparse::settle, nb::call_guard<ReleaseGil>())
      .def(
          "pin",
          [](Sparse& self, std::size_t first, std::size_t count) {
            ReleaseGil release;
            self.pin({first, count});
          },
          "first"_a, "count"_a)
      .def(
          "unpin",
          [](Sparse& self, std::size_t first, std::size_t count) {
            ReleaseGil release;
            self.unpin({first, count});
          },
          "first"_a, "count"_a)
      .def(
          "close",
          [](Sparse& self, const PlainStreams& streams) {
            ReleaseGil release;
            self.close(streams_of(streams));
          },
          "streams"_a)
      .def(
          "abandon",
          [](Sparse& self, const PlainStreams& streams) {
            ReleaseGil release;
            self.abandon(streams_of(streams));
          },
          "streams"_a)
      .def("runs",
           [](const Sparse& self) {
             PlainRuns runs;
             for (const PageRun& run : self.runs()) runs.emplace_back(run.first, run.count);
             return runs;
           })
      .def_prop_ro("ptr", &Sparse::ptr)
      .def_prop_ro("nbytes", &Sparse::nbytes)
      .def_prop_ro("page_nbytes", &Sparse::page_nbytes)
      .def_prop_ro("page_count", &Sparse::page_count)
      .def_prop_ro("mapped_pages", &Sparse::mapped_pages)
      .def_prop_ro("committed", &Sparse::committed)
      .def_prop_ro("worker_status",
                   [](const Sparse& self) { return static_cast<int>(self.worker_status()); })
      .def_prop_ro("closed", &Sparse::closed);
}

}  // namespace

void bind_mapping_buffers(nb::module_& m) {
  bind_growable(m);
  bind_sparse(m);
  m.def("set_recycle_limit", &Recycler::set_limit, "nbytes"_a);
  m.def("recycle_limit", &Recycler::limit);
  m.def("mapping_thread_running", &Worker::running);
  m.def("finish_mapping_thread", &Worker::finish, nb::call_guard<ReleaseGil>());
}

}  // namespace ringmem::bind
