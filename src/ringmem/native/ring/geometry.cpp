#include "ring/geometry.hpp"

#include <bit>
#include <cstring>
#include <string>

#include "driver/status.hpp"
#include "ring/words.hpp"

namespace ringmem::ring {
namespace {

RingView view_of(void* memory, const Geometry& geometry) {
  auto* header = static_cast<layout::RingHeader*>(memory);
  auto* slots = reinterpret_cast<layout::Line*>(header + 1);
  return {&header->producer, &header->consumer, slots, geometry};
}

void require_memory(const void* memory, std::size_t nbytes, std::size_t needed) {
  const auto ptr = reinterpret_cast<std::uintptr_t>(memory);
  if (ptr == 0 || ptr % alignof(layout::RingHeader) != 0) {
    throw InvalidValue("ring memory at " + std::to_string(ptr) +
                       " must be at a multiple of 128 bytes and not 0");
  }
  if (nbytes < needed) {
    throw InvalidValue("ring memory has " + std::to_string(nbytes) + " bytes; " +
                       std::to_string(needed) + " are needed");
  }
}

}  // namespace

Geometry make_geometry(u64 capacity, u64 message_nbytes) {
  if (!std::has_single_bit(capacity) || capacity > max_capacity) {
    throw InvalidValue("capacity=" + std::to_string(capacity) +
                       " must be a power of two of slots, at most 2^30");
  }
  if (message_nbytes == 0 || message_nbytes > max_message_nbytes) {
    throw InvalidValue("message size of " + std::to_string(message_nbytes) +
                       " bytes must be 1 to 1048576; send the address of larger data");
  }
  Geometry geometry;
  geometry.capacity = capacity;
  geometry.shift = static_cast<u32>(std::countr_zero(capacity));
  geometry.message_nbytes = static_cast<u32>(message_nbytes);
  geometry.slot_lines = layout::lines_for(geometry.message_nbytes);
  return geometry;
}

RingView format(void* memory, std::size_t nbytes, const Geometry& geometry, bool zeroed) {
  require_memory(memory, nbytes, geometry.nbytes());
  if (!zeroed) std::memset(memory, 0, geometry.nbytes());
  auto& descriptor = static_cast<layout::RingHeader*>(memory)->descriptor;
  descriptor.capacity = geometry.capacity;
  descriptor.slot_lines = geometry.slot_lines;
  descriptor.message_nbytes = geometry.message_nbytes;
  store(descriptor.magic, layout::ring_magic);  // last: whoever sees it sees a whole ring
  return view_of(memory, geometry);
}

RingView attach(void* memory, std::size_t nbytes) {
  require_memory(memory, nbytes, sizeof(layout::RingHeader));
  const auto& descriptor = static_cast<layout::RingHeader*>(memory)->descriptor;
  if (load(descriptor.magic) != layout::ring_magic) throw Corrupted("no ring in this memory");
  const u64 capacity = load(descriptor.capacity);
  const u32 message_nbytes = load(descriptor.message_nbytes);
  const u32 slot_lines = load(descriptor.slot_lines);
  Geometry geometry;
  try {
    geometry = make_geometry(capacity, message_nbytes);
  } catch (const InvalidValue& error) {
    throw Corrupted(std::string("the ring's descriptor is damaged: ") + error.what());
  }
  if (slot_lines != geometry.slot_lines || geometry.nbytes() > nbytes) {
    throw Corrupted("the ring's descriptor is damaged: " + std::to_string(capacity) +
                    " slots of " + std::to_string(slot_lines) + " lines for messages of " +
                    std::to_string(message_nbytes) + " bytes do not fit " +
                    std::to_string(nbytes) + " bytes of memory");
  }
  return view_of(memory, geometry);
}

}  // namespace ringmem::ring
