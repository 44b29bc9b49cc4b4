// Allocators of memory that the host reads too: pinned, managed, and host memory that exists and
// is page-locked in place. All give back through the reaper, behind the work of every stream that
// used the block.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "driver/driver.hpp"
#include "memory/stream_records.hpp"

namespace ringmem {

// What the three have in common: they release later.
class ReapedAllocator : public StreamRecords {
 public:
  ReapedAllocator(DriverRef driver, int device);
  Status deallocate(const Block& block, StreamHandle stream) noexcept override;
  StreamHandle idle_stream() const noexcept override { return per_thread_stream; }

 protected:
  // The call that releases `block`, with everything that it needs. Runs on the reaper's thread.
  virtual std::function<Status()> release_of(const Block& block) = 0;
  virtual const char* release_name() const noexcept = 0;  // "cuMemFreeHost"

  // Runs `allocate`; when memory is out and releases are pending, waits for those and tries again.
  Status with_retry(const std::function<Status()>& allocate) const;
};

// cuMemHostAlloc / cuMemFreeHost.
class PinnedAllocator final : public ReapedAllocator {
 public:
  PinnedAllocator(DriverRef driver, int device, HostFlags flags);
  Block allocate(std::size_t nbytes, StreamHandle stream) override;
  Home home() const noexcept override { return {driver_.get(), device_, Place::pinned}; }

 protected:
  std::function<Status()> release_of(const Block& block) override;
  const char* release_name() const noexcept override { return "cuMemFreeHost"; }

 private:
  HostFlags flags_;
};

// cuMemAllocManaged / cuMemFree.
class ManagedAllocator final : public ReapedAllocator {
 public:
  ManagedAllocator(DriverRef driver, int device, ManagedAttach attach);
  Block allocate(std::size_t nbytes, StreamHandle stream) override;
  Home home() const noexcept override { return {driver_.get(), device_, Place::managed}; }

 protected:
  std::function<Status()> release_of(const Block& block) override;
  const char* release_name() const noexcept override { return "cuMemFree"; }

 private:
  ManagedAttach attach_;
};

// cuMemHostRegister / cuMemHostUnregister of memory that `owner` keeps alive.
class RegisteredMemory final : public ReapedAllocator {
 public:
  RegisteredMemory(DriverRef driver, int device, HostFlags flags, std::shared_ptr<void> owner);
  // Page-locks [ptr, ptr + nbytes).
  Block adopt(DevicePtr ptr, std::size_t nbytes);
  Block allocate(std::size_t nbytes, StreamHandle stream) override;  // not supported

 protected:
  std::function<Status()> release_of(const Block& block) override;
  const char* release_name() const noexcept override { return "cuMemHostUnregister"; }

 private:
  HostFlags flags_;
  std::shared_ptr<void> owner_;
};

}  // namespace ringmem
