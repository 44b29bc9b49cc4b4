// How a growable buffer gives pages back: the mapping thread's part, and closing.
#include <algorithm>

#include "mapping/growable.hpp"
#include "mapping/limits.hpp"

namespace ringmem::mapping {

Job::Progress Growable::step() noexcept {
  std::unique_lock layout(layout_, std::try_to_lock);
  // Whoever holds it may be waiting for this thread (obtain() does): come back later.
  if (!layout.owns_lock()) return Progress::waiting;
  Life life;
  bool farewell;
  {
    std::lock_guard state(state_);
    life = life_;
    farewell = farewell_ != nullptr;
  }
  if (life == Life::open) return step_open();
  return life == Life::closing && farewell ? step_farewell() : Progress::done;
}

Job::Progress Growable::step_open() noexcept {
  Status status = clear_limbo();
  if (ok(status)) status = release_tail();
  std::size_t keep;
  {
    std::lock_guard state(state_);
    keep = ahead_ == 0 ? 0 : keep_locked();
  }
  if (ok(status) && mapped_ < keep) {
    try {
      map_up_to(keep);
    } catch (const DriverError& error) {
      status = error.status;
    } catch (...) {
      status = Status::out_of_memory;
    }
  }
  std::lock_guard state(state_);
  worker_status_ = status;
  return tail_waits() ? Progress::waiting : Progress::done;
}

bool Growable::tail_waits() const noexcept {
  return ok(worker_status_) && !segments_.empty() && segments_.back().offset >= keep_locked();
}

// Unmaps the segments at the end that are neither wanted nor guarded any more, in one call.
Status Growable::release_tail() noexcept {
  std::size_t first = segments_.size();
  std::size_t keep;
  {
    std::lock_guard state(state_);
    keep = keep_locked();
  }
  while (first > 0 && segments_[first - 1].offset >= keep &&
         (!segments_[first - 1].guard || segments_[first - 1].guard->done())) {
    --first;
  }
  {
    std::lock_guard state(state_);
    keep = keep_locked();  // the buffer may have grown in place meanwhile
    while (first < segments_.size() && segments_[first].offset < keep) ++first;
    if (first == segments_.size()) return Status::success;
    mapped_ = segments_[first].offset;  // from here on no growth takes them back
  }
  return unmap_from(first);
}

std::size_t Growable::end() const noexcept {
  return segments_.empty() ? 0 : segments_.back().offset + segments_.back().nbytes;
}

// Unmaps the segments from `first` on in one call and lets go of their memory. When the call fails
// they are in limbo.
Status Growable::unmap_from(std::size_t first) noexcept {
  if (first == segments_.size()) return Status::success;
  const std::size_t start = segments_[first].offset;
  Status status = driver()->mem_unmap(range_->ptr() + start, end() - start);
  {
    std::lock_guard state(state_);
    mapped_ = std::min(mapped_, start);
    limbo_ = ok(status) ? 0 : end() - mapped_;
  }
  if (!ok(status)) return status;
  return_mappings(segments_.size() - first);
  while (segments_.size() > first) drop_last(&status);
  return status;
}

// One by one, since some may be unmapped: an unmap that failed can have happened all the same.
Status Growable::clear_limbo() noexcept {
  Status first_failure = Status::success;
  while (end() > mapped_) {
    const Segment& last = segments_.back();
    const Status status = driver()->mem_unmap(range_->ptr() + last.offset, last.nbytes);
    if (!gone(status)) return status;
    return_mappings(1);
    drop_last(&first_failure);
    std::lock_guard state(state_);
    limbo_ = end() - mapped_;
  }
  return first_failure;
}

void Growable::drop_last(Status* first_failure) noexcept {
  Status status = Status::success;
  if (recycling_) {
    status = recycler_->offer(std::move(segments_.back().memory));
  } else {
    try {
      segments_.back().memory->close();
    } catch (const DriverError& error) {
      status = error.status;
    }
  }
  segments_.pop_back();
  if (ok(*first_failure)) *first_failure = status;
}

void Growable::settle() {
  for (;;) {
    std::vector<std::shared_ptr<Guard>> guards;
    {
      std::lock_guard layout(layout_);
      std::lock_guard state(state_);
      require_open_locked();
      for (const Segment& segment : segments_) {
        if (segment.guard && segment.offset >= keep_locked()) guards.push_back(segment.guard);
      }
    }
    for (const auto& guard : guards) check(guard->wait(), "cuEventSynchronize");
    wake();
    Worker::flush();
    std::lock_guard layout(layout_);
    std::lock_guard state(state_);
    const bool behind = ahead_ != 0 && mapped_ < keep_locked();
    bool tail = !segments_.empty() && segments_.back().offset >= keep_locked();
    // What a graph captured stays until close().
    tail = tail && (!segments_.back().guard || segments_.back().guard->done());
    if (!ok(worker_status_) || (!behind && !tail)) return;
  }
}

void Growable::begin_close() {
  std::lock_guard state(state_);
  if (!pins_.empty()) {
    throw InvalidValue("close: a live view needs the first " +
                       std::to_string(pins_.rbegin()->first) + " bytes; drop the view first");
  }
  life_ = Life::closing;
}

void Growable::close(const std::vector<StreamRef>& streams) {
  if (process_.inherited() || closed()) return;
  begin_close();
  Outcome outcome;
  try {
    wait_for(driver(), streams, {});
    std::vector<std::shared_ptr<Guard>> guards;
    {
      std::lock_guard layout(layout_);
      for (const Segment& segment : segments_) {
        if (segment.guard) guards.push_back(segment.guard);
      }
    }
    for (const auto& guard : guards) check(guard->wait(), "cuEventSynchronize");
    std::lock_guard layout(layout_);
    outcome = release_all();
  } catch (...) {
    std::lock_guard state(state_);
    life_ = Life::open;
    throw;
  }
  if (!outcome.unmapped) {
    recycling_ = true;
    std::lock_guard state(state_);
    life_ = Life::open;
  }
  check(outcome.status, outcome.operation);
}

void Growable::abandon(const std::vector<StreamRef>& streams) noexcept {
  if (process_.inherited() || closed()) return;
  std::shared_ptr<Guard> guard = Guard::record_at_last(driver(), streams);
  {
    std::lock_guard state(state_);
    pins_.clear();  // whoever pinned held the buffer, and is gone with it
    // Without a guard the pages stay for good: unmapping what work uses would lose the device.
    life_ = guard ? Life::closing : Life::closed;
    farewell_ = std::move(guard);
    if (life_ == Life::closed) return;
  }
  wake();
}

Job::Progress Growable::step_farewell() noexcept {
  bool over = farewell_->done();
  for (const Segment& segment : segments_) over = over && (!segment.guard || segment.guard->done());
  if (!over) return Progress::waiting;
  if (release_all().unmapped) return Progress::done;
  return ++farewell_attempts_ < farewell_attempts_most ? Progress::waiting : Progress::done;
}

// Pages, then handles, then addresses. When the pages cannot be unmapped nothing else is tried;
// after that everything is, and the first failure is told. Nothing is kept for reuse: closing
// gives memory back.
Growable::Outcome Growable::release_all() noexcept {
  Outcome outcome{Status::success, "cuMemRelease", true};
  recycling_ = false;
  {
    std::lock_guard state(state_);
    nbytes_ = 0;
  }
  outcome.status = clear_limbo();
  if (end() == mapped_ && !segments_.empty()) {
    const Status status = unmap_from(0);
    if (ok(outcome.status)) outcome.status = status;
  }
  if (!segments_.empty()) return {outcome.status, "cuMemUnmap", false};
  {
    std::lock_guard state(state_);
    life_ = Life::closed;
  }
  try {
    range_->close();
  } catch (const DriverError& error) {
    if (ok(outcome.status)) outcome = {error.status, "cuMemAddressFree", true};
  }
  recycler_.reset();
  return outcome;
}

}  // namespace ringmem::mapping
