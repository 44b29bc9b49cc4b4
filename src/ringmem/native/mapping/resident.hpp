// Memory of one tag on one device: an allocator whose physical pages can be given back (sleep) and
// had again (wake) at the same addresses, with their bytes, without them, or never given back.
//
// One address range is reserved; handles of 32 MiB and more are mapped at its end as it grows, and
// blocks are cut out of them best fit. States: awake -> sleeping -> asleep -> waking -> awake. What
// fails in between leaves the state it came from; once the bytes are safe and pages may be gone,
// that is `asleep`.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "mapping/backup.hpp"
#include "mapping/guard.hpp"
#include "mapping/range.hpp"
#include "memory/allocator.hpp"

namespace ringmem::mapping {

enum class Backup : unsigned char { host, discard, keep };
enum class Residence : unsigned char { awake, sleeping, asleep, waking, closed };

struct ResidentOptions {
  std::string tag;
  Backup backup = Backup::host;
  PhysicalProps props;
  std::size_t reserve_nbytes = 0;  // 0: twice the device's memory
  std::size_t min_handle_nbytes = 32 * mebibyte;
  ArenaSizes arena;
  // wake() maps so many bytes, whole handles, before the first copy and before each that needs
  // more. 0: a handle or two first, then all the rest beside the copies.
  std::size_t wake_step_nbytes = 0;
};

// One copy between device memory and a slot of the backup.
struct BackupCopy {
  std::size_t offset = 0;       // in the address range
  std::size_t nbytes = 0;
  std::size_t slot = 0;         // index among the slots of this sleep
  std::size_t slot_offset = 0;

  friend bool operator==(const BackupCopy&, const BackupCopy&) = default;
};

// Packs extents (offset -> bytes, disjoint) into slots, in order.
std::vector<BackupCopy> plan_backup(const std::map<std::size_t, std::size_t>& extents,
                                    std::size_t slot_nbytes);

class Resident final : public Allocator, public std::enable_shared_from_this<Resident> {
 public:
  using Report = std::function<void(std::size_t done, std::size_t total)>;  // bytes; may throw

  static std::shared_ptr<Resident> create(DriverRef driver, ResidentOptions options);

  Resident(RangeRef range, ResidentOptions options);
  ~Resident() override;

  Block allocate(std::size_t nbytes, StreamHandle stream) override;
  Status deallocate(const Block& block, StreamHandle stream) noexcept override;
  Status record_stream(Block& block, StreamHandle stream) override;
  Home home() const noexcept override { return {driver().get(), device(), Place::device}; }
  std::string unusable() const override;  // unless awake, or never unmapped (Backup::keep)

  // Both block, and hold no lock meanwhile. InvalidValue in a state that does not fit. `report`
  // may throw to call it off.
  void sleep(const std::vector<StreamRef>& streams, const Report& report);
  void wake(const Report& report);
  // Releases handles at the end of which nothing is in use. Returns their bytes.
  std::size_t trim();
  // InvalidValue while blocks are live.
  void close();
  std::size_t drop_backup() noexcept { return arena_->drop(); }

  Residence state() const;
  Backup backup() const noexcept { return options_.backup; }
  DevicePtr ptr() const noexcept { return base_; }
  std::size_t reserved() const noexcept { return range_->nbytes(); }
  std::size_t live_nbytes() const;  // bytes of live blocks
  std::size_t committed() const;    // bytes of physical memory held now
  std::size_t extent() const;       // bytes of physical memory when awake
  std::size_t backup_nbytes() const;  // bytes of backup in use
  std::size_t arena_nbytes() const { return arena_->nbytes(); }

 private:
  struct Live {
    std::size_t nbytes;
    UsedStreams others;  // streams beside the one of deallocate
  };
  struct Pending {  // freed, and perhaps still in use
    std::size_t offset;
    std::size_t nbytes;
    std::shared_ptr<Guard> guard;
    StreamHandle stream;
    bool alone;  // no other stream used it
  };

  // With mutex_ held; none blocks.
  bool take_free(std::size_t nbytes, std::size_t* offset);
  void put_free(std::size_t offset, std::size_t nbytes);
  void reclaim(StreamHandle stream, bool also_pending_on_it);
  void grow(std::size_t nbytes);
  void map_handles(const std::vector<std::size_t>& sizes);
  Status unmap_from(std::size_t first) noexcept;
  Status drop_handles(std::size_t first) noexcept;
  void require(Residence state, const char* operation) const;
  PhysicalRef obtain(std::size_t nbytes);

  // Without it.
  void save(const std::vector<BackupCopy>& copies, const Report& report);
  void restore(const Report& report);
  void map_again(const std::vector<std::size_t>& sizes, std::size_t end);
  void copy_all(const std::vector<BackupCopy>& copies, bool to_host, const Report& report,
                const std::function<BackupArena::Slot(std::size_t)>& slot_of,
                const std::function<void(std::size_t)>& before);
  void set_state(Residence state);
  void require_streams();

  const DriverRef& driver() const noexcept { return range_->driver(); }
  int device() const noexcept { return options_.props.location.id; }

  RangeRef range_;
  ResidentOptions options_;
  DevicePtr base_;
  std::shared_ptr<BackupArena> arena_;
  ProcessMark process_;

  mutable std::mutex mutex_;
  Residence state_ = Residence::awake;
  std::vector<PhysicalRef> handles_;   // mapped from the start of the range, in order
  std::vector<std::size_t> sizes_;     // of these; kept while asleep
  std::size_t extent_ = 0;             // sum of sizes_
  bool maybe_mapped_ = false;          // an unmap failed: nobody knows
  std::map<std::size_t, Live> live_;   // offset -> block
  std::size_t live_nbytes_ = 0;
  std::map<std::size_t, std::size_t> free_;                     // offset -> bytes
  std::set<std::pair<std::size_t, std::size_t>> free_by_size_;  // (bytes, offset)
  std::vector<Pending> pending_;

  // Of the sleep that is on; touched only by sleep() and wake(), which exclude each other.
  std::vector<BackupCopy> copies_;
  std::vector<BackupArena::Slot> slots_;
  StreamHandle streams_[2] = {0, 0};
};

}  // namespace ringmem::mapping
