// What the binding files of virtual memory share: plain arguments and what they become.
#pragma once

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <utility>
#include <vector>

#include "bind/objects.hpp"
#include "mapping/growable.hpp"
#include "mapping/range.hpp"
#include "mapping/sparse.hpp"

namespace ringmem::bind {

using mapping::AddressRange;
using mapping::MappedRange;
using mapping::PhysicalMemory;
using mapping::PhysicalRef;

using PlainLocation = std::pair<int, int>;                         // LocationKind, id
using PlainGrants = std::vector<std::tuple<int, int, int>>;        // LocationKind, id, Access
using PlainStreams = std::vector<std::pair<int, std::uint64_t>>;   // device ordinal, handle

inline Location location_of(PlainLocation location) {
  return Location{static_cast<LocationKind>(location.first), location.second};
}

inline std::vector<AccessGrant> grants_of(const PlainGrants& plain) {
  std::vector<AccessGrant> grants;
  for (const auto& [kind, id, access] : plain) {
    grants.push_back(AccessGrant{location_of({kind, id}), static_cast<Access>(access)});
  }
  return grants;
}

inline std::vector<mapping::StreamRef> streams_of(const PlainStreams& plain) {
  std::vector<mapping::StreamRef> streams;
  for (const auto& [device, handle] : plain) streams.push_back({device, handle});
  return streams;
}

inline std::vector<mapping::EventRef> events_of(const PlainStreams& plain) {
  std::vector<mapping::EventRef> events;
  for (const auto& [device, handle] : plain) events.push_back({device, handle});
  return events;
}

void bind_mapping_buffers(nb::module_& m);

}  // namespace ringmem::bind
