// What a copy or a fill does when its turn comes: address by address through the page table, never
// a signal. A transfer is made in parts, so that memory that is taken away meanwhile is noticed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "driver/host/page_table.hpp"
#include "driver/status.hpp"

namespace ringmem::host {

// Rows of `width` bytes. A 1-D copy is one row.
struct Transfer {
  std::uint64_t dst = 0, dst_pitch = 0;
  std::uint64_t src = 0, src_pitch = 0;
  std::uint64_t width = 0, height = 1;
  Requester writer, reader;
  std::shared_ptr<unsigned char[]> snapshot;  // `src` lies in here: ours, and packed
};

// illegal_address where the page table forbids it; invalid_value where a pageable address is bad.
Status perform(const PageTable& table, const Transfer& transfer) noexcept;

// Replaces a pageable source by a copy of it. False: its memory cannot be read.
bool take_snapshot(Transfer* transfer);

struct Fill {
  std::uint64_t ptr = 0;
  std::uint64_t nbytes = 0;
  std::uint32_t value = 0;
  int value_bytes = 1;
  Requester writer;
};
Status perform(const PageTable& table, const Fill& fill) noexcept;

// One aligned 32-bit word. illegal_address where the page table forbids it.
Status load_word(const PageTable& table, std::uint64_t ptr, const Requester& who,
                 std::uint32_t* value) noexcept;
Status store_word(const PageTable& table, std::uint64_t ptr, const Requester& who,
                  std::uint32_t value) noexcept;

}  // namespace ringmem::host
