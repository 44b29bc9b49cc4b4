// Messages between contiguous records and slots, whose lines carry 56 payload bytes each.
#pragma once

#include <cstddef>
#include <cstring>

#include "ring/words.hpp"

namespace ringmem::ring {

using layout::line_payload_nbytes;

// memcpy of at most one payload; the sizes that matter compile to a few moves.
inline void copy_payload(void* to, const void* from, std::size_t nbytes) noexcept {
  switch (nbytes) {
    case 56: std::memcpy(to, from, 56); break;
    case 48: std::memcpy(to, from, 48); break;
    case 40: std::memcpy(to, from, 40); break;
    case 32: std::memcpy(to, from, 32); break;
    case 24: std::memcpy(to, from, 24); break;
    case 16: std::memcpy(to, from, 16); break;
    case 8: std::memcpy(to, from, 8); break;
    default: std::memcpy(to, from, nbytes);
  }
}

// Writes one message into its slot, line by line, each made ready as soon as it is whole.
inline void pack(Line* slot, const std::byte* record, std::size_t nbytes, u64 word) noexcept {
  while (nbytes > line_payload_nbytes) {
    std::memcpy(slot->payload, record, line_payload_nbytes);
    store_word(*slot, word);
    record += line_payload_nbytes;
    nbytes -= line_payload_nbytes;
    ++slot;
  }
  copy_payload(slot->payload, record, nbytes);
  store_word(*slot, word);
}

inline void unpack(std::byte* record, const Line* slot, std::size_t nbytes) noexcept {
  while (nbytes > line_payload_nbytes) {
    std::memcpy(record, slot->payload, line_payload_nbytes);
    record += line_payload_nbytes;
    nbytes -= line_payload_nbytes;
    ++slot;
  }
  copy_payload(record, slot->payload, nbytes);
}

}  // namespace ringmem::ring
