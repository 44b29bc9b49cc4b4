// What gives memory and takes it back in stream order: the driver itself, a pool, a user's object.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "driver/status.hpp"
#include "driver/types.hpp"

namespace ringmem {

// Instead of a stream, where an allocator of host memory takes it: nothing on a device uses the
// block, so it is free as soon as it is freed. No driver knows this handle.
inline constexpr StreamHandle no_stream = ~StreamHandle{0};

// A block and whatever its allocator wants to be told about it when it comes back.
struct Block {
  DevicePtr ptr = 0;
  std::size_t nbytes = 0;      // as requested
  void* record = nullptr;      // the allocator's own; nobody else reads it
};

class Driver;

enum class Place : std::uint8_t { device, pinned, managed };

// Whose memory an allocator gives; without a driver it does not know, as a user's object.
struct Home {
  const Driver* driver = nullptr;
  int device = 0;
  Place place = Place::device;
};

class Allocator {
 public:
  Allocator() = default;
  Allocator(const Allocator&) = delete;
  Allocator& operator=(const Allocator&) = delete;
  virtual ~Allocator() = default;

  // The fast half of allocate: false unless the block is at hand without a driver call.
  virtual bool try_allocate(std::size_t nbytes, StreamHandle stream, Block* block) noexcept {
    static_cast<void>(nbytes), static_cast<void>(stream), static_cast<void>(block);
    return false;
  }

  // Throws DriverError (out of memory and the rest). The memory may be used in the order of
  // `stream` from now on. Takes nothing from Python: callable with or without the GIL.
  virtual Block allocate(std::size_t nbytes, StreamHandle stream) = 0;

  // The memory may be given to others once the work submitted to `stream` so far is done. On
  // failure nothing happened: the block is still allocated and the call may be repeated.
  virtual Status deallocate(const Block& block, StreamHandle stream) noexcept = 0;

  // The block cannot be freed and is lost: nobody will name it again.
  virtual void forget(const Block& block) noexcept { static_cast<void>(block); }

  // Work on `stream` uses the block too: reuse after deallocate waits for that work as well.
  // A stream that is announced (memory/used_stream.hpp) may be closed before the block is
  // deallocated; any other must live until then.
  virtual Status record_stream(Block& block, StreamHandle stream) = 0;

  // The stream to deallocate on what nothing uses any more. Not the legacy default stream where that
  // is a driver call, since it waits for other streams and spoils their captures.
  virtual StreamHandle idle_stream() const noexcept { return default_stream; }

  virtual Home home() const noexcept { return {}; }

  // Why nothing may touch live blocks now, and what to do about it; empty: everything may.
  virtual std::string unusable() const { return {}; }

  // allocate, beyond what try_allocate does, may wait for device work or for somebody who has no
  // need of the GIL: release the GIL around it.
  virtual bool allocate_may_block() const noexcept { return true; }

  // deallocate may wait for device work, of any block or of this one: release the GIL around it.
  virtual bool may_block() const noexcept { return false; }
  virtual bool free_may_block(const Block& block) const noexcept {
    return static_cast<void>(block), may_block();
  }
};

}  // namespace ringmem
