// Memory that grows in place: the maximum is reserved at once, physical memory is mapped at its end
// as it grows and taken off its end, by the mapping thread, as it shrinks.
//
// Invariant: [0, mapped) is mapped without a hole, by `segments_` in order; 0 <= nbytes <= mapped.
// What lies between nbytes and mapped was mapped ahead, or was given up by a shrink and waits for
// its guard; a growth takes it back in place. Segments behind `mapped` are in limbo: an unmap of
// them failed, so nobody knows whether they are mapped. They are unmapped again before anything is
// mapped in their place.
//
// Two locks. `layout_` is held by whoever maps or unmaps (none of those calls blocks); `state_`
// only for a few loads and stores, so growth into what is mapped never waits for the driver. Order:
// layout_ before state_.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "mapping/guard.hpp"
#include "mapping/plan.hpp"
#include "mapping/range.hpp"
#include "mapping/recycler.hpp"
#include "mapping/worker.hpp"

namespace ringmem::mapping {

struct GrowableOptions {
  std::size_t max_nbytes = 0;  // rounded up to whole pages
  PhysicalProps props;
  std::vector<AccessGrant> grants;
  std::size_t max_handle_nbytes = default_max_handle;
};

class Growable final : public Job, public std::enable_shared_from_this<Growable> {
 public:
  static std::shared_ptr<Growable> create(DriverRef driver, GrowableOptions options);

  // All of `memories`, which are of one kind, one after another: a buffer of another process.
  // It may shrink, and has no room to grow.
  static std::shared_ptr<Growable> adopt(std::vector<PhysicalRef> memories,
                                         std::vector<AccessGrant> grants);

  Growable(RangeRef range, GrowableOptions options);
  ~Growable() override;

  // Growth maps what is missing before it returns; bytes that were never in use are undefined.
  // Shrinking returns at once: pages go when the work submitted to `streams` so far is over.
  // Throws InvalidValue beyond the reserve and below a pin, and then nothing has changed.
  void resize(std::size_t nbytes, const std::vector<StreamRef>& streams);
  // To at least `nbytes`: where another thread grew further meanwhile, its size stays.
  void grow(std::size_t nbytes);
  // The part of that which makes no driver call: false when one is needed. Never waits.
  bool resize_in_place(std::size_t nbytes);
  // Keeps up to `nbytes` mapped beyond the size, by the mapping thread. 0 turns it off.
  void reserve_ahead(std::size_t nbytes);
  // Grants and revokes for all that is mapped now or later, in one driver call.
  void set_access(const std::vector<AccessGrant>& grants);
  // Waits (on the host) until the mapping thread has nothing left to do that is possible now.
  void settle();

  // A view of the first `nbytes` exists: no shrink below them, no close.
  void pin(std::size_t nbytes);
  void unpin(std::size_t nbytes) noexcept;

  // Blocks until the work of `streams` is over, then releases everything. Throws InvalidValue
  // while pinned (nothing has changed), DriverError when a call fails; if that was the unmap, the
  // buffer is open and empty, and a second close() tries again.
  void close(const std::vector<StreamRef>& streams);
  // As close(), by the mapping thread and without waiting here; for finalizers.
  void abandon(const std::vector<StreamRef>& streams) noexcept;

  DevicePtr ptr() const;  // throws Closed
  std::size_t nbytes() const;
  std::size_t committed() const;  // bytes of physical memory held now
  std::size_t reserved() const noexcept { return range_->nbytes(); }
  std::size_t granularity() const noexcept { return range_->granularity(); }
  std::size_t handles() const;
  Status worker_status() const;  // what stopped the mapping thread last; success if nothing
  bool closed() const;
  const DriverRef& driver() const noexcept { return range_->driver(); }
  const PhysicalProps& props() const noexcept { return options_.props; }
  // The memory of what is in use, in order; for sharing.
  std::vector<PhysicalRef> memories() const;

  Progress step() noexcept override;

 private:
  struct Segment {
    std::size_t offset;
    std::size_t nbytes;
    PhysicalRef memory;
    std::shared_ptr<Guard> guard;  // work that may use the pages still; null: none
  };
  enum class Life { open, closing, closed };
  struct Outcome {
    Status status = Status::success;
    const char* operation = "";
    bool unmapped = true;  // false: the pages are in limbo, and nothing else was tried
  };

  void shrink(std::size_t nbytes, const std::vector<StreamRef>& streams);
  void map_up_to(std::size_t target);                // layout_ held
  void map_more(const std::vector<std::size_t>& sizes, const PhysicalRef* ready);  // layout_ held
  Status release_tail() noexcept;                    // layout_ held
  Outcome release_all() noexcept;                    // layout_ held
  Status unmap_from(std::size_t first) noexcept;     // layout_ held
  Status clear_limbo() noexcept;                     // layout_ held
  void drop_last(Status* first_failure) noexcept;    // layout_ held
  std::size_t end() const noexcept;                  // layout_ held
  bool tail_waits() const noexcept;                  // layout_ held
  Progress step_open() noexcept;                     // layout_ held
  Progress step_farewell() noexcept;                 // layout_ held
  PhysicalRef obtain(std::size_t nbytes);
  std::size_t keep_locked() const noexcept;          // state_ held
  bool ahead_is_low_locked() const noexcept;         // state_ held
  void require_open_locked() const;                  // state_ held
  void require_reserved(std::size_t nbytes) const;
  void begin_close();
  std::size_t whole_pages(std::size_t nbytes) const noexcept;
  void wake() noexcept;

  RangeRef range_;
  GrowableOptions options_;
  std::shared_ptr<Recycler> recycler_;
  ProcessMark process_;

  mutable std::mutex layout_;
  std::vector<Segment> segments_;
  bool recycling_ = true;  // handles go to the recycler; not when closing
  mutable std::mutex state_;
  Life life_ = Life::open;
  std::size_t nbytes_ = 0;
  std::size_t mapped_ = 0;
  std::size_t ahead_ = 0;
  Status worker_status_ = Status::success;
  std::size_t limbo_ = 0;            // bytes of segments behind mapped_
  std::map<std::size_t, int> pins_;  // bytes -> views of so many
  std::shared_ptr<Guard> farewell_;  // what an abandoned buffer waits for
  int farewell_attempts_ = 0;
};

}  // namespace ringmem::mapping
