// Physical memory: a driver handle that many mappings may share. It is released when its owner has
// closed it and its last mapping is gone, in whatever order the user does these.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>

#include "driver/driver.hpp"
#include "mapping/fork.hpp"

namespace ringmem::mapping {

// The page size for memory like this. `recommended` is the size that maps fastest.
std::size_t granularity_of(Driver& driver, const PhysicalProps& props, bool recommended = false);

// What a repeated release, unmap or free may answer when the first one failed after it had happened:
// there is nothing there any more, which is what was wanted.
constexpr bool gone(Status status) noexcept {
  return status == Status::success || status == Status::invalid_value ||
         status == Status::invalid_handle || status == Status::not_mapped;
}

// Throws DriverError (not supported) for a device without virtual memory management, and for props
// that it cannot give (export, RDMA, host memory).
void require_capable(Driver& driver, const PhysicalProps& props);

class PhysicalMemory {
 public:
  // `nbytes` is rounded up to whole pages.
  static std::shared_ptr<PhysicalMemory> create(DriverRef driver, std::size_t nbytes,
                                                const PhysicalProps& props);
  // As create(), for sizes known to be whole pages on a device known to be capable.
  static std::shared_ptr<PhysicalMemory> create_pages(DriverRef driver, std::size_t nbytes,
                                                      const PhysicalProps& props);
  // The descriptor stays the caller's. `nbytes` must be the exact size of the exported handle.
  static std::shared_ptr<PhysicalMemory> import_fd(DriverRef driver, int fd, std::size_t nbytes,
                                                   const PhysicalProps& props);

  PhysicalMemory(DriverRef driver, PhysicalHandle handle, std::size_t nbytes,
                 const PhysicalProps& props) noexcept
      : driver_(std::move(driver)), handle_(handle), nbytes_(nbytes), props_(props) {}
  PhysicalMemory(const PhysicalMemory&) = delete;
  PhysicalMemory& operator=(const PhysicalMemory&) = delete;
  ~PhysicalMemory();

  // A new descriptor, the caller's to close. Each is one more reference to the memory, in whatever
  // process it ends up.
  int export_fd();
  // Throws what mem_release says when this is the last use; waits for nothing.
  void close();

  // A mapping comes and goes. The last to leave a closed memory releases it.
  PhysicalHandle enter();  // throws Closed
  Status leave() noexcept;

  bool closed() const noexcept { return closed_.load(std::memory_order_relaxed); }
  bool exported() const noexcept { return exported_.load(std::memory_order_relaxed); }
  PhysicalHandle handle() const;  // throws Closed
  std::size_t nbytes() const noexcept { return nbytes_; }
  const PhysicalProps& props() const noexcept { return props_; }
  const DriverRef& driver() const noexcept { return driver_; }
  bool imported() const noexcept { return imported_; }
  std::size_t mappings() const noexcept;

 private:
  Status release_locked() noexcept;

  DriverRef driver_;
  PhysicalHandle handle_;  // 0 once released
  std::size_t nbytes_;
  PhysicalProps props_;
  ProcessMark process_;
  mutable std::mutex mutex_;
  std::size_t mappings_ = 0;
  std::atomic<bool> closed_{false};
  std::atomic<bool> exported_{false};
  bool imported_ = false;
  bool release_failed_ = false;
};

using PhysicalRef = std::shared_ptr<PhysicalMemory>;

}  // namespace ringmem::mapping
