// How a sparse buffer gives pages back: the mapping thread's part, and closing.
#include "mapping/limits.hpp"
#include "mapping/sparse.hpp"

namespace ringmem::mapping {

Job::Progress Sparse::step() noexcept {
  std::unique_lock lock(mutex_, std::try_to_lock);
  // Whoever holds it may be waiting for this thread (obtain() does): come back later.
  if (!lock.owns_lock()) return Progress::waiting;
  if (life_ == Life::closed) return Progress::done;
  if (life_ == Life::closing) {
    return farewell_ ? step_farewell() : Progress::done;
  }
  const PageRun all{0, pages_.size()};
  Status status = Status::success;
  if (limbo_) {
    status = clear_limbo(all);
    limbo_ = !ok(status);
  }
  const Status released = release_leaving();
  if (ok(status)) status = released;
  worker_status_ = status;
  const Status covered = bare_ ? cover_with_zeros() : Status::success;
  if (ok(worker_status_)) worker_status_ = covered;
  if (!ok(worker_status_)) return Progress::done;
  for (const Page& page : pages_) {
    if (page.state == PageState::leaving) return Progress::waiting;
  }
  return Progress::done;
}

// Unmaps the leaving pages whose work is over, a run a call.
Status Sparse::release_leaving() noexcept {
  Status first = Status::success;
  const auto ready = [](const Page& page) {
    return page.state == PageState::leaving && !page.limbo && (!page.guard || page.guard->done());
  };
  for (std::size_t i = 0; i < pages_.size();) {
    std::size_t stop = i;
    while (stop < pages_.size() && ready(pages_[stop])) ++stop;
    if (stop == i) {
      ++i;
      continue;
    }
    const Status status = vacate(PageRun{i, stop - i});
    if (ok(first)) first = status;
    i = stop;
  }
  return first;
}

void Sparse::recount() noexcept {
  held_ = mapped_ = 0;
  for (const Page& page : pages_) {
    if (page.memory) ++held_;
    if (page.state == PageState::mapped) ++mapped_;
  }
}

void Sparse::settle() {
  for (;;) {
    std::vector<std::shared_ptr<Guard>> guards;
    {
      std::lock_guard lock(mutex_);
      require_open();
      for (const Page& page : pages_) {
        if (page.guard && (guards.empty() || guards.back() != page.guard)) {
          guards.push_back(page.guard);
        }
      }
    }
    for (const auto& guard : guards) check(guard->wait(), "cuEventSynchronize");
    Worker::post(shared_from_this());
    Worker::flush();
    std::lock_guard lock(mutex_);
    if (!ok(worker_status_)) return;
    bool leaving = false;
    for (const Page& page : pages_) {  // what a graph captured stays until close()
      leaving = leaving || (page.state == PageState::leaving && (!page.guard || page.guard->done()));
    }
    if (!leaving) return;
  }
}

void Sparse::close(const std::vector<StreamRef>& streams) {
  if (process_.inherited()) return;
  std::vector<std::shared_ptr<Guard>> guards;
  {
    std::lock_guard lock(mutex_);
    if (life_ != Life::open) return;
    for (const Page& page : pages_) {
      if (page.pins != 0) {
        throw InvalidValue("close: a live view needs mapped pages; drop the view first");
      }
      if (page.guard && (guards.empty() || guards.back() != page.guard)) {
        guards.push_back(page.guard);
      }
    }
    life_ = Life::closing;
  }
  Status status = Status::success;
  try {
    wait_for(driver(), streams, {});
    for (const auto& guard : guards) check(guard->wait(), "cuEventSynchronize");
    std::lock_guard lock(mutex_);
    status = release_all();
    if (life_ != Life::closed) life_ = Life::open;
  } catch (...) {
    std::lock_guard lock(mutex_);
    life_ = Life::open;
    throw;
  }
  check(status, "cuMemUnmap", "or releasing what was mapped");
}

void Sparse::abandon(const std::vector<StreamRef>& streams) noexcept {
  if (process_.inherited() || closed()) return;
  std::shared_ptr<Guard> guard = Guard::record_at_last(driver(), streams);
  {
    std::lock_guard lock(mutex_);
    // Without a guard the pages stay for good: unmapping what work uses would lose the device.
    life_ = guard ? Life::closing : Life::closed;
    farewell_ = std::move(guard);
    if (life_ == Life::closed) return;
  }
  Worker::post(shared_from_this());
}

Job::Progress Sparse::step_farewell() noexcept {
  if (!farewell_->done()) return Progress::waiting;
  for (const Page& page : pages_) {
    if (page.guard && !page.guard->done()) return Progress::waiting;
  }
  if (ok(release_all()) || life_ == Life::closed) return Progress::done;
  return ++farewell_attempts_ < farewell_attempts_most ? Progress::waiting : Progress::done;
}

// Every run of mappings, whosever memory it is, in one unmap call each. When a run cannot be
// unmapped the buffer stays as it is, less what went before.
Status Sparse::release_all() noexcept {
  life_ = Life::closing;  // so that nothing is kept for reuse: closing gives memory back
  Status status = clear_limbo(PageRun{0, pages_.size()});
  if (!ok(status)) return status;
  worker_status_ = Status::success;
  const auto occupied = [](const Page& page) { return page.memory || page.zero; };
  for (std::size_t i = 0; i < pages_.size();) {
    std::size_t stop = i;
    while (stop < pages_.size() && occupied(pages_[stop])) ++stop;
    if (stop == i) {
      ++i;
      continue;
    }
    status = vacate(PageRun{i, stop - i});
    if (!ok(status)) {
      recount();
      return status;
    }
    i = stop;
  }
  recount();
  life_ = Life::closed;
  Status first = worker_status_;
  free_.clear();
  zeros_.reset();
  try {
    range_->close();
  } catch (const DriverError& error) {
    if (ok(first)) first = error.status;
  }
  recycler_.reset();
  return first;
}

}  // namespace ringmem::mapping
