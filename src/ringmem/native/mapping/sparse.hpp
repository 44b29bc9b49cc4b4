// Memory with holes: a reserved range of equal pages that are mapped and unmapped on their own, in
// contiguous runs (one access call and one unmap call a run). Every page has a handle of its own,
// because the driver never unmaps part of one.
//
// With `read_zero`, what is not mapped reads as zero: one shared page of zeros is mapped read-only
// wherever nothing else is. That costs a mapping a page up front (about 20 µs a page of 2 MiB on
// an H200, mostly access), and an unmap before and a map after every use of a page.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "mapping/guard.hpp"
#include "mapping/range.hpp"
#include "mapping/recycler.hpp"
#include "mapping/worker.hpp"

namespace ringmem::mapping {

struct PageRun {
  std::size_t first = 0;  // page index
  std::size_t count = 0;  // pages

  friend bool operator==(const PageRun&, const PageRun&) = default;
};

// Sorted, adjacent ones joined. Throws InvalidValue for an empty run, one beyond `pages`, overlap.
std::vector<PageRun> normalized(std::vector<PageRun> runs, std::size_t pages);

struct SparseOptions {
  std::size_t nbytes = 0;       // rounded up to whole pages
  std::size_t page_nbytes = 0;  // a multiple of the granularity; 0: the granularity
  PhysicalProps props;
  std::vector<AccessGrant> grants;
  bool read_zero = false;
  std::size_t cache_nbytes = 0;  // of unmapped pages kept for its own next map()
};

class Sparse final : public Job, public std::enable_shared_from_this<Sparse> {
 public:
  static std::shared_ptr<Sparse> create(DriverRef driver, SparseOptions options);

  Sparse(RangeRef range, SparseOptions options);
  ~Sparse() override;

  // Maps all of it or nothing. InvalidValue for a page that is mapped already. A page whose unmap
  // still waits comes back in place, with its bytes; the bytes of others are undefined.
  void map(const std::vector<PageRun>& runs);
  // Returns at once; the pages go when the work submitted to `streams` so far is over. InvalidValue
  // for a page that is not mapped or is pinned, and then nothing has changed.
  void unmap(const std::vector<PageRun>& runs, const std::vector<StreamRef>& streams);
  void settle();

  void pin(PageRun run);  // InvalidValue unless all of it is mapped
  void unpin(PageRun run) noexcept;

  void close(const std::vector<StreamRef>& streams);
  void abandon(const std::vector<StreamRef>& streams) noexcept;

  DevicePtr ptr() const;
  std::size_t page_nbytes() const noexcept { return options_.page_nbytes; }
  std::size_t page_count() const noexcept { return pages_.size(); }
  std::size_t nbytes() const noexcept { return range_->nbytes(); }
  std::size_t mapped_pages() const;
  std::size_t committed() const;  // bytes of physical memory held now
  std::vector<PageRun> runs() const;
  bool closed() const;
  Status worker_status() const;
  const DriverRef& driver() const noexcept { return range_->driver(); }

  Progress step() noexcept override;

 private:
  enum class PageState : unsigned char { empty, mapped, leaving };
  enum class Life { open, closing, closed };
  struct Page {
    PhysicalRef memory;  // of `mapped` and `leaving`
    std::shared_ptr<Guard> guard;
    unsigned pins = 0;
    PageState state = PageState::empty;
    bool zero = false;   // the page of zeros is mapped here
    bool limbo = false;  // an unmap failed: nobody knows whether anything is mapped here
  };

  // All of these with mutex_ held; none blocks.
  void map_run(PageRun run);
  void take_off(PageRun run) noexcept;
  Status unmap_run(PageRun run) noexcept;
  Status clear_limbo(PageRun within) noexcept;
  void finish(Page& page) noexcept;
  Status vacate(PageRun run) noexcept;
  void set_state(const std::vector<PageRun>& runs, PageState state) noexcept;
  Status cover_with_zeros() noexcept;
  void uncover(PageRun run);
  PhysicalRef obtain();
  void keep_or_release(PhysicalRef memory) noexcept;
  std::vector<PageRun> runs_of(PageRun within, PageState state) const;
  Status release_leaving() noexcept;
  void recount() noexcept;
  Progress step_farewell() noexcept;
  Status release_all() noexcept;
  void require_open() const;

  void make_zero_page();
  DevicePtr at(std::size_t page) const noexcept { return base_ + page * options_.page_nbytes; }
  std::size_t bytes_of(PageRun run) const noexcept { return run.count * options_.page_nbytes; }

  RangeRef range_;
  SparseOptions options_;
  DevicePtr base_;
  std::shared_ptr<Recycler> recycler_;
  ProcessMark process_;
  PhysicalRef zeros_;
  std::vector<AccessGrant> zero_grants_;

  mutable std::mutex mutex_;
  std::vector<Page> pages_;
  std::vector<PhysicalRef> free_;
  std::size_t held_ = 0;     // pages with memory of their own
  std::size_t mapped_ = 0;   // of these, not leaving
  bool limbo_ = false;       // some page may be in limbo
  bool bare_ = false;        // some page may have to be covered with zeros
  Life life_ = Life::open;
  Status worker_status_ = Status::success;
  std::shared_ptr<Guard> farewell_;  // what an abandoned buffer waits for
  int farewell_attempts_ = 0;
};

}  // namespace ringmem::mapping
