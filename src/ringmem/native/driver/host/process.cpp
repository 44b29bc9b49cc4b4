#include "driver/host/process.hpp"

#include <errno.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>

namespace ringmem::host {
namespace {

std::atomic<std::size_t> mappings{0};

std::size_t system_mapping_limit() noexcept {
  static const std::size_t limit = [] {
    std::size_t value = 65530;  // the kernel's default
    if (std::FILE* file = std::fopen("/proc/sys/vm/max_map_count", "re")) {
      if (std::fscanf(file, "%zu", &value) != 1) value = 65530;
      std::fclose(file);
    }
    return value - std::min<std::size_t>(value / 2, 8192);  // libraries, stacks, other allocators
  }();
  return limit;
}

// For kernels and sandboxes that forbid process_vm_readv.
bool checked_copy(void* dst, const void* src, std::size_t nbytes) noexcept {
  if (!is_mapped(src, nbytes) || !is_mapped(dst, nbytes)) return false;
  std::memmove(dst, src, nbytes);
  return true;
}

}  // namespace

bool charge_mappings(std::size_t count, std::size_t limit) noexcept {
  if (limit == 0) limit = system_mapping_limit();
  std::size_t now = mappings.load(std::memory_order_relaxed);
  do {
    if (now + count > limit) return false;
  } while (!mappings.compare_exchange_weak(now, now + count, std::memory_order_relaxed));
  return true;
}

void release_mappings(std::size_t count) noexcept {
  mappings.fetch_sub(count, std::memory_order_relaxed);
}

std::uint64_t system_memory() noexcept {
  const long pages = sysconf(_SC_PHYS_PAGES);
  const long size = sysconf(_SC_PAGESIZE);
  if (pages <= 0 || size <= 0) return std::uint64_t{16} << 30;
  return static_cast<std::uint64_t>(pages) * static_cast<std::uint64_t>(size);
}

bool safe_copy(void* dst, const void* src, std::size_t nbytes) noexcept {
  const pid_t self = getpid();
  auto* to = static_cast<unsigned char*>(dst);
  auto* from = static_cast<const unsigned char*>(src);
  while (nbytes > 0) {
    const std::size_t part = std::min<std::size_t>(nbytes, std::size_t{1} << 30);
    const iovec local{to, part};
    const iovec remote{const_cast<unsigned char*>(from), part};
    const ssize_t done = process_vm_readv(self, &local, 1, &remote, 1, 0);
    if (done < 0) return (errno == ENOSYS || errno == EPERM) && checked_copy(to, from, nbytes);
    if (done == 0) return false;
    to += done;
    from += done;
    nbytes -= static_cast<std::size_t>(done);
  }
  return true;
}

bool is_mapped(const void* ptr, std::size_t nbytes) noexcept {
  const auto first = round_down(reinterpret_cast<std::uint64_t>(ptr), page_bytes);
  const auto last = reinterpret_cast<std::uint64_t>(ptr) + nbytes;
  if (last < first) return false;
  unsigned char present[1024];
  for (std::uint64_t at = first; at < last; at += sizeof present * page_bytes) {
    const std::uint64_t length = std::min<std::uint64_t>(last - at, sizeof present * page_bytes);
    if (mincore(reinterpret_cast<void*>(at), length, present) != 0) return false;
  }
  return true;
}

}  // namespace ringmem::host
