#include "mapping/limits.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>

namespace ringmem::mapping {
namespace {

std::atomic<std::size_t> live{0};
std::atomic<std::size_t> forced_limit{0};

// Memory areas of the process at the last count, and our live mappings then. A count reads
// /proc/self/maps, some 0.3 µs an area, so it is repeated only when the estimate gets near.
std::atomic<std::size_t> counted_areas{0};
std::atomic<std::size_t> counted_live{0};

// Areas that stay free for everybody else in the process: thread stacks, malloc, libraries.
constexpr std::size_t headroom = 4096;

std::size_t kernel_area_limit() noexcept {
  constexpr std::size_t kernel_default = 65530;
  const int fd = open("/proc/sys/vm/max_map_count", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return kernel_default;
  char text[32] = {};
  const ssize_t length = read(fd, text, sizeof(text) - 1);
  close(fd);
  const std::size_t value = length > 0 ? std::strtoull(text, nullptr, 10) : 0;
  return value > 0 ? value : kernel_default;
}

std::size_t count_areas() noexcept {
  const int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  std::size_t lines = 0;
  char text[1 << 14];
  for (ssize_t length = 0; (length = read(fd, text, sizeof(text))) > 0;) {
    lines += static_cast<std::size_t>(std::count(text, text + length, '\n'));
  }
  close(fd);
  return lines;
}

bool is_cpu(const Driver& driver) noexcept { return std::strcmp(driver.platform(), "cpu") == 0; }

// A mapping in the middle of a reserved range splits it: two areas more at worst.
std::size_t estimated_areas(std::size_t now_live) noexcept {
  const std::size_t before = counted_live.load(std::memory_order_relaxed);
  const std::size_t made = now_live > before ? now_live - before : 0;
  return counted_areas.load(std::memory_order_relaxed) + 2 * made;
}

void refuse(std::size_t count, std::size_t have, std::size_t limit, const char* of_what) {
  throw DriverError(
      Status::out_of_memory, "cuMemMap",
      std::to_string(count) + " more mappings on top of " + std::to_string(have) +
          " would come too near to the " + std::to_string(limit) + " " + of_what +
          ": use larger handles or pages, unmap some, or raise the limit (sysctl vm.max_map_count)");
}

void check_areas(std::size_t count, std::size_t now_live) {
  static const std::size_t limit = kernel_area_limit();
  const std::size_t bound = limit > 2 * headroom ? limit - headroom : limit / 2;
  const bool first = counted_areas.load(std::memory_order_relaxed) == 0;
  if (!first && estimated_areas(now_live) <= bound) return;
  const std::size_t areas = count_areas();
  counted_areas.store(areas, std::memory_order_relaxed);
  counted_live.store(now_live - count, std::memory_order_relaxed);
  if (areas + 2 * count > bound) {
    refuse(count, areas, limit, "memory areas that the kernel allows a process");
  }
}

}  // namespace

std::size_t live_mappings() noexcept { return live.load(std::memory_order_relaxed); }

std::size_t mapping_limit(const Driver& driver) {
  const std::size_t forced = forced_limit.load(std::memory_order_relaxed);
  if (forced != 0) return forced;
  if (!is_cpu(driver)) return 0;
  const std::size_t limit = kernel_area_limit();
  return (limit > 2 * headroom ? limit - headroom : limit / 2) / 2;
}

void set_mapping_limit(std::size_t limit) noexcept {
  forced_limit.store(limit, std::memory_order_relaxed);
}

MappingTicket::MappingTicket(const Driver& driver, std::size_t count) : count_(count) {
  const std::size_t now = live.fetch_add(count, std::memory_order_relaxed) + count;
  try {
    const std::size_t forced = forced_limit.load(std::memory_order_relaxed);
    if (forced != 0 && now > forced) refuse(count, now - count, forced, "mappings that are allowed");
    if (is_cpu(driver)) check_areas(count, now);
  } catch (...) {
    return_mappings(count);
    throw;
  }
}

MappingTicket::~MappingTicket() {
  if (count_ != 0) return_mappings(count_);
}

void return_mappings(std::size_t count) noexcept {
  live.fetch_sub(count, std::memory_order_relaxed);
}

}  // namespace ringmem::mapping
