// Host memory for the bytes of sleeping device memory: pinned, kept from one sleep to the next.
// Building it is slow, so it takes several threads. They touch all of it (8 GiB of memory that the
// machine had never used: 19 to 30 GB/s with 16 threads; H200); then the last of them registers it
// piece by piece (35 GB/s, with more threads no faster), while the pieces that are ready are being
// copied into. Not each its own piece at once: who touches and who registers wait for the same lock
// of the process, and together they reach 6.5 GB/s. Given back only through the reaper, because
// unregistering waits for every kernel.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "driver/driver.hpp"
#include "mapping/arithmetic.hpp"
#include "mapping/fork.hpp"

namespace ringmem::mapping {

struct ArenaSizes {
  std::size_t slot_nbytes = 32 * mebibyte;    // what one copy fills
  std::size_t piece_nbytes = 128 * mebibyte;  // what is registered at once; whole slots
  unsigned builders = 0;                      // threads that build; 0: as many as cores, up to 16
};

class BackupArena : public std::enable_shared_from_this<BackupArena> {
 public:
  struct Slot {
    unsigned char* host = nullptr;
  };

  // The one of a device; shared by everybody who holds it, and given back when nobody does.
  static std::shared_ptr<BackupArena> of(const DriverRef& driver, int device, ArenaSizes sizes);

  BackupArena(DriverRef driver, int device, ArenaSizes sizes) noexcept
      : driver_(std::move(driver)), device_(device), sizes_(sizes) {}
  ~BackupArena();

  std::size_t slot_nbytes() const noexcept { return sizes_.slot_nbytes; }
  std::size_t nbytes() const;  // pinned now

  // Slots as they become ready; those that were not asked for go back to the arena.
  class Delivery {
   public:
    Delivery(std::shared_ptr<BackupArena> arena, std::size_t count);
    ~Delivery();
    Delivery(const Delivery&) = delete;
    Delivery& operator=(const Delivery&) = delete;

    Slot next();  // waits for one; throws DriverError when no more can be had

   private:
    void start(std::size_t pieces);
    void build() noexcept;
    unsigned char* take_piece() noexcept;

    std::shared_ptr<BackupArena> arena_;
    std::size_t wanted_;               // still to be handed out
    unsigned char* region_ = nullptr;  // the pieces to build, one behind the other
    std::size_t pieces_ = 0;
    std::atomic<std::size_t> touched_ = 0;  // bytes that a builder has taken to touch
    std::vector<std::thread> builders_;
    // Under the arena's mutex:
    std::size_t taken_ = 0;  // pieces that were taken to be registered
    int building_ = 0;       // threads at work
    int touching_ = 0;       // of these, the ones that still touch
    bool waiting_ = false;   // next() does, for a slot
    Status failure_ = Status::success;
  };

  void give_back(const std::vector<Slot>& slots) noexcept;

  // Unpins every piece of which no slot is in use, by the reaper. Returns their bytes.
  std::size_t drop() noexcept;

 private:
  struct Piece {
    unsigned char* base;
    std::size_t used = 0;  // slots handed out
  };

  Status add_piece(unsigned char* base) noexcept;
  bool release_piece(unsigned char* base) noexcept;
  Piece* piece_of(const unsigned char* host) noexcept;

  DriverRef driver_;
  int device_;
  ArenaSizes sizes_;
  ProcessMark process_;
  mutable std::mutex mutex_;
  std::condition_variable ready_;
  std::vector<Piece> pieces_;
  std::vector<Slot> free_;
};

}  // namespace ringmem::mapping
