#include "mapping/backup.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>

#include "mapping/guard.hpp"
#include "memory/reaper.hpp"

namespace ringmem::mapping {
namespace {

constexpr std::size_t host_page = 4096;
constexpr std::size_t huge_page = 2 * mebibyte;
constexpr std::size_t touched_at_once = 2 * huge_page;
constexpr unsigned builders_most = 16;
constexpr auto patience = std::chrono::milliseconds(1);  // with a copier that is slower
constexpr int populate_write = 23;  // MADV_POPULATE_WRITE, from Linux 5.14 on

// Bytes that the kernel could give without swapping; 0 where it does not say.
std::size_t available_host_memory() noexcept {
  std::FILE* file = std::fopen("/proc/meminfo", "re");
  if (file == nullptr) return 0;
  char line[128];
  unsigned long long kib = 0;
  while (std::fgets(line, sizeof(line), file) != nullptr) {
    if (std::sscanf(line, "MemAvailable: %llu kB", &kib) == 1) break;
  }
  std::fclose(file);
  return static_cast<std::size_t>(kib) * 1024;
}

void require_host_memory(std::size_t nbytes) {
  const std::size_t available = available_host_memory();
  if (available == 0 || nbytes <= available) return;
  throw DriverError(Status::out_of_memory, "cuMemHostRegister",
                    "the backup needs " + std::to_string(nbytes) + " more bytes of host memory, " +
                        std::to_string(nbytes - available) + " more than there are");
}

// Addresses that start at a huge page, in huge pages where the kernel has them; nothing is there
// yet. Null when there are none.
unsigned char* map_region(std::size_t nbytes) noexcept {
  const std::size_t asked = nbytes + huge_page;
  void* const at = mmap(nullptr, asked, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return nullptr;
  auto* const first = static_cast<unsigned char*>(at);
  const std::size_t before = (huge_page - reinterpret_cast<std::uintptr_t>(at)) % huge_page;
  if (before > 0) munmap(first, before);
  munmap(first + before + nbytes, huge_page - before);
  madvise(first + before, nbytes, MADV_HUGEPAGE);
  madvise(first + before, nbytes, MADV_DONTFORK);  // a fork would copy what is pinned
  return first + before;
}

void touch(unsigned char* base, std::size_t nbytes) noexcept {
  if (madvise(base, nbytes, populate_write) == 0) return;
  for (std::size_t i = 0; i < nbytes; i += host_page) {
    *static_cast<volatile unsigned char*>(base + i) = 0;
  }
}

struct Registry {
  std::mutex mutex;
  std::map<std::pair<const Driver*, int>, std::weak_ptr<BackupArena>> arenas;
};

Registry& registry() {
  static Registry* const all = new Registry;
  return *all;
}

}  // namespace

std::shared_ptr<BackupArena> BackupArena::of(const DriverRef& driver, int device,
                                             ArenaSizes sizes) {
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  std::erase_if(all.arenas, [](const auto& entry) { return entry.second.expired(); });
  auto& slot = all.arenas[{driver.get(), device}];
  std::shared_ptr<BackupArena> arena = slot.lock();
  if (!arena) slot = arena = std::make_shared<BackupArena>(driver, device, sizes);
  return arena;
}

BackupArena::~BackupArena() {
  if (process_.inherited()) return;
  for (const Piece& piece : pieces_) release_piece(piece.base);
}

std::size_t BackupArena::nbytes() const {
  std::lock_guard lock(mutex_);
  return pieces_.size() * sizes_.piece_nbytes;
}

// Registers one piece, which is unmapped when that fails.
Status BackupArena::add_piece(unsigned char* base) noexcept {
  HostFlags flags;
  flags.portable = false;  // only this device copies to and from it
  Status status = driver_->host_register(device_, base, sizes_.piece_nbytes, flags);
  if (!ok(status)) {
    munmap(base, sizes_.piece_nbytes);
    return status;
  }
  try {
    std::lock_guard lock(mutex_);
    const std::size_t slots = sizes_.piece_nbytes / sizes_.slot_nbytes;
    pieces_.reserve(pieces_.size() + 1);
    free_.reserve((pieces_.size() + 1) * slots);  // giving slots back cannot throw
    pieces_.push_back(Piece{base});
    for (std::size_t i = 0; i < slots; ++i) free_.push_back(Slot{base + i * sizes_.slot_nbytes});
    return status;
  } catch (...) {
    release_piece(base);
    return Status::out_of_memory;
  }
}

// False when the reaper has no room for it.
bool BackupArena::release_piece(unsigned char* base) noexcept {
  try {
    ReaperJob job;
    job.driver = driver_;
    job.what = "cuMemHostUnregister of " + std::to_string(sizes_.piece_nbytes) + " bytes of backup";
    job.run = [driver = driver_, device = device_, base, nbytes = sizes_.piece_nbytes] {
      const Status status = driver->host_unregister(device, base);
      const bool gone = ok(status) || status == Status::host_memory_not_registered;
      if (gone) munmap(base, nbytes);
      return gone ? Status::success : status;
    };
    Reaper::instance().post(std::move(job));
    return true;
  } catch (...) {
    return false;
  }
}

BackupArena::Piece* BackupArena::piece_of(const unsigned char* host) noexcept {
  for (Piece& piece : pieces_) {
    if (host >= piece.base && host < piece.base + sizes_.piece_nbytes) return &piece;
  }
  return nullptr;
}

void BackupArena::give_back(const std::vector<Slot>& slots) noexcept {
  std::lock_guard lock(mutex_);
  for (const Slot& slot : slots) {
    --piece_of(slot.host)->used;
    free_.push_back(slot);  // there is room: it was reserved with the piece
  }
}

std::size_t BackupArena::drop() noexcept {
  std::lock_guard lock(mutex_);
  std::size_t dropped = 0;
  std::erase_if(pieces_, [&](const Piece& piece) {
    if (piece.used != 0 || !release_piece(piece.base)) return false;
    std::erase_if(free_, [&](const Slot& slot) {
      return slot.host >= piece.base && slot.host < piece.base + sizes_.piece_nbytes;
    });
    dropped += sizes_.piece_nbytes;
    return true;
  });
  return dropped;
}

BackupArena::Delivery::Delivery(std::shared_ptr<BackupArena> arena, std::size_t count)
    : arena_(std::move(arena)), wanted_(count) {
  std::size_t have = 0;
  {
    std::lock_guard lock(arena_->mutex_);
    have = arena_->free_.size();
  }
  if (have >= count) return;
  const std::size_t per_piece = arena_->sizes_.piece_nbytes / arena_->sizes_.slot_nbytes;
  start((count - have + per_piece - 1) / per_piece);
}

void BackupArena::Delivery::start(std::size_t pieces) {
  const ArenaSizes& sizes = arena_->sizes_;
  require_host_memory(pieces * sizes.piece_nbytes);
  region_ = map_region(pieces * sizes.piece_nbytes);
  if (region_ == nullptr) {
    throw DriverError(Status::out_of_memory, "cuMemHostRegister", "no addresses for the backup");
  }
  pieces_ = pieces;
  const unsigned cores = std::max(1U, std::thread::hardware_concurrency());
  const unsigned wanted = sizes.builders != 0 ? sizes.builders : std::min(builders_most, cores);
  for (std::size_t i = 0; i < std::min<std::size_t>(wanted, pieces); ++i) {
    {
      std::lock_guard lock(arena_->mutex_);
      ++building_;
    }
    try {
      builders_.emplace_back([this] { build(); });
    } catch (...) {
      std::lock_guard lock(arena_->mutex_);
      --building_;
      break;
    }
  }
}

BackupArena::Delivery::~Delivery() {
  std::size_t unregistered = 0;
  {
    std::lock_guard lock(arena_->mutex_);
    unregistered = pieces_ - taken_;
    taken_ = pieces_;
  }
  touched_ = pieces_ * arena_->sizes_.piece_nbytes;
  for (std::thread& thread : builders_) thread.join();
  const std::size_t nbytes = arena_->sizes_.piece_nbytes;
  if (unregistered > 0) {
    munmap(region_ + (pieces_ - unregistered) * nbytes, unregistered * nbytes);
  }
}

// The next piece to register; null when there is none.
unsigned char* BackupArena::Delivery::take_piece() noexcept {
  std::lock_guard lock(arena_->mutex_);
  if (taken_ == pieces_ || !ok(failure_)) return nullptr;
  return region_ + taken_++ * arena_->sizes_.piece_nbytes;
}

void BackupArena::Delivery::build() noexcept {
  const std::size_t nbytes = pieces_ * arena_->sizes_.piece_nbytes;
  {
    std::lock_guard lock(arena_->mutex_);
    ++touching_;
  }
  for (std::size_t at; (at = touched_.fetch_add(touched_at_once)) < nbytes;) {
    touch(region_ + at, std::min(touched_at_once, nbytes - at));
  }
  {
    std::lock_guard lock(arena_->mutex_);
    if (--touching_ > 0) {
      --building_;
      return;
    }
  }
  Status status = Status::success;
  while (unsigned char* const piece = ok(status) ? take_piece() : nullptr) {
    status = arena_->add_piece(piece);
    // Who registers without a pause keeps the driver's lock from who copies.
    std::unique_lock lock(arena_->mutex_);
    arena_->ready_.notify_all();
    arena_->ready_.wait_for(lock, patience, [&] {
      return wanted_ == 0 || (waiting_ && arena_->free_.empty());
    });
  }
  std::lock_guard lock(arena_->mutex_);
  --building_;
  if (!ok(status)) failure_ = status;
  arena_->ready_.notify_all();
}

BackupArena::Slot BackupArena::Delivery::next() {
  std::unique_lock lock(arena_->mutex_);
  if (arena_->free_.empty()) {
    waiting_ = true;
    arena_->ready_.notify_all();
    arena_->ready_.wait(lock, [&] { return !arena_->free_.empty() || building_ == 0; });
    waiting_ = false;
  }
  if (arena_->free_.empty()) {
    throw DriverError(ok(failure_) ? Status::out_of_memory : failure_, "cuMemHostRegister",
                      std::to_string(wanted_ * arena_->slot_nbytes()) +
                          " bytes of backup are missing");
  }
  const Slot slot = arena_->free_.back();
  arena_->free_.pop_back();
  ++arena_->piece_of(slot.host)->used;
  --wanted_;
  return slot;
}

}  // namespace ringmem::mapping
