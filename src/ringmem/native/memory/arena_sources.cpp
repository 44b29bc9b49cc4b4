#include "memory/arena_sources.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <system_error>
#include <thread>
#include <vector>

namespace ringmem {
namespace {

constexpr std::size_t huge_page = std::size_t{2} << 20;
constexpr std::size_t small_page = std::size_t{4} << 10;
constexpr std::size_t bytes_a_thread = std::size_t{32} << 20;  // fewer are not worth a thread
constexpr std::size_t most_threads = 16;

// --- pages ---------------------------------------------------------------------------------------

// `nbytes` at a multiple of 2 MiB, so that huge pages fit; null if there is no such range.
void* map_pages(std::size_t nbytes) noexcept {
  const std::size_t roomy = nbytes + huge_page;
  void* raw = mmap(nullptr, roomy, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  const auto start = reinterpret_cast<std::uintptr_t>(raw);
  const std::uintptr_t aligned = (start + huge_page - 1) / huge_page * huge_page;
  if (aligned > start) munmap(raw, aligned - start);
  const std::uintptr_t end = start + roomy;
  if (end > aligned + nbytes) {
    munmap(reinterpret_cast<void*>(aligned + nbytes), end - aligned - nbytes);
  }
  void* pages = reinterpret_cast<void*>(aligned);
  madvise(pages, nbytes, MADV_HUGEPAGE);  // a wish: small pages work as well
  return pages;
}

void touch(char* first, char* last) noexcept {
  for (char* page = first; page < last; page += small_page) *const_cast<volatile char*>(page) = 0;
}

// Threads that cannot be had are done without.
void touch_by_many(void* pages, std::size_t nbytes) {
  const std::size_t cores = std::max(1u, std::thread::hardware_concurrency());
  const std::size_t count =
      std::clamp<std::size_t>(nbytes / bytes_a_thread, 1, std::min(cores, most_threads));
  const std::size_t part = (nbytes / count + huge_page - 1) / huge_page * huge_page;
  char* const begin = static_cast<char*>(pages);
  char* const end = begin + nbytes;
  std::vector<std::thread> threads;
  char* mine = end;  // what this thread touches: all that no other does
  try {
    threads.reserve(count);
    for (std::size_t i = 1; i < count && part * i < nbytes; ++i) {
      char* const first = begin + part * i;
      char* const last = std::min(end, first + part);
      threads.emplace_back(touch, first, last);
      if (i == 1) mine = first;
    }
    if (threads.empty()) mine = end;
    touch(begin, mine);
  } catch (const std::system_error&) {
    touch(begin, end);
  }
  for (std::thread& thread : threads) thread.join();
}

// --- sources -------------------------------------------------------------------------------------

class PinnedArenas final : public ArenaSource {
 public:
  PinnedArenas(DriverRef driver, int device) : driver_(std::move(driver)), device_(device) {}

  Status acquire(std::size_t nbytes, DevicePtr* ptr, const char** operation) override {
    *operation = "cuMemHostRegister";
    void* pages = map_pages(nbytes);
    if (!pages) return Status::out_of_memory;
    touch_by_many(pages, nbytes);
    const Status status = driver_->host_register(device_, pages, nbytes, HostFlags{});
    if (!ok(status)) {
      munmap(pages, nbytes);
      return status == Status::not_supported ? allocate_locked(nbytes, ptr, operation) : status;
    }
    *ptr = reinterpret_cast<DevicePtr>(pages);
    return Status::success;
  }

  std::function<Status()> release_of(DevicePtr ptr, std::size_t nbytes) override {
    return [driver = driver_, device = device_, pages = reinterpret_cast<void*>(ptr), nbytes,
            locked = allocated_] {
      if (locked) return driver->host_free(device, pages);
      const Status status = driver->host_unregister(device, pages);
      if (ok(status)) munmap(pages, nbytes);
      return status;
    };
  }

  Place place() const noexcept override { return Place::pinned; }
  const char* release_name() const noexcept override {
    return allocated_ ? "cuMemFreeHost" : "cuMemHostUnregister";
  }

 private:
  // Where memory that exists cannot be locked, the driver gives locked memory; then always.
  Status allocate_locked(std::size_t nbytes, DevicePtr* ptr, const char** operation) {
    *operation = "cuMemHostAlloc";
    void* pages = nullptr;
    const Status status = driver_->host_alloc(device_, nbytes, HostFlags{}, &pages);
    if (!ok(status)) return status;
    allocated_ = true;
    *ptr = reinterpret_cast<DevicePtr>(pages);
    return Status::success;
  }

  DriverRef driver_;
  int device_;
  bool allocated_ = false;  // the device cannot register; decided by the first arena
};

class ManagedArenas final : public ArenaSource {
 public:
  ManagedArenas(DriverRef driver, int device) : driver_(std::move(driver)), device_(device) {}

  Status acquire(std::size_t nbytes, DevicePtr* ptr, const char** operation) override {
    *operation = "cuMemAllocManaged";
    MemoryInfo memory;
    if (ok(driver_->memory_info(device_, &memory)) && nbytes > memory.free) {
      return Status::out_of_memory;
    }
    return driver_->managed_alloc(device_, nbytes, ManagedAttach::global, ptr);
  }

  std::function<Status()> release_of(DevicePtr ptr, std::size_t) override {
    return [driver = driver_, device = device_, ptr] { return driver->mem_free(device, ptr); };
  }

  Place place() const noexcept override { return Place::managed; }
  const char* release_name() const noexcept override { return "cuMemFree"; }

 private:
  DriverRef driver_;
  int device_;
};

}  // namespace

std::unique_ptr<ArenaSource> pinned_arenas(DriverRef driver, int device) {
  return std::make_unique<PinnedArenas>(std::move(driver), device);
}

std::unique_ptr<ArenaSource> managed_arenas(DriverRef driver, int device) {
  return std::make_unique<ManagedArenas>(std::move(driver), device);
}

}  // namespace ringmem
