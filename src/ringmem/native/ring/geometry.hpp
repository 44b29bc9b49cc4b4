// The shape of a ring, checked once. Endpoints keep a copy: nothing that a peer writes later can
// change where they read or write.
#pragma once

#include <cstddef>

#include <stdexcept>

#include "layout/layout.hpp"

namespace ringmem::ring {

using layout::u32;
using layout::u64;

// Shared memory holds what no correct peer writes.
class Corrupted : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline constexpr u64 max_capacity = u64{1} << 30;      // slots
inline constexpr u32 max_message_nbytes = 1024 * 1024;  // bytes

struct Geometry {
  u64 capacity = 0;        // slots, a power of two
  u32 shift = 0;           // log2(capacity)
  u32 slot_lines = 0;      // lines of a slot
  u32 message_nbytes = 0;  // user bytes of a message

  std::size_t slot_nbytes() const noexcept {
    return std::size_t{slot_lines} * layout::line_nbytes;
  }
  std::size_t slots_nbytes() const noexcept { return capacity * slot_nbytes(); }
  // Header and slots.
  std::size_t nbytes() const noexcept { return sizeof(layout::RingHeader) + slots_nbytes(); }
};

// Throws InvalidValue unless `capacity` is a power of two and the sizes are within bounds.
Geometry make_geometry(u64 capacity, u64 message_nbytes);

// Where the parts of a ring are. They need not be neighbours: a consumer on another device keeps
// its index in its own memory.
struct RingView {
  layout::ProducerIndex* producer = nullptr;
  layout::ConsumerIndex* consumer = nullptr;
  layout::Line* slots = nullptr;
  Geometry geometry;
};

// Makes an empty ring of `memory` (128-aligned, at least geometry.nbytes()). Where the memory is
// `zeroed`, none of its pages is touched but the first.
RingView format(void* memory, std::size_t nbytes, const Geometry& geometry, bool zeroed = false);

// The ring that somebody made there. Throws Corrupted if it is none or does not fit the memory.
RingView attach(void* memory, std::size_t nbytes);

}  // namespace ringmem::ring
