#include "mapping/sparse.hpp"

#include <algorithm>

#include "mapping/arithmetic.hpp"
#include "mapping/limits.hpp"

namespace ringmem::mapping {
namespace {

std::string describe(PageRun run) {
  return std::to_string(run.first) + " to " + std::to_string(run.first + run.count - 1);
}

}  // namespace

std::vector<PageRun> normalized(std::vector<PageRun> runs, std::size_t pages) {
  std::sort(runs.begin(), runs.end(),
            [](const PageRun& a, const PageRun& b) { return a.first < b.first; });
  std::vector<PageRun> joined;
  for (const PageRun& run : runs) {
    if (run.count == 0) throw InvalidValue("pages: a run of 0 pages; ask for at least one");
    if (run.first >= pages || run.count > pages - run.first) {
      throw InvalidValue("pages: " + std::to_string(run.count) + " pages from page " +
                         std::to_string(run.first) + " reach beyond the " + std::to_string(pages) +
                         " that are reserved");
    }
    if (!joined.empty() && joined.back().first + joined.back().count > run.first) {
      throw InvalidValue("pages: page " + std::to_string(run.first) + " is named twice");
    }
    if (!joined.empty() && joined.back().first + joined.back().count == run.first) {
      joined.back().count += run.count;
    } else {
      joined.push_back(run);
    }
  }
  return joined;
}

std::shared_ptr<Sparse> Sparse::create(DriverRef driver, SparseOptions options) {
  require_positive(options.nbytes, "nbytes");
  require_capable(*driver, options.props);
  require_reachable(*driver, options.props.location, options.grants);
  const std::size_t page = granularity_of(*driver, options.props);
  if (options.page_nbytes == 0) options.page_nbytes = page;
  require_multiple(options.page_nbytes, page, "page_nbytes");
  options.nbytes = round_up(options.nbytes, options.page_nbytes, "nbytes");
  RangeRef range = AddressRange::reserve(std::move(driver), options.nbytes, 0, options.props);
  auto sparse = std::make_shared<Sparse>(std::move(range), std::move(options));
  if (sparse->options_.read_zero) sparse->make_zero_page();
  return sparse;
}

Sparse::Sparse(RangeRef range, SparseOptions options)
    : range_(std::move(range)), options_(std::move(options)), base_(range_->ptr()),
      recycler_(Recycler::of(range_->driver(), options_.props)),
      pages_(options_.nbytes / options_.page_nbytes) {
  for (const AccessGrant& grant : options_.grants) {
    zero_grants_.push_back(AccessGrant{grant.location, Access::read});
  }
}

Sparse::~Sparse() {
  if (process_.inherited() || Worker::finished() || life_ == Life::closed) return;
  // Nobody is left to try again, so this does.
  if (!ok(release_all()) && life_ != Life::closed) release_all();
}

// Fills one page with zero (fresh memory is zero only by observation) and maps it everywhere.
void Sparse::make_zero_page() {
  Driver& d = *driver();
  const int device = options_.props.location.id;
  zeros_ = PhysicalMemory::create_pages(driver(), options_.page_nbytes, options_.props);
  {
    const AccessGrant grant{options_.props.location, Access::readwrite};
    auto scratch = AddressRange::reserve(driver(), options_.page_nbytes, 0, options_.props);
    auto mapped = scratch->map(zeros_, 0, {grant});
    StreamHandle stream = 0;
    check(d.stream_create(device, StreamFlags{}, &stream), "cuStreamCreate");
    Status status = d.fill_async(device, mapped->ptr(), 0, 4, options_.page_nbytes / 4, stream);
    const char* operation = "cuMemsetD32Async";
    const Status waited = d.stream_synchronize(device, stream);
    if (ok(status)) status = waited, operation = "cuStreamSynchronize";
    insist([&] { return d.stream_destroy(device, stream); });
    check(status, operation);
    mapped->unmap({}, {});
  }
  std::lock_guard lock(mutex_);
  check(cover_with_zeros(), "cuMemMap", "of the page of zeros");
}

void Sparse::map(const std::vector<PageRun>& wanted) {
  process_.require_own("cuMemMap");
  const std::vector<PageRun> runs = normalized(wanted, pages_.size());
  std::lock_guard lock(mutex_);
  require_open();
  for (const PageRun& run : runs) {
    const std::vector<PageRun> taken = runs_of(run, PageState::mapped);
    if (!taken.empty()) {
      throw InvalidValue("pages: " + describe(taken.front()) + " are mapped already; unmap them " +
                         "first or leave them out");
    }
  }
  if (limbo_) {
    for (const PageRun& run : runs) {
      check(clear_limbo(run), "cuMemUnmap", "of pages that an earlier call could not unmap");
    }
  }
  std::vector<PageRun> fresh;
  std::vector<PageRun> revived;  // their unmap still waits: it is called off
  for (const PageRun& run : runs) {
    for (const PageRun& part : runs_of(run, PageState::empty)) fresh.push_back(part);
    for (const PageRun& part : runs_of(run, PageState::leaving)) revived.push_back(part);
  }
  set_state(revived, PageState::mapped);
  std::size_t done = 0;
  try {
    for (; done < fresh.size(); ++done) map_run(fresh[done]);
  } catch (...) {
    while (done > 0) take_off(fresh[--done]);
    set_state(revived, PageState::leaving);
    cover_with_zeros();
    throw;
  }
  set_state(fresh, PageState::mapped);
  for (const PageRun& run : runs) {
    for (std::size_t i = run.first; i < run.first + run.count; ++i) pages_[i].guard.reset();
    mapped_ += run.count;
  }
}

void Sparse::set_state(const std::vector<PageRun>& runs, PageState state) noexcept {
  for (const PageRun& run : runs) {
    for (std::size_t i = run.first; i < run.first + run.count; ++i) pages_[i].state = state;
  }
}

// Maps a run of empty pages, with memory, and grants access to all of it in one call. The pages
// stay `empty` in the books until the whole map() has succeeded, but own their memory.
void Sparse::map_run(PageRun run) {
  MappingTicket ticket(*driver(), run.count);
  uncover(run);
  std::size_t done = 0;
  try {
    for (; done < run.count; ++done) {
      Page& page = pages_[run.first + done];
      PhysicalRef memory = obtain();
      check(driver()->mem_map(at(run.first + done), options_.page_nbytes, memory->handle()),
            "cuMemMap");
      page.memory = std::move(memory);
    }
    if (!options_.grants.empty()) {
      check(driver()->mem_set_access(at(run.first), bytes_of(run), options_.grants.data(),
                                     options_.grants.size()),
            "cuMemSetAccess");
    }
  } catch (...) {
    held_ += done;
    if (done > 0) {
      ticket.keep();
      return_mappings(run.count - done);
      take_off(PageRun{run.first, done});
    }
    throw;
  }
  held_ += run.count;
  ticket.keep();
}

// Undo of map_run(). Pages that even a second try cannot unmap are left to step().
void Sparse::take_off(PageRun run) noexcept {
  set_state({run}, PageState::leaving);
  if (ok(vacate(run)) || ok(clear_limbo(run))) return;
  Worker::post(shared_from_this());
}

// Unmaps a run of pages, with memory or with zeros, in one call. When that fails they are in limbo.
Status Sparse::unmap_run(PageRun run) noexcept {
  const Status status = driver()->mem_unmap(at(run.first), bytes_of(run));
  for (std::size_t i = run.first; i < run.first + run.count; ++i) pages_[i].limbo = !ok(status);
  if (ok(status)) return_mappings(run.count);
  else limbo_ = true;
  return status;
}

// One by one, since some may be unmapped: an unmap that failed can have happened all the same.
Status Sparse::clear_limbo(PageRun within) noexcept {
  Status first = Status::success;
  for (std::size_t i = within.first; i < within.first + within.count; ++i) {
    if (!pages_[i].limbo) continue;
    const Status status = driver()->mem_unmap(at(i), options_.page_nbytes);
    if (gone(status)) {
      pages_[i].limbo = false;
      return_mappings(1);
      finish(pages_[i]);
    } else if (ok(first)) {
      first = status;
    }
  }
  return first;
}

// The page is unmapped: lets go of what was there.
void Sparse::finish(Page& page) noexcept {
  if (page.memory) {
    keep_or_release(std::move(page.memory));
    page.memory.reset();
    --held_;
  }
  page.guard.reset();
  page.zero = false;
  page.state = PageState::empty;
  bare_ = options_.read_zero;
}

// Unmaps a run of pages, in one call, and lets go of what was there.
Status Sparse::vacate(PageRun run) noexcept {
  const Status status = unmap_run(run);
  if (!ok(status)) return status;
  for (std::size_t i = run.first; i < run.first + run.count; ++i) finish(pages_[i]);
  return status;
}

// Takes the page of zeros off a run of empty pages.
void Sparse::uncover(PageRun run) {
  const std::size_t end = run.first + run.count;
  for (std::size_t i = run.first; i < end;) {
    std::size_t stop = i;
    while (stop < end && pages_[stop].zero) ++stop;
    if (stop == i) {
      ++i;
      continue;
    }
    const PageRun covered{i, stop - i};
    const Status status = vacate(covered);
    if (!ok(status)) {
      clear_limbo(covered);
      throw DriverError(status, "cuMemUnmap", "of the page of zeros");
    }
    i = stop;
  }
}

// Maps the page of zeros wherever a page is empty and bare; one access call a run.
Status Sparse::cover_with_zeros() noexcept {
  if (!options_.read_zero) return Status::success;
  bare_ = false;
  Status first = Status::success;
  for (std::size_t i = 0; i < pages_.size();) {
    std::size_t stop = i;
    const auto bare = [&](const Page& page) {
      return page.state == PageState::empty && !page.zero && !page.memory && !page.limbo;
    };
    while (stop < pages_.size() && bare(pages_[stop])) ++stop;
    if (stop == i) {
      ++i;
      continue;
    }
    const PageRun run{i, stop - i};
    std::size_t done = 0;
    Status status = Status::success;
    try {
      MappingTicket ticket(*driver(), run.count);
      while (done < run.count && ok(status)) {
        status = driver()->mem_map(at(i + done), options_.page_nbytes, zeros_->handle());
        if (ok(status)) ++done;
      }
      if (ok(status) && !zero_grants_.empty()) {
        status = driver()->mem_set_access(at(i), bytes_of(run), zero_grants_.data(),
                                          zero_grants_.size());
      }
      ticket.keep();
      return_mappings(run.count - done);
    } catch (const DriverError& error) {
      status = error.status;
    } catch (...) {
      status = Status::out_of_memory;
    }
    for (std::size_t k = 0; k < done; ++k) pages_[i + k].zero = true;
    if (!ok(status)) {
      const PageRun begun{i, done};
      if (done > 0 && !ok(vacate(begun))) clear_limbo(begun);
      bare_ = true;
      if (ok(first)) first = status;
    }
    i = stop;
  }
  return first;
}

PhysicalRef Sparse::obtain() {
  if (!free_.empty()) {
    PhysicalRef memory = std::move(free_.back());
    free_.pop_back();
    return memory;
  }
  if (PhysicalRef memory = recycler_->take(options_.page_nbytes)) return memory;
  try {
    return PhysicalMemory::create_pages(driver(), options_.page_nbytes, options_.props);
  } catch (const DriverError& error) {
    if (error.status != Status::out_of_memory) throw;
  }
  release_leaving();
  if (!free_.empty()) return obtain();
  Recycler::drain_all(*driver());
  Worker::flush();
  Recycler::drain_all(*driver());
  return PhysicalMemory::create_pages(driver(), options_.page_nbytes, options_.props);
}

void Sparse::keep_or_release(PhysicalRef memory) noexcept {
  const bool room = (free_.size() + 1) * options_.page_nbytes <= options_.cache_nbytes;
  const bool keep = life_ == Life::open && !memory->exported();
  Status released = Status::success;
  try {
    if (keep && room) free_.push_back(std::move(memory));
    else if (keep) released = recycler_->offer(std::move(memory));
    else memory->close();
  } catch (const DriverError& error) {
    released = error.status;
  } catch (...) {  // no memory for the list: the reference goes, and with it the memory
  }
  if (!ok(released)) worker_status_ = released;
}

void Sparse::unmap(const std::vector<PageRun>& wanted, const std::vector<StreamRef>& streams) {
  process_.require_own("cuMemUnmap");
  const std::vector<PageRun> runs = normalized(wanted, pages_.size());
  std::shared_ptr<Guard> guard = Guard::record(driver(), streams);
  {
    std::lock_guard lock(mutex_);
    require_open();
    for (const PageRun& run : runs) {
      for (std::size_t i = run.first; i < run.first + run.count; ++i) {
        if (pages_[i].state != PageState::mapped) {
          throw InvalidValue("pages: page " + std::to_string(i) + " is not mapped");
        }
        if (pages_[i].pins != 0) {
          throw InvalidValue("pages: a live view needs page " + std::to_string(i) +
                             "; drop the view first");
        }
      }
    }
    for (const PageRun& run : runs) {
      for (std::size_t i = run.first; i < run.first + run.count; ++i) {
        pages_[i].state = PageState::leaving;
        pages_[i].guard = guard;
      }
      mapped_ -= run.count;
    }
  }
  Worker::post(shared_from_this());
}

void Sparse::pin(PageRun wanted) {
  std::lock_guard lock(mutex_);
  require_open();
  for (const PageRun& run : normalized({wanted}, pages_.size())) {
    for (std::size_t i = run.first; i < run.first + run.count; ++i) {
      if (pages_[i].state != PageState::mapped) {
        throw InvalidValue("pages: a view needs page " + std::to_string(i) +
                           ", which is not mapped; map it first");
      }
    }
    for (std::size_t i = run.first; i < run.first + run.count; ++i) ++pages_[i].pins;
  }
}

void Sparse::unpin(PageRun run) noexcept {
  if (process_.inherited()) return;
  std::lock_guard lock(mutex_);
  for (std::size_t i = run.first; i < run.first + run.count && i < pages_.size(); ++i) {
    if (pages_[i].pins != 0) --pages_[i].pins;
  }
}

std::vector<PageRun> Sparse::runs_of(PageRun within, PageState state) const {
  std::vector<PageRun> found;
  for (std::size_t i = within.first; i < within.first + within.count; ++i) {
    if (pages_[i].state != state) continue;
    if (!found.empty() && found.back().first + found.back().count == i) ++found.back().count;
    else found.push_back(PageRun{i, 1});
  }
  return found;
}

void Sparse::require_open() const {
  if (life_ != Life::open) throw Closed("the sparse buffer is closed");
}

DevicePtr Sparse::ptr() const {
  std::lock_guard lock(mutex_);
  require_open();
  return base_;
}

std::size_t Sparse::mapped_pages() const {
  std::lock_guard lock(mutex_);
  return mapped_;
}

std::size_t Sparse::committed() const {
  std::lock_guard lock(mutex_);
  return (held_ + free_.size() + (zeros_ ? 1 : 0)) * options_.page_nbytes;
}

std::vector<PageRun> Sparse::runs() const {
  std::lock_guard lock(mutex_);
  return runs_of(PageRun{0, pages_.size()}, PageState::mapped);
}

bool Sparse::closed() const {
  std::lock_guard lock(mutex_);
  return life_ != Life::open;
}

Status Sparse::worker_status() const {
  std::lock_guard lock(mutex_);
  return worker_status_;
}

}  // namespace ringmem::mapping
