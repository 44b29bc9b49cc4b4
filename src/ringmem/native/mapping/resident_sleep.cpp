// Sleep and wake of tagged memory.
//
// Sleep: wait for the work, copy what is live to the backup (two streams, a slot a copy, while the
// arena is still being built), then unmap everything in one call and release the handles. Until
// the unmap nothing has changed; from there on the memory is asleep, whatever fails.
// Wake: create and map a little, and copy into that while all the rest is created and mapped with
// one access call. (Mapping handle by handle between the copies cost a tenth of the link's speed.)
// Until the last copy is done the memory is asleep, and its backup is kept.
#include <algorithm>
#include <deque>

#include "mapping/limits.hpp"
#include "mapping/resident.hpp"

namespace ringmem::mapping {
namespace {

// As much as is copied while the rest of a wake is mapped: creating and mapping 16 GiB takes 20 ms,
// copying it 310 (H200), so a sixteenth, and some more.
std::size_t copies_in_flight(std::size_t copies) noexcept {
  return std::max<std::size_t>(8, copies / 10);
}

}  // namespace

std::vector<BackupCopy> plan_backup(const std::map<std::size_t, std::size_t>& extents,
                                    std::size_t slot_nbytes) {
  std::vector<BackupCopy> copies;
  std::size_t slot = 0;
  std::size_t filled = 0;
  for (const auto& extent : extents) {
    std::size_t offset = extent.first;
    std::size_t nbytes = extent.second;
    while (nbytes > 0) {
      if (filled == slot_nbytes) ++slot, filled = 0;
      const std::size_t part = std::min(nbytes, slot_nbytes - filled);
      copies.push_back(BackupCopy{offset, part, slot, filled});
      offset += part, nbytes -= part, filled += part;
    }
  }
  return copies;
}

void Resident::set_state(Residence state) {
  std::lock_guard lock(mutex_);
  state_ = state;
}

void Resident::require_streams() {
  for (StreamHandle& stream : streams_) {
    if (stream == 0) {
      check(driver()->stream_create(device(), StreamFlags{}, &stream), "cuStreamCreate");
    }
  }
}

// Submits the copies, slot by slot on the two streams in turn, at most `copies_in_flight()` slots
// ahead of what is done; returns when all are done. `before(i)` runs before copy i is submitted.
// When anything throws, no copy is under way any more.
void Resident::copy_all(const std::vector<BackupCopy>& copies, bool to_host, const Report& report,
                        const std::function<BackupArena::Slot(std::size_t)>& slot_of,
                        const std::function<void(std::size_t)>& before) {
  std::size_t total = 0;
  for (const BackupCopy& copy : copies) total += copy.nbytes;
  std::size_t submitted = 0;
  std::size_t done = 0;
  struct Flight {
    std::shared_ptr<Guard> guard;
    std::size_t nbytes;
  };
  std::deque<Flight> flights;
  const auto land = [&] {
    check(flights.front().guard->wait(), "cuEventSynchronize", "for a copy of the backup");
    done += flights.front().nbytes;
    flights.pop_front();
    if (report) report(done, total);
  };
  try {
    for (std::size_t i = 0; i < copies.size();) {
      const std::size_t slot = copies[i].slot;
      const auto host = reinterpret_cast<DevicePtr>(slot_of(slot).host);
      const StreamRef stream{device(), streams_[slot % 2]};
      for (submitted = 0; i < copies.size() && copies[i].slot == slot; ++i) {
        before(i);
        const DevicePtr at_host = host + copies[i].slot_offset;
        const DevicePtr at_device = base_ + copies[i].offset;
        check(driver()->copy_async(device(), to_host ? at_host : at_device,
                                   to_host ? at_device : at_host, copies[i].nbytes, stream.stream),
              "cuMemcpyAsync");
        submitted += copies[i].nbytes;
      }
      flights.push_back(Flight{Guard::record(driver(), {stream}), submitted});
      if (flights.size() > copies_in_flight(copies.size())) land();
    }
    while (!flights.empty()) land();
  } catch (...) {
    for (const StreamHandle stream : streams_) {
      insist([&] { return driver()->stream_synchronize(device(), stream); });
    }
    throw;
  }
}

void Resident::save(const std::vector<BackupCopy>& copies, const Report& report) {
  require_streams();
  BackupArena::Delivery delivery(arena_, copies.back().slot + 1);
  try {
    copy_all(
        copies, true, report,
        [&](std::size_t slot) {
          if (slots_.size() == slot) {
            slots_.reserve(slot + 1);
            const BackupArena::Slot next = delivery.next();
            std::lock_guard lock(mutex_);
            slots_.push_back(next);
          }
          return slots_[slot];
        },
        [](std::size_t) {});
  } catch (...) {
    std::lock_guard lock(mutex_);
    arena_->give_back(slots_);
    slots_.clear();
    throw;
  }
}

void Resident::sleep(const std::vector<StreamRef>& streams, const Report& report) {
  std::map<std::size_t, std::size_t> extents;
  {
    std::lock_guard lock(mutex_);
    require(Residence::awake, "sleep");
    state_ = Residence::sleeping;
  }
  std::vector<BackupCopy> copies;
  try {
    wait_for(driver(), streams, {});
    std::vector<std::shared_ptr<Guard>> guards;
    {
      std::lock_guard lock(mutex_);
      for (const Pending& pending : pending_) guards.push_back(pending.guard);
    }
    for (const auto& guard : guards) check(guard->wait(), "cuEventSynchronize");
    if (options_.backup == Backup::host) {
      std::lock_guard lock(mutex_);
      for (const auto& [offset, block] : live_) {  // neighbours are one copy
        if (!extents.empty() && extents.rbegin()->first + extents.rbegin()->second == offset) {
          extents.rbegin()->second += block.nbytes;
        } else {
          extents.emplace(offset, block.nbytes);
        }
      }
      copies = plan_backup(extents, arena_->slot_nbytes());
    }
    if (!copies.empty()) save(copies, report);
  } catch (...) {
    set_state(Residence::awake);
    throw;
  }
  std::lock_guard lock(mutex_);
  copies_ = std::move(copies);
  state_ = Residence::asleep;
  if (options_.backup == Backup::keep) return;
  const Status unmapped = unmap_from(0);
  check(unmapped, "cuMemUnmap", "the bytes are safe, the memory is not given back yet");
  check(drop_handles(0), "cuMemRelease", "the memory is asleep");
}

// The handles from `first` on. In one call; when that fails, one by one, since some may be unmapped
// all the same.
Status Resident::unmap_from(std::size_t first) noexcept {
  if (first == handles_.size()) return Status::success;
  std::size_t start = 0;
  for (std::size_t i = 0; i < first; ++i) start += handles_[i]->nbytes();
  std::size_t end = start;
  for (std::size_t i = first; i < handles_.size(); ++i) end += handles_[i]->nbytes();
  Status status = maybe_mapped_ ? Status::unmap_failed
                                : driver()->mem_unmap(base_ + start, end - start);
  for (std::size_t i = first, at = start; !ok(status) && i < handles_.size(); ++i) {
    const std::size_t size = handles_[i]->nbytes();
    const Status one = insist([&] { return driver()->mem_unmap(base_ + at, size); });
    at += size;
    if (!gone(one)) {
      maybe_mapped_ = true;
      return one;
    }
    if (i + 1 == handles_.size()) status = Status::success;
  }
  maybe_mapped_ = false;
  return_mappings(handles_.size() - first);
  return Status::success;
}

void Resident::wake(const Report& report) {
  {
    std::lock_guard lock(mutex_);
    require(Residence::asleep, "wake");
    if (options_.backup == Backup::keep) {
      state_ = Residence::awake;
      return;
    }
    if (!handles_.empty()) {  // the sleep could not unmap them
      check(unmap_from(0), "cuMemUnmap", "of pages that sleep could not unmap");
      check(drop_handles(0), "cuMemRelease");
    }
    state_ = Residence::waking;
  }
  try {
    restore(report);
  } catch (...) {
    set_state(Residence::asleep);
    throw;
  }
  std::lock_guard lock(mutex_);
  arena_->give_back(slots_);
  slots_.clear();
  copies_.clear();
  state_ = Residence::awake;
}

// Maps the next handles of these sizes, unless there is memory up to `end` already.
void Resident::map_again(const std::vector<std::size_t>& sizes, std::size_t end) {
  std::lock_guard lock(mutex_);
  if (extent_ >= end) return;
  std::size_t least = options_.wake_step_nbytes;
  if (least == 0) {  // first as much as may be in flight
    least = extent_ == 0 ? copies_in_flight(copies_.size()) * arena_->slot_nbytes() : std::size_t(-1);
  }
  std::vector<std::size_t> step;
  std::size_t mapped = 0;
  for (std::size_t i = handles_.size(); i < sizes.size(); ++i) {
    if (mapped >= least && extent_ + mapped >= end) break;
    step.push_back(sizes[i]);
    mapped += sizes[i];
  }
  map_handles(step);
}

// Maps the handles again and fills them. Undoes everything when a call fails.
void Resident::restore(const Report& report) {
  std::vector<std::size_t> sizes;
  std::size_t extent = 0;
  {
    std::lock_guard lock(mutex_);
    sizes.swap(sizes_);
    extent = std::exchange(extent_, 0);
  }
  try {
    if (!copies_.empty()) {
      require_streams();
      copy_all(
          copies_, false, report, [&](std::size_t slot) { return slots_[slot]; },
          [&](std::size_t i) { map_again(sizes, copies_[i].offset + copies_[i].nbytes); });
    }
    map_again(sizes, extent);
  } catch (const DriverError& error) {
    std::lock_guard lock(mutex_);
    if (ok(unmap_from(0))) drop_handles(0);
    sizes_ = std::move(sizes);
    extent_ = extent;
    if (error.status != Status::out_of_memory) throw;
    MemoryInfo info;
    driver()->memory_info(device(), &info);
    const std::size_t missing = extent > info.free ? extent - info.free : 0;
    throw DriverError(Status::out_of_memory, error.operation,
                      "waking the tag \"" + options_.tag + "\" needs " + std::to_string(extent) +
                          " bytes, " + std::to_string(info.free) + " are free, " +
                          std::to_string(missing) + " are missing; it stays asleep with its " +
                          "backup (" + error.detail + ")");
  } catch (...) {
    std::lock_guard lock(mutex_);
    if (ok(unmap_from(0))) drop_handles(0);
    sizes_ = std::move(sizes);
    extent_ = extent;
    throw;
  }
}

}  // namespace ringmem::mapping
