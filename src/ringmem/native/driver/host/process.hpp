// What belongs to the process and not to one driver: has it forked since, how many kernel mappings
// are ours, how to copy through an address that nobody vouches for.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringmem::host {

inline constexpr std::uint64_t page_bytes = 4096;  // of a memfd, and of the smallest mapping

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) noexcept {
  return (value + unit - 1) / unit * unit;
}
constexpr std::uint64_t round_down(std::uint64_t value, std::uint64_t unit) noexcept {
  return value / unit * unit;
}
constexpr bool is_power_of_two(std::uint64_t value) noexcept {
  return value != 0 && (value & (value - 1)) == 0;
}

// Kernel mappings of all drivers of the process, kept below vm.max_map_count: at that limit even an
// unmap fails. `limit` 0 means what the system allows less some headroom for everybody else.
bool charge_mappings(std::size_t count, std::size_t limit) noexcept;
void release_mappings(std::size_t count) noexcept;

// Bytes of memory of the machine.
std::uint64_t system_memory() noexcept;

// Copies by way of the kernel: false, and perhaps a part copied, where an address of either side is
// not mapped or not allowed. Never a signal.
bool safe_copy(void* dst, const void* src, std::size_t nbytes) noexcept;

// Whether all of [ptr, ptr + nbytes) is mapped in this process.
bool is_mapped(const void* ptr, std::size_t nbytes) noexcept;

}  // namespace ringmem::host
