// Physical memory behind a reserved range of addresses: which handle is mapped where, and the
// driver calls that create, map, move and give back. Every operation happens or is undone.
//
// A handle moves by being mapped at its new address as well; the caller unmaps the old address
// once nobody can use it any more. So a move creates no memory and waits for nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "driver/driver.hpp"

namespace ringmem::pool {

class Backing {
 public:
  static constexpr std::uint32_t none = 0;

  struct Handle {
    PhysicalHandle id = 0;
    DevicePtr at = 0;  // where it is mapped now
    std::size_t nbytes = 0;
  };
  // One handle's worth of addresses to fill: with a handle that is mapped elsewhere, or a new one.
  struct Piece {
    DevicePtr at = 0;
    std::size_t nbytes = 0;
    std::uint32_t handle = none;  // none: create
  };
  struct Counters {
    std::atomic<std::uint64_t> calls{0};    // driver calls
    std::atomic<std::uint64_t> created{0};  // handles
    std::atomic<std::uint64_t> moved{0};    // handles mapped at another address
    std::atomic<std::uint64_t> moved_bytes{0};
    std::atomic<std::uint64_t> released{0};
    std::atomic<std::size_t> reserved{0};  // bytes in unreleased handles
    std::atomic<std::size_t> peak_reserved{0};
  };

  Backing(Driver& driver, int device, PhysicalProps props, std::vector<AccessGrant> grants);
  Backing(const Backing&) = delete;
  Backing& operator=(const Backing&) = delete;

  // Reserves the addresses: about `nbytes`, less if the driver has no such range.
  Status open(std::size_t nbytes, std::size_t least) noexcept;
  // Where the device has no virtual memory: every handle is a plain allocation of the driver, and
  // the addresses here are only names of places; real() tells what they stand for. Nothing moves.
  Status open_chunks(std::size_t nbytes);
  bool chunked() const noexcept { return chunked_; }
  DevicePtr real(DevicePtr ptr) const noexcept {
    return chunked_ ? real_of_chunk(ptr) : ptr;
  }
  // The other way; 0 if no chunk holds it.
  DevicePtr name_of(DevicePtr real) const noexcept;
  bool is_open() const noexcept { return base_ != 0; }
  DevicePtr base() const noexcept { return base_; }
  std::size_t nbytes() const noexcept { return nbytes_; }
  std::size_t page_bytes() const noexcept { return page_bytes_; }
  Status find_page_bytes() noexcept;
  static constexpr std::size_t chunk_page_bytes = std::size_t{2} << 20;

  // The handle that fills the page at `ptr`.
  std::uint32_t handle_at(DevicePtr ptr) const noexcept {
    return pages_[(ptr - base_) / page_bytes_];
  }
  const Handle& handle(std::uint32_t index) const noexcept { return handles_[index]; }

  // Fills all pieces (ascending addresses), or none. A moved handle is then at its new address; its
  // old addresses are still mapped and must be given to unmap() later. `failed` names the call.
  Status fill(const std::vector<Piece>& pieces, const char** failed);
  // After a failed fill(): whether its addresses are unmapped again.
  bool undone() const noexcept { return undone_; }
  // Addresses that handles have left. They stay mapped when this fails.
  Status unmap(DevicePtr ptr, std::size_t nbytes) noexcept;
  // Gives a handle back; it stays mapped, and its memory in use, until unmap(). After a failure it
  // may or may not be gone: call it again, and never use the handle otherwise.
  Status release(std::uint32_t index, bool again = false) noexcept;
  // Unmaps and frees the addresses; all handles must have been released. Idempotent.
  Status close() noexcept;

  const Counters& counters() const noexcept { return counters_; }
  void reset_peak() noexcept { counters_.peak_reserved.store(counters_.reserved.load()); }

 private:
  [[gnu::cold]] DevicePtr real_of_chunk(DevicePtr ptr) const noexcept;
  Status make(std::size_t nbytes, PhysicalHandle* id) noexcept;
  Status create(Piece* piece);
  Status grant(const std::vector<Piece>& pieces) noexcept;
  void undo(const std::vector<Piece>& pieces, std::size_t mapped,
            const std::vector<std::uint32_t>& created) noexcept;
  std::uint32_t new_index();
  void place(std::uint32_t index, DevicePtr at) noexcept;
  void count_reserved(std::size_t nbytes) noexcept;

  Driver& driver_;
  const int device_;
  const PhysicalProps props_;
  const std::vector<AccessGrant> grants_;
  std::size_t page_bytes_ = 0;
  DevicePtr base_ = 0;
  std::size_t nbytes_ = 0;
  std::vector<std::uint32_t> pages_;
  std::vector<Handle> handles_;         // [0] is not used
  std::vector<std::uint32_t> spare_;    // indices not in use
  std::vector<PhysicalHandle> orphans_; // whose release failed in an undo: tried again at close()
  bool undone_ = true;
  bool chunked_ = false;
  Counters counters_;
};

}  // namespace ringmem::pool
