// What a pool tells: figures, what lives, what debug mode found, and that memory is out.
#include "bind/pool.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdio>
#include <utility>

namespace ringmem::bind {
namespace {

nb::dict as_dict(const PoolStatistics& s) {
  nb::dict d;
  d["requested"] = s.requested;
  d["allocated"] = s.allocated;
  d["reserved"] = s.reserved;
  d["cached"] = s.cached;
  d["live"] = s.live;
  d["peak_requested"] = s.peak_requested;
  d["peak_allocated"] = s.peak_allocated;
  d["peak_reserved"] = s.peak_reserved;
  d["largest_free_block"] = s.largest_free_block;
  d["allocations"] = s.allocations;
  d["frees"] = s.frees;
  d["hits"] = s.hits;
  d["misses"] = s.misses;
  d["returns"] = s.returns;
  d["retries"] = s.retries;
  d["driver_calls"] = s.driver_calls;
  d["device_waits"] = s.device_waits;
  d["handles_created"] = s.handles_created;
  d["handles_released"] = s.handles_released;
  d["remaps"] = s.remaps;
  d["remapped"] = s.remapped;
  d["growth_ns"] = s.growth_ns;
  d["remap_ns"] = s.remap_ns;
  return d;
}

// --- memory is out -------------------------------------------------------------------------------

constexpr std::size_t named_holders = 5;

std::vector<DebugAllocator::LiveBlock> blocks_of(const Pool& pool, const DebugAllocator* debug,
                                                 std::size_t most = ~std::size_t{0}) {
  if (debug) return debug->live_blocks();
  std::vector<DebugAllocator::LiveBlock> blocks;
  for (const Pool::LiveBlock& block : pool.live_blocks(most)) {
    blocks.push_back({block.ptr, block.nbytes, {}});
  }
  return blocks;
}

// "64000000 bytes at 0x7f…", and in debug mode "of model.py:12", the largest live blocks first.
nb::list holders_of(const Pool& pool, const DebugAllocator* debug) {
  auto blocks = blocks_of(pool, debug);
  const std::size_t most = std::min(blocks.size(), named_holders);
  std::partial_sort(blocks.begin(), blocks.begin() + static_cast<std::ptrdiff_t>(most),
                    blocks.end(),
                    [](const auto& a, const auto& b) { return a.nbytes > b.nbytes; });
  nb::list names;
  for (std::size_t i = 0; i < most; ++i) {
    char text[64];
    snprintf(text, sizeof text, "%zu bytes at 0x%llx", blocks[i].nbytes,
             static_cast<unsigned long long>(blocks[i].ptr));
    const std::string& place = blocks[i].allocated_at;
    names.append(place.empty() ? std::string(text) : text + (" of " + place));
  }
  return names;
}

// Memory is out: asks the Python object, if it is still there, and leaves on this thread what the
// error should say should it come to that.
bool ask(const Pool& pool, const DebugAllocator* debug, nb::handle weak, std::size_t requested,
         const PoolStatistics& now) {
  nb::object self = weak();
  if (self.is_none()) return false;
  bool again = false;
  nb::object cause = nb::none();
  try {
    const nb::object method = self.attr("_ask");
    const nb::object answer = call_or_park(method, nb::int_(requested), as_dict(now));
    again = nb::cast<bool>(answer[0]);
    cause = answer[1];
  } catch (nb::python_error& error) {
    cause = nb::borrow(error.value());
  }
  explain_out_of_memory(requested, std::move(cause), holders_of(pool, debug));
  return again;
}

void connect_callbacks(nb::handle_t<NativePool> self) {
  NativePool& native = *nb::inst_ptr<NativePool>(self);
  PyObject* reference = PyWeakref_NewRef(self.ptr(), nullptr);
  if (!reference) nb::raise_python_error();
  std::shared_ptr<PyObject> weak(reference, [](PyObject* held) {
    if (!nb::is_alive()) return;
    const HoldGil gil;
    Py_DECREF(held);
  });
  native.callbacks.push_back(native.pool->add_callback(
      [weak, pool = native.pool.get(), debug = native.debug.get()](std::size_t requested,
                                                                   const PoolStatistics& now) {
        if (!nb::is_alive()) return false;
        const HoldGil gil;
        return ask(*pool, debug, weak.get(), requested, now);
      }));
}

// --- what lives, and what debug mode found ---------------------------------------------------------

nb::list live_blocks(NativePool& self, std::size_t most) {
  nb::list blocks;
  for (const auto& block : blocks_of(*self.pool, self.debug.get(), most)) {
    if (blocks.size() < most) blocks.append(nb::make_tuple(block.ptr, block.nbytes));
  }
  return blocks;
}

nb::dict places(NativePool& self) {
  nb::dict found;
  if (!self.debug) return found;
  for (const auto& block : self.debug->live_blocks()) {
    found[nb::int_(block.ptr)] = block.allocated_at;
  }
  return found;
}

const char* name_of(DebugReport::Kind kind) noexcept {
  switch (kind) {
    case DebugReport::Kind::underrun:
      return "underrun";
    case DebugReport::Kind::overrun:
      return "overrun";
    case DebugReport::Kind::double_free:
      return "double_free";
    case DebugReport::Kind::foreign:
      return "foreign";
    case DebugReport::Kind::unordered_use:
      return "unordered_use";
    default:
      return "unordered_free";
  }
}

nb::list take_reports(NativePool& self) {
  nb::list reports;
  if (!self.debug) return reports;
  for (const DebugReport& found : self.debug->take_reports()) {
    reports.append(nb::make_tuple(name_of(found.kind), found.ptr, found.nbytes,
                                  found.allocated_at, found.message));
  }
  return reports;
}

// Debug mode reports with the place of the Python code that runs; without one where none does.
std::string python_place() {
  if (!nb::is_alive()) return {};
  const HoldGil gil;
  const nb::error_scope keep;
  try {
    const nb::object place = place_of_call();
    if (!place.is_valid()) return {};
    const auto [file, line] = nb::cast<std::pair<std::string, int>>(place);
    return file + ":" + std::to_string(line);
  } catch (const std::exception&) {  // a name that is no text
    return {};
  }
}

}  // namespace

void bind_pool_reports(nb::class_<NativePool>& cls) {
  DebugAllocator::ask_for_places(&python_place);
  cls.def("native_reports", &take_reports,
          nb::sig("def native_reports(self) -> list[tuple[str, int, int, str, str]]"),
          "(kind, ptr, nbytes, allocated_at, message) of what debug mode found since the last call.")
      .def("connect_callbacks", [](nb::handle_t<NativePool> self) { connect_callbacks(self); },
           "From now on `_ask(requested, statistics)` is called when memory is out.")
      .def("live_blocks", &live_blocks, nb::arg("most") = ~std::size_t{0},
           nb::sig("def live_blocks(self, most: int = ...) -> list[tuple[int, int]]"),
           "(ptr, nbytes) of what is allocated.")
      .def("places", &places, nb::sig("def places(self) -> dict[int, str]"),
           "By address, where live blocks were allocated; debug mode knows.")
      .def("native_statistics", [](NativePool& self) { return as_dict(self.pool->statistics()); },
           nb::sig("def native_statistics(self) -> dict[str, int]"));
}

}  // namespace ringmem::bind
